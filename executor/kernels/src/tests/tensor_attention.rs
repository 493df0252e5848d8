//! Attention on tensor cores in sixteen bits: more queries and keys than their tiles have, heads
//! that fill them and that do not.

use super::accuracy::Arithmetic;
use super::precision::assert_close;
use super::{ProductSupport, Tensor, attention, cuda_backend, dropped, last_member, operands_in, reference, run_in};
use crate::cuda::CudaBackend;
use crate::cuda::tests::device::{DriverCall, TestDevice};
use crate::half::SixteenBits;
use foretell_models::{Attention, Kernel, RelativePositions};
use foretell_units::DataType;
use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;

/// Tiles have 64 or 128 queries, and 32, 64 or 128 keys, of 64 or 128 features.
fn sizes() -> Vec<Attention> {
    let mut all = Vec::new();
    for causal in [false, true] {
        let wide = attention([1, 140, 1, 128], causal, false);
        let relative = Some(RelativePositions { buckets: 8, max_distance: 20, bidirectional: !causal });
        all.extend([
            attention([1, 260, 1, 64], causal, true),
            attention([2, 64, 1, 128], causal, true),
            Attention { group: 2, scaled: false, ..attention([1, 150, 1, 64], causal, false) },
            Attention { head_dimension: 96, ..wide },
            Attention { head_dimension: 40, keys: 150, queries: 70, query_offset: 80, ..wide },
            Attention { queries: 50, query_parts: 3, group: 2, ..wide },
            Attention { dropout: Some(dropped()), relative, ..wide },
            Attention { dropout: Some(dropped()), head_dimension: 64, group: 2, keys: 190, ..wide },
        ]);
    }
    all
}

#[test]
fn attention_on_tensor_cores_is_that_of_the_reference() {
    let mut random = ChaCha8Rng::seed_from_u64(9);
    for (precision, half) in [(DataType::Bf16, SixteenBits::Bf16), (DataType::Fp16, SixteenBits::Fp16)] {
        for kernel in sizes().into_iter().flat_map(|sizes| [Kernel::Attention(sizes), Kernel::AttentionGradient(sizes)]) {
            let (reads, before) = operands_in(&kernel, precision, &mut random);
            let member = last_member(&kernel);
            let expected = reference::run(&kernel, &reads, &before, false, &super::PARAMETERS, member);
            for backend in &mut cuda_backend(ProductSupport::Full) {
                let mut run = || run_in(backend.as_mut(), precision, &kernel, &reads, &before, false, false, member);
                let computed = run();
                assert_close(Arithmetic::of_cuda(), &kernel, half, "on tensor cores", &computed, &expected, 0.0);
                if precision == DataType::Bf16 {
                    assert_eq!(computed, run(), "{kernel:?} is not deterministic");
                }
            }
        }
    }
}

/// The kernels that were launched for one call.
fn launched(kernel: &Kernel, precision: DataType) -> Vec<&'static str> {
    let Some(device) = TestDevice::new() else { return Vec::new() };
    let mut backend = CudaBackend::new(device.clone()).unwrap();
    let (reads, before): (Vec<Tensor>, Vec<Tensor>) = operands_in(kernel, precision, &mut ChaCha8Rng::seed_from_u64(1));
    device.take_calls();
    run_in(&mut backend, precision, kernel, &reads, &before, false, false, 0);
    let name = |told: DriverCall| if let DriverCall::Launch { function, .. } = told { Some(function) } else { None };
    device.take_calls().into_iter().filter_map(name).collect()
}

#[test]
fn tensor_cores_are_used_where_heads_and_formats_allow() {
    if TestDevice::new().is_none() {
        return;
    }
    let sizes = attention([1, 8, 1, 64], true, false);
    let relative = Some(RelativePositions { buckets: 8, max_distance: 20, bidirectional: false });
    let forward = |sizes, precision| launched(&Kernel::Attention(sizes), precision);
    assert_eq!(forward(sizes, DataType::Bf16), ["attention_tensor_64_plain"]);
    assert_eq!(forward(Attention { head_dimension: 128, ..sizes }, DataType::Fp16), ["attention_tensor_128_plain"]);
    assert_eq!(forward(Attention { dropout: Some(dropped()), ..sizes }, DataType::Fp16), ["attention_tensor_64"]);
    for (sizes, precision, name) in [
        (sizes, DataType::Fp32, "attention_64"),
        (Attention { head_dimension: 66, ..sizes }, DataType::Bf16, "attention_128"),
        (Attention { head_dimension: 136, ..sizes }, DataType::Bf16, "attention_256"),
    ] {
        assert_eq!(forward(sizes, precision), [name]);
    }
    let gradient = |sizes| launched(&Kernel::AttentionGradient(sizes), DataType::Bf16);
    let (queries, keys) = ("attention_tensor_query_gradient_64_plain", "attention_tensor_key_gradient_64_plain");
    assert_eq!(gradient(sizes), ["attention_dots", queries, keys]);
    // The table's gradient is made beside that of the queries.
    let with_table = gradient(Attention { relative, ..sizes });
    let expected = ["attention_query_gradient_64", "attention_tensor_key_gradient_64", "attention_table_gradient"];
    assert_eq!(with_table[with_table.len() - 3..], expected);
}
