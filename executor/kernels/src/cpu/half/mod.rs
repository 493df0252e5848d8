//! Half-precision kernels. Memory holds 16 bits per number; sums are in single precision.
//!
//! This file has the general method: operands are widened into scratch memory, the single-precision
//! kernel runs there, and the results are narrowed. Kernels that treat rows independently do so in
//! blocks that stay in the cache, so that main memory sees 16 bits only. The files below have
//! faster methods, such as [`dot`] for products on machines that multiply bf16. Like the
//! single-precision kernels, nothing here knows ranks, layouts or schedules.

mod batch_norm;
#[cfg(target_arch = "x86_64")]
mod convolutions;
mod cross_entropy;
#[cfg(target_arch = "x86_64")]
mod dot;
mod elementwise;
mod optimizers;
#[cfg(target_arch = "x86_64")]
mod products;

use foretell_models::{Attention, Kernel, KernelSpec, MOST_OPERANDS, Storage};
use foretell_units::DataType;

use super::CpuBackend;
use super::dropout;
use super::memory::{Scratch, halves, halves_mut};
use super::micro_kernel::MicroKernel;
use super::movement;
use crate::half::SixteenBits;
use crate::operands;
use crate::{Backend as _, BackendError, KernelCall, Operand};

/// Single-precision elements per block of rows, over all operands: 32 KiB.
const BLOCK_ELEMENTS: usize = 8192;

/// State of the half-precision kernels.
#[derive(Debug)]
pub(super) struct HalfKernels {
    /// Widened operands. The single-precision kernels have their own scratch.
    scratch: Scratch,
    /// Micro-kernel for pairs of bf16, if the machine has one.
    pairs: Option<MicroKernel>,
}

impl HalfKernels {
    /// Detects what this machine supports.
    pub(super) fn detect() -> Self {
        HalfKernels { scratch: Scratch::default(), pairs: MicroKernel::detect_pairs() }
    }

    /// The state on a machine without bf16 products.
    #[cfg(test)]
    pub(super) fn without_pairs() -> Self {
        HalfKernels { scratch: Scratch::default(), pairs: None }
    }
}

/// Runs a call in precision `half`.
///
/// # Safety
///
/// The call's operands are checked and valid, as [`Backend::run`](crate::Backend::run)
/// wants them.
pub(super) unsafe fn run(backend: &mut CpuBackend, call: &KernelCall<'_>, half: SixteenBits) -> Result<(), BackendError> {
    #[cfg(target_arch = "x86_64")]
    if let (SixteenBits::Bf16, Some(kernel)) = (half, backend.half.pairs) {
        // SAFETY: this function's own contract.
        if unsafe { products::run(call, &kernel, [&mut backend.half.scratch, &mut backend.scratch]) } {
            return Ok(());
        }
    }
    // SAFETY: this function's own contract.
    unsafe {
        match *call.kernel {
            _ if half == SixteenBits::Bf16 && elementwise::run(call) => Ok(()),
            Kernel::CrossEntropyGradient { classes, normalizer, parts, scaled, .. } if half == SixteenBits::Bf16 => {
                cross_entropy::gradient(call, classes, normalizer, parts, scaled)
            }
            Kernel::Sgd { .. } | Kernel::AdamW { .. } | Kernel::LambStep { .. } | Kernel::MuonStep { .. } => {
                optimizers::step(backend, call, half)
            }
            Kernel::BatchNorm { groups, positions, channels } if groups * positions * channels > 0 => {
                batch_norm::forward(call, positions, channels, half, &mut backend.half.scratch);
                Ok(())
            }
            Kernel::BatchNormInputGradient { groups, positions, channels } if groups * positions * channels > 0 => {
                batch_norm::input_gradient(call, positions, channels, half, &mut backend.half.scratch);
                Ok(())
            }
            Kernel::Dropout(ref sizes) => {
                dropout::drop_some_of_halves(call, sizes, half, &mut backend.half.scratch);
                Ok(())
            }
            _ if operands::moved_width(call) == Some(4) => backend.run(&KernelCall { precision: DataType::Fp32, ..*call }),
            _ => match moved(call) {
                Some(result) => result,
                None => widened(backend, call, half),
            },
        }
    }
}

