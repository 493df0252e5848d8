//! Software stacks on GPUs of the library.
#![allow(clippy::unwrap_used)]

use foretell_models::{Mlp, Model};
use foretell_program::{Footprint, Layout, Offload, Optimizer, Overlap, Plan, Program, Schedule, Stack, compile_training};
use foretell_simulator::gpu::Profiles;
use foretell_simulator::{
    CostModel, Folding, Options, Oversubscription, Simulation, predict, simulate, simulate_representatives,
};
use foretell_topologies::Topology;
use foretell_units::{Bytes, DataType, Picoseconds};
use proptest::prelude::*;

fn gpt() -> Model {
    Model::named("gpt2-medium").unwrap()
}

fn program(model: &Model, layout: Layout, micro_batches: usize, overlap: Overlap) -> Program {
    let batch = layout.samples_at_once() * micro_batches;
    // Any that is not our own: those may have messages that block.
    let stack = Stack::new("megatron-core");
    let plan = Plan { precision: DataType::Bf16, overlap, stack, ..Plan::new(layout, batch) };
    compile_training(model, "model", &plan).unwrap()
}

fn costs(topology: &Topology, stack: &str) -> CostModel {
    CostModel::new(None, topology).with_stack(topology, stack, DataType::Bf16).unwrap()
}

fn run(program: &Program, topology: &Topology, costs: &CostModel) -> Simulation {
    simulate(program, topology, costs, &Options::default()).unwrap()
}

/// Leaves of 32 nodes do not tell the 40 nodes of a stage apart where no exchange can leave their
/// links busy or find them full.
#[test]
fn leaves_that_stages_straddle_leave_one_rank_a_stage() {
    let topology = Topology::library("dgx-h100").unwrap().with_nodes(96).unwrap();
    let layout =
        Layout { data: 40, tensor: 8, pipeline: 2, zero: 1, sequence_parallel: true, micro_batch: 1, ..Layout::default() };
    let model = r#"{"family": "gpt", "layers": 4, "hidden": 64, "heads": 8, "vocab": 128, "sequence": 16}"#;
    let program = program(&serde_json::from_str(model).unwrap(), layout, 4, Overlap::default());
    let costs = costs(&topology, "megatron-core");
    let with = |folding| simulate(&program, &topology, &costs, &Options { folding, ..Options::default() }).unwrap();
    let (folded, unfolded) = (with(Folding::On), with(Folding::Off));
    assert_eq!((folded.simulated_ranks, unfolded.simulated_ranks), (2, 640));
    assert!(folded.step.0.abs_diff(unfolded.step.0) <= 100, "{} and {}", folded.step.0, unfolded.step.0);
}

/// What the many do is what the one that stands for them does, where its assumptions hold: within
/// what flows that meet on a node's interfaces and parts that are uneven make of it.
#[test]
fn one_rank_a_stage_tells_what_all_ranks_do() {
    let topology = Topology::library("dgx-a100-80g").unwrap().with_nodes(4).unwrap();
    let model = gpt();
    for stack in ["megatron-core", "nemo", "ddp", "deepspeed", "mosaicml-composer"] {
        let costs = costs(&topology, stack);
        let overlap = Profiles::library().unwrap().stack(stack).unwrap().defaults.overlap;
        for (data, tensor, pipeline, zero) in
            [(8, 1, 1, 0), (16, 2, 1, 3), (1, 8, 1, 0), (2, 4, 4, 1), (4, 8, 1, 1), (1, 1, 8, 0)]
        {
            let layout = Layout { data, tensor, pipeline, zero, micro_batch: 2, ..Layout::default() };
            let program = program(&model, layout, 2 * pipeline, overlap);
            let all = run(&program, &topology, &costs);
            let one = simulate_representatives(&program, &costs, |_| 0).unwrap();
            let ratio = one.step.0 as f64 / all.step.0 as f64;
            println!("{stack} {data} {tensor} {pipeline} {zero}: {} beside {}, {ratio:.4}", one.step, all.step);
            assert!((ratio - 1.0).abs() < 0.001, "{stack} {data} {tensor} {pipeline} {zero}: {} beside {}", one.step, all.step);
            assert_eq!(one.simulated_ranks, pipeline);
        }
    }
}

