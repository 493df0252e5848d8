//! fp8 matrices and their products by definition: operands are decoded into scratch memory in the
//! run's precision, and that precision's product runs there. Values of both fp8 formats times a
//! power of two are exact in bf16. This is the reference for GPU kernels; it is no faster than half
//! precision.

use foretell_models::{EightBits, Kernel, WeightLayout};

use super::CpuBackend;
use super::memory::{Number, Scratch, floats, floats_mut, halves, numbers, numbers_mut};
use crate::fp8::{nearest, scale_and_factor, to_single};
use crate::half::SixteenBits;
use crate::operands::EightBitCopies;
use crate::{Backend as _, BackendError, KernelCall, Operand};

impl Number for u8 {
    const ZERO: u8 = 0;
}

/// Rows rounded before they are written transposed: one cache line of the transposed matrix.
const ROWS: usize = 64;

/// A source matrix in single or half precision.
enum Source<'a> {
    Single(&'a [f32]),
    SixteenBits(SixteenBits, &'a [u16]),
}

impl Source<'_> {
    /// Returns a run of elements in single precision, widened into `room` if needed.
    fn run<'a>(&'a self, first: usize, room: &'a mut [f32]) -> &'a [f32] {
        match self {
            Source::Single(all) => &all[first..][..room.len()],
            Source::SixteenBits(half, all) => {
                half.widen(room, &all[first..][..room.len()]);
                room
            }
        }
    }
}

/// [`Kernel::Quantise`].
///
/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn quantise(
    call: &KernelCall<'_>,
    [rows, columns]: [usize; 2],
    format: EightBits,
    EightBitCopies { straight, transposed }: EightBitCopies,
    scratch: &mut Scratch,
) {
    // SAFETY: the read and the writes are valid, and none of them overlap.
    let (source, factor) = unsafe {
        let source = match SixteenBits::of(call.precision) {
            Some(half) => Source::SixteenBits(half, halves(&call.reads[0])),
            None => Source::Single(floats(&call.reads[0])),
        };
        (source, floats_mut(&call.writes[0]))
    };
    let [row, room] = scratch.pieces([columns, (ROWS * columns).div_ceil(4)]);
    let mut largest = 0u32;
    for index in 0..rows {
        let run = source.run(index * columns, row);
        largest = run.iter().fold(largest, |largest, value| largest.max(value.to_bits() & 0x7fff_ffff));
    }
    let scale;
    (scale, factor[0]) = scale_and_factor(format, largest);
    // SAFETY: as above; bytes need no alignment, and `room` has four bytes for each code.
    let (mut straight, mut transposed, codes) = unsafe {
        let written = |index: usize| numbers_mut::<u8>(&call.writes[index]);
        let codes = std::slice::from_raw_parts_mut(room.as_mut_ptr().cast::<u8>(), ROWS * columns);
        (straight.then(|| written(1)), transposed.then(|| written(1 + usize::from(straight))), codes)
    };
    for first in (0..rows).step_by(ROWS) {
        let count = ROWS.min(rows - first);
        for (index, codes) in codes.chunks_exact_mut(columns.max(1)).enumerate().take(count) {
            let run = source.run((first + index) * columns, row);
            codes.iter_mut().zip(run).for_each(|(code, value)| *code = nearest(format, value * scale));
        }
        if let Some(straight) = &mut straight {
            straight[first * columns..][..count * columns].copy_from_slice(&codes[..count * columns]);
        }
        if let Some(transposed) = &mut transposed {
            for column in 0..columns {
                let line = transposed[column * rows + first..][..count].iter_mut();
                line.enumerate().for_each(|(index, code)| *code = codes[index * columns + column]);
            }
        }
    }
}