/// Runs a kernel that only moves numbers, without widening them.
///
/// # Safety
///
/// The call's operands are checked and valid.
unsafe fn moved(call: &KernelCall<'_>) -> Option<Result<(), BackendError>> {
    // SAFETY: this function's own contract.
    unsafe {
        match *call.kernel {
            Kernel::Embedding { vocabulary, hidden, parts, .. } => {
                return Some(movement::embedding::<u16>(call, vocabulary, hidden, parts));
            }
            Kernel::Split { columns, .. } => movement::split::<u16>(call, columns),
            Kernel::Join { columns, .. } => movement::join::<u16>(call, columns),
            Kernel::Prepend { positions, features, .. } => movement::prepend::<u16>(call, positions, features),
            Kernel::PrependInputGradient { positions, features, .. } => {
                movement::prepend_input_gradient::<u16>(call, positions, features);
            }
            Kernel::First { positions, features, .. } => movement::first::<u16>(call, positions, features),
            Kernel::FirstGradient { positions, features, .. } => movement::first_gradient::<u16>(call, positions, features),
            Kernel::Slice { parts, inner, .. } => movement::slice::<u16>(call, parts, inner),
            Kernel::Interleave { outer, parts, inner } => movement::exchange::<u16>(call, parts, outer, inner),
            Kernel::Deinterleave { outer, parts, inner } => movement::exchange::<u16>(call, outer, parts, inner),
            Kernel::TakeColumns { columns, start, part, .. } => movement::take_columns::<u16>(call, columns, start, part),
            Kernel::PutColumns { columns, start, part, .. } => movement::put_columns::<u16>(call, columns, start, part),
            _ => return None,
        }
    }
    Some(Ok(()))
}

/// Returns the row count (rows, elements or samples) of a kernel that treats rows independently, so
/// that it can run block by block. Operands whose size does not depend on the row count are shared
/// by all blocks; if the kernel writes such an operand, it is a sum to which each block adds.
fn rows_mut(kernel: &mut Kernel) -> Option<&mut usize> {
    match kernel {
        Kernel::Relu { elements }
        | Kernel::ReluGradient { elements }
        | Kernel::Gelu { elements }
        | Kernel::GeluGradient { elements }
        | Kernel::GeluExact { elements }
        | Kernel::GeluExactGradient { elements }
        | Kernel::SiluMultiply { elements }
        | Kernel::SiluMultiplyGradient { elements }
        | Kernel::Multiply { elements }
        | Kernel::Scale { elements, .. }
        | Kernel::Narrow { elements }
        | Kernel::Add { elements } => Some(elements),
        Kernel::BiasAdd { rows, .. }
        | Kernel::BiasGradient { rows, .. }
        | Kernel::LayerNorm { rows, .. }
        | Kernel::LayerNormInputGradient { rows, .. }
        | Kernel::LayerNormWeightGradient { rows, .. }
        | Kernel::CrossEntropy { rows, .. }
        | Kernel::RmsNorm { rows, .. }
        | Kernel::RmsNormInputGradient { rows, .. }
        | Kernel::RmsNormWeightGradient { rows, .. }
        | Kernel::LogitStatistics { rows, .. }
        | Kernel::CrossEntropyGradient { rows, .. }
        | Kernel::ClassScores { rows, .. }
        | Kernel::WeightedCrossEntropy { rows, .. }
        | Kernel::WeightedCrossEntropyGradient { rows, .. } => Some(rows),
        Kernel::BatchNormInference { positions, .. } => Some(positions),
        Kernel::EmbeddingWeightGradient { tokens, .. } => Some(tokens),
        Kernel::GlobalAveragePool { batch, .. }
        | Kernel::GlobalAveragePoolGradient { batch, .. }
        | Kernel::PrependWeightGradient { batch, .. } => Some(batch),
        Kernel::Attention(sizes) | Kernel::AttentionGradient(sizes) => Some(&mut sizes.batch),
        _ => None,
    }
}

/// Returns the kernel on `count` of its rows, from `first` on.
fn with_rows(mut kernel: Kernel, first: usize, count: usize) -> Kernel {
    if let Some(rows) = rows_mut(&mut kernel) {
        *rows = count;
    }
    // Rows of attention are samples.
    if let Kernel::Attention(Attention { dropout: Some(dropout), .. })
    | Kernel::AttentionGradient(Attention { dropout: Some(dropout), .. }) = &mut kernel
    {
        dropout.first_sample += first;
    }
    kernel
}

/// Converts a block's error to the error of the whole call, for kernels with one index per row.
fn of_whole(error: BackendError, first: usize) -> BackendError {
    match error {
        BackendError::IndexOutOfRange { kernel, position, value, limit } => {
            BackendError::IndexOutOfRange { kernel, position: first + position, value, limit }
        }
        other => other,
    }
}

/// An operand, and its location while the single-precision kernel runs.
#[derive(Clone, Copy)]
struct Widened {
    operand: Operand,
    /// Whether it is widened; otherwise it is used in place.
    is_half: bool,
    /// Elements per row; 0 if all rows share it.
    row: usize,
    /// Number of elements.
    elements: usize,
    /// Offset of the widened operand in the scratch memory.
    place: usize,
}

impl Widened {
    /// Bytes per element in memory.
    fn width(&self) -> usize {
        if self.is_half { 2 } else { 4 }
    }

    /// Number of elements of `count` rows.
    fn elements_of(&self, count: usize) -> usize {
        if self.row == 0 { self.elements } else { count * self.row }
    }

    /// The operand's elements for `count` rows from `first` on.
    fn part(&self, first: usize, count: usize) -> Operand {
        let pointer = self.operand.pointer.wrapping_add(first * self.row * self.width());
        Operand { pointer, bytes: self.elements_of(count) * self.width() }
    }
}

