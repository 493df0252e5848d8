//! The CPU backend: one core, deterministic, in single precision or in half precision ([`half`])
//! with sums in single precision. Parallelism is one process per core, so nothing here starts a
//! thread. This file checks a call and dispatches it. Each file below has one family of kernels. A
//! kernel sees its operands and sizes, and must not know ranks, layouts or schedules.

mod activations;
mod attention;
mod attention_plan;
mod batch_norm;
mod blocked;
mod compression;
mod control;
mod convolution;
mod cross_entropy;
mod direct;
mod dropout;
mod eight_bits;
mod elementwise;
mod exchange;
mod experts;
mod half;
mod head_products;
mod layer_norm;
mod lstm;
mod matmul;
mod memory;
mod micro_kernel;
mod mixture;
mod movement;
mod optimizers;
mod ordered;
mod orthogonal;
mod pooling;
mod product;
mod rms_norm;
mod rope;
mod scores;
mod strided;
mod sums;
mod transpose;
mod vector;
mod view;
mod weighted_cross_entropy;

use dropout::ProbabilityDropout;
use foretell_models::{Kernel, scale_factor};

use super::{Backend, BackendError, KernelCall, operands};

/// Runs kernels on one core. Owns only scratch memory, which grows to the largest kernel's need.
#[derive(Debug)]
pub struct CpuBackend {
    scratch: memory::Scratch,
    micro_kernel: Option<micro_kernel::MicroKernel>,
    half: half::HalfKernels,
    /// Decoded fp8 operands.
    eight_bits: memory::Scratch,
}

impl CpuBackend {
    /// Makes a backend without scratch memory.
    pub fn new() -> Self {
        let half = half::HalfKernels::detect();
        CpuBackend {
            scratch: memory::Scratch::default(),
            micro_kernel: micro_kernel::MicroKernel::detect(),
            half,
            eight_bits: memory::Scratch::default(),
        }
    }

    /// Returns a backend for each code path of this machine's kernels, for tests.
    #[cfg(test)]
    pub(super) fn variants() -> Vec<Self> {
        let kernels = micro_kernel::MicroKernel::all().into_iter().map(Some).chain([None]);
        let half = |with_pairs| if with_pairs { half::HalfKernels::detect() } else { half::HalfKernels::without_pairs() };
        kernels
            .enumerate()
            .map(|(index, micro_kernel)| CpuBackend {
                scratch: memory::Scratch::default(),
                micro_kernel,
                half: half(index == 0),
                eight_bits: memory::Scratch::default(),
            })
            .collect()
    }
}

impl Default for CpuBackend {
    fn default() -> Self {
        Self::new()
    }
}

