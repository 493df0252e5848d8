//! `foretell run`: calibrates, plans, simulates, trains, checks and reports.

use crate::calibrate::{Needs, Patience, measure};
use crate::check::check_compiled;
use crate::choices::Choices;
use crate::execute::{self, ExecuteAnswer};
use crate::failure::{Failure, code};
use crate::input;
use crate::inputs::{self, NamedModel};
use crate::launch::{backend_here, enough_devices};
use crate::objective_words::ObjectiveWords;
use crate::output;
use crate::plan::{PlanAnswer, document};
use crate::predict;
use crate::recovery::Recovery;
use crate::run_folder::RunFolder;
use crate::training::{Training, TrainingArguments};
use crate::usual_stack::Trainer;
use clap::Args;
use foretell_executor::World;
use foretell_reports::{CheckDocument, check_table};
use foretell_simulator::Prediction;
use schemars::JsonSchema;
use serde::Serialize;
use std::path::PathBuf;

/// Calibrate, plan, simulate, train and check, in one go
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  foretell run --model mlp --topology local --epochs 10")]
pub struct Arguments {
    #[command(flatten)]
    choices: Choices,
    #[command(flatten)]
    training: TrainingArguments,
    /// Measured costs, in place of a new calibration
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    #[command(flatten)]
    patience: Patience,
    /// The run's folder [default: the next free number under runs/]
    #[arg(long, value_name = "DIR")]
    run: Option<PathBuf>,
    /// Replace the run that the folder has
    #[arg(long, requires = "run")]
    overwrite: bool,
}

/// The document of `run`: those of its parts.
#[derive(Debug, Serialize, JsonSchema)]
pub struct RunAnswer {
    /// The document of `plan`.
    plan: PlanAnswer,
    /// The prediction of the plan that ran.
    predicted: Prediction,
    /// The document of `execute`.
    execute: ExecuteAnswer,
    /// The document of `check`.
    check: CheckDocument,
    /// The run's folder, with the report.
    report: String,
}

/// Runs the command.
pub fn run(arguments: &Arguments, json: bool) -> Result<(), Failure> {
    let choices = &arguments.choices;
    choices.refuse_policy("`run`")?;
    let mut setting = choices.setting(Trainer::Ours)?;
    if choices.precision.len() > 1 {
        return Err(Failure::input(code::OPTION_VALUE, "a calibration covers one number format").hint("name one `--precision`"));
    }
    // Refuses what cannot be trained here before spending minutes on measuring.
    let backend = backend_here(&setting.topology)?;
    World::check_transport(None, arguments.training.transport(), backend)?;
    let devices = choices.devices(&setting);
    enough_devices(devices, &setting.topology, backend, choices.oversubscribe)?;
    let dataset = arguments.training.check_possible(&setting.model.model, &setting.base, None, backend)?;
    let profile = inputs::profile(arguments.profile.as_deref())?;
    let folder = RunFolder::claim(arguments.run.as_deref(), arguments.overwrite)?;
    folder.clear()?;
    let say = |text: &str| if json { Ok(()) } else { output::line(text) };

    let profile = match profile {
        Some(profile) => profile,
        None => {
            let transport = arguments.training.transport();
            let mut needs = Needs::default();
            let NamedModel { model, name } = &setting.model;
            needs.add_layouts(model, name, &setting.base, &setting.topology, devices, &choices.fix)?;
            let model = Some(setting.model.model.clone());
            measure(needs, setting.base.storage(), model, &setting.topology, arguments.patience, transport)?
        }
    };
    let profile_path = folder.keep_profile(&profile)?;
    say(&format!(
        "calibrated: {} kernels, {} collectives and messages ({})",
        profile.kernels.len(),
        profile.exchanges.len(),
        profile_path.display()
    ))?;

    let planned = output::with_spinner("search", || choices.search(&mut setting, Some(&profile), 5))?;
    say(&format!(
        "\nplanned: {} layouts, {} simulated\n{}",
        planned.search.layouts,
        planned.search.simulated,
        predict::layouts(&planned.candidates, &ObjectiveWords::new(choices.objective, setting.topology.currency()))
    ))?;
    let Some(best) = planned.candidates.first() else {
        return Err(Failure::undone(code::NOTHING_FITS, "the search returned nothing"));
    };
    let chosen = folder.file("chosen.yaml");
    let loaded = choices.loaded(&setting, &best.plan, chosen)?;
    output::write(&loaded.path, loaded.file.to_yaml()?.as_bytes())?;

    let mut predicted = predict::predict_own(&loaded, Some(&profile), choices.oversubscribe)?;
    let options = arguments.training.input_options(None);
    let waiting = input::waiting_for(&loaded, &dataset, &options, &predicted)?;
    if let Some(waiting) = &waiting {
        waiting.apply(&mut predicted);
    }
    drop(dataset);
    predict::require_fit(&predicted, &loaded)?;
    predict::print_caveats(
        &loaded.topology,
        &predicted.prediction,
        predicted.compiled.training.mesh.world_size(),
        &predicted.remarks,
    );
    say(&format!("\npredicted:\n{}", predict::table(&predicted.prediction, &loaded.topology)))?;

    let compiled = predicted.compiled.clone();
    let prediction = predicted.prediction.clone();
    let training = Training {
        loaded: loaded.clone(),
        predicted,
        arguments: &arguments.training,
        folder: &folder,
        world: None,
        start: arguments.training.start(),
    };
    let job = arguments.training.job(&loaded, &training.predicted, arguments.training.start());
    arguments.training.check_start(&job)?;
    let outcome = Recovery::none().train(training)?;
    arguments.training.record(&outcome)?;
    say(&format!("\ntrained: {}", execute::summary(&outcome)))?;

    let checked = check_compiled(&folder, loaded, compiled)?;
    checked.write_reports()?;
    if json {
        let planned = document(choices, &setting, &planned)?;
        return output::json(&RunAnswer {
            plan: planned,
            predicted: prediction,
            execute: execute::document(&outcome, &folder),
            check: checked.document,
            report: folder.path().display().to_string(),
        });
    }
    output::line(&format!("\nchecked:\n{}", check_table(&checked.document)))?;
    output::line(&format!("the report is {}", folder.file("report.html").display()))
}