/// Runs the single-precision kernel on widened operands.
///
/// # Safety
///
/// As [`run`].
unsafe fn widened(backend: &mut CpuBackend, call: &KernelCall<'_>, half: SixteenBits) -> Result<(), BackendError> {
    let spec = call.kernel.spec();
    let mut kernel = *call.kernel;
    // A call with zero rows still runs one empty block.
    let rows = rows_mut(&mut kernel).map_or(0, |rows| *rows);
    let is_streamed = rows > 0;
    let rows = rows.max(1);
    let one_row = with_rows(kernel, 0, 1).spec();
    let two_rows = with_rows(kernel, 0, 2).spec();
    let none = Operand { pointer: std::ptr::null_mut(), bytes: 0 };
    let empty = Widened { operand: none, is_half: false, row: 0, elements: 0, place: 0 };
    let mut all = [empty; 2 * MOST_OPERANDS];
    let reads = call.reads.len();
    let operands = reads + call.writes.len();
    let described = |spec: &KernelSpec, index: usize| spec.reads().chain(spec.writes(call.precision)).nth(index).copied();
    for (index, operand) in call.reads.iter().chain(call.writes).enumerate() {
        let described = |spec: &KernelSpec| described(spec, index).expect("invariant: the call's operands are checked");
        let elements_of = |spec: &KernelSpec| described(spec).elements;
        let (elements, storage) = (elements_of(&spec), described(&spec).storage);
        all[index] = Widened {
            operand: *operand,
            is_half: storage == Storage::Precision,
            row: if is_streamed { elements_of(&two_rows) - elements_of(&one_row) } else { 0 },
            elements,
            place: 0,
        };
    }
    let all = &mut all[..operands];
    let streamed: usize = all.iter().filter(|operand| operand.is_half).map(|operand| operand.row).sum();
    let block = (BLOCK_ELEMENTS / streamed.max(1)).clamp(1, rows);
    // A write that is also a read shares its location.
    let mut needed = 0;
    for index in 0..operands {
        let shared = all[..index]
            .iter()
            .find(|operand| operand.is_half && std::ptr::eq(operand.operand.pointer, all[index].operand.pointer));
        all[index].place = match shared {
            Some(earlier) => earlier.place,
            None => {
                let place = needed;
                needed += if all[index].is_half { all[index].elements_of(block).next_multiple_of(16) } else { 0 };
                place
            }
        };
    }
    let mut scratch = std::mem::take(&mut backend.half.scratch);
    let [memory] = scratch.pieces([needed]);
    let result = (|| {
        let whole = |widened: &Widened| widened.is_half && widened.row == 0;
        // An accumulating write is read too.
        let is_read = |index: usize| index < reads || call.accumulate;
        for (_, one) in all.iter().enumerate().filter(|(index, operand)| whole(operand) && is_read(*index)) {
            // SAFETY: the operand is valid and initialised.
            half.widen(&mut memory[one.place..][..one.elements], unsafe { halves(&one.operand) });
        }
        for first in (0..rows).step_by(block) {
            let count = block.min(rows - first);
            for (index, one) in all.iter().enumerate().filter(|(_, operand)| operand.is_half && operand.row > 0) {
                if is_read(index) {
                    // SAFETY: the part lies in the operand.
                    half.widen(&mut memory[one.place..][..count * one.row], unsafe { halves(&one.part(first, count)) });
                }
            }
            let mut singles = [none; 2 * MOST_OPERANDS];
            for (single, one) in singles.iter_mut().zip(&*all) {
                *single = if one.is_half {
                    Operand { pointer: memory[one.place..].as_mut_ptr().cast(), bytes: 4 * one.elements_of(count) }
                } else {
                    one.part(first, count)
                };
            }
            let kernel = if block < rows { with_rows(kernel, first, count) } else { kernel };
            let (single_reads, single_writes) = singles[..operands].split_at(reads);
            let part = KernelCall {
                kernel: &kernel,
                reads: single_reads,
                writes: single_writes,
                accumulate: call.accumulate || first > 0,
                precision: DataType::Fp32,
                ..*call
            };
            // SAFETY: operands lie in the call's operands or in scratch memory, and overlap only
            // where the call's do.
            unsafe { backend.run(&part) }.map_err(|error| of_whole(error, first))?;
            for one in all[reads..].iter().filter(|operand| operand.is_half && operand.row > 0) {
                // SAFETY: these rows lie in an operand that this call writes; if it is also a read,
                // it has been read already.
                half.narrow(unsafe { halves_mut(&one.part(first, count)) }, &memory[one.place..][..count * one.row]);
            }
        }
        for one in all[reads..].iter().filter(|operand| whole(operand)) {
            // SAFETY: the operand is this call's to write.
            half.narrow(unsafe { halves_mut(&one.operand) }, &memory[one.place..][..one.elements]);
        }
        Ok(())
    })();
    backend.half.scratch = scratch;
    result
}