impl Backend for CpuBackend {
    fn name(&self) -> &'static str {
        "cpu"
    }

    unsafe fn run(&mut self, call: &KernelCall<'_>) -> Result<(), BackendError> {
        operands::check(call)?;
        if let Some([product, bias]) = matmul::apart(call.kernel) {
            // SAFETY: this function's own contract; each of the two kernels gets a subset of the
            // call's operands.
            return unsafe {
                self.run(&KernelCall { kernel: &product, writes: &call.writes[..1], ..*call })?;
                self.run(&KernelCall { kernel: &bias, reads: &call.reads[..1], writes: &call.writes[1..], ..*call })
            };
        }
        if let Kernel::Quantise { rows, columns, format, straight, transposed } = *call.kernel {
            let scratch = &mut self.eight_bits;
            // SAFETY: the operands are checked; the rest is this function's own contract.
            unsafe {
                eight_bits::quantise(call, [rows, columns], format, operands::EightBitCopies { straight, transposed }, scratch)
            };
            return Ok(());
        }
        match *call.kernel {
            Kernel::Compress { format, feedback, .. } => {
                // SAFETY: as above.
                unsafe { compression::compress(call, format, feedback) };
                return Ok(());
            }
            Kernel::Decompress { format, .. } => {
                // SAFETY: as above.
                unsafe { compression::decompress(call, format) };
                return Ok(());
            }
            _ => {}
        }
        if let Some(decoded) = eight_bits::decoded(call.kernel) {
            // SAFETY: as above.
            return unsafe { eight_bits::product(self, call, decoded) };
        }
        if let Some(format) = crate::half::SixteenBits::of(call.precision) {
            // SAFETY: the operands are checked; the rest is this function's own contract.
            return unsafe { half::run(self, call, format) };
        }
        let (scratch, micro_kernel) = (&mut self.scratch, self.micro_kernel.as_ref());
        // SAFETY: counts, sizes and alignment are checked; valid memory without overlap is this
        // function's own contract.
        unsafe {
            match *call.kernel {
                Kernel::Matmul { rows, columns, contracted, weight, bias, activation } => {
                    let sizes = matmul::Sizes { rows, columns, contracted, weight };
                    matmul::forward(call, sizes, bias, activation, micro_kernel, scratch);
                }
                Kernel::MatmulInputGradient { rows, columns, contracted, weight, gelu } => {
                    matmul::input_gradient(
                        call,
                        matmul::Sizes { rows, columns, contracted, weight },
                        gelu,
                        micro_kernel,
                        scratch,
                    );
                }
                Kernel::MatmulWeightGradient { rows, columns, contracted, weight, .. } => {
                    matmul::weight_gradient(call, matmul::Sizes { rows, columns, contracted, weight }, micro_kernel, scratch);
                }
                Kernel::Quantise { .. }
                | Kernel::Compress { .. }
                | Kernel::Decompress { .. }
                | Kernel::EightBitMatmul { .. }
                | Kernel::EightBitMatmulInputGradient { .. }
                | Kernel::EightBitMatmulWeightGradient { .. } => unreachable!("they ran above, in every precision"),
                Kernel::BiasAdd { .. } => matmul::bias_add(call),
                Kernel::BiasGradient { columns, .. } => {
                    let [partial] = scratch.pieces([columns]);
                    matmul::bias_gradient(call, partial);
                }
                Kernel::Relu { .. } => elementwise::relu(call),
                Kernel::ReluGradient { .. } => elementwise::relu_gradient(call),
                Kernel::Gelu { .. } => elementwise::gelu(call),
                Kernel::GeluGradient { .. } => elementwise::gelu_gradient(call),
                Kernel::GeluExact { .. } => activations::gelu_exact(call),
                Kernel::GeluExactGradient { .. } => activations::gelu_exact_gradient(call),
                Kernel::SiluMultiply { .. } => activations::silu_multiply(call),
                Kernel::SiluMultiplyGradient { .. } => activations::silu_multiply_gradient(call),
                Kernel::Add { .. } => elementwise::add(call),
                Kernel::SumOfSquares { .. } => elementwise::sum_of_squares(call),
                Kernel::Convolution(ref window) => convolution::forward(call, window, micro_kernel, scratch),
                Kernel::ConvolutionInputGradient(ref window) => {
                    convolution::input_gradient(call, window, micro_kernel, scratch);
                }
                Kernel::ConvolutionWeightGradient(ref window) => {
                    convolution::weight_gradient(call, window, micro_kernel, scratch);
                }
                Kernel::BatchNorm { groups, positions, channels } => {
                    batch_norm::forward(call, groups, positions, channels, scratch);
                }
                Kernel::BatchNormInputGradient { groups, positions, channels } => {
                    batch_norm::input_gradient(call, groups, positions, channels, scratch);
                }
                Kernel::BatchNormWeightGradient { channels, .. } => batch_norm::weight_gradient(call, channels),
                Kernel::BatchNormInference { channels, .. } => batch_norm::inference(call, channels, scratch),
                Kernel::RunningStatistics { contributions, .. } => batch_norm::running_statistics(call, contributions),
                Kernel::MaxPool(ref window) => pooling::maximum(call, window),
                Kernel::MaxPoolGradient(_) => pooling::maximum_gradient(call)?,
                Kernel::GlobalAveragePool { positions, channels, .. } => pooling::average(call, positions, channels, scratch),
                Kernel::GlobalAveragePoolGradient { positions, channels, .. } => {
                    pooling::average_gradient(call, positions, channels);
                }
                Kernel::LayerNorm { epsilon, .. } => layer_norm::forward(call, epsilon.value() as f32),
                Kernel::LayerNormInputGradient { .. } => layer_norm::input_gradient(call),
                Kernel::LayerNormWeightGradient { .. } => layer_norm::weight_gradient(call, scratch),
                Kernel::RmsNorm { epsilon, .. } => rms_norm::forward(call, epsilon.value() as f32),
                Kernel::RmsNormInputGradient { .. } => rms_norm::input_gradient(call),
                Kernel::RmsNormWeightGradient { .. } => rms_norm::weight_gradient(call, scratch),
                Kernel::Rope(sizes) => rope::turn(call, &sizes.for_member(call.group_index), 1.0, scratch),
                Kernel::RopeGradient(sizes) => rope::turn(call, &sizes.for_member(call.group_index), -1.0, scratch),
                Kernel::Dropout(ref sizes) => dropout::drop_some(call, sizes),
                Kernel::Prepend { positions, features, .. } => movement::prepend::<f32>(call, positions, features),
                Kernel::PrependInputGradient { positions, features, .. } => {
                    movement::prepend_input_gradient::<f32>(call, positions, features);
                }
                Kernel::PrependWeightGradient { positions, .. } => movement::prepend_weight_gradient(call, positions),
                Kernel::First { positions, features, .. } => movement::first::<f32>(call, positions, features),
                Kernel::FirstGradient { positions, features, .. } => movement::first_gradient::<f32>(call, positions, features),
                Kernel::Embedding { vocabulary, hidden, parts, .. } => {
                    movement::embedding::<f32>(call, vocabulary, hidden, parts)?
                }
                Kernel::EmbeddingWeightGradient { vocabulary, hidden, parts, .. } => {
                    movement::embedding_gradient(call, vocabulary, hidden, parts)?;
                }
                Kernel::Attention(sizes) => {
                    let dropout = ProbabilityDropout::of(call, &sizes);
                    attention::forward(call, &sizes.for_member(call.group_index), dropout, micro_kernel, scratch);
                }
                Kernel::AttentionGradient(sizes) => {
                    let dropout = ProbabilityDropout::of(call, &sizes);
                    attention::gradient(call, &sizes.for_member(call.group_index), dropout, micro_kernel, scratch);
                }
                Kernel::Split { columns, .. } => movement::split::<f32>(call, columns),
                Kernel::Join { columns, .. } => movement::join::<f32>(call, columns),
                Kernel::CrossEntropy { classes, .. } => cross_entropy::forward(call, classes)?,
                Kernel::LabelRanks { rows, classes, parts } => scores::label_ranks(call, rows, classes, parts)?,
                Kernel::TopLabels { top, .. } => scores::top_labels(call, top),
                Kernel::ClassScores { classes, .. } => scores::class_scores(call, classes)?,
                Kernel::WeightedCrossEntropy { classes, smoothing, .. } => {
                    weighted_cross_entropy::forward(call, classes, smoothing)?;
                }
                Kernel::WeightedCrossEntropyGradient { classes, smoothing, normalizer, scaled, .. } => {
                    weighted_cross_entropy::gradient(call, classes, smoothing, normalizer, scaled)?;
                }
                Kernel::Scale { times, square, .. } => elementwise::scale(call, scale_factor(times, square)),
                Kernel::Multiply { .. } => elementwise::multiply(call),
                Kernel::Route { experts, top, .. } => mixture::route(call, experts, top),
                Kernel::RouteGradient { experts, top, .. } => mixture::route_gradient(call, experts, top)?,
                Kernel::Dispatch(ref sizes) => mixture::dispatch(call, sizes)?,
                Kernel::DispatchGradient(ref sizes) => mixture::dispatch_gradient(call, sizes)?,
                Kernel::Combine(ref sizes) => mixture::combine(call, sizes)?,
                Kernel::CombineInputGradient(ref sizes) => mixture::combine_input_gradient(call, sizes)?,
                Kernel::CombineGateGradient(ref sizes) => mixture::combine_gate_gradient(call, sizes)?,
                Kernel::Lstm(ref sizes) => lstm::forward(call, sizes, scratch),
                Kernel::LstmGradient { ref sizes, outputs, last } => lstm::gradient(call, sizes, outputs, last, scratch),
                Kernel::LstmWeightGradient(ref sizes) => lstm::weight_gradient(call, sizes, scratch),
                Kernel::ExpertMatmul { experts, rows, columns, contracted } => {
                    experts::forward(call, experts, [rows, columns, contracted], micro_kernel, scratch);
                }
                Kernel::ExpertMatmulInputGradient { experts, rows, columns, contracted } => {
                    experts::input_gradient(call, experts, [rows, columns, contracted], micro_kernel, scratch);
                }
                Kernel::ExpertMatmulWeightGradient { experts, rows, columns, contracted } => {
                    experts::weight_gradient(call, experts, [rows, columns, contracted], micro_kernel, scratch);
                }
                Kernel::LogitStatistics { classes, parts, .. } => cross_entropy::statistics(call, classes, parts)?,
                Kernel::CrossEntropyOfStatistics { rows, .. } => cross_entropy::of_statistics(call, rows),
                Kernel::CrossEntropyGradient { classes, normalizer, parts, scaled, .. } => {
                    cross_entropy::gradient(call, classes, normalizer, parts, scaled)?;
                }
                Kernel::UpdateControl { clip, scaled, predictions } => control::update(call, clip, scaled, predictions),
                Kernel::Sum { .. } => control::sum(call),
                Kernel::Accumulate { .. } => control::accumulate(call),
                Kernel::Average { parts, .. } => exchange::average(call, parts),
                Kernel::Difference { .. } => exchange::difference(call),
                Kernel::OuterStep { replicas, momentum, nesterov, mixed, .. } => {
                    exchange::outer_step(call, replicas, exchange::OuterForm { momentum, nesterov, mixed })
                }
                Kernel::Narrow { .. } => control::narrow(call),
                Kernel::Zero { .. } => control::zero(call),
                Kernel::Sgd { momentum, nesterov, controlled, exempt, .. } => {
                    optimizers::sgd(call, momentum, nesterov, [controlled, exempt]);
                }
                Kernel::AdamW { controlled, exempt, .. } => optimizers::adamw(call, controlled, exempt),
                Kernel::LambDirection { controlled, exempt, .. } => optimizers::lamb_direction(call, controlled, exempt),
                Kernel::LambStep { controlled, .. } => optimizers::lamb_step(call, controlled),
                Kernel::MuonDirection { controlled, .. } => optimizers::muon_direction(call, controlled),
                Kernel::Orthogonalise { rows, columns, .. } => orthogonal::orthogonalise(call, [rows, columns], scratch),
                Kernel::MuonStep { longest, controlled, exempt, .. } => {
                    optimizers::muon_step(call, longest, [controlled, exempt]);
                }
                Kernel::Slice { parts, inner, .. } => movement::slice::<f32>(call, parts, inner),
                Kernel::Interleave { outer, parts, inner } => movement::exchange::<f32>(call, parts, outer, inner),
                Kernel::Deinterleave { outer, parts, inner } => movement::exchange::<f32>(call, outer, parts, inner),
                Kernel::TakeColumns { columns, start, part, .. } => movement::take_columns::<f32>(call, columns, start, part),
                Kernel::PutColumns { columns, start, part, .. } => movement::put_columns::<f32>(call, columns, start, part),
                Kernel::Planned(_) | Kernel::Scan(_) | Kernel::ScanGradient(_) => {
                    unreachable!("the check of operands refuses it")
                }
            }
        }
        Ok(())
    }
}
