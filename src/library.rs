//! `foretell models` and `foretell topologies`: list and print what the library holds.

use crate::failure::{Failure, code};
use crate::host;
use crate::inputs::{self, ModelFile};
use crate::output;
use clap::{Args, Subcommand};
use foretell_models::{GraphOptions, Model};
use foretell_reports::{Column, table};
use foretell_topologies::Topology;
use schemars::JsonSchema;
use serde::Serialize;

/// List the models of the library, or print one
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  foretell models show resnet50")]
pub struct Models {
    #[command(subcommand)]
    action: Option<Show>,
}

/// List the topologies of the library, or print one
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  foretell topologies show dgx-a100-80g")]
pub struct Topologies {
    #[command(subcommand)]
    action: Option<Show>,
}

#[derive(Debug, Subcommand)]
enum Show {
    /// Print one in full, in the form of a file
    Show {
        /// A name or a file
        name: String,
    },
}

/// A model in the list of `models`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ListedModel {
    /// The model's name.
    name: String,
    /// Its parameters.
    parameters: usize,
    /// Multiply-adds of the forward pass for one sample.
    multiply_adds: f64,
    /// The same number, under its longer name.
    forward_multiply_adds: f64,
}

impl ListedModel {
    fn new(name: &str, parameters: usize, multiply_adds: f64) -> Self {
        Self { name: name.into(), parameters, multiply_adds, forward_multiply_adds: multiply_adds }
    }
}

/// The document of `models show`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ShownModel {
    #[serde(flatten)]
    listed: ListedModel,
    /// The model, in the form of a model file.
    model: Model,
    /// Its parts that are planned and simulated, but not executed.
    planned_only: Vec<&'static str>,
}

/// A topology in the list of `topologies`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ListedTopology {
    /// The topology's name.
    name: String,
    /// Its nodes.
    nodes: usize,
    /// Its devices.
    devices: usize,
    /// The names of its kinds of devices.
    device_kinds: Vec<String>,
}

/// Returns a model's number of parameters, and the multiply-adds of its forward pass for one
/// sample.
fn figures(name: &str, model: &Model) -> Result<(usize, f64), Failure> {
    let options = GraphOptions::ONE;
    let graph = model.graph(name, &options)?;
    Ok((graph.parameter_count(), graph.model_flops().value() / 2.0))
}

/// Runs `foretell models`.
pub fn models(arguments: &Models, json: bool) -> Result<(), Failure> {
    if let Some(Show::Show { name }) = &arguments.action {
        let named = inputs::model(name)?;
        let (parameters, multiply_adds) = figures(&named.name, &named.model)?;
        let planned_only = named.model.planned_only();
        if json {
            return output::json(&ShownModel {
                listed: ListedModel::new(&named.name, parameters, multiply_adds),
                model: named.model,
                planned_only,
            });
        }
        if !planned_only.is_empty() {
            output::note(&format!("{} can be planned and simulated, but not executed", planned_only.join(", ")));
        }
        let text = ModelFile::to_yaml(&named.model)?;
        output::line(&format!(
            "# {parameters} parameters, {:.2} G multiply-adds per sample in the forward pass",
            multiply_adds / 1e9
        ))?;
        return output::line(text.trim_end());
    }
    let mut rows = Vec::new();
    let mut documents = Vec::new();
    for (name, model) in Model::zoo() {
        let (parameters, multiply_adds) = figures(name, &model)?;
        rows.push(vec![name.into(), parameters.to_string(), format!("{:.2}", multiply_adds / 1e9)]);
        documents.push(ListedModel::new(name, parameters, multiply_adds));
    }
    if json {
        return output::json_as_it_is(&documents);
    }
    let columns = [Column::words("model"), Column::numbers("parameters"), Column::numbers("G multiply-adds per sample")];
    output::line(&table(&columns, &rows))?;
    output::line("a model file describes any other size: see `foretell models show NAME`")
}

/// Runs `foretell topologies`.
pub fn topologies(arguments: &Topologies, json: bool) -> Result<(), Failure> {
    if let Some(Show::Show { name }) = &arguments.action {
        let topology = inputs::topology(name, None)?;
        for remark in topology.notes() {
            output::note(&remark);
        }
        if json {
            return output::json_as_it_is(&topology);
        }
        let text = serde_saphyr::to_string(&topology).map_err(|error| Failure::undone(code::SYSTEM, error.to_string()))?;
        return output::line(text.trim_end());
    }
    let mut rows = Vec::new();
    let mut documents = Vec::new();
    // A machine without GPUs has no `local-gpus`.
    let gpus = inputs::topology(inputs::LOCAL_GPUS, None).is_ok().then_some(inputs::LOCAL_GPUS);
    for name in Topology::library_names().chain(host::SEES_MACHINE.then_some(inputs::LOCAL)).chain(gpus) {
        let topology = inputs::topology(name, None)?;
        let kinds: Vec<&str> = topology.device_kinds().iter().map(|kind| kind.name.as_str()).collect();
        rows.push(vec![
            name.into(),
            topology.node_count().to_string(),
            topology.device_count().to_string(),
            kinds.join(", "),
            topology.device_kinds().first().map_or(String::new(), |kind| kind.memory.to_string()),
        ]);
        documents.push(ListedTopology {
            name: name.into(),
            nodes: topology.node_count(),
            devices: topology.device_count(),
            device_kinds: kinds.iter().map(|&kind| kind.into()).collect(),
        });
    }
    if json {
        return output::json_as_it_is(&documents);
    }
    let columns = [
        Column::words("topology"),
        Column::numbers("nodes"),
        Column::numbers("devices"),
        Column::words("device"),
        Column::numbers("memory"),
    ];
    output::line(&table(&columns, &rows))?;
    output::line("`--nodes N` sets how many nodes there are; a file describes any other cluster")
}
