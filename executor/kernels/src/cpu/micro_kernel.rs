//! The micro-kernel: one tile of a product, held in registers. Its rows may start anywhere in
//! memory; the other factor is a panel of packed weights. Unlike a general matrix product it needs
//! no copy that brings rows together. It exists for AVX2 and AVX-512; on other CPUs convolutions go
//! through patches.

/// Most rows of a tile on any machine.
pub(super) const MOST_ROWS: usize = 14;

/// The index set of a tile's sums: `segments` runs of `length` elements of a row, each with its
/// line of the panel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Taps {
    pub(super) segments: usize,
    pub(super) length: usize,
    /// Strides in a row: between elements, and between runs.
    pub(super) row: Step,
    /// Strides in the panel: between lines, and between the first lines of runs.
    pub(super) panel: Step,
}

/// Strides within a run and between runs, in elements.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub(super) within: usize,
    pub(super) between: usize,
}

/// Computes `destination[row][..columns] (+)= Σ_k rows[row][k] panel[k]` over the taps. A line of
/// the panel has `panel_width` floats.
///
/// Arguments: the taps; the rows (one pointer per row, or one to the first row for
/// [`Rows::Neighbours`]); the panel; one destination per row; columns of the destination (at most
/// the panel's); whether to add.
type Tile = unsafe fn(&Taps, *const *const f32, *const f32, *const *mut f32, usize, bool);

/// The micro-kernel of this machine.
#[derive(Clone, Copy, Debug)]
pub(super) struct MicroKernel {
    /// Floats of a panel per k.
    pub(super) panel_width: usize,
    /// Kernels for [`Rows::Anywhere`], by number of rows less one.
    anywhere: &'static [Tile],
    /// Kernels for [`Rows::Neighbours`], by number of rows less one.
    neighbours: &'static [Tile],
}

/// Location of a tile's rows.
#[derive(Clone, Copy, Debug)]
pub(super) enum Rows<'a> {
    /// Each row at its own pointer, contiguous; the panel is packed. [`Step::within`] must be 1 for
    /// the rows and the panel's width for the panel, so that the strides are constants.
    Anywhere(&'a [*const f32]),
    /// Each row one element after the previous one, from this pointer on; any strides.
    Neighbours(*const f32),
}

impl MicroKernel {
    /// Returns the kernel for this machine's instruction set, if there is one.
    pub(super) fn detect() -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        {
            use super::vector::{InstructionSet, instruction_set};
            match instruction_set() {
                InstructionSet::Avx512 => Some(x86::AVX512),
                InstructionSet::Avx2 => Some(x86::AVX2),
                InstructionSet::Baseline => None,
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        None
    }

    /// Returns the kernel that reads each float as a pair of bf16 numbers, the earlier one in the
    /// lower half, if this machine multiplies them: `destination (+)= Σ_k rows[row][k].lower
    /// panel[k].lower + rows[row][k].upper panel[k].upper`, in single precision.
    pub(super) fn detect_pairs() -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        {
            let has_avx512 = super::vector::instruction_set() == super::vector::InstructionSet::Avx512;
            (has_avx512 && is_x86_feature_detected!("avx512bf16")).then_some(x86::AVX512_PAIRS)
        }
        #[cfg(not(target_arch = "x86_64"))]
        None
    }

