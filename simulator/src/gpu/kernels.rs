//! Time of kernels under a software stack, on the device and on the host. It must not know Programs
//! or links.

use super::attention::{Direction, attention_time, scan_products_time};
use super::category::Category;
use super::costs::GpuCosts;
use super::format::ProductFormat;
use super::product::Product;
use foretell_models::{Kernel, NEWTON_SCHULZ_STEPS, Window};
use foretell_program::Phase;
use foretell_units::{DataType, Seconds};

/// In an eight-bit product, the columns and the contracted dimension must be multiples of this
/// (cuBLASLt: sixteen bytes).
const EIGHT_BIT_GRANULE: usize = 16;

/// Rate of sixteen-bit products whose weight has an odd dimension, over that of other sixteen-bit
/// products. Rows of such a weight begin at addresses from which tensor cores cannot load two
/// elements together. GPT's unpadded vocabulary of 50,257 takes 4.7 ms per sequence and 1,024
/// features on vTrain's A100s (`benches/vtrain_slopes.py`). That is 68 of 312 TFLOP/s, where
/// products of layers reach about 213.
const UNEVEN: f64 = 0.32;

/// Number of kernels of a scan, in each pass (`ssd_combined.py` of mamba_ssm).
const SCAN_KERNELS: f64 = 5.0;

/// Time of an instruction's kernels.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct KernelTime {
    /// Time on the device.
    pub device: Seconds,
    /// Time of the host to launch them. It runs ahead of the device where it can.
    pub host: Seconds,
}

/// Work of an instruction on the device.
struct DeviceWork {
    time: Seconds,
    /// Number of kernels, which determines the launches. 0 if the stack fuses the work away.
    kernels: f64,
    category: Category,
}

impl DeviceWork {
    fn product(time: Seconds, kernels: f64) -> Self {
        Self { time, kernels, category: Category::Product }
    }
}

