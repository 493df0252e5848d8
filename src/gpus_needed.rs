//! `foretell plan --gpus-needed KIND,...`: the least number of each kind of device on which a job
//! fits.

use crate::best_of_job::{BestOfJob, best_of_job};
use crate::choices::Choices;
use crate::explain::{LAYOUTS_TO_CHOOSE_FROM, risk};
use crate::failure::Failure;
use crate::output;
use foretell_planner::PlannerError;
use foretell_program::Profile;
use foretell_reports::{Column, table};
use foretell_units::{Bytes, Seconds};
use schemars::JsonSchema;
use serde::Serialize;

/// The document of `plan --gpus-needed --json`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct GpusNeededAnswer {
    /// The kinds, in the order in which they were named.
    kinds: Vec<Needed>,
}

/// What a job needs of one kind of device.
#[derive(Debug, Serialize, JsonSchema)]
struct Needed {
    /// The kind, as it was named.
    device: String,
    /// The least number on which the job fits; `None` if it fits on none that was tried.
    devices: Option<usize>,
    /// The predicted step there.
    step_seconds: Option<f64>,
    /// Tokens per second there, or samples if they are no sequences.
    rate: Option<f64>,
    /// Peak memory of the fullest device there.
    memory_bytes: Option<u64>,
    /// The chance of running out of memory there, if it is known.
    chance_of_running_out: Option<f64>,
    /// The layout in words.
    layout: String,
}

/// Numbers of nodes that are tried after the devices of a single node, which has eight.
const NODES: [usize; 7] = [2, 3, 4, 6, 8, 16, 32];
/// Devices of a node.
const OF_NODE: usize = 8;

/// Samples per step, unless they are stated.
const USUAL_BATCH: usize = 32;

/// Finds the least number of each kind.
pub fn answer(kinds: &[String], choices: &Choices, profile: Option<&Profile>) -> Result<GpusNeededAnswer, Failure> {
    // The batch is the same for any number of devices. A rollout states its own.
    let batch = choices.global_batch.or_else(|| {
        (!choices.method.generates()).then(|| {
            output::note(&format!("`--global-batch {USUAL_BATCH}` is assumed"));
            USUAL_BATCH
        })
    });
    let choices = Choices { global_batch: batch, ..choices.clone() };
    let kinds = kinds.iter().map(|kind| needed(kind, &choices, profile)).collect::<Result<_, _>>()?;
    Ok(GpusNeededAnswer { kinds })
}

fn needed(kind: &str, choices: &Choices, profile: Option<&Profile>) -> Result<Needed, Failure> {
    let mut found = Needed {
        device: kind.into(),
        devices: None,
        step_seconds: None,
        rate: None,
        memory_bytes: None,
        chance_of_running_out: None,
        layout: String::new(),
    };
    let within = (1..=OF_NODE).map(|devices| (1, devices));
    for (nodes, of_node) in within.chain(NODES.map(|nodes| (nodes, OF_NODE))) {
        let job = Choices { topology: format!("{nodes}x{of_node}x{kind}"), ..choices.clone() };
        match best_of_job(&job, profile, LAYOUTS_TO_CHOOSE_FROM)? {
            BestOfJob::Fits(best) if !best.probably_runs_out => {
                found.devices = Some(best.devices);
                found.step_seconds = Some(best.step_seconds);
                found.rate = Some(best.rate);
                found.memory_bytes = best.memory;
                found.chance_of_running_out = best.chance_of_running_out;
                found.layout = best.layout;
                break;
            }
            // Try the next larger number: more devices may fit where fewer do not, or the search
            // ran out of time.
            BestOfJob::Fits(_)
            | BestOfJob::DoesNotFit(_)
            | BestOfJob::Refused(Failure::Unplanned(PlannerError::OutOfTime { .. })) => {}
            BestOfJob::Refused(failure) => return Err(failure),
        }
    }
    Ok(found)
}

impl GpusNeededAnswer {
    /// The answer as a table.
    pub fn text(&self) -> String {
        let columns = [
            Column::words("device"),
            Column::numbers("needed"),
            Column::numbers("step"),
            Column::numbers("tokens/s"),
            Column::numbers("memory"),
            Column::words("layout"),
        ];
        let row = |needed: &Needed| {
            let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".into());
            vec![
                needed.device.clone(),
                or_none(needed.devices.map(|count| count.to_string())),
                or_none(needed.step_seconds.map(|step| Seconds::new(step).to_string())),
                or_none(needed.rate.map(|rate| format!("{rate:.0}"))),
                or_none(needed.memory_bytes.map(|bytes| Bytes::new(bytes).to_string())),
                match (needed.devices, risk(needed.chance_of_running_out)) {
                    (None, _) => "does not fit on 256".into(),
                    (_, Some(risk)) => format!("{}; {risk}", needed.layout),
                    _ => needed.layout.clone(),
                },
            ]
        };
        table(&columns, &self.kinds.iter().map(row).collect::<Vec<_>>())
    }
}
