//! Which change of hardware would change an answer of `foretell plan`.

use crate::choices::Setting;
use crate::failure::Failure;
use foretell_models::GraphOptions;
use foretell_planner::SearchResult;
use foretell_program::{PlanError, Profile};
use foretell_simulator::{ChangeablePlan, WhatIf};
use foretell_units::Seconds;
use rayon::prelude::*;

/// Changes for which the shown layouts are simulated again, and their names.
const QUESTIONS: [(&str, &str); 4] = [
    ("inter_node.bandwidth*2", "doubling the bandwidth between nodes"),
    ("inter_node.bandwidth/2", "halving the bandwidth between nodes"),
    ("intra_node.bandwidth/2", "halving the bandwidth inside nodes"),
    ("device.peak*2", "doubling compute"),
];

/// Share of a step that two layouts may differ by and still be called equally fast.
const INDISTINCT: f64 = 0.002;

/// Blocks times micro-batches of all shown layouts together, up to which `plan` answers these
/// questions without `--explain`. The product indicates how many instructions have to be simulated.
const MOST_PASSES: usize = 10_000;

/// One line for the short answer. If simulating the layouts again takes more than moments, it names
/// the command that does.
pub fn in_short(planned: &SearchResult, setting: &Setting, profile: Option<&Profile>) -> Result<String, Failure> {
    let graph = setting.base.training.graph(&setting.model.model, &setting.model.name, &GraphOptions::ONE)?;
    let micro_batches = planned.candidates.iter().map(|candidate| candidate.plan.micro_batches());
    let passes = micro_batches.sum::<Result<usize, PlanError>>()?.saturating_mul(graph.blocks.len());
    if passes > MOST_PASSES {
        return Ok("sensitivity: `--explain` simulates the layouts shown on other hardware".into());
    }
    Changes::new(planned, setting, profile)?.in_short()
}

/// The shown layouts, ready to be predicted on changed hardware.
pub struct Changes<'a> {
    setting: &'a Setting,
    layouts: Vec<ChangeablePlan<'a>>,
}

/// The shown layouts after one change.
struct Verdict {
    question: &'static str,
    name: &'static str,
    /// The index of the fastest layout.
    fastest: usize,
    /// Its step.
    step: Seconds,
    /// The step of the first layout.
    of_first: Seconds,
}

impl<'a> Changes<'a> {
    /// Prepares the layouts of an answer.
    pub fn new(planned: &'a SearchResult, setting: &'a Setting, profile: Option<&Profile>) -> Result<Self, Failure> {
        let model = (&setting.model.model, setting.model.name.as_str());
        let layouts = planned
            .candidates
            .par_iter()
            .map(|candidate| ChangeablePlan::new(model, &candidate.plan, &setting.topology, profile));
        Ok(Self { setting, layouts: layouts.collect::<Result<_, _>>()? })
    }

    /// One line for the short answer.
    fn in_short(&self) -> Result<String, Failure> {
        let verdicts = self.verdicts()?;
        let (same, other): (Vec<&Verdict>, Vec<&Verdict>) = verdicts.iter().partition(|verdict| verdict.fastest == 0);
        let change = |verdict: &&Verdict| {
            let Verdict { name, fastest, step, of_first, .. } = verdict;
            format!("{name} makes layout {} the fastest ({step}, layout 1: {of_first})", fastest + 1)
        };
        let mut sentences: Vec<String> = other.iter().map(change).collect();
        if !same.is_empty() {
            let names: Vec<&str> = same.iter().map(|verdict| verdict.name).collect();
            let names = match names.as_slice() {
                [first @ .., last] if !first.is_empty() => format!("{} or {last}", first.join(", ")),
                names => names.concat(),
            };
            sentences.push(format!("{names} does not change the choice"));
        }
        Ok(format!("sensitivity, among the layouts shown: {}", sentences.join("; ")))
    }

    /// A line for each question.
    pub fn in_full(&self) -> Result<String, Failure> {
        let mut text = String::from("\nsensitivity, among the layouts shown:\n");
        for Verdict { question, fastest, step, of_first, .. } in self.verdicts()? {
            let verdict = if fastest == 0 {
                "layout 1 stays the fastest".to_owned()
            } else {
                format!("layout {} would be the fastest; layout 1 would take {of_first}", fastest + 1)
            };
            text.push_str(&format!("  {question:<24} {verdict}: {step}\n"));
        }
        Ok(text)
    }

    fn verdicts(&self) -> Result<Vec<Verdict>, Failure> {
        // With a single node, changes between nodes are left out.
        let is_asked =
            |(question, _): &&(&str, &str)| self.setting.topology.node_count() > 1 || !question.starts_with("inter_node");
        let verdicts = QUESTIONS.iter().filter(is_asked).map(|(question, name)| self.verdict(question, name));
        verdicts.filter_map(Result::transpose).collect()
    }

    /// `None` if no layout is shown.
    fn verdict(&self, question: &'static str, name: &'static str) -> Result<Option<Verdict>, Failure> {
        let what_if: WhatIf = question.parse().map_err(Failure::of_input)?;
        let steps = self.layouts.par_iter().map(|layout| Ok(layout.predict(&what_if)?.step_seconds));
        let steps: Vec<Seconds> = steps.collect::<Result<_, Failure>>()?;
        let fastest = steps.iter().enumerate().min_by(|a, b| a.1.value().total_cmp(&b.1.value()));
        // A layout that is faster by less than the printed precision does not change the choice.
        let fastest =
            fastest.map(|(place, step)| if *step > steps[0] * (1.0 - INDISTINCT) { (0, &steps[0]) } else { (place, step) });
        Ok(fastest.map(|(place, step)| Verdict { question, name, fastest: place, step: *step, of_first: steps[0] }))
    }
}
