//! `foretell plan --breakeven QUANTITY`: the factors on a bandwidth or rate at which another layout
//! becomes the fastest, among the layouts that the answer shows and the best one of a single node.

use crate::choices::{Choices, Setting};
use crate::failure::{Failure, code};
use crate::inputs::NamedModel;
use foretell_planner::{Candidate, SearchResult};
use foretell_program::Profile;
use foretell_reports::{Column, table};
use foretell_simulator::{ChangeablePlan, WhatIf};
use foretell_topologies::Topology;
use foretell_units::Seconds;
use foretell_units::diagnostic::Mistake;
use rayon::prelude::*;
use schemars::JsonSchema;
use serde::Serialize;

/// The document of `plan --breakeven --json`: the stretches of the factor, the lowest first.
#[derive(Debug, Serialize, JsonSchema)]
pub struct BreakevenAnswer {
    /// The quantity that is scaled.
    quantity: String,
    /// The stretches.
    stretches: Vec<FactorRange>,
}

/// A range of factors on which one layout is the fastest.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
struct FactorRange {
    /// The least factor of the range, to 2 %; for the first range, the least that was tried.
    from: f64,
    /// The layout's number in the answer; `None` for the best one of a single node.
    layout: Option<usize>,
    /// The layout in words.
    words: String,
    /// Its predicted step at the least factor.
    step_seconds: f64,
}

/// The least and the greatest factor, as powers of two.
const POWERS: std::ops::RangeInclusive<i32> = -8..=4;

/// The factor to which a limit between two layouts is determined.
const EXACTNESS: f64 = 1.02;

/// Finds the stretches.
pub fn answer(
    quantity: &str,
    planned: &SearchResult,
    setting: &Setting,
    choices: &Choices,
    profile: Option<&Profile>,
) -> Result<BreakevenAnswer, Failure> {
    let has_nodes = setting.topology.node_count() > 1;
    let alone = if has_nodes { of_one_node(choices, setting, profile)? } else { None };
    let shown = planned.candidates.iter().enumerate().map(|(index, candidate)| (Some(index + 1), candidate, &setting.topology));
    let of_one_node = alone.iter().map(|(candidate, topology)| (None, candidate, topology));
    let contender = |(layout, candidate, topology)| Contender::new(layout, candidate, topology, &setting.model, profile);
    let contenders = shown.chain(of_one_node).map(contender).collect::<Result<Vec<_>, _>>()?;
    let factors: Vec<f64> = POWERS.map(|power| 2.0_f64.powi(power)).collect();
    let fastest = |factor: f64| fastest(&contenders, quantity, factor);
    let mut stretches: Vec<(f64, usize, Seconds)> = Vec::new();
    for &factor in &factors {
        let (winner, step) = fastest(factor)?;
        if stretches.last().is_some_and(|last| last.1 == winner) {
            continue;
        }
        // Between the previous factor and this one, another layout became the fastest.
        let (mut below, mut above) = (stretches.last().map_or(factor, |_| factor / 2.0), (factor, winner, step));
        while above.0 / below > EXACTNESS {
            let middle = (below * above.0).sqrt();
            let (other, step) = fastest(middle)?;
            if other == winner { above = (middle, winner, step) } else { below = middle }
        }
        stretches.push(above);
    }
    let stretch = |(from, index, step): (f64, usize, Seconds)| {
        let Contender { layout, words, .. } = &contenders[index];
        FactorRange { from, layout: *layout, words: words.clone(), step_seconds: step.value() }
    };
    Ok(BreakevenAnswer { quantity: quantity.into(), stretches: stretches.into_iter().map(stretch).collect() })
}

impl BreakevenAnswer {
    /// The answer as a table.
    pub fn text(&self) -> String {
        let columns = [Column::words(""), Column::words("fastest"), Column::numbers("step")];
        let row = |stretch: &FactorRange| {
            let number = stretch.layout.map_or_else(|| "one node".to_owned(), |number| format!("layout {number}"));
            vec![
                format!("from {:.3} x", stretch.from),
                format!("{number}: {}", stretch.words),
                Seconds::new(stretch.step_seconds).to_string(),
            ]
        };
        let rows: Vec<Vec<String>> = self.stretches.iter().map(row).collect();
        format!("breakeven of {}, as a multiple of today's\n{}", self.quantity, table(&columns, &rows))
    }
}

/// A layout, ready to be predicted on changed hardware.
struct Contender<'a> {
    layout: Option<usize>,
    words: String,
    plan: ChangeablePlan<'a>,
}

impl<'a> Contender<'a> {
    fn new(
        layout: Option<usize>,
        candidate: &'a Candidate,
        topology: &'a Topology,
        model: &'a NamedModel,
        profile: Option<&Profile>,
    ) -> Result<Self, Failure> {
        let words = candidate.plan.layout.in_words();
        let plan = ChangeablePlan::new((&model.model, &model.name), &candidate.plan, topology, profile)?;
        Ok(Self { layout, words, plan })
    }
}

/// The index of the fastest layout at a factor, and its step. Of equally fast layouts the first.
fn fastest(contenders: &[Contender<'_>], quantity: &str, factor: f64) -> Result<(usize, Seconds), Failure> {
    let what_if = question(quantity, factor)?;
    let steps = contenders.par_iter().map(|contender| Ok(contender.plan.predict(&what_if)?.step_seconds));
    let steps: Vec<Seconds> = steps.collect::<Result<_, Failure>>()?;
    let fastest = steps.into_iter().enumerate().min_by(|a, b| a.1.value().total_cmp(&b.1.value()));
    fastest.ok_or_else(|| Failure::undone(code::NOTHING_FITS, "the search returned nothing"))
}

fn question(quantity: &str, factor: f64) -> Result<WhatIf, Failure> {
    format!("{quantity}*{factor}").parse::<WhatIf>().map_err(Failure::of_input)
}

/// Parses the name of a quantity, before anything is searched.
pub fn quantity(text: &str) -> Result<String, Mistake> {
    question(text, 1.0).map(|_| text.to_owned()).map_err(|failure| Mistake::of(failure.diagnostic()))
}

/// The best layout of a single node, if the job fits there.
fn of_one_node(
    choices: &Choices,
    setting: &Setting,
    profile: Option<&Profile>,
) -> Result<Option<(Candidate, Topology)>, Failure> {
    if setting.topology.node_groups().len() > 1 || choices.fix != foretell_planner::Fixed::default() {
        return Ok(None);
    }
    let topology = setting.topology.clone().with_nodes(1)?;
    let mut alone = Setting {
        model: setting.model.clone(),
        topology,
        first_nodes: None,
        base: setting.base.clone(),
        taken: Vec::new(),
        policy: None,
    };
    match choices.search(&mut alone, profile, 1) {
        Ok(planned) => Ok(planned.candidates.into_iter().next().map(|candidate| (candidate, alone.topology))),
        // The job needs more nodes.
        Err(Failure::Unplanned(_)) => Ok(None),
        Err(failure) => Err(failure),
    }
}
