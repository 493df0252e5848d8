//! Time of matrix products on a GPU, whose multiprocessors compute tiles of the output in waves.
//!
//! ```text
//! time = waves x 2 x tile_rows x tile_columns x (contracted + ramp)
//!        / (rate of one multiprocessor x efficiency)
//! ```
//!
//! The time is at least that in which the memory moves the operands and the output. The fastest
//! tile shape counts, since the libraries' heuristics are assumed to find it. Smaller tiles reuse
//! loaded data less, and so are less efficient. An incomplete last wave costs as much as a full
//! one, except for what stream-K and split-K kernels recover (`quantisation`). Fitted on
//! `bf16_op_efficiency.csv` (SimuMax) with a mean error of 3.0 % over 183 shapes on A100.
//!
//! Products in single precision do not run on tensor cores. On A100, arithmetic takes sixteen times
//! as long there, and a tile has twice the bytes. So small tiles are as efficient as large ones,
//! and a tile's fixed cost counts for less. Fitted on `neusight_gemm_fp32.csv` of six devices. The
//! mean error is 9 % over 6,200 plain products, and 21 % over 9,000 batched ones. With the values
//! of tensor cores the errors were 11 % and 39 %, because the predicted time of batched products
//! with a contracted dimension of 64 to 128, as in attention scores, was 50 % too long.

use super::device::GpuProfile;
use super::format::ProductFormat;
use foretell_units::Seconds;

/// Sizes of a batched matrix product, and the bytes it moves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Product {
    /// Number of products of these sizes that run as one kernel.
    pub(super) batch: usize,
    /// Rows of the output.
    pub(super) rows: usize,
    /// Columns of the output.
    pub(super) columns: usize,
    /// Size of the contracted dimension.
    pub(super) contracted: usize,
    /// Bytes per element of the operands.
    pub(super) operand_bytes: f64,
    /// Bytes moved per element of the output: written, and read if the product adds to it.
    pub(super) output_bytes: f64,
}

/// Tile shapes of the libraries' kernels, largest first.
const TILES: [(usize, usize); 8] = [(256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64)];

/// For tensor cores, the bytes of an operand's row must be a multiple of this (NVIDIA, "Matrix
/// Multiplication Background User's Guide": eight sixteen-bit elements).
const ALIGNMENT: f64 = 16.0;

/// Share of the peak in single precision that unaligned batched products reach. BLOOM's layouts
/// with heads of 108 and 150 features took a fifth longer than those with 112, 128 and 144,
/// although the heads' products are a fortieth of the arithmetic.
const UNALIGNED: f64 = 0.7;

/// Returns whether the libraries' kernels can use tensor cores. For a single product they copy
/// operands into aligned rows. In a batch, such as that of heads, matrices directly follow each
/// other, so their rows must be aligned already.
fn is_aligned(product: &Product) -> bool {
    let is_whole = |elements: usize| (elements as f64 * product.operand_bytes) % ALIGNMENT == 0.0;
    product.batch == 1 || (is_whole(product.columns) && is_whole(product.contracted))
}