/// Causal attention of half of a sequence is half of the work, as frameworks share it out, though
/// the later half has more before it: with our own executor, whose parts are contiguous, all ranks
/// wait for the one that has that. So says the one that stands for the others, and all of them.
#[test]
fn parts_of_a_sequence_are_balanced_but_ours() {
    let topology = Topology::library("dgx-h100").unwrap();
    let model = r#"{"family": "gpt", "layers": 2, "hidden": 1024, "heads": 8, "vocab": 128, "sequence": 65536}"#;
    let model: Model = serde_json::from_str(model).unwrap();
    for (stack, of_two, of_four) in [("megatron-core", 0.98..1.15, 0.98..1.15), ("foretell", 1.4..1.6, 1.6..1.9)] {
        let costs = costs(&topology, stack);
        let compute = |context| {
            let layout = Layout { context, micro_batch: 1, ..Layout::default() };
            let program = program(&model, layout, 1, Overlap::default());
            let one = simulate_representatives(&program, &costs, |_| 0).unwrap();
            let all = run(&program, &topology, &costs).step;
            assert!((one.step.0 as f64 / all.0 as f64 - 1.0).abs() < 0.001, "{stack} {context}: {} beside {all}", one.step);
            one.breakdown.compute
        };
        let whole = compute(1);
        for (parts, expected) in [(2, &of_two), (4, &of_four)] {
            // What is not sharded takes the rest.
            let share = compute(parts) / whole * parts as f64;
            assert!(expected.contains(&share), "{stack} {parts}: {share}");
        }
    }
}

#[test]
fn communication_beside_kernels_is_hidden_and_what_blocks_is_not() {
    let topology = Topology::library("dgx-a100-80g").unwrap();
    let costs = costs(&topology, "megatron-core");
    let layout = Layout { data: 8, micro_batch: 8, ..Layout::default() };
    let step = |gradients| {
        run(&program(&gpt(), layout.clone(), 1, Overlap { gradients, ..Overlap::default() }), &topology, &costs).breakdown
    };
    let (beside, after) = (step(true), step(false));
    assert!(beside.exposed_communication < after.exposed_communication / 2.0, "{beside:?} {after:?}");
}

#[test]
fn a_step_of_tiny_kernels_takes_what_the_host_takes_to_launch_them() {
    let topology = Topology::library("dgx-h100").unwrap();
    let model = Model::Mlp(Mlp { widths: vec![8; 65] });
    let program = program(&model, Layout::default(), 1, Overlap::default());
    let costs = costs(&topology, "ddp");
    let launches: f64 = program.lists[0]
        .instructions
        .iter()
        .filter_map(|instruction| match *instruction.operation {
            foretell_program::Operation::Compute { kernel, accumulate, .. } => {
                let launch = costs.kernel_cost(&kernel, accumulate, program.precision, 0).launch;
                Some(launch.value() * costs.launch_share(0, instruction.phase))
            }
            _ => None,
        })
        .sum();
    let step = run(&program, &topology, &costs).step;
    let last: Picoseconds = costs.parameters(0).step_overhead.median.into();
    let ratio = (step.0 - last.0) as f64 * 1e-12 / launches;
    assert!((1.0..1.05).contains(&ratio), "{ratio}");
}

#[test]
fn intervals_belong_to_the_stack_and_unknown_devices_are_not_calibrated() {
    let program = program(&gpt(), Layout { micro_batch: 4, ..Layout::default() }, 1, Overlap::default());
    let topology = Topology::library("dgx-a100-80g").unwrap();
    let answer = |topology: &Topology, costs: &CostModel| {
        predict(&program, topology, costs, Oversubscription::Refused, Folding::On).unwrap().0
    };
    let known = answer(&topology, &costs(&topology, "megatron-core"));
    let [low, high] = Profiles::library().unwrap().stack("megatron-core").unwrap().spread;
    assert!(known.calibrated, "{:?}", known.uncalibrated);
    assert!((known.step_seconds_p10 / known.step_seconds - low).abs() < 1e-9);
    assert!((known.step_seconds_p90 / known.step_seconds - high).abs() < 1e-9);
    let text = "name: odd\ndevices:\n  odd: {architecture: gpu, memory: 80GiB, memory_bandwidth: 1TB/s, peak: {bf16: 100TFLOP/s}, link: 100GB/s}\n\
                nodes:\n  - {name: n, count: 1, devices: {kind: odd, count: 1}, link: nvswitch-100GB/s}\n\
                network: {kind: switch, latency: 5us}\n";
    let odd = Topology::from_yaml(text, "odd.yaml").unwrap();
    let unknown = answer(&odd, &costs(&odd, "megatron-core"));
    assert!(!unknown.calibrated && unknown.uncalibrated.iter().any(|what| what.contains("odd")), "{:?}", unknown.uncalibrated);
    assert!(CostModel::new(None, &topology).with_stack(&topology, "abacus", DataType::Bf16).is_err());
}

