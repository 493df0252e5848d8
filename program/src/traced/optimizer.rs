//! What optimizers hold, and what they allocate while they update.
//!
//! Sources: `torch/optim/adamw.py`, `sgd.py`; `bitsandbytes/optim/optimizer.py` (blocks, sizes
//! from which states are narrow or paged); `transformers/optimization.py` (Adafactor). Muon's are
//! in `muon.rs`.

mod muon;

pub use muon::MuonProducts;
pub(super) use muon::matrix_of;

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
    /// The same with its moments, but not their scales, in memory that device and host share.
    AdamWPaged,
    /// Adafactor without a first moment, as Hugging Face's Trainer has it.
    Adafactor,
    /// PyTorch's SGD over lists of tensors.
    Sgd {
        /// Whether it keeps a velocity.
        momentum: bool,
        /// Whether it has weight decay, which it adds to copies of all gradients.
        decay: bool,
    },
    /// PyTorch's Muon for the layers' matrices, and its fused AdamW for the rest.
    Muon,
}

/// A tensor that an optimizer updates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TrainedTensor {
    /// Its elements.
    pub(super) elements: u64,
    /// Bytes of each.
    pub(super) width: u64,
    /// Its rows and columns as Muon turns it, if it is a whole matrix of a layer.
    pub(super) matrix: Option<[u64; 2]>,
}

impl TrainedTensor {
    /// One that is no matrix, such as a shard.
    pub(super) fn flat(elements: u64, width: u64) -> Self {
        Self { elements, width, matrix: None }
    }

    /// Its bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.elements * self.width
    }
}

/// Elements from which bitsandbytes keeps states in eight bits, and in paged memory.
const NARROW_FROM: u64 = 4096;
const PAGED_FROM: u64 = 100_000;

impl TracedOptimizer {
    /// Bytes of each of a tensor's states on the device.
    pub(super) fn state_bytes(self, tensor: TrainedTensor) -> Vec<u64> {
        let TrainedTensor { elements, width, matrix } = tensor;
        let scales = elements.div_ceil(256) * 4;
        match self {
            TracedOptimizer::Muon if matrix.is_some() => vec![elements * width],
            TracedOptimizer::AdamWForeach | TracedOptimizer::AdamWFused | TracedOptimizer::Muon => vec![elements * width; 2],
            TracedOptimizer::AdamWEightBits | TracedOptimizer::AdamWPaged if elements < NARROW_FROM => vec![elements * 4; 2],
            TracedOptimizer::AdamWPaged if elements >= PAGED_FROM => vec![scales, scales],
            TracedOptimizer::AdamWEightBits | TracedOptimizer::AdamWPaged => vec![elements, scales, elements, scales],
            // Rows and columns are not known here, those of a square are close.
            TracedOptimizer::Adafactor => vec![4 * elements.isqrt(); 2],
            TracedOptimizer::Sgd { momentum, .. } => vec![elements * width; usize::from(momentum)],
        }
    }

    /// Bytes of states that may leave the device.
    pub(super) fn paged_bytes(self, elements: u64) -> u64 {
        if self == TracedOptimizer::AdamWPaged && elements >= PAGED_FROM { 2 * elements } else { 0 }
    }

