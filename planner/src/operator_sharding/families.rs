//! Layouts with placed operators beside those without, for a search over layouts.

use super::{ShardingRequest, applies, choose};
use crate::space::{Family, Request};
use foretell_models::GraphOptions;
use foretell_program::{Layout, OperatorShares, Plan, Recompute, Schedule};
use rayon::prelude::*;

/// The families, each that has ranks of `tensor` followed by itself with operators placed one by one: where that applies to the model, and the user's own
/// layout says nothing of operators. What does not bear on the placement (schedule, chunks, recomputation) is not placed again; and what ZeRO shares out is
/// not looked at: all members of a family have the same placement.
pub(crate) fn with_sharded_operators(request: &Request<'_>, families: Vec<Family>) -> Vec<Family> {
    let applies = request.base.layout.operators.is_empty()
        && request.model.graph(request.name, &GraphOptions::ONE).is_ok_and(|graph| applies(&graph));
    if !applies {
        return families;
    }
    let mut different: Vec<(Layout, usize)> = Vec::new();
    let of_family: Vec<Option<usize>> = families
        .iter()
        .map(|Family { layout, micro_batches }| {
            let bearing = (bearing(layout), *micro_batches);
            (layout.stages.is_none() && layout.tensor > 1).then(|| {
                different.iter().position(|known| *known == bearing).unwrap_or_else(|| {
                    different.push(bearing);
                    different.len() - 1
                })
            })
        })
        .collect();
    let placed: Vec<Option<OperatorShares>> = different.into_par_iter().map(|(layout, _)| operators(request, layout)).collect();
    let twin = |(family, place): (Family, Option<usize>)| {
        let operators = place.and_then(|place| placed.get(place).cloned().flatten());
        let twin = operators.map(|operators| Family { layout: Layout { operators, ..family.layout.clone() }, ..family.clone() });
        [Some(family), twin].into_iter().flatten()
    };
    families.into_iter().zip(of_family).flat_map(twin).collect()
}

/// A layout as far as it bears on the placement of operators.
fn bearing(layout: &Layout) -> Layout {
    Layout { schedule: Schedule::default(), virtual_stages: 1, recompute: Recompute::None, cuts: None, ..layout.clone() }
}

fn operators(request: &Request<'_>, layout: Layout) -> Option<OperatorShares> {
    let plan = Plan { layout, ..request.base.clone() };
    let placed = choose(&ShardingRequest {
        model: request.model,
        name: request.name,
        topology: request.topology,
        costs: request.costs,
        plan: &plan,
        oversubscription: request.oversubscription,
    });
    // What cannot be laid out is counted by the search, of the layout without placed operators.
    placed.ok().flatten().map(|placed| placed.operators)
}