/// Runs an fp8 product as a product in the run's precision.
///
/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn product(backend: &mut CpuBackend, call: &KernelCall<'_>, decoded: Decoded) -> Result<(), BackendError> {
    let Decoded { plain, formats, shapes: [left, right] } = decoded;
    let sizes = [left, right].map(|matrix| matrix.rows * matrix.columns);
    let width = call.precision.size().count() as usize;
    let mut scratch = std::mem::take(&mut backend.eight_bits);
    let pieces = scratch.pieces(sizes.map(|size| (size * width).div_ceil(4)));
    let mut reads = [Operand { pointer: std::ptr::null_mut(), bytes: 0 }; 3];
    for (index, (piece, shape)) in pieces.into_iter().zip([left, right]).enumerate() {
        // SAFETY: the read and its factor are valid.
        let (codes, factor) = unsafe { (numbers::<u8>(&call.reads[index]), floats(&call.reads[2 + index])[0]) };
        let value = |code: usize| to_single(formats[index], code as u8) * factor;
        match SixteenBits::of(call.precision) {
            Some(half) => {
                let table = std::array::from_fn(|code| half.nearest(value(code)));
                // SAFETY: the piece has room for as many numbers of half its own width.
                let target = unsafe { std::slice::from_raw_parts_mut(piece.as_mut_ptr().cast::<u16>(), sizes[index]) };
                decode(target, codes, &table, shape);
            }
            None => decode(piece, codes, &std::array::from_fn(value), shape),
        }
        reads[index] = Operand { pointer: piece.as_mut_ptr().cast(), bytes: width * sizes[index] };
    }
    let others = &call.reads[4..];
    reads[2..2 + others.len()].copy_from_slice(others);
    let plain = KernelCall { kernel: &plain, reads: &reads[..2 + others.len()], ..*call };
    // SAFETY: this function's own contract; the decoded operands lie in scratch memory that nothing
    // else uses.
    let result = unsafe { backend.run(&plain) };
    backend.eight_bits = scratch;
    result
}

/// An fp8 product expressed as a product in the run's precision.
pub(super) struct Decoded {
    plain: Kernel,
    /// Formats of its two fp8 operands.
    formats: [EightBits; 2],
    shapes: [Shape; 2],
}

/// Extents of a matrix of codes, and whether decoding transposes it.
#[derive(Clone, Copy)]
struct Shape {
    rows: usize,
    columns: usize,
    is_turned: bool,
}

/// Returns the decoded form of an fp8 product; `None` for other kernels.
pub(super) fn decoded(kernel: &Kernel) -> Option<Decoded> {
    let straight = |rows, columns| Shape { rows, columns, is_turned: false };
    let turned = |rows, columns| Shape { rows, columns, is_turned: true };
    let (plain, formats, shapes) = match *kernel {
        Kernel::EightBitMatmul { rows, columns, contracted, bias, activation } => {
            let plain = Kernel::Matmul { rows, columns, contracted, weight: WeightLayout::OutIn, bias, activation };
            (plain, [EightBits::E4M3; 2], [straight(rows, contracted), straight(columns, contracted)])
        }
        Kernel::EightBitMatmulInputGradient { rows, columns, contracted, gelu } => {
            let plain = Kernel::MatmulInputGradient { rows, columns, contracted, weight: WeightLayout::InOut, gelu };
            (plain, [EightBits::E5M2, EightBits::E4M3], [straight(rows, columns), straight(contracted, columns)])
        }
        Kernel::EightBitMatmulWeightGradient { rows, columns, contracted, weight } => {
            let plain = Kernel::MatmulWeightGradient { rows, columns, contracted, weight, bias: false };
            (plain, [EightBits::E5M2, EightBits::E4M3], [turned(columns, rows), turned(contracted, rows)])
        }
        _ => return None,
    };
    Some(Decoded { plain, formats, shapes })
}

/// Decodes a matrix through a table of all 256 codes.
fn decode<N: Number>(target: &mut [N], codes: &[u8], table: &[N; 256], Shape { rows, columns, is_turned }: Shape) {
    if !is_turned {
        target.iter_mut().zip(codes).for_each(|(number, &code)| *number = table[usize::from(code)]);
        return;
    }
    // In blocks of one cache line of codes, so that lines of the target are filled while in the
    // cache.
    for first in (0..columns).step_by(ROWS) {
        let count = ROWS.min(columns - first);
        for row in 0..rows {
            let run = &codes[row * columns + first..][..count];
            run.iter().enumerate().for_each(|(index, &code)| target[(first + index) * rows + row] = table[usize::from(code)]);
        }
    }
}
