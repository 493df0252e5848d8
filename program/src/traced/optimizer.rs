//! What optimizers hold, and what they allocate while they update.

use super::{AllocationStream, Contents, Emitter, RankEvent};

/// An optimizer of a traced job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TracedOptimizer {
    /// PyTorch's AdamW over lists of tensors, its default on GPUs: one temporary copy of the second
    /// moments.
    AdamWForeach,
    /// PyTorch's fused AdamW.
    AdamWFused,
    /// AdamW with states in eight bits, in blocks of 256 with one scale each (bitsandbytes).
    AdamWEightBits,
    /// SGD with momentum.
    Sgd,
}

impl TracedOptimizer {
    /// Bytes of states per trained element of `width` bytes.
    pub(super) fn state_bytes(self, elements: u64, width: u64) -> Vec<u64> {
        match self {
            TracedOptimizer::AdamWForeach | TracedOptimizer::AdamWFused => vec![elements * width; 2],
            // Parameters below 4,096 elements keep states in single precision.
            TracedOptimizer::AdamWEightBits if elements < 4096 => vec![elements * 4; 2],
            TracedOptimizer::AdamWEightBits => vec![elements, elements.div_ceil(256) * 4, elements, elements.div_ceil(256) * 4],
            TracedOptimizer::Sgd => vec![elements * width],
        }
    }

    /// Emits an update of trained tensors, given the elements and width of each, with the clipping
    /// of gradients before it.
    pub(super) fn update<'a, V: FnMut(RankEvent<'a>)>(self, emitter: &mut Emitter<'a, V>, held: &[(u64, u64)]) {
        let bytes: u64 = held.iter().map(|&(elements, width)| elements * width).sum();
        let count = held.len() as u64;
        emitter.send(RankEvent::Moves { name: "gradients' norm", bytes, launches: 1 + count / 30 });
        emitter.send(RankEvent::Moves { name: "gradients' clipping", bytes: 2 * bytes, launches: 1 + count / 60 });
        self.step(emitter, held);
    }

    /// Emits the update alone.
    pub(super) fn step<'a, V: FnMut(RankEvent<'a>)>(self, emitter: &mut Emitter<'a, V>, held: &[(u64, u64)]) {
        let bytes: u64 = held.iter().map(|&(elements, width)| elements * width).sum();
        let count = held.len() as u64;
        match self {
            TracedOptimizer::AdamWForeach => {
                let copies: Vec<u64> = held
                    .iter()
                    .map(|&(elements, width)| {
                        emitter.allocate(elements * width, Contents::OptimizerStates, AllocationStream::Compute)
                    })
                    .collect();
                // Decay 2; first moment 3; second moment 2 and 3; root 2; division, addition 2
                // each; update 4.
                emitter.send(RankEvent::Moves { name: "AdamW", bytes: 20 * bytes, launches: 8 * (1 + count / 40) });
                copies.into_iter().for_each(|id| emitter.release(id));
            }
            TracedOptimizer::AdamWFused => {
                emitter.send(RankEvent::Moves { name: "AdamW", bytes: 7 * bytes, launches: 1 + count / 40 })
            }
            TracedOptimizer::AdamWEightBits => {
                let elements: u64 = held.iter().map(|&(elements, _)| elements).sum();
                emitter.send(RankEvent::Moves { name: "AdamW in eight bits", bytes: 3 * bytes + 4 * elements, launches: count });
            }
            TracedOptimizer::Sgd => {
                emitter.send(RankEvent::Moves { name: "SGD", bytes: 5 * bytes, launches: 2 * (1 + count / 40) })
            }
        }
    }
}
