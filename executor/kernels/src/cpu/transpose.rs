//! Transposes matrices, to pack operands for micro-kernels and to turn weight gradients.

use super::vector::{InstructionSet, instruction_set};

/// Side of the blocks that are transposed in registers: AVX-512 registers hold 16 rows of 16
/// floats.
const BLOCK: usize = 16;

/// `target[column · target_stride + row] = source[row · source_stride + column]` for `columns`
/// columns of `rows` rows; `+=` with `ADD`.
pub(super) fn transpose<const ADD: bool>(
    target: &mut [f32],
    target_stride: usize,
    source: &[f32],
    source_stride: usize,
    [rows, columns]: [usize; 2],
) {
    if rows == 0 || columns == 0 {
        return;
    }
    // Blocks are accessed through pointers; these bounds keep them inside the slices.
    assert!(rows <= target_stride && (columns - 1) * target_stride + rows <= target.len());
    assert!(columns <= source_stride && (rows - 1) * source_stride + columns <= source.len());
    let in_registers = instruction_set() != InstructionSet::Baseline && cfg!(target_arch = "x86_64");
    // One strip of source columns at a time: its target lines stay in the L1 cache until they are
    // full.
    for first_column in (0..columns).step_by(BLOCK) {
        let width = BLOCK.min(columns - first_column);
        for first_row in (0..rows).step_by(BLOCK) {
            let height = BLOCK.min(rows - first_row);
            let target = &mut target[first_column * target_stride + first_row..];
            let source = &source[first_row * source_stride + first_column..];
            if in_registers
                && width == BLOCK
                && height == BLOCK
                && transpose_block::<ADD>(target, target_stride, source, source_stride)
            {
                continue;
            }
            for column in 0..width {
                for row in 0..height {
                    let value = &mut target[column * target_stride + row];
                    *value =
                        if ADD { *value + source[row * source_stride + column] } else { source[row * source_stride + column] };
                }
            }
        }
    }
}

/// Transposes a whole block if the machine has AVX-512. Returns whether it did.
#[inline]
fn transpose_block<const ADD: bool>(target: &mut [f32], target_stride: usize, source: &[f32], source_stride: usize) -> bool {
    #[cfg(target_arch = "x86_64")]
    if instruction_set() == InstructionSet::Avx512 {
        assert!(15 * target_stride + BLOCK <= target.len() && 15 * source_stride + BLOCK <= source.len());
        // SAFETY: the machine was seen to have AVX-512, and the block lies in both slices.
        unsafe { avx512::<ADD>(target.as_mut_ptr(), target_stride, source.as_ptr(), source_stride) };
        return true;
    }
    false
}

/// # Safety
///
/// The machine has AVX-512, and 16 rows of 16 floats are valid at both pointers.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn avx512<const ADD: bool>(target: *mut f32, target_stride: usize, source: *const f32, source_stride: usize) {
    use std::arch::x86_64::*;

    // SAFETY: the caller vouches for the sixteen rows.
    let row: [__m512; BLOCK] = std::array::from_fn(|index| unsafe { _mm512_loadu_ps(source.add(index * source_stride)) });
    // In every 128-bit lane l, `quads[g][j]` has column 4l + j of the rows 4g to 4g + 3.
    let quads: [[__m512; 4]; 4] = std::array::from_fn(|group| {
        let [a, b, c, d] = [row[4 * group], row[4 * group + 1], row[4 * group + 2], row[4 * group + 3]];
        let (low, high) = (_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        let (next_low, next_high) = (_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        let pair = |x, y| (_mm512_castps_pd(x), _mm512_castps_pd(y));
        let ((low, next_low), (high, next_high)) = (pair(low, next_low), pair(high, next_high));
        [
            _mm512_castpd_ps(_mm512_unpacklo_pd(low, next_low)),
            _mm512_castpd_ps(_mm512_unpackhi_pd(low, next_low)),
            _mm512_castpd_ps(_mm512_unpacklo_pd(high, next_high)),
            _mm512_castpd_ps(_mm512_unpackhi_pd(high, next_high)),
        ]
    });
    for column in 0..4 {
        let [first, second, third, fourth] = quads.map(|group| group[column]);
        // Even lanes (0x88) and odd lanes (0xdd) of two groups of rows, then of all four.
        let even = _mm512_shuffle_f32x4::<0x88>(first, second);
        let odd = _mm512_shuffle_f32x4::<0xdd>(first, second);
        let next_even = _mm512_shuffle_f32x4::<0x88>(third, fourth);
        let next_odd = _mm512_shuffle_f32x4::<0xdd>(third, fourth);
        let columns = [
            _mm512_shuffle_f32x4::<0x88>(even, next_even),
            _mm512_shuffle_f32x4::<0x88>(odd, next_odd),
            _mm512_shuffle_f32x4::<0xdd>(even, next_even),
            _mm512_shuffle_f32x4::<0xdd>(odd, next_odd),
        ];
        for (lane, &values) in columns.iter().enumerate() {
            // SAFETY: the caller vouches for the sixteen rows.
            unsafe {
                let target = target.add((4 * lane + column) * target_stride);
                _mm512_storeu_ps(target, if ADD { _mm512_add_ps(_mm512_loadu_ps(target), values) } else { values });
            }
        }
    }
}
