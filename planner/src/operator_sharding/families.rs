//! Adds families of layouts with sharded operators to a search.

use super::{ShardingRequest, applies, choose};
use crate::space::{Family, Request};
use foretell_models::GraphOptions;
use foretell_program::{Layout, OperatorPatterns, Plan, Recompute, Schedule};
use rayon::prelude::*;

/// Adds to each family with several ranks of `tensor` a copy with sharded operators, right behind
/// it. Nothing is added if sharding does not apply to the model, or if the request's plan shards
/// operators itself.
///
/// One sharding serves all families that differ only in fields without influence on it. It also
/// serves all variants of a family, although they differ in ZeRO.
pub(crate) fn with_sharded_operators(request: &Request<'_>, families: Vec<Family>) -> Vec<Family> {
    let applies = request.base.layout.operators.is_empty()
        && request.model.graph(request.name, &GraphOptions::ONE).is_ok_and(|graph| applies(&graph));
    if !applies {
        return families;
    }
    let mut different: Vec<(Layout, usize)> = Vec::new();
    let place_of_family: Vec<Option<usize>> = families
        .iter()
        .map(|Family { layout, micro_batches }| {
            let key = (relevant_fields(layout), *micro_batches);
            (layout.stages.is_none() && layout.tensor > 1).then(|| {
                different.iter().position(|known| *known == key).unwrap_or_else(|| {
                    different.push(key);
                    different.len() - 1
                })
            })
        })
        .collect();
    let sharded: Vec<Option<OperatorPatterns>> =
        different.into_par_iter().map(|(layout, _)| operators(request, layout)).collect();
    let with_copy = |(family, place): (Family, Option<usize>)| {
        let operators = place.and_then(|place| sharded.get(place).cloned().flatten());
        let copy = operators.map(|operators| Family { layout: Layout { operators, ..family.layout.clone() }, ..family.clone() });
        [Some(family), copy].into_iter().flatten()
    };
    families.into_iter().zip(place_of_family).flat_map(with_copy).collect()
}

/// Returns a layout with all fields reset that do not influence how operators are best sharded.
fn relevant_fields(layout: &Layout) -> Layout {
    Layout { schedule: Schedule::default(), virtual_stages: 1, recompute: Recompute::None, cuts: None, ..layout.clone() }
}

/// Returns the best sharding of a layout's operators. `None` also if the layout cannot be laid out.
/// The search then counts it in the family without sharded operators.
fn operators(request: &Request<'_>, layout: Layout) -> Option<OperatorPatterns> {
    let plan = Plan { layout, ..request.base.clone() };
    let sharding = choose(&ShardingRequest {
        model: request.model,
        name: request.name,
        topology: request.topology,
        costs: request.costs,
        plan: &plan,
        oversubscription: request.oversubscription,
    });
    sharding.ok().flatten().map(|sharding| sharding.operators)
}
