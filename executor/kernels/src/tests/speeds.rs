//! What the kernels reach on this machine. Not a test of anything: run it with `cargo test
//! --release -p foretell-kernels print_kernel_speeds -- --ignored --nocapture --test-threads 1`.

use std::time::Instant;

use foretell_models::{Activation, Attention, Dropout, DropoutRate, DropoutSite, Epsilon, Kernel, Rope, WeightLayout, Window};
use foretell_units::DataType;

use super::{CpuBackend, Hyperparameters, KernelCall, Operand, attention, dropped, integers, window};
use crate::half::SixteenBits;
use crate::{Backend as _, operand_bytes, operand_types};

/// The least seconds of a call, over at least a fifth of a second.
fn least_seconds(kernel: &Kernel, precision: DataType) -> f64 {
    let mut backend = CpuBackend::new();
    let sizes = operand_bytes(kernel, precision);
    let types = operand_types(kernel, precision);
    let mut memory: Vec<Vec<u32>> = Vec::new();
    let operands = sizes.reads.iter().chain(&sizes.writes).zip(types.reads.iter().chain(&types.writes));
    for (index, (bytes, &data_type)) in operands.enumerate() {
        let count = (bytes.count() as usize).div_ceil(4);
        let number = |position: usize| (position * 7919 % 1000) as f32 / 1000.0 + 0.01;
        let value = |position: usize| match (integers(kernel, index), SixteenBits::of(data_type)) {
            (Some(limit), _) => (position * 7919 % limit) as u32,
            (None, Some(half)) => u32::from(half.nearest(number(position))) * 0x1_0001,
            (None, None) => number(position).to_bits(),
        };
        memory.push((0..count).map(value).collect());
    }
    let bytes = sizes.reads.iter().chain(&sizes.writes).map(|bytes| bytes.count() as usize);
    let operands: Vec<Operand> =
        memory.iter_mut().zip(bytes).map(|(memory, bytes)| Operand { pointer: memory.as_mut_ptr().cast(), bytes }).collect();
    let (reads, writes) = operands.split_at(sizes.reads.len());
    let hyperparameters = Hyperparameters { learning_rate: 1e-6, momentum: 0.9, ..Hyperparameters::default() };
    let hyperparameters = &hyperparameters;
    let call =
        KernelCall { kernel, reads, writes, accumulate: false, hyperparameters, group_index: 0, samples_before: 0, precision };
    let (started, mut least, mut calls) = (Instant::now(), f64::INFINITY, 0);
    while calls < 5 || started.elapsed().as_secs_f64() < 0.2 {
        let start = Instant::now();
        // SAFETY: the operands are vectors that live until the end and do not overlap.
        unsafe { backend.run(&call) }.unwrap();
        least = least.min(start.elapsed().as_secs_f64());
        calls += 1;
    }
    least
}

/// One line a kernel: the rate in single precision, the time in every precision.
fn print_speed(kernel: Kernel) {
    let [seconds, bf16, fp16] = [DataType::Fp32, DataType::Bf16, DataType::Fp16].map(|format| least_seconds(&kernel, format));
    let (rate, unit) = if kernel.is_matrix_product() {
        (kernel.flops().value() / seconds / 1e9, "GFLOP/s")
    } else {
        (kernel.bytes(DataType::Fp32).value() / seconds / 1e9, "GB/s")
    };
    let [seconds, bf16, fp16] = [seconds, bf16, fp16].map(|seconds| seconds * 1e6);
    println!("{rate:8.1} {unit:7}  fp32 {seconds:9.1} us  bf16 {bf16:9.1} us  fp16 {fp16:9.1} us  {kernel:?}");
}

fn print_products(rows: usize, contracted: usize, columns: usize, weight: WeightLayout, bias: bool, activation: Activation) {
    print_speed(Kernel::Matmul { rows, columns, contracted, weight, bias, activation });
    print_speed(Kernel::MatmulInputGradient { rows, columns, contracted, weight, gelu: activation.is_gelu() });
    print_speed(Kernel::MatmulWeightGradient { rows, columns, contracted, weight, bias });
}

fn print_convolutions(window: Window) {
    print_speed(Kernel::Convolution(window));
    print_speed(Kernel::ConvolutionInputGradient(window));
    print_speed(Kernel::ConvolutionWeightGradient(window));
}

