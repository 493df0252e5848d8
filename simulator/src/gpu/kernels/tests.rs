use super::*;
use crate::gpu::{AttentionKind, NodeSpread, Profiles, StackProfile, TrainedParameters, Workload};
use foretell_models::Attention;
use foretell_program::{Collective, CollectiveAlgorithm, CollectiveRole};

/// Attention with heads of 64 features.
fn attention(batch: usize, positions: usize, heads: usize, causal: bool) -> Attention {
    Attention {
        batch,
        queries: positions,
        keys: positions,
        key_heads: heads,
        group: 1,
        head_dimension: 64,
        value_dimension: None,
        causal,
        scaled: true,
        window: None,
        relative: None,
        packed: false,
        query_parts: 1,
        query_offset: 0,
        zigzag: None,
        ring: None,
        dropout: None,
    }
}

#[test]
fn fused_kernels_take_no_time() {
    let profiles = Profiles::library().expect("the library is sound");
    let cluster = profiles.cluster("a100-sxm-80g", None, 8, 8, None).expect("known");
    let stack = profiles.stack("megatron-core").expect("known");
    let costs = GpuCosts { cluster: &cluster, stack, format: ProductFormat::Bf16, workload: Workload::default() };
    let bias = Kernel::BiasAdd { rows: 4096, columns: 4096 };
    assert_eq!(costs.kernel_time(&bias, false, DataType::Bf16), KernelTime::default());
    let norm = Kernel::RmsNorm { rows: 4096, features: 4096, epsilon: foretell_models::Epsilon::new(5) };
    assert!(costs.kernel_time(&norm, false, DataType::Bf16).device > Seconds::ZERO);
}

#[test]
fn products_launched_expert_by_expert_match_the_measurements() {
    // In `bf16_op_efficiency.csv`, 160 experts of 154 rows, 3072 x 5120, take 11.3 us each on a
    // B200. A single kernel for all would take 6 us each.
    let profiles = Profiles::library().expect("the library is sound");
    let mut cluster = profiles.cluster("b200-sxm-180g", None, 8, 8, None).expect("known");
    assert!(cluster.gpu.set_value("product:bf16", 0.51));
    let mut stack = profiles.stack("megatron-core").expect("known").clone();
    assert!(stack.set_value("product_scale", 1.0) && stack.set_value("expert_product", 1.0));
    stack.products.product = Default::default();
    let costs = GpuCosts { cluster: &cluster, stack: &stack, format: ProductFormat::Bf16, workload: Workload::default() };
    let kernel = Kernel::ExpertMatmul { experts: 160, rows: 154, columns: 3072, contracted: 5120 };
    let each = costs.kernel_time(&kernel, false, DataType::Bf16).device.value() / 160.0;
    assert!((9e-6..12e-6).contains(&each), "{each}");
}

#[test]
fn autocast_moves_less_than_twice_the_bytes_in_single_precision() {
    let profiles = Profiles::library().expect("the library is sound");
    let cluster = profiles.cluster("v100-sxm-32g", None, 8, 8, None).expect("known");
    let time = |single, format, precision| {
        let unfused = AttentionKind::Unfused { forward_bytes: 27.0, backward_bytes: 38.0, single, fused_by: 1 };
        let mut stack = profiles.stack("pytorch-eager").expect("known").clone();
        stack.attention = unfused;
        let costs = GpuCosts { cluster: &cluster, stack: &stack, format, workload: Workload::default() };
        let sizes = attention(8, 512, 16, false);
        costs.kernel_time(&Kernel::Attention(sizes), false, precision).device.value()
    };
    let half = |single| time(single, ProductFormat::Fp16, DataType::Fp16);
    let full = |single| time(single, ProductFormat::Fp32, DataType::Fp32);
    assert_eq!(half(1.2), half(2.0));
    // 8 x 16 x 512 x 512 scores of 27 bytes, and factors that differ by 0.8.
    let bytes = (full(2.0) - full(1.2)) * cluster.gpu.memory_bandwidth.value() * cluster.gpu.memory_efficiency;
    assert!((bytes / (8.0 * 16.0 * 512.0 * 512.0 * 27.0 * 0.8) - 1.0).abs() < 1e-6, "{bytes}");
}

