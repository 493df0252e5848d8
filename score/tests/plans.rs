//! What `score` knows of a row can be said in a plan: the plan's prediction is the row's, to the
//! last bit.
#![allow(clippy::unwrap_used, clippy::panic)]

use foretell_models::Model;
use foretell_program::{Layout, Plan};
use foretell_score::{CompiledRun, Row, Run, published};
use foretell_simulator::gpu::Profiles;
use foretell_topologies::Topology;

/// Returns what is written, as it reads back.
fn through_text<T: serde::Serialize + serde::de::DeserializeOwned>(value: &T) -> T {
    serde_json::from_str(&serde_json::to_string(value).unwrap()).unwrap()
}

/// Checks every `step`th row and returns the number of those that were predicted.
fn check(step: usize) -> usize {
    let rows: Vec<Row> = published().unwrap().into_iter().step_by(step).collect();
    let mut checked = 0;
    for row in &rows {
        let Ok(run) = Run::of(row, Profiles::library().unwrap()) else { continue };
        let Ok(compiled) = CompiledRun::new(&run) else { continue };
        let Ok(expected) = compiled.predict(&run) else { continue };
        let layout = Layout { recompute: compiled.recompute.clone(), ..run.plan.layout.clone() };
        let plan: Plan = through_text(&Plan { layout, ..run.plan.clone() });
        let topology: Topology = through_text(&run.topology().unwrap());
        let model: Model = through_text(&run.model);
        plan.validate().unwrap();
        let of_plan = Run::of_plan(&model, &plan, &topology).unwrap();
        let found = CompiledRun::new(&of_plan).unwrap().predict(&of_plan).unwrap();
        let figures = |prediction: &foretell_score::StepPrediction| {
            [prediction.step, prediction.p10, prediction.p90].map(|time| time.value().to_bits())
        };
        assert_eq!(figures(&expected), figures(&found), "{}: {} beside {}", row.row_id, expected.step, found.step);
        assert_eq!(expected.memory, found.memory, "{}", row.row_id);
        checked += 1;
    }
    checked
}

#[test]
fn a_plan_of_a_row_is_predicted_as_the_row_is() {
    assert!(check(97) > 10);
}

/// `cargo test --release -p foretell-score --test plans -- --ignored`
#[test]
#[ignore = "minutes: every published row"]
fn a_plan_of_every_row_is_predicted_as_the_row_is() {
    assert!(check(1) > 1800);
}
