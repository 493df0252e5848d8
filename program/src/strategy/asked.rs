//! What a plan asks of single operators (`layout.operators`), as loops.

use super::{Chooser, Strategy};
use crate::mesh::{Axis, StageMesh};
use crate::plan::{Layout, OperatorShares, PlanError, Share};
use foretell_models::{BATCH, EXPERTS, Extent, Graph, LoopId, Operator, OperatorKind, Pass};
use std::collections::BTreeSet;

/// The loop that a share walks: of several columns, or summed dimensions, the first that may be shared out. `None` where the operator has none
/// such, or where nothing is to be shared out.
fn loop_of(operator: &Operator, share: Share) -> Option<LoopId> {
    let of_role = |roles: &[Extent]| operator.loops.iter().position(|one| one.shardable && roles.contains(&one.role)).map(LoopId);
    let last = || operator.outputs.first().and_then(|output| *output.axes.last()?);
    let found = match share {
        Share::Whole => None,
        Share::Batch => operator.find_loop(BATCH),
        Share::Outputs => of_role(&[Extent::Columns]).or_else(last),
        Share::Inputs => of_role(&[Extent::Contracted, Extent::Vocabulary]),
    };
    found.filter(|one| operator.loops[one.0].shardable)
}

/// What `tensor` may share out of each operator of the forward pass, with the whole strategy that it then has: each loop once, by the first of its
/// names. Empty for gradients, and where the loop is not the plan's to choose.
///
/// # Errors
/// [`PlanError`] where the other axes cannot be laid out.
pub(crate) fn choices(graph: &Graph, mesh: &StageMesh, layout: &Layout) -> Result<Vec<Vec<(Share, Strategy)>>, PlanError> {
    let chooser = Chooser::new(graph, mesh, layout);
    let of_operator = |operator: &Operator| {
        let mut choices: Vec<(Share, Strategy)> = Vec::new();
        for share in Share::ALL.into_iter().filter(|_| operator.pass == Pass::Forward) {
            let Some(chosen) = chooser.asked_loop(operator, share)? else { continue };
            let mut strategy = Strategy::default();
            chooser.share_others(operator, &mut strategy)?;
            strategy.set(Axis::Tensor, chosen);
            if choices.iter().all(|(_, known)| *known != strategy) {
                choices.push((share, strategy));
            }
        }
        Ok(choices)
    };
    graph.operators.iter().map(of_operator).collect()
}

impl Chooser<'_> {
    /// Finds the loops that the plan asks for.
    ///
    /// # Errors
    /// [`PlanError::Invalid`] where a name is nobody's, or what it is to share out cannot be; of the operators that a pattern matches one that
    /// can is enough, and the others follow their inputs. Evaluation lacks some operators that training has, and is not refused.
    pub(super) fn resolve_asked(&mut self, operators: &OperatorShares) -> Result<(), PlanError> {
        let ranks = self.mesh.size(Axis::Tensor);
        if operators.is_empty() || ranks == 1 {
            return Ok(());
        }
        let (mut matching, mut tried, mut used) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        let graph = self.graph;
        for (index, operator) in graph.operators.iter().enumerate().filter(|(_, one)| one.pass == Pass::Forward) {
            let block = &graph.blocks[operator.block].name;
            let Some(asked) = operators.of(&operator.name, block) else { continue };
            matching.extend(operators.matching(&operator.name, block));
            tried.insert((asked.pattern, asked.share));
            let chosen = self.asked_loop(operator, asked.share)?;
            if chosen.is_some() {
                used.insert(asked.pattern);
            } else if asked.by_name {
                return Err(refused(asked.pattern, asked.share, ranks));
            }
            self.asked[index] = chosen;
            self.asks |= chosen.is_some();
        }
        if graph.operators.iter().all(|operator| operator.pass == Pass::Forward) {
            return Ok(());
        }
        if let Some((pattern, _)) = operators.iter().find(|(pattern, _)| !matching.contains(pattern)) {
            return Err(PlanError::Invalid {
                field: "operators",
                reason: format!("no operator or block of `{}` is called `{pattern}`", graph.name),
                hint: "`foretell simulate --dump-program` prints the operators' names; a `*` stands for any characters".into(),
            });
        }
        match tried.iter().find(|(pattern, _)| !used.contains(pattern)) {
            Some(&(pattern, share)) => Err(refused(pattern, share, ranks)),
            None => Ok(()),
        }
    }

    /// What an operator's `tensor` is then laid along, if that can be: inside, nothing where every rank does all of it.
    fn asked_loop(&self, operator: &Operator, share: Share) -> Result<Option<Option<LoopId>>, PlanError> {
        // What such an operator makes has a place for each rank's part of the classes; and whole experts are another choice of the plan.
        let is_decided =
            operator.kind == OperatorKind::LogitStatistics || (self.spreads_experts && operator.find_loop(EXPERTS).is_some());
        if is_decided {
            return Ok(None);
        }
        let Some(chosen) = loop_of(operator, share) else { return Ok((share == Share::Whole).then_some(None)) };
        let mut strategy = Strategy::default();
        self.share_others(operator, &mut strategy)?;
        let can = self.divides(operator, chosen, &strategy) && !self.is_positional_twice(operator, chosen, &strategy);
        Ok(can.then_some(Some(chosen)))
    }
}

fn refused(pattern: &str, share: Share, ranks: usize) -> PlanError {
    PlanError::Invalid {
        field: "operators",
        reason: format!("{ranks} ranks of `tensor` cannot share out the `{share}` of `{pattern}`"),
        hint: "choose another of whole, batch, outputs and inputs, or a size of `tensor` that divides it".into(),
    }
}
