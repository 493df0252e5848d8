//! `foretell schema`: the JSON Schema of each file that the program reads and each document that it
//! prints, and the reference pages made of them. A schema follows from the type that is read or
//! written; this file only names the types.

mod page;

use crate::failure::{Failure, code};
use crate::inputs::ModelFile;
use crate::output::{self, Versioned};
use crate::plan_file::PlanFile;
use crate::{
    calibrate, data, doctor, execute, export, failure, framework, generate, import, lab, library, plan, run, serve, simulate,
    status, submit,
};
use clap::Args;
use foretell_program::{Profile, Training};
use foretell_reports::CheckDocument;
use foretell_score::Scores;
use foretell_topologies::TopologySpec;
use foretell_units::suggest;
use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde_json::Value;
use std::path::PathBuf;

/// Print the JSON Schema of a file or of a `--json` document
///
/// Without a name it lists the names. Editors complete and check YAML files by such a schema.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  foretell schema plan > plan.schema.json")]
pub struct Arguments {
    /// A file (`plan`) or the document of a command (`plan-answer`)
    name: Option<String>,
    /// Write the reference pages into a folder, whose `examples/` has an example of each form
    #[arg(long, value_name = "DIR", hide = true)]
    pages: Option<PathBuf>,
}

/// Whether the program reads a form or prints it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A file that the program reads.
    File,
    /// A document that it prints with `--json`.
    Answer,
}

/// The form of a file or document.
struct Form {
    name: &'static str,
    /// What it is, in a sentence.
    meaning: &'static str,
    kind: Kind,
    schema: fn(&mut SchemaGenerator) -> Schema,
}

const fn file<T: JsonSchema>(name: &'static str, meaning: &'static str) -> Form {
    Form { name, meaning, kind: Kind::File, schema: T::json_schema }
}

/// A document that is an object, to which the version is added.
const fn answer<T: JsonSchema + 'static>(name: &'static str, meaning: &'static str) -> Form {
    Form { name, meaning, kind: Kind::Answer, schema: Versioned::<'static, T>::json_schema }
}

/// A document that is a list, or an object that already has its version.
const fn plain<T: JsonSchema>(name: &'static str, meaning: &'static str) -> Form {
    Form { name, meaning, kind: Kind::Answer, schema: T::json_schema }
}

