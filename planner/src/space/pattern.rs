//! The pattern of repeating blocks in a model's graph.

use foretell_models::{Graph, Model};

/// The fewest repetitions of blocks with which truncated models bound a model. With fewer,
/// compiling the whole model costs about as much.
pub(crate) const FEWEST_REPEATS: usize = 5;

/// The most blocks of a period. Truncated models with a longer period would be as long as most
/// models.
const LONGEST_PERIOD: usize = 12;

/// A model's blocks: some at its beginning, a period that repeats, and some at its end.
///
/// A plain stack has an embedding, equal layers and a head. Dense layers before mixtures count in
/// `first`; modules after the head, and a decoder after an encoder, count in `last`; layers that
/// alternate between windowed and full attention form a period of several blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BlockPattern {
    /// Blocks before the first period; at least 1.
    pub(crate) first: usize,
    /// The kind of each block of a period. Kinds are numbered from 0 in order of first appearance.
    pub(crate) period: Vec<usize>,
    /// Number of periods; at least [`FEWEST_REPEATS`].
    pub(crate) repeats: usize,
    /// Blocks after the last period; at least 1.
    pub(crate) last: usize,
    /// Whether full recomputation may recompute each block.
    recomputable: Vec<bool>,
}

impl BlockPattern {
    /// Finds the pattern of a forward graph: the period that covers the most blocks; among equals
    /// the shortest, then the first. `None` if no period repeats often enough, or if its blocks
    /// cannot be left out of the graph.
    pub(crate) fn of(graph: &Graph, is_frozen: impl Fn(&str) -> bool) -> Option<Self> {
        let kinds = graph.kinds_of_blocks(is_frozen);
        // The model's first and last block are in no period.
        let inner = kinds.get(1..kinds.len().checked_sub(1)?)?;
        let (mut best, mut most) = (None, 0);
        for period in 1..=LONGEST_PERIOD.min(inner.len()) {
            for first in 0..inner.len() {
                let rest = &inner[first..];
                let equal = rest.iter().enumerate().take_while(|(block, kind)| *block < period || rest[block - period] == **kind);
                let repeats = equal.count() / period;
                if repeats >= FEWEST_REPEATS && repeats * period > most {
                    (best, most) = (Some((first + 1, period, repeats)), repeats * period);
                }
            }
        }
        let (first, period, repeats) = best?;
        let mut different: Vec<usize> = Vec::new();
        let kind_in_period = |kind: &usize| {
            different.iter().position(|other| other == kind).unwrap_or_else(|| {
                different.push(*kind);
                different.len() - 1
            })
        };
        let pattern = Self {
            first,
            period: kinds[first..first + period].iter().map(kind_in_period).collect(),
            repeats,
            last: kinds.len() - first - period * repeats,
            recomputable: graph.blocks.iter().map(|block| block.recomputable).collect(),
        };
        let can_be_short = |blocks: Vec<usize>| graph.with_blocks(&blocks).is_some();
        let are_left_out = can_be_short(pattern.with_periods(1))
            && (0..pattern.kinds()).all(|kind| can_be_short(pattern.with_one_kind(kind, FEWEST_REPEATS)));
        are_left_out.then_some(pattern)
    }

    /// A stack of equal layers between an embedding and a head.
    #[cfg(test)]
    pub(crate) fn plain(layers: usize) -> Self {
        let recomputable = [vec![false], vec![true; layers], vec![false]].concat();
        Self { first: 1, period: vec![0], repeats: layers, last: 1, recomputable }
    }

    /// Returns a model with as few periods as truncated models need, and its pattern. `graph` is
    /// the graph of `model`; `graph_of` returns that of a smaller model. `None` if no smaller model
    /// of the family equals `model` without the left-out periods.
    pub(crate) fn shortened(
        &self,
        model: &Model,
        graph: &Graph,
        graph_of: impl Fn(&Model) -> Option<Graph>,
        is_frozen: impl Fn(&str) -> bool,
    ) -> Option<(Model, Self)> {
        let left_out = (self.repeats - FEWEST_REPEATS) * self.period.len();
        let short = model.with_layers(model.layers()?.checked_sub(left_out)?)?;
        let cut = graph.with_blocks(&self.with_periods(FEWEST_REPEATS))?;
        let recomputable = cut.blocks.iter().map(|block| block.recomputable).collect();
        let pattern = Self { repeats: FEWEST_REPEATS, recomputable, ..self.clone() };
        graph_of(&short)?.is_like(&cut, is_frozen).then_some((short, pattern))
    }