impl GpuCosts<'_> {
    /// Returns the time of an instruction's kernels. The time is zero if the stack fuses the
    /// kernels into others, or does not run them because their parameters are not trained.
    pub fn kernel_time(&self, kernel: &Kernel, accumulate: bool, precision: DataType) -> KernelTime {
        let DeviceWork { time, kernels, category } = self.device_work(kernel, accumulate, precision);
        if kernels == 0.0 || self.is_skipped(category, kernel) {
            return KernelTime::default();
        }
        let launches = kernels * self.stack.launches(category);
        KernelTime { device: time + self.cluster.gpu.launch * kernels, host: self.stack.host.host_launch * launches }
    }

    /// Returns whether the stack does not run a kernel, because its parameters are not trained.
    pub(super) fn is_skipped(&self, category: Category, kernel: &Kernel) -> bool {
        self.workload.trained.are_adapters() && category.updates_parameters(kernel)
    }

    /// Returns the host time of a launch in a phase over that in the forward pass.
    pub fn launch_share(&self, phase: Phase) -> f64 {
        if phase == Phase::Backward { self.stack.host.backward_launch } else { 1.0 }
    }

    fn device_work(&self, kernel: &Kernel, accumulate: bool, precision: DataType) -> DeviceWork {
        // Gradients of weights are in single precision. If they are accumulated, the kernel also
        // reads them.
        let gradient = if accumulate { 8.0 } else { 4.0 };
        let element = precision.size().value();
        // An epilogue reads or writes another tensor as large as the product's output.
        let with_epilogue = |has_epilogue: bool| if has_epilogue { 2.0 * element } else { element };
        match *kernel {
            Kernel::Matmul { rows, columns, contracted, activation, .. } => {
                let output = with_epilogue(activation.keeps_argument());
                self.matmul([rows, columns, contracted], output, rows * contracted, [columns, contracted])
            }
            Kernel::MatmulInputGradient { rows, columns, contracted, gelu, .. } => {
                self.matmul([rows, contracted, columns], with_epilogue(gelu), rows * columns, [columns, contracted])
            }
            // The bias gradient is summed from an operand as the product reads it (cuBLASLt's
            // `BGRAD`), at no additional cost.
            Kernel::MatmulWeightGradient { rows, columns, contracted, .. } => {
                self.matmul([columns, contracted, rows], gradient, 0, [columns, contracted])
            }
            Kernel::EightBitMatmul { rows, columns, contracted, activation, .. } => {
                self.eight_bit_matmul([rows, columns, contracted], with_epilogue(activation.keeps_argument()))
            }
            Kernel::EightBitMatmulInputGradient { rows, columns, contracted, gelu } => {
                self.eight_bit_matmul([rows, contracted, columns], with_epilogue(gelu))
            }
            Kernel::EightBitMatmulWeightGradient { rows, columns, contracted, .. } => {
                self.eight_bit_matmul([columns, contracted, rows], gradient)
            }
            // One kernel finds the largest element, and one rounds all elements.
            Kernel::Quantise { .. } => DeviceWork { kernels: 2.0, ..self.memory_bound(kernel, accumulate, precision) },
            Kernel::ExpertMatmul { experts, rows, columns, contracted } => {
                let rows = self.received(experts, rows);
                self.expert_matmul(experts, [rows, columns, contracted], element, rows * contracted)
            }
            Kernel::ExpertMatmulInputGradient { experts, rows, columns, contracted } => {
                let rows = self.received(experts, rows);
                self.expert_matmul(experts, [rows, contracted, columns], element, rows * columns)
            }
            Kernel::ExpertMatmulWeightGradient { experts, rows, columns, contracted } => {
                self.expert_matmul(experts, [columns, contracted, self.received(experts, rows)], gradient, 0)
            }
            Kernel::Orthogonalise { matrices, rows, columns } => {
                let (short, long) = (rows.min(columns), rows.max(columns));
                let operand_bytes = self.format.bytes();
                let product = |rows, columns, contracted| {
                    let product = Product { batch: matrices, rows, columns, contracted, operand_bytes, output_bytes: element };
                    self.product_time(&product)
                };
                let step = product(short, short, long) + product(short, short, short) + product(short, long, short);
                let steps = NEWTON_SCHULZ_STEPS as f64;
                DeviceWork::product(step * steps, 3.0 * steps)
            }
            // PyTorch makes a view without a kernel.
            Kernel::Planned(work) if work.is_view() => {
                DeviceWork { time: Seconds::ZERO, kernels: 0.0, category: Category::of(kernel) }
            }
            Kernel::Planned(work) if work.is_product() => {
                let [batch, rows, columns, contracted] = work.product();
                let output_bytes = if work.summed { gradient } else { element };
                let product = Product { batch, rows, columns, contracted, operand_bytes: element, output_bytes };
                DeviceWork::product(self.product_time(&product), 1.0)
            }
            Kernel::Convolution(window)
            | Kernel::ConvolutionInputGradient(window)
            | Kernel::ConvolutionWeightGradient(window) => DeviceWork::product(self.convolution_time(window, precision), 1.0),
            Kernel::Attention(sizes) => {
                let (time, kernels) = attention_time(self, &sizes, Direction::Forward, precision);
                DeviceWork { time, kernels, category: Category::Attention }
            }
            Kernel::AttentionGradient(sizes) => {
                let (time, kernels) = attention_time(self, &sizes, Direction::Backward, precision);
                DeviceWork { time, kernels, category: Category::Attention }
            }
            Kernel::Lstm(sizes) | Kernel::LstmGradient { sizes, .. } => {
                let step = Product {
                    batch: 1,
                    rows: sizes.batch,
                    columns: 4 * sizes.hidden,
                    contracted: sizes.hidden,
                    operand_bytes: element,
                    output_bytes: element,
                };
                DeviceWork::product(self.product_time(&step) * sizes.sequence as f64, sizes.sequence as f64)
            }
            Kernel::Scan(_) => self.scan(kernel, Direction::Forward, precision),
            Kernel::ScanGradient(_) => self.scan(kernel, Direction::Backward, precision),
            kernel => self.memory_bound(&kernel, accumulate, precision),
        }
    }

    /// Returns the work of a scan: the time of its products or of its memory traffic, whichever is
    /// longer. Its kernels are those of `mamba_chunk_scan_combined`: sums of decays, states of
    /// chunks, passing on of states, products of keys, and outputs.
    fn scan(&self, kernel: &Kernel, direction: Direction, precision: DataType) -> DeviceWork {
        let moving = self.moving_time(kernel.traffic().bytes(precision).value());
        let time = scan_products_time(self, kernel, direction).max(moving);
        DeviceWork { time, kernels: SCAN_KERNELS, category: Category::Attention }
    }

    /// Returns the work of a product of the given rows, columns and contracted dimension. `cast` is
    /// the number of elements that are cast to a narrow format, and `weight` has the weight's
    /// dimensions.
    fn matmul(&self, [rows, columns, contracted]: [usize; 3], output_bytes: f64, cast: usize, weight: [usize; 2]) -> DeviceWork {
        let operand_bytes = self.format.bytes();
        let product = Product { batch: 1, rows, columns, contracted, operand_bytes, output_bytes };
        let time = self.product_time(&product) + self.cast_time(cast);
        let is_uneven = operand_bytes == 2.0 && !weight.iter().all(|size| size.is_multiple_of(2));
        DeviceWork::product(if is_uneven { time * (1.0 / UNEVEN) } else { time }, 1.0)
    }

    /// Returns the rows of each expert on the fullest rank, where all experts are assumed to have
    /// equally many.
    fn received(&self, experts: usize, slots: usize) -> usize {
        let more = self.workload.rows_over_slots(experts);
        if more <= 1.0 {
            return slots;
        }
        // Products of odd sizes do not use tensor cores. So the rows keep the largest power of two
        // (up to 16) that divides the slots.
        let granule = 1 << slots.trailing_zeros().min(4);
        let parts = (slots as f64 * more / granule as f64).ceil() as usize;
        granule * if granule < 16 { parts | 1 } else { parts }
    }

    /// Returns the work of the products of all experts. `cast` is the number of elements to cast
    /// per expert.
    fn expert_matmul(
        &self,
        experts: usize,
        [rows, columns, contracted]: [usize; 3],
        output_bytes: f64,
        cast: usize,
    ) -> DeviceWork {
        let operand_bytes = self.format.bytes();
        let product = Product { batch: experts, rows, columns, contracted, operand_bytes, output_bytes };
        let costs = &self.stack.products;
        let time = self.product_time(&product) * (1.0 / costs.expert_product) + self.cast_time(experts * cast);
        DeviceWork::product(time, 1.0 + costs.expert_launches * experts as f64)
    }

    /// Returns the work of a product whose operands a kernel of the Program has quantised. If the
    /// libraries do not support its sizes in eight bits, both operands are first converted to
    /// sixteen bits. Such sizes come from sharding a layer, or from the number of rows that a
    /// weight gradient sums over.
    fn eight_bit_matmul(&self, [rows, columns, contracted]: [usize; 3], output_bytes: f64) -> DeviceWork {
        let is_supported = columns.is_multiple_of(EIGHT_BIT_GRANULE) && contracted.is_multiple_of(EIGHT_BIT_GRANULE);
        let format = if is_supported { ProductFormat::Fp8 } else { ProductFormat::Bf16 };
        let product = Product { batch: 1, rows, columns, contracted, operand_bytes: format.bytes(), output_bytes };
        let time = self.product_time_in(&product, format);
        if is_supported {
            return DeviceWork::product(time, 1.0);
        }
        let converted = (ProductFormat::Fp8.bytes() + ProductFormat::Bf16.bytes()) * ((rows + columns) * contracted) as f64;
        DeviceWork::product(time + self.moving_time(converted), 3.0)
    }

    /// Returns the time of a convolution, computed as a matrix product whose rows are the output's
    /// pixels (implicit GEMM). Operands have the width of `precision`, also in fp8 runs.
    fn convolution_time(&self, window: Window, precision: DataType) -> Seconds {
        let Window { batch, in_channels, out_channels, size, .. } = window;
        let arithmetic = Product {
            batch: 1,
            rows: batch * window.out_height() * window.out_width(),
            columns: out_channels,
            contracted: in_channels * size * size,
            operand_bytes: 0.0,
            output_bytes: 0.0,
        };
        // The cache serves the overlaps of windows, so memory is read only once.
        let moved = Kernel::Convolution(window).bytes(precision).value();
        self.product_time(&arithmetic).max(self.moving_time(moved))
    }

    fn memory_bound(&self, kernel: &Kernel, accumulate: bool, precision: DataType) -> DeviceWork {
        let category = Category::of(kernel);
        match self.moved(kernel, accumulate, precision) {
            Some((bytes, slowdown)) => DeviceWork { time: self.moving_time(bytes) * slowdown, kernels: 1.0, category },
            None => DeviceWork { time: Seconds::ZERO, kernels: 0.0, category },
        }
    }

    /// Returns the bytes that a memory-bound kernel moves under the stack, and the ratio of its
    /// time to the time in which memory moves these bytes. `None` if the stack fuses the kernel
    /// away.
    pub(super) fn moved(&self, kernel: &Kernel, accumulate: bool, precision: DataType) -> Option<(f64, f64)> {
        let category = Category::of(kernel);
        let share = self.stack.traffic_share(category);
        if share == 0.0 {
            return None;
        }
        // Kernels over whole buckets stream in every stack. So does a scaling: it is one kernel
        // even in stacks whose norms and activations are chains of kernels. An addition is one
        // kernel, too, but residual additions keep the factor that the fit gave to the kernels
        // around them.
        let is_streaming = matches!(category, Category::Optimizer | Category::Bucket)
            || matches!(kernel, Kernel::Scale { .. })
            || (self.workload.has_adapters && matches!(kernel, Kernel::Add { .. }));
        let slowdown = if is_streaming { 1.0 } else { self.stack.memory_bound.elementwise };
        let traffic = kernel.traffic();
        let mut bytes = traffic.bytes(precision).value();
        if accumulate {
            bytes += 4.0 * traffic.single as f64;
        }
        if category == Category::Optimizer {
            // `update_share` assumes an update with moments. LAMB, Muon and outer steps move other
            // values.
            let moments = match kernel {
                Kernel::Sgd { momentum, .. } => Some(usize::from(*momentum)),
                Kernel::AdamW { .. } => Some(2),
                _ => None,
            };
            let is_narrow = precision.size().count() < 4;
            bytes *= moments.map_or(1.0, |moments| self.workload.update_share(is_narrow, moments));
        }
        Some((bytes * share, slowdown))
    }
}

#[cfg(test)]
mod tests;