/// Every form, files first.
const FORMS: [Form; 39] = [
    file::<ModelFile>("model", "A model: a family with its sizes. A file may also say `base: NAME` and only what differs."),
    file::<TopologySpec>("topology", "A cluster: devices, nodes and the network."),
    file::<PlanFile>("plan", "A plan: model, topology, layout and training."),
    file::<Profile>("profile", "Measured costs of a machine, from `foretell calibrate`."),
    file::<Training>("recipe", "A recipe: the optimizer's parameters, the loss, what is trained. A plan has it as `training`."),
    answer::<plan::PlanAnswer>("plan-answer", "`plan --json`."),
    answer::<crate::post_training::PlanRolesAnswer>(
        "plan-roles-answer",
        "`plan --method grpo --json` and `plan --method ppo --json`.",
    ),
    answer::<plan::PointsAnswer>("points-answer", "`plan --scaling --json` and `plan --front --json`."),
    answer::<crate::gpus_needed::GpusNeededAnswer>("gpus-needed-answer", "`plan --gpus-needed --json`."),
    answer::<crate::fit_table::TableAnswer>("table-answer", "`plan --table --json`."),
    answer::<simulate::SimulateAnswer>("simulate-answer", "`simulate --json`."),
    answer::<crate::post_training::SimulateRolesAnswer>("simulate-roles-answer", "`simulate --json` of a plan with a `rollout`."),
    plain::<Profile>("calibrate-answer", "`calibrate --json`: the profile."),
    answer::<calibrate::ConvergenceAnswer>("convergence-answer", "`calibrate --convergence --json`."),
    answer::<execute::ExecuteAnswer>("execute-answer", "`execute --json`."),
    answer::<CheckDocument>("check-answer", "`check --json`."),
    answer::<framework::TrainedSteps>("framework-execute-answer", "`execute --json` where another framework trains."),
    answer::<framework::FrameworkCheck>("framework-check-answer", "`check --json` of such a run."),
    answer::<run::RunAnswer>("run-answer", "`run --json`."),
    answer::<generate::GenerateAnswer>("generate-answer", "`generate --json`."),
    answer::<data::TokenizeAnswer>("tokenize-answer", "`data tokenize --json`."),
    answer::<Scores>("score-answer", "`score --json`."),
    answer::<foretell_score::RolloutScores>("rollout-score-answer", "`score --json` of rows of RL post-training."),
    answer::<export::JobAnswer>("export-answer", "`export --json` of a framework's job."),
    answer::<export::ChangedAnswer>("export-into-answer", "`export --into --json`."),
    answer::<export::TraceAnswer>("trace-answer", "`export --to perfetto --json`."),
    answer::<export::ChakraAnswer>("chakra-answer", "`export --to chakra --json`."),
    answer::<import::ImportAnswer>("import-answer", "`import --json`."),
    answer::<import::kineto::KinetoAnswer>("kineto-answer", "`import kineto --json`."),
    answer::<submit::SubmitAnswer>("submit-answer", "`submit --json`."),
    answer::<status::StatusAnswer>("status-answer", "`status --json`."),
    plain::<Vec<library::ListedModel>>("models-answer", "`models --json`."),
    answer::<library::ShownModel>("model-answer", "`models show NAME --json`."),
    plain::<Vec<library::ListedTopology>>("topologies-answer", "`topologies --json`. `topologies show` prints a topology file."),
    plain::<Vec<doctor::Finding>>("doctor-answer", "`doctor --json`."),
    answer::<lab::LabUpAnswer>("lab-up-answer", "`lab up --json`."),
    answer::<lab::LabExecAnswer>("lab-exec-answer", "`lab exec --json`. `lab down` prints `taken_down` alone."),
    answer::<serve::ServeAnswer>("serve-answer", "`serve --json`, before it serves."),
    answer::<failure::FailureAnswer>("error-answer", "Any command with `--json` that fails."),
];

impl Kind {
    fn settings(self) -> SchemaSettings {
        match self {
            Kind::File => SchemaSettings::draft2020_12().for_deserialize(),
            Kind::Answer => SchemaSettings::draft2020_12().for_serialize(),
        }
    }
}

impl Form {
    /// The schema, with the definitions that it refers to.
    fn document(&self) -> Value {
        let mut generator = self.kind.settings().into_generator();
        let schema = (self.schema)(&mut generator);
        let mut document = self.described(schema);
        if let Some(object) = document.as_object_mut() {
            object.insert("$schema".into(), "https://json-schema.org/draft/2020-12/schema".into());
            let definitions = generator.take_definitions(true);
            if !definitions.is_empty() {
                object.insert("$defs".into(), definitions.into());
            }
        }
        document
    }

    /// The schema with the form's name and meaning.
    fn described(&self, schema: Schema) -> Value {
        let mut document = schema.to_value();
        if let Some(object) = document.as_object_mut() {
            object.insert("title".into(), self.name.into());
            object.insert("description".into(), self.meaning.into());
        }
        document
    }
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    if let Some(folder) = &arguments.pages {
        return page::write_all(folder, &FORMS);
    }
    let Some(name) = &arguments.name else {
        let width = FORMS.iter().map(|form| form.name.len()).max().unwrap_or_default();
        return FORMS.iter().try_for_each(|form| output::line(&format!("{:<width$}  {}", form.name, form.meaning)));
    };
    let Some(form) = FORMS.iter().find(|form| form.name == name) else {
        let hint = suggest(name, FORMS.iter().map(|form| form.name));
        return Err(Failure::input(code::UNKNOWN_NAME, format!("no file or document is called `{name}`")).hint(hint));
    };
    output::json_as_it_is(&form.document())
}