#[test]
fn training_adapters_skips_weight_gradients() {
    let profiles = Profiles::library().expect("the library is sound");
    let cluster = profiles.cluster("h100-sxm-80g", None, 8, 8, None).expect("known");
    let stack = profiles.stack("nemo").expect("known");
    let of_adapters = |beside_shards| GpuCosts {
        cluster: &cluster,
        stack,
        format: ProductFormat::Bf16,
        workload: Workload { trained: TrainedParameters::Adapters { beside_shards }, ..Workload::default() },
    };
    let costs = of_adapters(false);
    let weight = foretell_models::WeightLayout::OutIn;
    let [weight, input] = [
        Kernel::MatmulWeightGradient { rows: 4096, columns: 4096, contracted: 4096, weight, bias: false },
        Kernel::MatmulInputGradient { rows: 4096, columns: 4096, contracted: 4096, weight, gelu: false },
    ]
    .map(|kernel| costs.kernel_time(&kernel, false, DataType::Bf16).device);
    assert!(weight == Seconds::ZERO && input > Seconds::ZERO);
    let group = NodeSpread { members: 8, nodes: 1, most_on_node: 8 };
    let summed = |role| costs.collective_time(Collective::AllReduce, role, &group, 1e9, CollectiveAlgorithm::Automatic);
    assert_eq!(summed(CollectiveRole::Gradients), Seconds::ZERO);
    assert!(summed(CollectiveRole::Tensor) > Seconds::ZERO);
    // Nothing is updated that must be gathered, but shards are gathered before use.
    let gathered = |beside_shards| of_adapters(beside_shards).network_share(Collective::AllGather, CollectiveRole::Parameters);
    assert_eq!((gathered(false), gathered(true) > 0.0), (0.0, true));
    assert_eq!(of_adapters(true).network_share(Collective::ReduceScatter, CollectiveRole::Gradients), 0.0);
}

#[test]
fn packed_sequences_attend_to_their_documents_alone() {
    let profiles = Profiles::library().expect("the library is sound");
    let cluster = profiles.cluster("h100-sxm-80g", None, 8, 8, None).expect("known");
    let time = |stack: &str, attended| {
        let stack = profiles.stack(stack).expect("known");
        let workload = Workload { attended, ..Workload::default() };
        let costs = GpuCosts { cluster: &cluster, stack, format: ProductFormat::Bf16, workload };
        [Kernel::Attention(attention(1, 4096, 32, true)), Kernel::AttentionGradient(attention(1, 4096, 32, true))]
            .map(|kernel| (costs.kernel_time(&kernel, false, DataType::Bf16).device - cluster.gpu.launch).value())
    };
    for (whole, packed) in time("nemo", 1.0).into_iter().zip(time("nemo", 0.25)) {
        assert!((0.25..0.3).contains(&(packed / whole)), "{packed} of {whole}");
    }
    // Products and a softmax one by one compute every score.
    assert_eq!(time("megatron-deepspeed", 1.0), time("megatron-deepspeed", 0.25));
}

#[test]
fn the_softmax_is_fused_if_heads_are_a_multiple_of_four() {
    let profiles = Profiles::library().expect("the library is sound");
    let cluster = profiles.cluster("a100-sxm-80g", None, 8, 8, None).expect("known");
    let time = |stack: &str, heads| {
        let stack = profiles.stack(stack).expect("known");
        let costs = GpuCosts { cluster: &cluster, stack, format: ProductFormat::Fp16, workload: Workload::default() };
        let sizes = attention(1, 1024, heads, true);
        costs.kernel_time(&Kernel::Attention(sizes), false, DataType::Fp16)
    };
    let [two, four] = [2, 4].map(|heads| time("megatron-deepspeed", heads));
    assert!(two.device > four.device && two.host.value() > 1.9 * four.host.value(), "{two:?} and {four:?}");
    let [two, four] = [2, 4].map(|heads| time("deeplearningexamples-pytorch", heads));
    assert!(two.device < four.device && two.host == four.host, "{two:?} and {four:?}");
}

#[test]
fn products_with_an_odd_vocabulary_are_slow_on_tensor_cores() {
    let profiles = Profiles::library().expect("the library is sound");
    let cluster = profiles.cluster("a100-sxm-80g", None, 8, 8, None).expect("known");
    let stack = profiles.stack("megatron-deepspeed").expect("known");
    let ratio = |format, precision| {
        let costs = GpuCosts { cluster: &cluster, stack, format, workload: Workload::default() };
        let [odd, even] = [50_257, 50_304].map(|classes| {
            let kernel = Kernel::MatmulInputGradient {
                rows: 8192,
                columns: classes,
                contracted: 1024,
                weight: foretell_models::WeightLayout::OutIn,
                gelu: false,
            };
            costs.kernel_time(&kernel, false, precision).device.value()
        });
        odd / even
    };
    let half = ratio(ProductFormat::Fp16, DataType::Fp16);
    assert!((2.5..3.5).contains(&half), "{half}");
    assert!((0.9..1.1).contains(&ratio(ProductFormat::Fp32, DataType::Fp32)));
}