/// Returns the device time of a product, without its launch. `scale` is the software stack's factor
/// on the product efficiency in the device's profile.
pub(super) fn product_time(product: &Product, format: ProductFormat, gpu: &GpuProfile, scale: f64) -> Seconds {
    let Product { batch, rows, columns, contracted, operand_bytes, output_bytes } = *product;
    let elements = |left: usize, right: usize| batch as f64 * left as f64 * right as f64;
    let moved =
        operand_bytes * (elements(rows, contracted) + elements(columns, contracted)) + output_bytes * elements(rows, columns);
    let memory = Seconds::new(moved / (gpu.memory_bandwidth.value() * gpu.memory_efficiency));
    let rate = gpu.peak(format).value() / gpu.multiprocessors * gpu.product_efficiency(format) * scale;
    let rate = if is_aligned(product) {
        rate
    } else {
        rate.min(gpu.peak(ProductFormat::Fp32).value() / gpu.multiprocessors * UNALIGNED)
    };
    let tiling = gpu.tiling(format);
    let largest = (TILES[0].0 * TILES[0].1) as f64;
    let arithmetic = TILES
        .iter()
        .map(|&(tile_rows, tile_columns)| {
            let tiles = batch as f64 * rows.div_ceil(tile_rows) as f64 * columns.div_ceil(tile_columns) as f64;
            let waves = tiles / gpu.multiprocessors;
            let waves = (tiling.quantisation * waves.ceil() + (1.0 - tiling.quantisation) * waves).max(1.0);
            let area = (tile_rows * tile_columns) as f64;
            let work = 2.0 * area * (contracted as f64 + tiling.product_ramp);
            waves * work / (rate * (area / largest).powf(tiling.small_tile))
        })
        .fold(f64::INFINITY, f64::min);
    Seconds::new(arithmetic).max(memory)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::Profiles;

    fn time(rows: usize, columns: usize, contracted: usize) -> f64 {
        let profiles = Profiles::library().expect("the library is sound");
        let gpu = profiles.gpu("a100-sxm-80g").expect("is in the library");
        let product = Product { batch: 1, rows, columns, contracted, operand_bytes: 2.0, output_bytes: 2.0 };
        product_time(&product, ProductFormat::Bf16, gpu, 1.0).value()
    }

    #[test]
    fn more_work_never_takes_less_time() {
        for size in (64..4096).step_by(96) {
            assert!(time(size, 2048, 1024) <= time(size + 96, 2048, 1024) * (1.0 + 1e-12), "rows {size}");
            assert!(time(2048, size, 1024) <= time(2048, size + 96, 1024) * (1.0 + 1e-12), "columns {size}");
            assert!(time(2048, 1024, size) < time(2048, 1024, size + 96), "contracted {size}");
        }
    }

    #[test]
    fn an_incomplete_second_wave_costs_part_of_a_wave() {
        // With 108 multiprocessors and tiles of 128 x 256, 9 x 12 tiles are one wave. Another row
        // of tiles begins a second.
        let (full, over) = (time(1152, 3072, 4096), time(1280, 3072, 4096));
        let work = 1280.0 / 1152.0;
        assert!(over / full > work * 1.1, "{over} beside {full}");
        assert!(over / full < 2.0);
    }

    #[test]
    fn heads_of_unaligned_width_do_not_use_tensor_cores() {
        let profiles = Profiles::library().expect("the library is sound");
        let gpu = profiles.gpu("a100-sxm-80g").expect("is in the library");
        let time = |batch, width| {
            let product = Product { batch, rows: 2048, columns: 2048, contracted: width, operand_bytes: 2.0, output_bytes: 0.0 };
            product_time(&product, ProductFormat::Fp16, gpu, 1.0).value()
        };
        // 150 features have 300 bytes, not a multiple of sixteen.
        assert!(time(48, 150) > 5.0 * time(48, 152), "{} beside {}", time(48, 150), time(48, 152));
        assert!(time(1, 150) < 1.1 * time(1, 152));
    }

    #[test]
    fn scores_in_single_precision_match_the_measurements() {
        // In `neusight_gemm_fp32.csv`, batched products with a small contracted dimension reach
        // most of the peak in single precision.
        let profiles = Profiles::library().expect("the library is sound");
        let gpu = profiles.gpu("a100-pcie-80g").expect("is in the library");
        let share = |contracted, format, operand_bytes| {
            let product = Product { batch: 64, rows: 2048, columns: 2048, contracted, operand_bytes, output_bytes: 0.0 };
            let flops = 2.0 * 64.0 * 2048f64.powi(2) * contracted as f64;
            flops / (product_time(&product, format, gpu, 1.0).value() * gpu.peak(format).value() * gpu.product_efficiency(format))
        };
        let single = share(128, ProductFormat::Fp32, 4.0);
        assert!((0.7..=0.8).contains(&single), "{single}");
        assert!(share(128, ProductFormat::Bf16, 2.0) < 0.5);
    }

    #[test]
    fn a_large_product_reaches_the_profile_efficiency() {
        let flops = 2.0 * 8192f64.powi(3);
        let reached = flops / time(8192, 8192, 8192) / 312e12;
        let profiles = Profiles::library().expect("the library is sound");
        let share = profiles.gpu("a100-sxm-80g").expect("is in the library").product_efficiency(ProductFormat::Bf16);
        assert!((0.9..=1.0).contains(&(reached / share)), "{reached} of {share}");
    }
}