    /// Returns the number of different blocks of a period.
    pub(crate) fn kinds(&self) -> usize {
        self.period.iter().max().map_or(0, |last| last + 1)
    }

    /// Returns all blocks of the model.
    pub(crate) fn blocks(&self) -> usize {
        self.first + self.period.len() * self.repeats + self.last
    }

    /// Returns the blocks of all periods.
    pub(crate) fn repeated(&self) -> std::ops::Range<usize> {
        self.first..self.blocks() - self.last
    }

    /// Returns the kind of the block `offset` blocks after the first repeated one.
    pub(crate) fn kind(&self, offset: usize) -> usize {
        self.period[offset % self.period.len()]
    }

    /// Returns how many of `blocks` full recomputation may recompute.
    pub(crate) fn recomputable(&self, blocks: std::ops::Range<usize>) -> usize {
        self.recomputable.get(blocks).map_or(0, |blocks| blocks.iter().filter(|&&is_recomputable| is_recomputable).count())
    }

    /// Returns `true` if all blocks that repeat are equal, and no other block is recomputed.
    pub(crate) fn is_plain(&self) -> bool {
        let repeated = self.repeated();
        let outside = self.recomputable(0..repeated.start) + self.recomputable(repeated.end..self.blocks());
        self.period.len() == 1 && outside == 0
    }

    /// Returns the model's blocks with `periods` periods.
    pub(crate) fn with_periods(&self, periods: usize) -> Vec<usize> {
        let repeated = self.repeated();
        (0..self.first + periods * self.period.len()).chain(repeated.end..self.blocks()).collect()
    }

    /// Returns the model's blocks with the first `count` blocks of one kind in place of all
    /// repeated blocks. `count` is at most [`FEWEST_REPEATS`].
    pub(crate) fn with_one_kind(&self, kind: usize, count: usize) -> Vec<usize> {
        let repeated = self.repeated();
        let of_kind = repeated.clone().filter(|block| self.kind(block - self.first) == kind).take(count);
        (0..self.first).chain(of_kind).chain(repeated.end..self.blocks()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foretell_models::{GraphOptions, Model};

    fn pattern(name: &str) -> BlockPattern {
        let model = Model::named(name).expect("in the zoo");
        let graph = model.graph(name, &GraphOptions::ONE).expect("its sizes are sound");
        BlockPattern::of(&graph, |_| false).expect("its layers repeat")
    }

    #[test]
    fn patterns_of_known_models_are_found() {
        assert_eq!(pattern("llama3-8b"), BlockPattern::plain(32));
        let of = |name: &str| {
            let found = pattern(name);
            (found.first, found.period, found.repeats, found.last)
        };
        assert_eq!(of("deepseek-v3"), (4, vec![0], 58, 1));
        assert_eq!(of("gpt-oss-120b"), (1, vec![0, 1], 18, 1));
        // Each sixth layer sees all positions, and two are left.
        assert_eq!(of("gemma3-27b"), (1, vec![0, 0, 0, 0, 0, 1], 10, 3));
        // The decoder is behind the encoder.
        assert_eq!(of("flan-t5-xxl").2, 24);
    }

    #[test]
    fn short_models_keep_both_ends() {
        let found = pattern("gpt-oss-120b");
        let model = Model::named("gpt-oss-120b").expect("in the zoo");
        let graph = |model: &Model| model.graph("model", &GraphOptions::ONE).ok();
        let whole = graph(&model).expect("its sizes are sound");
        let (short, of_short) = found.shortened(&model, &whole, graph, |_| false).expect("it is a shorter model of the family");
        assert_eq!((short.layers(), of_short.repeats, of_short.blocks()), (Some(10), 5, 12));
        assert_eq!(found.with_periods(1), [0, 1, 2, 37]);
        assert_eq!(found.with_one_kind(1, 2), [0, 2, 4, 37]);
        assert!(!found.is_plain() && pattern("gpt2").is_plain() && !pattern("deepseek-v3").is_plain());
    }
}