#[test]
fn what_a_topology_changes_of_a_device_counts() {
    let plain = Topology::library("dgx-a100-80g").unwrap();
    let text = "name: half\ndevices:\n  half: {base: a100-sxm-80g, memory_bandwidth: 1TB/s, peak: {bf16: 156TFLOP/s}}\n\
                nodes:\n  - {name: n, count: 1, devices: {kind: half, count: 8}, link: nvswitch-300GB/s}\n\
                network: {kind: switch, latency: 5us}\n";
    let half = Topology::from_yaml(text, "half.yaml").unwrap();
    let program = program(&gpt(), Layout { micro_batch: 8, ..Layout::default() }, 1, Overlap::default());
    let ratio =
        run(&program, &half, &costs(&half, "nemo")).step.0 as f64 / run(&program, &plain, &costs(&plain, "nemo")).step.0 as f64;
    assert!((1.6..2.1).contains(&ratio), "{ratio}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    /// Whatever the stack has kernels wait for, on nodes that groups fill, straddle and share.
    #[test]
    fn folded_is_unfolded_whatever_the_stack(
        (data, tensor, pipeline) in (1usize..7, 1usize..5, 1usize..4),
        zero in 0usize..4,
        micro_batches in 1usize..4,
        beside in any::<[bool; 6]>(),
        stack in prop_oneof![Just("megatron-core"), Just("ddp"), Just("nemo"), Just("deepspeed"), Just("foretell")],
        (nodes, devices) in prop_oneof![Just((1usize, 72usize)), Just((9, 8)), Just((18, 4)), Just((24, 3))],
        network in prop_oneof![
            Just("{kind: switch, latency: 5us}"),
            Just("{kind: fat-tree, oversubscription: 1, nodes_per_leaf: 4, latency: 5us}"),
            Just("{kind: fat-tree, oversubscription: 3, nodes_per_leaf: 4, latency: 5us}")
        ],
    ) {
        let text = format!(
            "name: some\ndevices:\n  one: {{base: a100-sxm-80g}}\n\
             nodes:\n  - {{name: n, count: {nodes}, devices: {{kind: one, count: {devices}}}, link: nvswitch-300GB/s, nics: {{count: {devices}, bandwidth: 100Gbit/s}}}}\n\
             network: {network}\n"
        );
        let topology = Topology::from_yaml(&text, "some.yaml").unwrap();
        let costs = costs(&topology, stack);
        let model = Model::Mlp(Mlp { widths: vec![768; 7] });
        let layout = Layout { data, tensor, pipeline, zero, micro_batch: 3, ..Layout::default() };
        let [tensor, context, expert, gradients, parameters, pipeline] = beside;
        let program = program(&model, layout, micro_batches, Overlap { tensor, context, expert, gradients, parameters, pipeline });
        let with = |folding| simulate(&program, &topology, &costs, &Options { folding, ..Options::default() }).unwrap();
        let (folded, unfolded) = (with(Folding::On), with(Folding::Off));
        prop_assert_eq!(unfolded.simulated_ranks, program.mesh.world_size());
        for (one, other) in folded.timeline.ranks.iter().zip(&unfolded.timeline.ranks) {
            // Sums of equal parts and one product round otherwise.
            let same = |one: Picoseconds, other: Picoseconds| one.0.abs_diff(other.0) <= 100 + other.0 / 1_000_000_000;
            for (one, other) in one.spans.iter().zip(&other.spans) {
                prop_assert!(same(one.start, other.start) && same(one.end, other.end), "{:?} and {:?}", one, other);
            }
        }
    }
}

/// What devices hold follows the stack: Megatron's four bytes of gradient a parameter, the
/// optimizer's state, and a context.
#[test]
fn a_framework_holds_other_copies_than_our_arena() {
    let topology = Topology::library("dgx-a100-80g").unwrap();
    let layout = Layout { data: 8, zero: 1, ..Layout::default() };
    let program = program(&gpt(), layout, 1, Overlap::default());
    let list = &program.lists[0];
    let held = |costs: &CostModel| {
        predict(&program, &topology, costs, Oversubscription::Refused, Folding::On).unwrap().0.memory_by_component[0]
    };
    let ours = held(&costs(&topology, "foretell"));
    assert_eq!(ours, Footprint::of(list));
    assert_eq!(ours.total(), list.arena);
    let theirs = held(&costs(&topology, "megatron-core"));
    // The default is stochastic gradient descent with momentum: a copy and a velocity in single
    // precision.
    let bytes = 8.0;
    let parameters = theirs.parameters.value() / 2.0;
    // Of 355 M parameters and what pads the vocabulary; an eighth of the optimizer's state is on
    // each.
    assert!((350e6..360e6).contains(&parameters), "{theirs:?}");
    assert!((theirs.optimizer_state.value() * 8.0 / parameters / bytes - 1.0).abs() < 0.01, "{theirs:?}");
    assert!(theirs.gradients.value() / parameters > 3.9 && theirs.context > Bytes::ZERO, "{theirs:?}");
    assert!(theirs.total().value() > ours.total().value(), "{theirs:?} beside {ours:?}");
    // An uncalibrated device without a profile of its kind has our arena.
    assert_eq!(held(&CostModel::new(None, &topology)), ours);
}

/// Products of a GPT's layers in eight bits take less than in sixteen, and with what makes their
/// operands still; those of small ones do not.
#[test]
fn a_plan_of_eight_bits_pays_where_products_are_large() {
    let topology = Topology::library("dgx-h100").unwrap();
    let step = |hidden: usize, precision: DataType| {
        let text =
            format!(r#"{{"family": "gpt", "layers": 4, "hidden": {hidden}, "heads": 16, "vocab": 50304, "sequence": 2048}}"#);
        let model: Model = serde_json::from_str(&text).expect("a model");
        let plan =
            Plan { precision, optimizer: Optimizer::AdamW, ..Plan::new(Layout { micro_batch: 2, ..Layout::default() }, 2) };
        let program = compile_training(&model, "gpt", &plan).unwrap();
        let costs = CostModel::new(None, &topology).with_stack(&topology, "foretell", plan.unstated_format()).expect("known");
        predict(&program, &topology, &costs, Oversubscription::Allowed, Folding::On).expect("it can be simulated").0
    };
    let [wide, narrow] = [DataType::Bf16, DataType::Fp8].map(|precision| step(8192, precision));
    let ratio = narrow.step_seconds / wide.step_seconds;
    assert!((0.5..0.85).contains(&ratio), "{ratio}");
    // Of a peak that is twice as high, so less of it.
    assert!(narrow.mfu < wide.mfu, "{} of {}", narrow.mfu, wide.mfu);
    let ratio = step(512, DataType::Fp8).step_seconds / step(512, DataType::Bf16).step_seconds;
    assert!(ratio > 0.97, "{ratio}");
}

/// What goes to the host may be late: it is caught up with beside the pass back that follows. Were
/// its place in memory wanted at once, every pass forward would wait for the link.
#[test]
fn activations_on_their_way_to_the_host_do_not_hold_up_each_pass() {
    let topology = Topology::library("dgx-h100").unwrap();
    let costs = costs(&topology, "foretell");
    let model = r#"{"family": "llama", "layers": 40, "hidden": 4096, "heads": 64, "kv_heads": 8, "ffn": 28672, "vocab": 512, "sequence": 8192}"#;
    let model: Model = serde_json::from_str(model).unwrap();
    let step = |offload| {
        let layout = Layout {
            tensor: 2,
            pipeline: 4,
            virtual_stages: 4,
            schedule: Schedule::Interleaved,
            sequence_parallel: true,
            micro_batch: 1,
            offload,
            ..Layout::default()
        };
        run(&program(&model, layout, 16, Overlap::default()), &topology, &costs).step.0 as f64
    };
    let ratio = step(Offload::Activations) / step(Offload::None);
    // With places that are wanted after 64 instructions it is 1.35.
    assert!((1.1..1.28).contains(&ratio), "{ratio}");
}
