//! The blocks of each chunk of a pipeline.

use crate::bounds::truncated::Chunk;
use foretell_program::{Schedule, usual_cuts};

/// Which blocks each chunk of a pipeline has.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::bounds) struct PipelineCuts {
    /// The different chunks.
    pub(super) chunks: Vec<Chunk>,
    /// Index in `chunks` of the chunk at each position in the model.
    pub(super) chunk_of_position: Vec<usize>,
}

impl PipelineCuts {
    /// Returns the usual cuts of blocks with so much work each, for a pipeline of `stages` stages
    /// with `chunks` chunks each.
    pub(in crate::bounds) fn usual(work: &[f64], stages: usize, chunks: usize) -> Self {
        Self::new(&usual_cuts(work, stages, chunks))
    }

    /// Returns the cuts that give each chunk, in model order, so many blocks. The model's first and
    /// last block are in the first and the last chunk.
    pub(in crate::bounds) fn new(cuts: &[usize]) -> Self {
        let positions = cuts.len();
        let chunks = cuts.iter().enumerate().map(|(position, &blocks)| {
            let (has_first, has_last) = (position == 0, position + 1 == positions);
            let equal_blocks = blocks - usize::from(has_first) - usize::from(has_last && blocks > usize::from(has_first));
            Chunk { equal_blocks, recomputed: 0, has_first, has_last }
        });
        Self::from_chunks(chunks)
    }

    fn from_chunks(positions: impl Iterator<Item = Chunk>) -> Self {
        let mut chunks = Vec::new();
        let chunk_of_position = positions
            .map(|chunk| {
                chunks.iter().position(|one| *one == chunk).unwrap_or_else(|| {
                    chunks.push(chunk);
                    chunks.len() - 1
                })
            })
            .collect();
        Self { chunks, chunk_of_position }
    }

    /// Returns the same cuts where each stage recomputes the first `layers[stage]` of its equal
    /// blocks.
    pub(in crate::bounds) fn recomputing(&self, mut layers: Vec<usize>, schedule: Schedule) -> Self {
        let stages = layers.len();
        let chunks = self.chunk_of_position.iter().enumerate().map(|(position, &chunk)| {
            let chunk = self.chunks[chunk];
            let left = &mut layers[schedule.place(stages, position).0];
            let recomputed = chunk.equal_blocks.min(*left);
            *left -= recomputed;
            Chunk { recomputed, ..chunk }
        });
        Self::from_chunks(chunks)
    }
}