#[test]
#[ignore = "prints speeds, checks nothing"]
fn print_kernel_speeds_of_a_transformer() {
    println!("GPT, 1024 rows of 256 features, vocabulary 8192");
    for (contracted, columns) in [(256, 768), (256, 1024), (1024, 256)] {
        print_products(1024, contracted, columns, WeightLayout::InOut, true, Activation::None);
    }
    print_products(1024, 256, 8192, WeightLayout::OutIn, false, Activation::None);
    for extents in [[8, 128, 4, 64], [1, 1024, 4, 64]] {
        for packed in [true, false] {
            print_speed(Kernel::Attention(attention(extents, true, packed)));
            print_speed(Kernel::AttentionGradient(attention(extents, true, packed)));
            let dropped = Attention { dropout: Some(dropped()), ..attention(extents, true, packed) };
            print_speed(Kernel::Attention(dropped));
            print_speed(Kernel::AttentionGradient(dropped));
        }
    }
    let (rows, features, tokens, hidden, vocabulary, classes) = (1024, 256, 1024, 256, 8192, 8192);
    print_speed(Kernel::LayerNorm { rows, features, epsilon: Epsilon::new(5) });
    print_speed(Kernel::RmsNorm { rows, features, epsilon: Epsilon::new(5) });
    print_speed(Kernel::RmsNormInputGradient { rows, features });
    print_speed(Kernel::RmsNormWeightGradient { rows, features });
    let rope = Rope {
        batch: 8,
        positions: 128,
        heads: 4,
        head_dimension: 64,
        rotated: None,
        theta: 10_000,
        position_parts: 1,
        position_offset: 0,
        zigzag: None,
    };
    print_speed(Kernel::Rope(rope));
    print_speed(Kernel::Dropout(Dropout {
        first_sample: 0,
        samples: 8,
        positions: 128,
        features: 1024,
        parts: 1,
        sample_parts: 1,
        zigzag: None,
        site: DropoutSite { rate: DropoutRate::TENTH, site: 0 },
    }));
    print_speed(Kernel::GeluExact { elements: 1 << 20 });
    print_speed(Kernel::GeluExactGradient { elements: 1 << 20 });
    print_speed(Kernel::SiluMultiply { elements: 1 << 20 });
    print_speed(Kernel::SiluMultiplyGradient { elements: 1 << 20 });
    print_speed(Kernel::Split { rows, parts: 3, columns: 256 });
    print_speed(Kernel::LayerNormInputGradient { rows, features });
    print_speed(Kernel::LayerNormWeightGradient { rows, features });
    print_speed(Kernel::BiasGradient { rows, columns: 1024 });
    print_speed(Kernel::Gelu { elements: 1 << 20 });
    print_speed(Kernel::GeluGradient { elements: 1 << 20 });
    print_speed(Kernel::Add { elements: 1 << 18 });
    print_speed(Kernel::Embedding { tokens, vocabulary, hidden, parts: 1 });
    print_speed(Kernel::EmbeddingWeightGradient { tokens, vocabulary, hidden, parts: 1 });
    print_speed(Kernel::CrossEntropy { rows, classes });
    print_speed(Kernel::CrossEntropyGradient { rows, classes, normalizer: rows, parts: 1, scaled: false });
}

#[test]
#[ignore = "prints speeds, checks nothing"]
fn print_kernel_speeds_of_large_products() {
    println!("GPT-2, 512 rows of 768 features, vocabulary 50257");
    for (contracted, columns) in [(768, 768), (768, 3072), (3072, 768)] {
        print_products(512, contracted, columns, WeightLayout::InOut, true, Activation::None);
        print_products(512, contracted, columns, WeightLayout::OutIn, true, Activation::None);
    }
    print_products(512, 768, 50257, WeightLayout::OutIn, false, Activation::None);
}

#[test]
#[ignore = "prints speeds, checks nothing"]
fn print_kernel_speeds_of_optimizers_and_an_mlp() {
    println!("optimizers, 5 million parameters");
    let elements = 5_000_000;
    let kernels = [
        Kernel::AdamW { elements, controlled: false, exempt: false },
        Kernel::Sgd { elements, momentum: true, nesterov: false, controlled: false, exempt: false },
        Kernel::SumOfSquares { elements },
    ];
    for kernel in kernels {
        let [fp32, bf16] = [DataType::Fp32, DataType::Bf16].map(|format| least_seconds(&kernel, format) / elements as f64 * 1e9);
        println!("{fp32:8.3} ns an element, in bf16 {bf16:8.3}  {kernel:?}");
    }

    println!("MLP, batch 128");
    print_products(128, 784, 512, WeightLayout::OutIn, true, Activation::Relu);
    print_products(128, 512, 512, WeightLayout::OutIn, true, Activation::Relu);
}

#[test]
#[ignore = "prints speeds, checks nothing"]
fn print_kernel_speeds_of_convolutions() {
    for batch in [16, 64] {
        println!("ResNet-18 on 32 x 32 images, batch {batch}");
        for extents in [
            [batch, 32, 32, 3, 64, 3, 1, 1],
            [batch, 32, 32, 64, 64, 3, 1, 1],
            [batch, 32, 32, 64, 128, 3, 2, 1],
            [batch, 32, 32, 64, 128, 1, 2, 0],
            [batch, 16, 16, 128, 128, 3, 1, 1],
            [batch, 8, 8, 256, 256, 3, 1, 1],
            [batch, 4, 4, 512, 512, 3, 1, 1],
        ] {
            print_convolutions(window(extents));
        }
        let (groups, positions, channels) = (1, batch * 1024, 64);
        print_speed(Kernel::BatchNorm { groups, positions, channels });
        print_speed(Kernel::BatchNormInputGradient { groups, positions, channels });
        print_speed(Kernel::Relu { elements: positions * channels });
    }
    println!("ImageNet shapes, batch 8");
    print_convolutions(window([8, 224, 224, 3, 64, 7, 2, 3]));
    print_convolutions(window([8, 56, 56, 64, 64, 3, 1, 1]));
    print_convolutions(window([8, 56, 56, 64, 256, 1, 1, 0]));
    let pooling = window([8, 112, 112, 64, 64, 3, 2, 1]);
    print_speed(Kernel::MaxPool(pooling));
    print_speed(Kernel::MaxPoolGradient(pooling));
}