#[test]
fn collectives_over_tensor_wait_for_the_slowest_rank() {
    let profiles = Profiles::library().expect("the library is sound");
    let cluster = profiles.cluster("a100-sxm-80g", None, 8, 8, None).expect("known");
    let patient = profiles.stack("megatron-deepspeed").expect("known");
    let at_once = {
        let mut stack = patient.clone();
        stack.communication.tensor_wait = Seconds::ZERO;
        stack
    };
    let time = |stack: &StackProfile, role, members| {
        let costs = GpuCosts { cluster: &cluster, stack, format: ProductFormat::Fp16, workload: Workload::default() };
        let group = NodeSpread { members, nodes: 1, most_on_node: members };
        costs.collective_time(Collective::AllReduce, role, &group, 1e6, CollectiveAlgorithm::Automatic).value()
    };
    let waits = |role, members| time(patient, role, members) - time(&at_once, role, members);
    let [two, eight] = [2, 8].map(|members| waits(CollectiveRole::Tensor, members));
    assert!(two > 0.0 && (eight / two - 3.0).abs() < 1e-9, "{two} and {eight}");
    assert_eq!(waits(CollectiveRole::Gradients, 8), 0.0);
}

#[test]
fn gathered_operands_travel_in_the_format_of_products() {
    let profiles = Profiles::library().expect("the library is sound");
    let cluster = profiles.cluster("h100-sxm-80g", None, 8, 8, None).expect("known");
    let costs = |stack: &str, format| {
        let stack = profiles.stack(stack).expect("known");
        GpuCosts { cluster: &cluster, stack, format, workload: Workload::default() }
            .network_share(Collective::AllGather, CollectiveRole::Tensor)
    };
    assert_eq!(costs("nemo", ProductFormat::Fp8), 0.5);
    assert_eq!((costs("nemo", ProductFormat::Bf16), costs("megatron-core", ProductFormat::Fp8)), (1.0, 1.0));
}

#[test]
fn every_kernel_costs_the_host_a_launch() {
    let profiles = Profiles::library().expect("the library is sound");
    let cluster = profiles.cluster("h100-sxm-80g", None, 8, 8, None).expect("known");
    let stack = profiles.stack("pytorch-eager").expect("known");
    let costs = GpuCosts { cluster: &cluster, stack, format: ProductFormat::Bf16, workload: Workload::default() };
    assert!(costs.kernel_time(&Kernel::Add { elements: 1 }, false, DataType::Bf16).host >= stack.host.host_launch);
}

#[test]
fn no_parts_of_a_kernel_are_faster_than_its_bound() {
    let profiles = Profiles::library().expect("the library is sound");
    let input_gradient = |rows, columns| Kernel::MatmulInputGradient {
        rows,
        columns,
        contracted: 4096,
        weight: foretell_models::WeightLayout::OutIn,
        gelu: false,
    };
    let of_part = |parts: usize| {
        [
            input_gradient((1 << 16) / parts, 4096),
            // An odd size, whose parts may be even.
            input_gradient(4096, ((1usize << 16) + 1).div_ceil(parts)),
            Kernel::ExpertMatmul { experts: 8, rows: (1 << 16) / parts, columns: 1024, contracted: 1024 },
            Kernel::Attention(attention((1 << 10) / parts, 1024, 16, true)),
            Kernel::AttentionGradient(attention((1 << 10) / parts, 1024, 16, true)),
            Kernel::BiasAdd { rows: (1 << 18) / parts, columns: 4096 },
            Kernel::RmsNorm { rows: (1 << 18) / parts, features: 4096, epsilon: foretell_models::Epsilon::new(5) },
        ]
    };
    for (device, stack) in
        [("a100-sxm-80g", "foretell"), ("h100-sxm-80g", "megatron-core"), ("v100-sxm-32g", "megatron-deepspeed")]
    {
        let cluster = profiles.cluster(device, None, 8, 8, None).expect("known");
        let stack = profiles.stack(stack).expect("known");
        let costs = GpuCosts { cluster: &cluster, stack, format: ProductFormat::Fp16, workload: Workload::default() };
        let bounds = of_part(1).map(|kernel| costs.least_total_time(&kernel, false, DataType::Fp16));
        for parts in (0..=10).map(|power| 1 << power) {
            for (part, bound) in of_part(parts).iter().zip(bounds) {
                let all = costs.kernel_time(part, false, DataType::Fp16).device * parts as f64;
                assert!(bound <= all * (1.0 + 1e-9), "{device}, {parts} of {part:?}: {bound} above {all}");
            }
        }
        let large = costs.kernel_time(&of_part(1)[0], false, DataType::Fp16).device;
        assert!(bounds[0] >= large * 0.8, "{device}: {} is far below {large}", bounds[0]);
    }
}
