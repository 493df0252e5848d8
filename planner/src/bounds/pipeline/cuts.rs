//! The blocks of each chunk of a pipeline.

use crate::bounds::truncated::Chunk;
use crate::space::BlockPattern;
use foretell_program::{Schedule, usual_cuts};

/// The blocks of each chunk of a pipeline.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::bounds) struct PipelineCuts {
    /// The different chunks.
    pub(super) chunks: Vec<Chunk>,
    /// Index in `chunks` of the chunk at each position in the model.
    pub(super) chunk_of_position: Vec<usize>,
}

impl PipelineCuts {
    /// Returns the usual cuts of blocks whose work is `work`, for a pipeline of `stages` stages
    /// with `chunks` chunks each.
    pub(in crate::bounds) fn usual(work: &[f64], stages: usize, chunks: usize, pattern: &BlockPattern) -> Self {
        Self::new(&usual_cuts(work, stages, chunks), pattern)
    }

    /// Returns the cuts with these numbers of blocks in each chunk, in model order.
    pub(in crate::bounds) fn new(cuts: &[usize], pattern: &BlockPattern) -> Self {
        let repeated = pattern.repeated();
        let mut start = 0;
        let chunks = cuts.iter().map(|&blocks| {
            let end = start + blocks;
            let (first, last) = (start.max(repeated.start), end.min(repeated.end));
            let chunk = Chunk {
                equal_blocks: last.saturating_sub(first),
                offset: if last > first { (first - repeated.start) % pattern.period.len() } else { 0 },
                recomputable: pattern.recomputable(start..end),
                recomputed: 0,
                has_first: start == 0 && end >= repeated.start,
                has_last: start <= repeated.end && end == pattern.blocks(),
            };
            start = end;
            chunk
        });
        Self::from_chunks(chunks)
    }

    fn from_chunks(positions: impl Iterator<Item = Chunk>) -> Self {
        let mut chunks = Vec::new();
        let chunk_of_position = positions
            .map(|chunk| {
                chunks.iter().position(|known| *known == chunk).unwrap_or_else(|| {
                    chunks.push(chunk);
                    chunks.len() - 1
                })
            })
            .collect();
        Self { chunks, chunk_of_position }
    }

    /// Returns these cuts with recomputation: each stage recomputes the first `layers[stage]` of
    /// its recomputable blocks.
    pub(in crate::bounds) fn recomputing(&self, mut layers: Vec<usize>, schedule: Schedule) -> Self {
        let stages = layers.len();
        let chunks = self.chunk_of_position.iter().enumerate().map(|(position, &chunk)| {
            let chunk = self.chunks[chunk];
            let left = &mut layers[schedule.place(stages, position).0];
            let recomputed = chunk.recomputable.min(*left);
            *left -= recomputed;
            Chunk { recomputed, ..chunk }
        });
        Self::from_chunks(chunks)
    }
}
