//! Adds families of layouts with sharded operators to a search.

use super::{ShardingRequest, applies, choose};
use crate::space::{Family, Request};
use foretell_models::GraphOptions;
use foretell_program::{Layout, OperatorPatterns, Plan, Recompute, Schedule};
use rayon::prelude::*;
use std::collections::HashMap;

/// Adds to each family with several ranks of `tensor` a copy with sharded operators, right after
/// it. Nothing is added if sharding does not apply to the model, or if the request's plan shards
/// operators itself.
///
/// One sharding serves all families that differ only in fields without influence on it. It also
/// serves all variants of a family, although they differ in ZeRO.
///
/// Once `is_over` returns `true`, the remaining families get no copy.
pub(crate) fn with_sharded_operators(
    request: &Request<'_>,
    families: Vec<Family>,
    is_over: &(dyn Fn() -> bool + Sync),
) -> Vec<Family> {
    let graph = || request.base.training.graph(request.model, request.name, &GraphOptions::ONE);
    let applies = request.base.layout.operators.is_empty() && graph().is_ok_and(|graph| applies(&graph));
    if !applies {
        return families;
    }
    let mut different: Vec<(Layout, usize)> = Vec::new();
    let mut places: HashMap<(Layout, usize), usize> = HashMap::new();
    let place_of_family: Vec<Option<usize>> = families
        .iter()
        .map(|Family { layout, micro_batches }| {
            let key = (relevant_fields(layout), *micro_batches);
            (layout.stages.is_none() && layout.tensor > 1).then(|| {
                *places.entry(key).or_insert_with_key(|key| {
                    different.push(key.clone());
                    different.len() - 1
                })
            })
        })
        .collect();
    let sharded: Vec<Option<OperatorPatterns>> =
        different.into_par_iter().map(|(layout, _)| if is_over() { None } else { operators(request, layout) }).collect();
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
/// The search then counts that layout in the family without sharded operators.
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
