//! A short form of one sharding per operator: the most frequent one as `*`, a block's most frequent
//! one under the block's name if that saves patterns, and all others under their operators' names.

use foretell_models::{Graph, OperatorId};
use foretell_program::{Choices, OperatorPatterns, ShardedPart};
use std::collections::BTreeMap;

/// Returns the patterns of the choices `values[i]` of `operators[i]`.
pub(super) fn patterns(choices: &Choices, operators: &[OperatorId], values: &[usize]) -> OperatorPatterns {
    let graph = &choices.graph;
    let chosen: Vec<(OperatorId, ShardedPart)> =
        operators.iter().zip(values).map(|(&id, &value)| (id, choices.of_operator[id.0][value].part)).collect();
    let most = most_frequent(chosen.iter().map(|&(_, part)| part)).unwrap_or(ShardedPart::Whole);
    let mut patterns: BTreeMap<String, ShardedPart> = BTreeMap::from([("*".into(), most)]);
    for of_block in chosen.chunk_by(|choice, next| block(graph, choice.0) == block(graph, next.0)) {
        let exceptions = |usual: ShardedPart| of_block.iter().filter(|(_, part)| *part != usual).count();
        let own = most_frequent(of_block.iter().map(|&(_, part)| part)).unwrap_or(most);
        let usual = if exceptions(own) + 1 < exceptions(most) && has_unique_name(graph, of_block) { own } else { most };
        if usual != most {
            patterns.insert(block(graph, of_block[0].0).into(), usual);
        }
        let others = of_block.iter().filter(|(_, part)| *part != usual);
        patterns.extend(others.map(|&(id, part)| (graph.operators[id.0].name.clone(), part)));
    }
    // A pattern for an operator that has a block's name matches that whole block. So the block's
    // other operators get their own patterns.
    for &(id, part) in &chosen {
        let name = &graph.operators[id.0].name;
        let is_operator_name = |name: &str| graph.operators.iter().any(|operator| operator.name == name);
        if is_operator_name(block(graph, id)) && patterns.contains_key(block(graph, id)) && !patterns.contains_key(name) {
            patterns.insert(name.clone(), part);
        }
    }
    patterns.into_iter().collect()
}

fn block(graph: &Graph, id: OperatorId) -> &str {
    &graph.blocks[graph.operators[id.0].block].name
}

/// Returns `true` if no operator and no other block has the name of these operators' block, so that
/// a pattern with that name matches only this block.
fn has_unique_name(graph: &Graph, of_block: &[(OperatorId, ShardedPart)]) -> bool {
    let name = of_block.first().map_or("", |&(id, _)| block(graph, id));
    graph.operators.iter().all(|operator| operator.name != name)
        && graph.blocks.iter().filter(|block| block.name == name).count() == 1
}

fn most_frequent(parts: impl Iterator<Item = ShardedPart>) -> Option<ShardedPart> {
    let mut counts: BTreeMap<ShardedPart, usize> = BTreeMap::new();
    for part in parts {
        *counts.entry(part).or_default() += 1;
    }
    counts.into_iter().rev().max_by_key(|&(_, count)| count).map(|(part, _)| part)
}