    /// Returns every kernel that this machine can run, for tests.
    #[cfg(test)]
    pub(super) fn all() -> Vec<Self> {
        #[cfg(target_arch = "x86_64")]
        {
            use super::vector::{InstructionSet, instruction_set};
            match instruction_set() {
                InstructionSet::Avx512 => vec![x86::AVX512, x86::AVX2],
                InstructionSet::Avx2 => vec![x86::AVX2],
                InstructionSet::Baseline => Vec::new(),
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        Vec::new()
    }

    /// Most rows of its tiles: as many as the registers hold.
    pub(super) fn most_rows(&self) -> usize {
        self.anywhere.len()
    }

    /// Computes one tile.
    ///
    /// # Safety
    ///
    /// There are 1 to [`MicroKernel::most_rows`] destinations, and as many rows. They are valid for
    /// the taps and the columns, which are at most the panel's width. Every line of the panel has
    /// that width. No destination overlaps another or anything read.
    #[inline]
    pub(super) unsafe fn tile(
        &self,
        taps: &Taps,
        rows: Rows<'_>,
        panel: *const f32,
        destinations: &[*mut f32],
        columns: usize,
        add: bool,
    ) {
        let (tiles, rows) = match &rows {
            Rows::Anywhere(rows) => {
                debug_assert!(taps.row.within == 1 && taps.panel.within == self.panel_width && rows.len() == destinations.len());
                (self.anywhere, rows.as_ptr())
            }
            Rows::Neighbours(first) => (self.neighbours, std::ptr::from_ref(first)),
        };
        // SAFETY: as this function's own contract, and the machine has the kernel's instructions.
        unsafe { tiles[destinations.len() - 1](taps, rows, panel, destinations.as_ptr(), columns, add) }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{MicroKernel, Taps, Tile};

    /// Repeats a statement for every row of a tile as unrolled code. In a loop that the compiler
    /// does not unroll, the sums would live in memory.
    macro_rules! each_row {
        ($row:ident, $body:block) => {
            each_row!(@ $row, $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13)
        };
        (@ $row:ident, $body:block, $($number:literal)*) => {
            $(if $number < ROWS {
                let $row = $number;
                $body
            })*
        };
    }

    /// A tile of two vectors of columns. Its rows leave two registers for the panel and one for a
    /// row's element.
    macro_rules! tile {
        ($name:ident, $features:literal, $lanes:literal, $zero:ident, $load:ident, $store:ident, $set:ident, $multiply_add:ident, $sum:ident) => {
            #[target_feature(enable = $features)]
            unsafe fn $name<const ROWS: usize, const NEIGHBOURS: bool>(
                taps: &Taps,
                rows: *const *const f32,
                panel: *const f32,
                destinations: *const *mut f32,
                columns: usize,
                add: bool,
            ) {
                const LANES: usize = $lanes;
                // SAFETY: the caller vouches for every pointer at these offsets.
                unsafe {
                    // For neighbours only the first pointer is loaded; the others are at constant
                    // distances.
                    let row: [*const f32; ROWS] =
                        std::array::from_fn(|index| if NEIGHBOURS { (*rows).wrapping_add(index) } else { *rows.add(index) });
                    // Destinations may be far apart in memory: prefetch them while the sums are
                    // computed.
                    each_row!(index, {
                        let target = *destinations.add(index);
                        _mm_prefetch::<_MM_HINT_T0>(target.cast());
                        _mm_prefetch::<_MM_HINT_T0>(target.wrapping_add(columns - 1).cast());
                    });
                    let mut sums = [[$zero(); 2]; ROWS];
                    macro_rules! step {
                        ($at:expr, $line:expr) => {
                            let line: *const f32 = $line;
                            let left = $load(line);
                            let right = $load(line.add(LANES));
                            each_row!(index, {
                                let value = $set(*row[index].add($at));
                                sums[index][0] = $multiply_add(value, left, sums[index][0]);
                                sums[index][1] = $multiply_add(value, right, sums[index][1]);
                            });
                        };
                    }
                    let (row_step, panel_step) = if NEIGHBOURS { (taps.row.within, taps.panel.within) } else { (1, 2 * LANES) };
                    for segment in 0..taps.segments {
                        let mut at = segment * taps.row.between;
                        let mut line = panel.add(segment * taps.panel.between);
                        // Four steps per iteration: the row pointers exceed the registers and are
                        // then loaded once per four steps.
                        for _ in 0..taps.length / 4 {
                            step!(at, line);
                            step!(at + row_step, line.add(panel_step));
                            step!(at + 2 * row_step, line.add(2 * panel_step));
                            step!(at + 3 * row_step, line.add(3 * panel_step));
                            at += 4 * row_step;
                            line = line.wrapping_add(4 * panel_step);
                        }
                        for _ in 0..taps.length % 4 {
                            step!(at, line);
                            at += row_step;
                            line = line.wrapping_add(panel_step);
                        }
                    }
                    if columns < 2 * LANES {
                        let mut values = [[0.0_f32; 2 * LANES]; ROWS];
                        each_row!(index, {
                            $store(values[index].as_mut_ptr(), sums[index][0]);
                            $store(values[index].as_mut_ptr().add(LANES), sums[index][1]);
                        });
                        for (index, values) in values.iter().enumerate() {
                            let destination = *destinations.add(index);
                            for (column, &value) in values.iter().enumerate().take(columns) {
                                let target = destination.add(column);
                                *target = if add { *target + value } else { value };
                            }
                        }
                    } else if add {
                        each_row!(index, {
                            let target = *destinations.add(index);
                            $store(target, $sum($load(target), sums[index][0]));
                            $store(target.add(LANES), $sum($load(target.add(LANES)), sums[index][1]));
                        });
                    } else {
                        each_row!(index, {
                            let target = *destinations.add(index);
                            $store(target, sums[index][0]);
                            $store(target.add(LANES), sums[index][1]);
                        });
                    }
                }
            }
        };
    }

    tile!(
        avx512,
        "avx512f",
        16,
        _mm512_setzero_ps,
        _mm512_loadu_ps,
        _mm512_storeu_ps,
        _mm512_set1_ps,
        _mm512_fmadd_ps,
        _mm512_add_ps
    );
    tile!(
        avx2,
        "avx2,fma",
        8,
        _mm256_setzero_ps,
        _mm256_loadu_ps,
        _mm256_storeu_ps,
        _mm256_set1_ps,
        _mm256_fmadd_ps,
        _mm256_add_ps
    );

    /// Adds two products of bf16 pairs to `sum`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    fn add_pairs(left: __m512, right: __m512, sum: __m512) -> __m512 {
        // SAFETY: sixteen words are thirty-two halves.
        let [left, right]: [__m512bh; 2] = unsafe { std::mem::transmute([left, right]) };
        _mm512_dpbf16_ps(sum, left, right)
    }

    tile!(
        pairs,
        "avx512f,avx512bf16",
        16,
        _mm512_setzero_ps,
        _mm512_loadu_ps,
        _mm512_storeu_ps,
        _mm512_set1_ps,
        add_pairs,
        _mm512_add_ps
    );

    const PAIRS_ANYWHERE: [Tile; 14] = [
        pairs::<1, false>,
        pairs::<2, false>,
        pairs::<3, false>,
        pairs::<4, false>,
        pairs::<5, false>,
        pairs::<6, false>,
        pairs::<7, false>,
        pairs::<8, false>,
        pairs::<9, false>,
        pairs::<10, false>,
        pairs::<11, false>,
        pairs::<12, false>,
        pairs::<13, false>,
        pairs::<14, false>,
    ];
    const PAIRS_NEIGHBOURS: [Tile; 14] = [
        pairs::<1, true>,
        pairs::<2, true>,
        pairs::<3, true>,
        pairs::<4, true>,
        pairs::<5, true>,
        pairs::<6, true>,
        pairs::<7, true>,
        pairs::<8, true>,
        pairs::<9, true>,
        pairs::<10, true>,
        pairs::<11, true>,
        pairs::<12, true>,
        pairs::<13, true>,
        pairs::<14, true>,
    ];
    pub(super) const AVX512_PAIRS: MicroKernel =
        MicroKernel { panel_width: 32, anywhere: &PAIRS_ANYWHERE, neighbours: &PAIRS_NEIGHBOURS };

    const AVX512_ANYWHERE: [Tile; 14] = [
        avx512::<1, false>,
        avx512::<2, false>,
        avx512::<3, false>,
        avx512::<4, false>,
        avx512::<5, false>,
        avx512::<6, false>,
        avx512::<7, false>,
        avx512::<8, false>,
        avx512::<9, false>,
        avx512::<10, false>,
        avx512::<11, false>,
        avx512::<12, false>,
        avx512::<13, false>,
        avx512::<14, false>,
    ];
    const AVX512_NEIGHBOURS: [Tile; 14] = [
        avx512::<1, true>,
        avx512::<2, true>,
        avx512::<3, true>,
        avx512::<4, true>,
        avx512::<5, true>,
        avx512::<6, true>,
        avx512::<7, true>,
        avx512::<8, true>,
        avx512::<9, true>,
        avx512::<10, true>,
        avx512::<11, true>,
        avx512::<12, true>,
        avx512::<13, true>,
        avx512::<14, true>,
    ];
    const AVX2_ANYWHERE: [Tile; 6] =
        [avx2::<1, false>, avx2::<2, false>, avx2::<3, false>, avx2::<4, false>, avx2::<5, false>, avx2::<6, false>];
    const AVX2_NEIGHBOURS: [Tile; 6] =
        [avx2::<1, true>, avx2::<2, true>, avx2::<3, true>, avx2::<4, true>, avx2::<5, true>, avx2::<6, true>];

    pub(super) const AVX512: MicroKernel =
        MicroKernel { panel_width: 32, anywhere: &AVX512_ANYWHERE, neighbours: &AVX512_NEIGHBOURS };
    pub(super) const AVX2: MicroKernel = MicroKernel { panel_width: 16, anywhere: &AVX2_ANYWHERE, neighbours: &AVX2_NEIGHBOURS };
}
