//! `foretell plan --breakeven QUANTITY`: from which bandwidth or rate on which layout is the
//! fastest, among those that the answer shows and the best one of a single node.

use crate::choices::{Choices, Setting};
use crate::failure::{Failure, code};
use crate::predict;
use foretell_planner::{Candidate, Planned};
use foretell_program::{Profile, Program, compile_training};
use foretell_reports::{Column, table};
use foretell_simulator::{CostModel, Folding, WhatIf, predict as simulate, traced_prediction};
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
    stretches: Vec<Stretch>,
}

/// A stretch of factors on which one layout is the fastest.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
struct Stretch {
    /// The least factor, to 2 %; the least that was tried for the first stretch.
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

/// How exactly a limit between two layouts is found.
const EXACTNESS: f64 = 1.02;

/// Finds the stretches.
pub fn answer(
    quantity: &str,
    planned: &Planned,
    setting: &Setting,
    choices: &Choices,
    profile: Option<&Profile>,
) -> Result<BreakevenAnswer, Failure> {
    let mut contenders = Vec::new();
    for (index, candidate) in planned.candidates.iter().enumerate() {
        contenders.push(Contender::new(Some(index + 1), candidate, &setting.topology, setting, profile)?);
    }
    if setting.topology.node_count() > 1
        && let Some((candidate, topology)) = of_one_node(choices, setting, profile)?
    {
        contenders.push(Contender::new(None, &candidate, &topology, setting, profile)?);
    }
    let factors: Vec<f64> = POWERS.map(|power| 2.0_f64.powi(power)).collect();
    let fastest = |factor: f64| fastest(&contenders, quantity, factor, setting, profile);
    let mut stretches: Vec<(f64, usize, Seconds)> = Vec::new();
    for &factor in &factors {
        let (winner, step) = fastest(factor)?;
        if stretches.last().is_some_and(|last| last.1 == winner) {
            continue;
        }
        // Between the factor before and this one another layout took over.
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
        Stretch { from, layout: *layout, words: words.clone(), step_seconds: step.value() }
    };
    Ok(BreakevenAnswer { quantity: quantity.into(), stretches: stretches.into_iter().map(stretch).collect() })
}

impl BreakevenAnswer {
    /// The answer as a table.
    pub fn text(&self) -> String {
        let columns = [Column::words(""), Column::words("fastest"), Column::numbers("step")];
        let row = |stretch: &Stretch| {
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

/// A layout, ready to be simulated on changed hardware.
struct Contender {
    layout: Option<usize>,
    words: String,
    candidate: Candidate,
    topology: Topology,
    /// Its Program; `None` where its framework's own operators predict it.
    program: Option<(Program, CostModel)>,
}

impl Contender {
    fn new(
        layout: Option<usize>,
        candidate: &Candidate,
        topology: &Topology,
        setting: &Setting,
        profile: Option<&Profile>,
    ) -> Result<Self, Failure> {
        let model = &setting.model;
        let program = if candidate.prediction.is_traced() {
            None
        } else {
            let costs = predict::costs(profile, topology, &candidate.plan, &model.model)?;
            Some((compile_training(&model.model, &model.name, &candidate.plan)?, costs))
        };
        let words = candidate.plan.layout.in_words();
        Ok(Self { layout, words, candidate: candidate.clone(), topology: topology.clone(), program })
    }

    fn step(&self, what_if: &WhatIf, setting: &Setting, profile: Option<&Profile>) -> Result<Seconds, Failure> {
        let topology = what_if.topology(&self.topology)?;
        match &self.program {
            Some((program, costs)) => {
                let oversubscription = predict::oversubscription(false);
                let (prediction, _) = simulate(program, &topology, &what_if.costs(costs), oversubscription, Folding::On)?;
                Ok(prediction.step_seconds)
            }
            None => {
                let (plan, model) = (&self.candidate.plan, &setting.model.model);
                let costs = predict::costs(profile, &topology, plan, model)?;
                let traced = traced_prediction(plan, model, &topology, &costs);
                traced.map(|traced| traced.prediction.step_seconds).map_err(Failure::of_undone)
            }
        }
    }
}

/// The place of the fastest layout at a factor, and its step. Of equal ones the first.
fn fastest(
    contenders: &[Contender],
    quantity: &str,
    factor: f64,
    setting: &Setting,
    profile: Option<&Profile>,
) -> Result<(usize, Seconds), Failure> {
    let what_if = question(quantity, factor)?;
    let steps = contenders.par_iter().map(|contender| contender.step(&what_if, setting, profile));
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
        // It needs more nodes.
        Err(Failure::Unplanned(_)) => Ok(None),
        Err(failure) => Err(failure),
    }
}