    /// Emits an update of trained tensors, with the clipping of gradients before it.
    pub(super) fn update<'a, V: FnMut(RankEvent<'a>)>(self, emitter: &mut Emitter<'a, V>, held: &[TrainedTensor]) {
        if emitter.job.clips_gradients {
            let bytes: u64 = held.iter().map(TrainedTensor::bytes).sum();
            let count = held.len() as u64;
            emitter.send(RankEvent::Moves { name: "gradients' norm", bytes, launches: 1 + count / 30 });
            emitter.send(RankEvent::Moves { name: "gradients' clipping", bytes: 2 * bytes, launches: 1 + count / 60 });
        }
        self.step(emitter, held);
    }

    /// Emits the update alone.
    pub(super) fn step<'a, V: FnMut(RankEvent<'a>)>(self, emitter: &mut Emitter<'a, V>, held: &[TrainedTensor]) {
        let bytes: u64 = held.iter().map(TrainedTensor::bytes).sum();
        let all: u64 = held.iter().map(|tensor| tensor.elements).sum();
        let count = held.len() as u64;
        match self {
            TracedOptimizer::AdamWForeach => {
                // Decay 2; first moment 3; second moment 2 and 3; root 2; division, addition 2
                // each; update 4.
                emitter.send(RankEvent::Moves { name: "AdamW", bytes: 20 * bytes, launches: 8 * (1 + count / 40) });
                let copies = copies(emitter, held);
                copies.into_iter().for_each(|id| emitter.release(id));
            }
            TracedOptimizer::AdamWFused => {
                emitter.send(RankEvent::Moves { name: "AdamW", bytes: 7 * bytes, launches: 1 + count / 40 })
            }
            TracedOptimizer::AdamWEightBits | TracedOptimizer::AdamWPaged => {
                let paged: u64 = held.iter().map(|tensor| self.paged_bytes(tensor.elements)).sum();
                if emitter.job.pages_out && paged > 0 {
                    // In before the update, and out to make room for the next tensor's.
                    emitter.send(RankEvent::HostCopy { bytes: 2 * paged, stream: AllocationStream::Compute });
                }
                emitter.send(RankEvent::Moves { name: "AdamW in eight bits", bytes: 3 * bytes + 4 * all, launches: count });
            }
            TracedOptimizer::Adafactor => step_of_adafactor(emitter, held),
            TracedOptimizer::Sgd { momentum, decay } => {
                // `_multi_tensor_sgd`: decay 3, into copies; velocity times momentum 2, plus
                // gradient 3; update 3.
                let passes: &[u64] = match (decay, momentum) {
                    (false, false) => &[3],
                    (false, true) => &[2, 3, 3],
                    (true, false) => &[3, 3],
                    (true, true) => &[3, 2, 3, 3],
                };
                let launches = passes.len() as u64 * (1 + count / 40);
                emitter.send(RankEvent::Moves { name: "SGD", bytes: passes.iter().sum::<u64>() * bytes, launches });
                let copies = if decay { copies(emitter, held) } else { Vec::new() };
                copies.into_iter().for_each(|id| emitter.release(id));
            }
            TracedOptimizer::Muon => {
                let (matrices, rest): (Vec<_>, Vec<_>) = held.iter().copied().partition(|tensor| tensor.matrix.is_some());
                muon::step(emitter, &matrices);
                if !rest.is_empty() {
                    TracedOptimizer::AdamWFused.step(emitter, &rest);
                }
            }
        }
    }
}

/// A temporary as large as each tensor, in its format.
fn copies<'a, V: FnMut(RankEvent<'a>)>(emitter: &mut Emitter<'a, V>, held: &[TrainedTensor]) -> Vec<u64> {
    held.iter().map(|tensor| temporary(emitter, tensor.bytes())).collect()
}

/// A temporary of an update.
fn temporary<'a, V: FnMut(RankEvent<'a>)>(emitter: &mut Emitter<'a, V>, bytes: u64) -> u64 {
    emitter.allocate(bytes, Contents::OptimizerStates, AllocationStream::Compute)
}

/// Adafactor's loop over parameters in Python, whose variables keep what they had of the parameter
/// before until they are assigned: the update, and copies in single precision of a gradient and a
/// parameter that are narrower.
fn step_of_adafactor<'a, V: FnMut(RankEvent<'a>)>(emitter: &mut Emitter<'a, V>, held: &[TrainedTensor]) {
    let (mut update, mut widened) = (None, [None; 2]);
    for &TrainedTensor { elements, width, .. } in held {
        let single = 4 * elements;
        for copy in &mut widened {
            copy.take().into_iter().for_each(|id| emitter.release(id));
            *copy = (width < 4).then(|| temporary(emitter, single));
        }
        let square = temporary(emitter, single);
        let sum = temporary(emitter, single);
        emitter.release(square);
        update.take().into_iter().for_each(|id| emitter.release(id));
        update = Some(temporary(emitter, single));
        emitter.release(sum);
        // Square 2, addition 2, means 2, outer product 1, times the gradient 3, norm 1, two
        // scalings 4, subtraction 3; casts.
        let casts = if width < 4 { 2 * single + single * width / 4 } else { 0 };
        emitter.send(RankEvent::Moves { name: "Adafactor", bytes: 18 * single + casts, launches: 20 });
        let negative = temporary(emitter, single);
        emitter.release(negative);
    }
    update.into_iter().chain(widened.into_iter().flatten()).for_each(|id| emitter.release(id));
}
