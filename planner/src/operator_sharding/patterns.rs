//! Saying a choice for each operator in few patterns: what most operators do as `*`, what most of a block's do under its name where that is shorter, the
//! others under their own names.

use foretell_models::{Graph, OperatorId};
use foretell_program::{Choices, OperatorShares, Share};
use std::collections::BTreeMap;

/// The patterns of an assignment of choices to operators.
pub(super) fn patterns(choices: &Choices, operators: &[OperatorId], values: &[usize]) -> OperatorShares {
    let graph = &choices.graph;
    let chosen: Vec<(OperatorId, Share)> =
        operators.iter().zip(values).map(|(&id, &value)| (id, choices.of_operator[id.0][value].share)).collect();
    let most = most_usual(chosen.iter().map(|&(_, share)| share)).unwrap_or(Share::Whole);
    let mut patterns: BTreeMap<String, Share> = BTreeMap::from([("*".into(), most)]);
    for of_block in chosen.chunk_by(|one, next| block(graph, one.0) == block(graph, next.0)) {
        let exceptions = |usual: Share| of_block.iter().filter(|(_, share)| *share != usual).count();
        let own = most_usual(of_block.iter().map(|&(_, share)| share)).unwrap_or(most);
        let usual = if exceptions(own) + 1 < exceptions(most) && is_plain(graph, of_block) { own } else { most };
        if usual != most {
            patterns.insert(block(graph, of_block[0].0).into(), usual);
        }
        let others = of_block.iter().filter(|(_, share)| *share != usual);
        patterns.extend(others.map(|&(id, share)| (graph.operators[id.0].name.clone(), share)));
    }
    // The name of an operator may be that of a block, whose others are then named, too.
    for &(id, share) in &chosen {
        let name = &graph.operators[id.0].name;
        let is_named = |one: &str| graph.operators.iter().any(|operator| operator.name == one);
        if is_named(block(graph, id)) && patterns.contains_key(block(graph, id)) && !patterns.contains_key(name) {
            patterns.insert(name.clone(), share);
        }
    }
    patterns.into_iter().collect()
}

fn block(graph: &Graph, id: OperatorId) -> &str {
    &graph.blocks[graph.operators[id.0].block].name
}

/// Whether the name of a block is nobody else's: a pattern under it would count for an operator of that name.
fn is_plain(graph: &Graph, of_block: &[(OperatorId, Share)]) -> bool {
    let name = of_block.first().map_or("", |&(id, _)| block(graph, id));
    graph.operators.iter().all(|operator| operator.name != name)
        && graph.blocks.iter().filter(|block| block.name == name).count() == 1
}

fn most_usual(shares: impl Iterator<Item = Share>) -> Option<Share> {
    let mut counts: BTreeMap<Share, usize> = BTreeMap::new();
    for share in shares {
        *counts.entry(share).or_default() += 1;
    }
    counts.into_iter().rev().max_by_key(|&(_, count)| count).map(|(share, _)| share)
}
