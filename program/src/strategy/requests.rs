//! The requests of a plan for single operators (`layout.operators`), as loops.

use super::Strategy;
use super::rules::Rules;
use crate::mesh::{Axis, StageMesh};
use crate::plan::{Layout, OperatorPatterns, PlanError, ShardedPart};
use foretell_models::{BATCH, EXPERTS, Extent, Graph, LoopId, Operator, OperatorId, Pass};
use std::collections::BTreeSet;

/// The requests for all operators of a graph.
pub(super) struct Requests {
    /// By operator: the requested loop along `tensor`, or `Some(None)` if `tensor` is to shard no
    /// loop.
    requested: Vec<Option<Option<LoopId>>>,
    /// Whether there is any request.
    pub(super) any: bool,
}

impl Requests {
    /// Finds the loops that a plan requests.
    ///
    /// # Errors
    /// [`PlanError::Invalid`] if a name matches no operator, or if an operator cannot be sharded as
    /// requested. It is enough that one of the operators that a pattern matches can be sharded so;
    /// the others follow their inputs. Evaluation lacks some operators of training and has its own
    /// loss, so only training refuses.
    pub(super) fn resolve(rules: &Rules<'_>, operators: &OperatorPatterns) -> Result<Self, PlanError> {
        let graph = rules.graph;
        let mut requests = Self { requested: vec![None; graph.operators.len()], any: false };
        let ranks = rules.mesh.size(Axis::Tensor);
        if operators.is_empty() || ranks == 1 {
            return Ok(requests);
        }
        let is_evaluation = graph.operators.iter().all(|operator| operator.pass == Pass::Forward);
        let (mut matching, mut tried, mut used) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        for (index, operator) in graph.operators.iter().enumerate().filter(|(_, operator)| operator.pass == Pass::Forward) {
            let block = &graph.blocks[operator.block].name;
            let Some(choice) = operators.of(&operator.name, block) else { continue };
            matching.extend(operators.matching(&operator.name, block));
            tried.insert((choice.pattern, choice.part));
            let requested = requested_loop(rules, operator, choice.part)?;
            if requested.is_some() {
                used.insert(choice.pattern);
            } else if choice.by_name && !is_evaluation {
                return Err(refused(choice.pattern, choice.part, ranks));
            }
            requests.requested[index] = requested;
            requests.any |= requested.is_some();
        }
        if is_evaluation {
            return Ok(requests);
        }
        if let Some((pattern, _)) = operators.iter().find(|(pattern, _)| !matching.contains(pattern)) {
            return Err(PlanError::Invalid {
                field: "operators",
                reason: format!("no operator or block of `{}` is called `{pattern}`", graph.name),
                hint: "`foretell simulate --dump-program` prints the operators' names; a `*` matches any characters".into(),
            });
        }
        match tried.iter().find(|(pattern, _)| !used.contains(pattern)) {
            Some(&(pattern, part)) => Err(refused(pattern, part, ranks)),
            None => Ok(requests),
        }
    }

    /// The requested loop of an operator, or `Some(None)` if `tensor` is to shard no loop. `None`
    /// without a request.
    pub(super) fn of(&self, id: OperatorId) -> Option<Option<LoopId>> {
        self.requested[id.0]
    }
}

/// The choices of `tensor` for each forward operator, with the whole strategy of each. A loop that
/// has several names is listed once, by the first. Empty for gradients, and for operators for which
/// a plan cannot choose the loop.
///
/// # Errors
/// [`PlanError`] if the other axes cannot shard an operator.
pub(crate) fn choices(graph: &Graph, mesh: &StageMesh, layout: &Layout) -> Result<Vec<Vec<(ShardedPart, Strategy)>>, PlanError> {
    let rules = Rules::new(graph, mesh, layout);
    let of_operator = |operator: &Operator| {
        let mut choices: Vec<(ShardedPart, Strategy)> = Vec::new();
        for part in ShardedPart::ALL.into_iter().filter(|_| operator.pass == Pass::Forward) {
            let Some(chosen) = requested_loop(&rules, operator, part)? else { continue };
            let mut strategy = rules.without_tensor(operator)?;
            strategy.set(Axis::Tensor, chosen);
            if choices.iter().all(|(_, known)| *known != strategy) {
                choices.push((part, strategy));
            }
        }
        Ok(choices)
    };
    graph.operators.iter().map(of_operator).collect()
}

/// The loop along `tensor` for a request, or `Some(None)` for no loop. `None` if the operator
/// cannot be sharded as requested.
fn requested_loop(rules: &Rules<'_>, operator: &Operator, part: ShardedPart) -> Result<Option<Option<LoopId>>, PlanError> {
    // The outputs of logit statistics have a slot for each rank's part of the classes, and
    // `expert_tensor` decides whether experts are spread.
    let is_decided = operator.works_on_parts_of_classes() || (rules.spreads_experts && operator.find_loop(EXPERTS).is_some());
    if is_decided {
        return Ok(None);
    }
    let Some(chosen) = loop_of(operator, part) else { return Ok((part == ShardedPart::Whole).then_some(None)) };
    let strategy = rules.without_tensor(operator)?;
    Ok(rules.can_add_tensor(operator, chosen, &strategy).then_some(Some(chosen)))
}

/// The first shardable loop of the kind that `part` names; `None` if there is none, or for
/// [`ShardedPart::Whole`].
fn loop_of(operator: &Operator, part: ShardedPart) -> Option<LoopId> {
    let of_role = |roles: &[Extent]| {
        operator.loops.iter().position(|dimension| dimension.shardable && roles.contains(&dimension.role)).map(LoopId)
    };
    let last = || operator.outputs.first().and_then(|output| *output.axes.last()?);
    let found = match part {
        ShardedPart::Whole => None,
        ShardedPart::Batch => operator.find_loop(BATCH),
        ShardedPart::Outputs => of_role(&[Extent::Columns]).or_else(last),
        ShardedPart::Inputs => of_role(&[Extent::Contracted, Extent::Vocabulary]),
    };
    found.filter(|walked| operator.loops[walked.0].shardable)
}

fn refused(pattern: &str, part: ShardedPart, ranks: usize) -> PlanError {
    PlanError::Invalid {
        field: "operators",
        reason: format!("the {ranks} ranks of `tensor` cannot shard the `{part}` of `{pattern}`"),
        hint: "choose another of `whole`, `batch`, `outputs` and `inputs`, or a size of `tensor` that divides it".into(),
    }
}
