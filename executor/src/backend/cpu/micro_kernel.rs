//! The innermost loop of direct convolutions: a tile of a product, held in registers, of rows that may start anywhere in memory
//! with a panel of packed weights. Because rows are read where they lie, nothing is copied to bring them together: that is what it has over
//! a general matrix product. Exists where there are AVX2 or AVX-512; elsewhere convolutions go through patches.

/// Most rows of a tile, on any machine.
pub(super) const MOST_ROWS: usize = 14;

/// What the tile of one call sums over: `segments` stretches of `length` consecutive numbers of a row, `pitch` apart.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Taps {
    pub(super) segments: usize,
    pub(super) pitch: usize,
    pub(super) length: usize,
}

/// `destination[row][..columns] (+)= Σ_k rows[row][k] panel[k]`, over the taps. `panel` has `panel_width` numbers for each k.
///
/// Called with: the taps, as many row pointers as the tile has, the panel, as many destinations, columns of the destination (at
/// most the panel's), whether to add.
type Tile = unsafe fn(&Taps, *const *const f32, *const f32, *const *mut f32, usize, bool);

/// The machine's kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct MicroKernel {
    /// Numbers of a panel for each k.
    pub(super) panel_width: usize,
    /// A kernel for each number of rows, from one.
    tiles: &'static [Tile],
}

impl MicroKernel {
    /// The kernel for this machine's instruction set, if there is one.
    pub(super) fn detect() -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        {
            use super::vector::{InstructionSet, instruction_set};
            return match instruction_set() {
                InstructionSet::Avx512 => Some(x86::AVX512),
                InstructionSet::Avx2 => Some(x86::AVX2),
                InstructionSet::Baseline => None,
            };
        }
        #[cfg(not(target_arch = "x86_64"))]
        None
    }

    /// Every kernel that this machine can run, for tests.
    #[cfg(test)]
    pub(super) fn all() -> Vec<Self> {
        #[cfg(target_arch = "x86_64")]
        {
            use super::vector::{InstructionSet, instruction_set};
            return match instruction_set() {
                InstructionSet::Avx512 => vec![x86::AVX512, x86::AVX2],
                InstructionSet::Avx2 => vec![x86::AVX2],
                InstructionSet::Baseline => Vec::new(),
            };
        }
        #[cfg(not(target_arch = "x86_64"))]
        Vec::new()
    }

    /// Rows of its largest tile: as many as the registers hold.
    pub(super) fn most_rows(&self) -> usize {
        self.tiles.len()
    }

    /// Computes one tile.
    ///
    /// # Safety
    ///
    /// There are from one to [`MicroKernel::most_rows`] rows and as many destinations, valid for the taps and the columns, the latter at most
    /// the panel's width; the panel is packed to its width; no destination overlaps another or anything read.
    #[inline]
    pub(super) unsafe fn tile(
        &self,
        taps: &Taps,
        rows: &[*const f32],
        panel: *const f32,
        destinations: &[*mut f32],
        columns: usize,
        add: bool,
    ) {
        // SAFETY: as this function's own contract, and the machine has the kernel's instructions.
        unsafe { self.tiles[rows.len() - 1](taps, rows.as_ptr(), panel, destinations.as_ptr(), columns, add) }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{MicroKernel, Taps, Tile};

    /// Two vectors of columns, and as many rows as leave two registers for the panel and one for a row's number.
    macro_rules! tile {
        ($name:ident, $features:literal, $lanes:literal, $zero:ident, $load:ident, $store:ident, $set:ident, $multiply_add:ident, $sum:ident) => {
            #[target_feature(enable = $features)]
            unsafe fn $name<const ROWS: usize>(
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
                    let mut row: [*const f32; ROWS] = std::array::from_fn(|index| *rows.add(index));
                    let mut sums = [[$zero(); 2]; ROWS];
                    let mut panel = panel;
                    // Four steps a turn, so that the row pointers, more than there are registers for, are loaded once for four.
                    macro_rules! step {
                        ($k:expr) => {
                            let left = $load(panel.add($k * 2 * LANES));
                            let right = $load(panel.add($k * 2 * LANES + LANES));
                            for index in 0..ROWS {
                                let value = $set(*row[index].add($k));
                                sums[index][0] = $multiply_add(value, left, sums[index][0]);
                                sums[index][1] = $multiply_add(value, right, sums[index][1]);
                            }
                        };
                    }
                    for _ in 0..taps.segments {
                        let mut k = 0;
                        while k + 4 <= taps.length {
                            step!(0);
                            step!(1);
                            step!(2);
                            step!(3);
                            panel = panel.add(8 * LANES);
                            for index in 0..ROWS {
                                row[index] = row[index].add(4);
                            }
                            k += 4;
                        }
                        while k < taps.length {
                            step!(0);
                            panel = panel.add(2 * LANES);
                            for index in 0..ROWS {
                                row[index] = row[index].add(1);
                            }
                            k += 1;
                        }
                        for index in 0..ROWS {
                            row[index] = row[index].wrapping_add(taps.pitch).wrapping_sub(taps.length);
                        }
                    }
                    for index in 0..ROWS {
                        let destination = *destinations.add(index);
                        if columns == 2 * LANES {
                            for half in 0..2 {
                                let target = destination.add(half * LANES);
                                let sum = if add { $sum($load(target), sums[index][half]) } else { sums[index][half] };
                                $store(target, sum);
                            }
                        } else {
                            let mut values = [0.0_f32; 2 * LANES];
                            $store(values.as_mut_ptr(), sums[index][0]);
                            $store(values.as_mut_ptr().add(LANES), sums[index][1]);
                            for (column, &value) in values.iter().enumerate().take(columns) {
                                let target = destination.add(column);
                                *target = if add { *target + value } else { value };
                            }
                        }
                    }
                }
            }
        };
    }

    tile!(
        avx512, "avx512f", 16, _mm512_setzero_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_set1_ps, _mm512_fmadd_ps, _mm512_add_ps
    );
    tile!(avx2, "avx2,fma", 8, _mm256_setzero_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_set1_ps, _mm256_fmadd_ps, _mm256_add_ps);

    const AVX512_TILES: [Tile; 14] = [
        avx512::<1>,
        avx512::<2>,
        avx512::<3>,
        avx512::<4>,
        avx512::<5>,
        avx512::<6>,
        avx512::<7>,
        avx512::<8>,
        avx512::<9>,
        avx512::<10>,
        avx512::<11>,
        avx512::<12>,
        avx512::<13>,
        avx512::<14>,
    ];
    const AVX2_TILES: [Tile; 6] = [avx2::<1>, avx2::<2>, avx2::<3>, avx2::<4>, avx2::<5>, avx2::<6>];

    pub(super) const AVX512: MicroKernel = MicroKernel { panel_width: 32, tiles: &AVX512_TILES };
    pub(super) const AVX2: MicroKernel = MicroKernel { panel_width: 16, tiles: &AVX2_TILES };
}
