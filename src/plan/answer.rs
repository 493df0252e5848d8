//! The documents that `foretell plan --json` prints.

use crate::breakeven::BreakevenAnswer;
use crate::choices::{Choices, Setting};
use crate::failure::Failure;
use crate::lengths::LengthsAnswer;
use crate::modes::ModesAnswer;
use crate::plan_file::PlanFile;
use crate::running_cost;
use foretell_planner::{Candidate, Search, SearchResult, SizePoint};
use foretell_simulator::Prediction;
use schemars::JsonSchema;
use serde::Serialize;
use std::path::PathBuf;

/// The JSON document of `plan`. Its plans can be moved to any folder.
pub fn document(choices: &Choices, setting: &Setting, planned: &SearchResult) -> Result<PlanAnswer, Failure> {
    let candidate = |candidate: &Candidate| -> Result<AlternativeAnswer, Failure> {
        let plan = choices.movable_plan_file(setting, &candidate.plan)?;
        Ok(AlternativeAnswer { plan, predicted: candidate.prediction.clone() })
    };
    let best = planned.candidates.first();
    Ok(PlanAnswer {
        plan: best.map(|best| choices.movable_plan_file(setting, &best.plan)).transpose()?,
        predicted: best.map(|best| best.prediction.clone()),
        alternatives: planned.candidates.iter().skip(1).map(candidate).collect::<Result<Vec<_>, _>>()?,
        search: planned.search.clone(),
        modes: None,
        compared: None,
        breakeven: None,
        lengths: None,
        cost: None,
        goodput: None,
    })
}

/// The document of `plan`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct PlanAnswer {
    /// The best plan. Its paths are absolute.
    pub(super) plan: Option<PlanFile>,
    /// The plan's prediction.
    pub(super) predicted: Option<Prediction>,
    /// The next best plans.
    pub(super) alternatives: Vec<AlternativeAnswer>,
    /// A summary of the search.
    pub(super) search: Search,
    /// The modes of `--mode any`. `plan` is then the best one's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) modes: Option<ModesAnswer>,
    /// The plan given by `--compare`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) compared: Option<ComparedAnswer>,
    /// The stretches of `--breakeven`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) breakeven: Option<BreakevenAnswer>,
    /// The effect of the samples' lengths on the best plan's step, with `--lengths`. The plans are
    /// then for the longest batch, ordered by their mean step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) lengths: Option<LengthsAnswer>,
    /// The cost of a step and of a run of the best plan, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) cost: Option<running_cost::CostAnswer>,
    /// The share of a long run's time that makes progress, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) goodput: Option<running_cost::GoodputAnswer>,
}

/// Another good plan.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Alternative")]
pub(super) struct AlternativeAnswer {
    /// The plan.
    pub(super) plan: PlanFile,
    /// The plan's prediction.
    pub(super) predicted: Prediction,
}

/// A plan of the user's, compared with the answer.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Compared")]
pub(super) struct ComparedAnswer {
    /// The plan's file.
    pub(super) plan: PathBuf,
    /// The plan's prediction.
    pub(super) predicted: Prediction,
}

/// The document of `plan --scaling` and of `plan --front`, which has one of the two lists.
#[derive(Debug, Serialize, JsonSchema)]
pub struct PointsAnswer {
    /// The best layout of each size.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) scaling: Option<Vec<SizePoint>>,
    /// The Pareto front of step time, memory and devices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) front: Option<Vec<SizePoint>>,
}
