//! What holds for every search: its bounds are never above the simulator's answer, it finds what trying everything finds, on any number
//! of threads.

use foretell_models::{DropoutRate, Gpt, Mlp, Model, Resnet, Stem};
use foretell_planner::{Planned, PlannerError, Request, deadline, layouts, least, plan};
use foretell_program::{
    Axis, CollectiveAlgorithm, KernelSample, Layout, MachineIdentity, Offload, Optimizer, Overlap, Plan, Profile, Rank,
    Recompute, Sample, Schedule, StageLayout, StageProgram, compile,
};
use foretell_simulator::{CostModel, Folding, Options, Oversubscription, SimulationError, predict, predict_with};
use foretell_topologies::{DeviceId, Topology};
use foretell_units::{Bytes, DataType, Picoseconds, Seconds};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use std::sync::{Arc, LazyLock};

static DGX: LazyLock<Topology> = LazyLock::new(|| Topology::library("dgx-a100-80g").expect("in the library"));

static MIXED: LazyLock<Topology> = LazyLock::new(|| {
    let text = "name: mixed\ndevices:\n  slow: {base: a100-sxm-80g, memory: 40GiB}\n  fast: {base: h100-sxm-80g}\nnodes:\n  \
                - {name: new, count: 2, devices: {kind: fast, count: 4}, link: nvswitch-450GB/s, nics: {count: 4, bandwidth: 400Gbit/s}}\n  \
                - {name: old, count: 3, devices: {kind: slow, count: 4}, link: nvswitch-300GB/s, nics: {count: 4, bandwidth: 200Gbit/s}}\n\
                network: {kind: switch, latency: 5us}\n";
    Topology::from_yaml(text, "mixed.yaml").expect("it is sound")
});

fn gpt(layers: usize, hidden: usize, vocab: usize, tied_embeddings: bool) -> Model {
    Model::Gpt(Gpt {
        layers,
        hidden,
        heads: 4,
        ffn: None,
        vocab,
        sequence: 16,
        tied_embeddings,
        dropout: DropoutRate::NONE,
        attention_dropout: DropoutRate::NONE,
    })
}

fn models() -> impl Strategy<Value = Model> {
    prop_oneof![
        proptest::collection::vec(prop_oneof![Just(16usize), Just(64), Just(2048)], 3..6)
            .prop_map(|widths| Model::Mlp(Mlp { widths })),
        Just(Model::Resnet(Resnet { depth: 18, stem: Stem::Small, image: 8, channels: 1, classes: 10, width: 4 })),
        (1usize..9, prop_oneof![Just(16usize), Just(256)], prop_oneof![Just(64usize), Just(8192)], any::<bool>())
            .prop_map(|(layers, hidden, vocab, tied_embeddings)| { gpt(layers, hidden, vocab, tied_embeddings) }),
    ]
}

prop_compose! {
    fn plans()(
        data in 1usize..4,
        tensor in prop_oneof![Just(1usize), Just(2)],
        (schedule, virtual_stages) in proptest::sample::select(vec![
            (Schedule::Gpipe, 1),
            (Schedule::OneForwardOneBackward, 1),
            (Schedule::Interleaved, 2),
            (Schedule::ZeroBubbleH1, 1),
            (Schedule::ZeroBubbleV, 2),
        ]),
        pipeline in 1usize..6,
        micro_batch in 1usize..5,
        micro_batches in 1usize..5,
        recompute in proptest::sample::select(vec![
            Recompute::None, Recompute::Selective, Recompute::Full, Recompute::FullLayers(1), Recompute::FullLayers(3),
            Recompute::FullLayersOfStages(vec![]),
        ]),
        adam in any::<bool>(),
        zero in 0usize..4,
        sequence_parallel in any::<bool>(),
        inside in any::<bool>(),
        kib in proptest::sample::select(vec![1u64, 8, 16, 64, 1 << 10, 3 << 10, 25 << 10, 100 << 10, 400 << 10]),
        without in any::<[bool; 3]>(),
        turned in 0usize..6,
        precision in proptest::sample::select(vec![DataType::Fp32, DataType::Fp32, DataType::Fp32, DataType::Fp8]),
        (offload, collective) in (
            proptest::sample::select(Offload::ALL.to_vec()), proptest::sample::select(CollectiveAlgorithm::ALL.to_vec())
        ),
    ) -> Plan {
        let placement = inside.then(|| vec![Axis::Tensor, Axis::Pipeline]);
        let stage_places = (turned > 0).then(|| (0..pipeline).map(|stage| (stage + turned) % pipeline).collect());
        let bucket = Bytes::new(kib << 10);
        // Fewer and fewer of each stage's blocks.
        let recompute = if matches!(recompute, Recompute::FullLayersOfStages(_)) {
            Recompute::FullLayersOfStages((0..pipeline).map(|stage| (pipeline - stage) % 4).collect())
        } else {
            recompute
        };
        let mesh = Layout { data, tensor, pipeline, virtual_stages, micro_batch, schedule, recompute, ..Layout::default() };
        let layout = Layout { zero, sequence_parallel, placement, stage_places, bucket, offload, collective, ..mesh };
        let optimizer = if adam { Optimizer::AdamW } else { Optimizer::Sgd };
        let overlap = Overlap { tensor: !without[0], gradients: !without[1], parameters: !without[2], ..Overlap::default() };
        Plan { optimizer, overlap, precision, ..Plan::new(layout, data * micro_batch * micro_batches) }
    }
}

/// A profile of a device that is said to be faster at times than its kernels' samples, as a hand-written one might.
fn profile(device: &str, paces: Vec<f64>) -> Profile {
    let sample =
        |median: f64| Sample { median: Seconds::new(median), p10: Seconds::new(median), p90: Seconds::new(median), count: 9 };
    Profile {
        device: device.into(),
        machine: MachineIdentity { device: device.into(), system: "Linux".into(), devices: 8, cores: None },
        backend: "cuda".into(),
        transport: "nccl".into(),
        measured_at: 0,
        instruction_overhead: sample(3e-6),
        stream_handoff: sample(1e-6),
        step_overhead: sample(2e-5),
        launch: Seconds::ZERO,
        load_seconds_per_byte: Seconds::new(1e-10),
        communication_share: 0.2,
        communication_growth: None,
        interruption: Seconds::ZERO,
        buffered_bytes: 4096,
        paces,
        speeds: Vec::new(),
        kernels: vec![KernelSample {
            kernel: foretell_models::Kernel::Relu { elements: 1 << 20 },
            accumulate: false,
            precision: DataType::Fp32,
            time: sample(1e-5),
        }],
        exchanges: Vec::new(),
    }
}

/// `FORETELL_BOUND_CASES=3000 cargo test --release -p foretell-planner bound` tries more than every run does.
fn bound_cases() -> u32 {
    std::env::var("FORETELL_BOUND_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(64)
}

/// So many cases, after those that failed once.
fn cases(cases: u32) -> ProptestConfig {
    let failed = FileFailurePersistence::Direct("tests/planner.proptest-regressions");
    ProptestConfig { cases, failure_persistence: Some(Box::new(failed)), ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(cases(bound_cases()))]

    #[test]
    fn the_bound_never_exceeds_what_is_simulated(
        model in models(), plan in plans(), paces in proptest::collection::vec(0.5f64..2.0, 0..5), believed in any::<bool>(),
        stack in proptest::sample::select(vec![None, Some("foretell"), Some("megatron-core")])
    ) {
        let device = &DGX.device_kinds()[0].name;
        let profile = believed.then(|| profile(device, paces));
        let costs = CostModel::new(profile.as_ref(), &DGX);
        let costs = match stack {
            Some(stack) => costs.with_stack(&DGX, stack, plan.unstated_format()).expect("the library knows it"),
            None => costs,
        };
        bounded(&model, &plan, &DGX, &costs)?;
    }

    /// Where hosts are so far that all waits for what goes there.
    #[test]
    fn where_hosts_are_far_neither(
        layers in 5usize..10, hidden in prop_oneof![Just(16usize), Just(256)], plan in plans(), both in any::<bool>(),
        rate in prop_oneof![Just("20MB/s"), Just("500MB/s"), Just("10GB/s")]
    ) {
        let text = format!(
            "name: far\ndevices:\n  far: {{base: a100-sxm-80g, host_link: {rate}}}\nnodes:\n  - {{name: node, count: 1, \
                devices: {{kind: far, count: 8}}, link: nvswitch-300GB/s, nics: {{count: 8, bandwidth: 200Gbit/s}}, host_memory: 1TiB}}\n"
        );
        let topology = Topology::from_yaml(&text, "far.yaml").expect("it is sound");
        let costs = CostModel::new(None, &topology).with_stack(&topology, "foretell", plan.unstated_format()).expect("the library knows it");
        let layout = Layout { offload: if both { Offload::Both } else { Offload::Activations }, ..plan.layout.clone() };
        bounded(&gpt(layers, hidden, 64, false), &Plan { layout, ..plan }, &topology, &costs)?;
    }

    #[test]
    fn however_the_blocks_are_cut_neither(
        layers in 5usize..10, hidden in prop_oneof![Just(16usize), Just(256)], plan in plans(), mixed in any::<bool>(),
        places in prop::collection::vec(0usize..100, 12), again in prop::collection::vec(0usize..4, 6)
    ) {
        // Each chunk has a block, and the others are anyhow.
        let chunks = plan.layout.pipeline * plan.layout.virtual_stages;
        let mut cuts = vec![1; chunks];
        (chunks..layers + 2).zip(places).for_each(|(_, place)| cuts[place % chunks] += 1);
        let recompute = Recompute::FullLayersOfStages(again[..plan.layout.pipeline].to_vec());
        let plan = Plan { layout: Layout { cuts: Some(cuts), recompute, ..plan.layout.clone() }, ..plan };
        let topology: &Topology = if mixed { &MIXED } else { &DGX };
        let costs = CostModel::new(None, topology);
        bounded(&gpt(layers, hidden, 64, false), &plan, topology, &costs)?;
    }

    #[test]
    fn on_unequal_devices_neither(model in models(), plan in plans(), stack in prop_oneof![Just("foretell"), Just("megatron-core")]) {
        let costs = CostModel::new(None, &MIXED).with_stack(&MIXED, stack, plan.unstated_format()).expect("the library knows it");
        bounded(&model, &plan, &MIXED, &costs)?;
    }
}

proptest! {
    #![proptest_config(cases(64))]

    /// What lets a search compile once what it simulates in several orders of the ranks.
    #[test]
    fn what_ranks_do_does_not_depend_on_where_they_lie(model in models(), plan in plans()) {
        let usual = Plan { layout: Layout { placement: None, stage_places: None, ..plan.layout.clone() }, ..plan.clone() };
        let (Ok(usual), Ok(wanted)) = (compile(&model, "model", &usual), compile(&model, "model", &plan)) else { return Ok(()) };
        let mut laid_out = usual.training;
        prop_assert!(laid_out.lay_out(wanted.training.mesh.clone()));
        prop_assert_eq!(format!("{laid_out:?}"), format!("{:?}", wanted.training));
    }
}

/// What bounds leave to simulations is what they know nothing of: messages that slow kernels, and links that several use.
#[test]
fn bounds_are_near_what_is_simulated() {
    let none = DropoutRate::NONE;
    let model = Model::Gpt(Gpt {
        layers: 32,
        hidden: 4096,
        heads: 32,
        ffn: None,
        vocab: 51200,
        sequence: 2048,
        tied_embeddings: true,
        dropout: none,
        attention_dropout: none,
    });
    let topology = DGX.clone().with_nodes(8).expect("there may be as many");
    let costs = CostModel::new(None, &topology).with_stack(&topology, "foretell", DataType::Bf16).expect("the library knows it");
    let base = Plan { precision: DataType::Bf16, ..Plan::new(Layout::default(), 32) };
    let request = Request::new(&model, "model", &topology, &costs, &base);
    let interleaved = Layout { tensor: 4, pipeline: 8, data: 2, sequence_parallel: true, ..Layout::default() };
    let interleaved = Layout { schedule: Schedule::Interleaved, virtual_stages: 4, ..interleaved };
    let inside = Layout { placement: Some(vec![Axis::Tensor, Axis::Pipeline]), ..interleaved.clone() };
    let v_shaped =
        Layout { tensor: 1, pipeline: 8, data: 8, schedule: Schedule::ZeroBubbleV, virtual_stages: 2, ..Layout::default() };
    for (layout, share) in [(interleaved, 0.965), (inside, 0.94), (v_shaped, 0.96)] {
        let program =
            compile(&model, "model", &Plan { layout: layout.clone(), ..base.clone() }).expect("it divides the model").training;
        let (prediction, _) =
            predict(&program, &topology, &costs, Oversubscription::Refused, Folding::On).expect("it can be simulated");
        let least = least(&request, &layout).expect("it is sound").expect("it was compiled").step;
        let step = prediction.step_seconds;
        // A little less than it takes is known long before its end.
        let enough = deadline(&request, &layout, &program, step * 0.99).expect("it is sound").expect("it has a probe");
        let options = Options { deadline: Some(Arc::new(enough)), ..Options::default() };
        let stopped = predict_with(&program, &topology, &costs, &options).expect_err("it is later");
        let is_certain = |at_least: Picoseconds| step * 0.99 < Seconds::from(at_least) && Seconds::from(at_least) <= step;
        assert!(matches!(stopped, SimulationError::PastDeadline { at_least } if is_certain(at_least)), "{stopped}, {step}");
        println!("{:.4}", least / step);
        assert!(least <= step && least >= step * share, "{least} of {step}: {:.4}", least / step);
    }
}

/// Copies to the hosts and back are most of the step where layers leave much and compute little.
#[test]
fn bounds_count_what_goes_to_the_hosts() {
    let none = DropoutRate::NONE;
    let model = Model::Gpt(Gpt {
        layers: 32,
        hidden: 256,
        heads: 8,
        ffn: None,
        vocab: 512,
        sequence: 1024,
        tied_embeddings: false,
        dropout: none,
        attention_dropout: none,
    });
    let costs = CostModel::new(None, &DGX).with_stack(&DGX, "foretell", DataType::Bf16).expect("the library knows it");
    let shares = |layout: &Layout, micro_batches: usize| {
        let plan =
            Plan { precision: DataType::Bf16, ..Plan::new(layout.clone(), layout.data * layout.micro_batch * micro_batches) };
        let base = Plan { layout: Layout::default(), ..plan.clone() };
        let request = Request::new(&model, "model", &DGX, &costs, &base);
        let program = compile(&model, "model", &plan).expect("it divides the model").training;
        let (prediction, _) =
            predict(&program, &DGX, &costs, Oversubscription::Refused, Folding::On).expect("it can be simulated");
        let with = |offload| {
            let layout = Layout { offload, ..layout.clone() };
            least(&request, &layout).expect("it is sound").expect("it was compiled").step / prediction.step_seconds
        };
        (with(Offload::None), with(layout.offload))
    };
    let alone = Layout { micro_batch: 32, offload: Offload::Activations, ..Layout::default() };
    let piped = Layout { pipeline: 2, micro_batch: 8, ..alone.clone() };
    for (layout, micro_batches, share) in [(&alone, 1, 0.9), (&alone, 3, 0.9), (&piped, 8, 0.7)] {
        let (without, with) = shares(layout, micro_batches);
        assert!(with <= 1.0 && with >= share && with > 1.5 * without, "{with} beside {without}");
    }
}

/// The ranks of `context` wait for the one that has the end of the sequence, as our own executor shares it out.
#[test]
fn bounds_count_the_part_of_a_sequence_that_has_the_most() {
    let none = DropoutRate::NONE;
    let model = Model::Gpt(Gpt {
        layers: 8,
        hidden: 256,
        heads: 8,
        ffn: None,
        vocab: 512,
        sequence: 32_768,
        tied_embeddings: false,
        dropout: none,
        attention_dropout: none,
    });
    let costs = CostModel::new(None, &DGX).with_stack(&DGX, "foretell", DataType::Bf16).expect("the library knows it");
    for context in [2, 4] {
        let layout = Layout { context, micro_batch: 1, ..Layout::default() };
        let plan = Plan { precision: DataType::Bf16, ..Plan::new(layout.clone(), 2) };
        let base = Plan { layout: Layout::default(), ..plan.clone() };
        let program = compile(&model, "model", &plan).expect("it divides the model").training;
        let (prediction, _) =
            predict(&program, &DGX, &costs, Oversubscription::Refused, Folding::On).expect("it can be simulated");
        let request = Request::new(&model, "model", &DGX, &costs, &base);
        let least = least(&request, &layout).expect("it is sound").expect("it was compiled").step;
        let share = least / prediction.step_seconds;
        assert!((0.95..=1.0).contains(&share), "{context}: {share}");
    }
}

/// In a pipeline's beginning passes forward leave more than the link to the host takes: where there is no room for it, the next pass waits.
#[test]
fn bounds_count_what_waits_for_the_link_to_the_host() {
    let none = DropoutRate::NONE;
    let model = Model::Gpt(Gpt {
        layers: 32,
        hidden: 2048,
        heads: 16,
        ffn: None,
        vocab: 512,
        sequence: 1024,
        tied_embeddings: false,
        dropout: none,
        attention_dropout: none,
    });
    let gpipe =
        Layout { pipeline: 4, micro_batch: 2, offload: Offload::Activations, schedule: Schedule::Gpipe, ..Layout::default() };
    let interleaved = Layout { schedule: Schedule::Interleaved, virtual_stages: 8, ..gpipe.clone() };
    let mut gained: f64 = 0.0;
    for rate in [12, 16, 20, 24, 28, 32, 40] {
        let text = format!(
            "name: near\ndevices:\n  near: {{base: a100-sxm-80g, host_link: {rate}GB/s}}\nnodes:\n  - {{name: node, count: 1, \
                devices: {{kind: near, count: 8}}, link: nvswitch-300GB/s, nics: {{count: 8, bandwidth: 200Gbit/s}}, host_memory: 1TiB}}\n"
        );
        let topology = Topology::from_yaml(&text, "near.yaml").expect("it is sound");
        let costs =
            CostModel::new(None, &topology).with_stack(&topology, "foretell", DataType::Bf16).expect("the library knows it");
        for layout in [&gpipe, &interleaved] {
            let plan = Plan { precision: DataType::Bf16, ..Plan::new(layout.clone(), 48) };
            let program = compile(&model, "model", &plan).expect("it divides the model").training;
            let (prediction, _) =
                predict(&program, &topology, &costs, Oversubscription::Refused, Folding::On).expect("it can be simulated");
            let base = Plan { layout: Layout::default(), ..plan.clone() };
            let step = prediction.step_seconds;
            let share = |memory_limit: Option<Bytes>| {
                let request = Request { memory_limit, ..Request::new(&model, "model", &topology, &costs, &base) };
                least(&request, layout).expect("it is sound").expect("it was compiled").step / step
            };
            let (roomy, tight) = (share(None), share(program.arenas().into_iter().max()));
            println!("{rate} {} {roomy:.4} {tight:.4}", layout.schedule);
            assert!(roomy <= tight && tight <= 1.0, "{rate} GB/s, {}: {roomy} and {tight}", layout.schedule);
            gained = gained.max(tight / roomy);
        }
    }
    assert!(gained > 1.05, "{gained}");
}

/// What a pass computes again may be done when its gradient arrives: a stage's micro-batch is as long on its way back as what comes after that.
#[test]
fn what_is_computed_again_hides_behind_the_wait_for_a_gradient() {
    let model = gpt(5, 16, 64, true);
    let layout = Layout { pipeline: 5, micro_batch: 2, recompute: Recompute::Full, ..Layout::default() };
    let profile = profile(&DGX.device_kinds()[0].name, vec![1.0; 4]);
    let costs = CostModel::new(Some(&profile), &DGX);
    bounded(&model, &Plan::new(layout, 2), &DGX, &costs).expect("no bound is above what is simulated");
}

/// The two ends of a short pipeline, which share a table, may lie in one node where those of a probe of four stages do not.
#[test]
fn bounds_hold_where_the_ends_of_a_pipeline_lie_nearer_than_those_of_its_probe() {
    let topology = DGX.clone().with_nodes(4).expect("there may be as many");
    let costs = CostModel::new(None, &topology).with_stack(&topology, "foretell", DataType::Fp32).expect("the library knows it");
    for (data, tensor, pipeline) in [(4, 1, 2), (2, 2, 2), (2, 1, 2), (2, 1, 3), (1, 4, 2), (4, 2, 3)] {
        for (schedule, zero) in [(Schedule::OneForwardOneBackward, 0), (Schedule::ZeroBubbleH1, 1)] {
            for placement in [None, Some(vec![Axis::Tensor, Axis::Pipeline])] {
                let layout = Layout { data, tensor, pipeline, schedule, zero, placement, ..Layout::default() };
                let model = gpt(6, 256, 65536, true);
                bounded(&model, &Plan::new(layout, data * pipeline), &topology, &costs)
                    .expect("no bound is above what is simulated");
            }
        }
    }
}

/// Meshes of stages' own on [`MIXED`], whose micro-batches have eight samples.
fn own_stages() -> impl Strategy<Value = Vec<StageLayout>> {
    let sizes = proptest::sample::select(vec![(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 2), (1, 4), (2, 4)]);
    proptest::collection::vec(sizes, 2..5)
        .prop_filter("there are twenty devices", |sizes| sizes.iter().map(|(data, tensor)| data * tensor).sum::<usize>() <= 20)
        .prop_map(|sizes| {
            sizes.into_iter().map(|(data, tensor)| StageLayout { data, tensor, ..StageLayout::default() }).collect()
        })
}

proptest! {
    #![proptest_config(cases(bound_cases()))]

    #[test]
    fn of_stages_with_meshes_of_their_own_neither(
        layers in 5usize..10, hidden in prop_oneof![Just(16usize), Just(256)], plan in plans(), stages in own_stages(),
        stack in prop_oneof![Just("foretell"), Just("megatron-core")]
    ) {
        let model = gpt(layers, hidden, 64, false);
        let schedule = if plan.layout.schedule.splits_backward() { Schedule::ZeroBubbleH1 } else { Schedule::OneForwardOneBackward };
        let (micro_batch, pipeline, micro_batches) = (8 / stages[0].data, stages.len(), plan.micro_batches().expect("they divide"));
        let base = Layout { data: 1, tensor: 1, placement: None, stage_places: None, virtual_stages: 1, ..plan.layout.clone() };
        let layout = Layout { stages: Some(stages), pipeline, micro_batch, schedule, ..base };
        let plan = Plan { layout, global_batch: 8 * micro_batches, ..plan };
        let costs = CostModel::new(None, &MIXED).with_stack(&MIXED, stack, plan.unstated_format()).expect("the library knows it");
        bounded(&model, &plan, &MIXED, &costs)?;
    }
}

/// The bounds of a plan are not above what is simulated and compiled.
fn bounded(model: &Model, plan: &Plan, topology: &Topology, costs: &CostModel) -> Result<(), TestCaseError> {
    let Ok(compiled) = compile(model, "model", plan) else { return Ok(()) };
    let (prediction, _) =
        predict(&compiled.training, topology, costs, Oversubscription::Allowed, Folding::On).expect("it can be simulated");
    let base = Plan { layout: Layout::default(), ..plan.clone() };
    let request = Request { oversubscription: Oversubscription::Allowed, ..Request::new(model, "model", topology, costs, &base) };
    let least = least(&request, &plan.layout).expect("it is sound").expect("it was compiled");
    let step = prediction.step_seconds;
    prop_assert!(least.step > Seconds::ZERO && least.step <= step, "{} above {step}", least.step);
    // Nothing that is known of the rest of a step has a simulation stop before it must.
    if let Some(deadline) = deadline(&request, &plan.layout, &compiled.training, step).expect("it is sound").map(Arc::new) {
        let options = Options { oversubscription: Oversubscription::Allowed, deadline: Some(deadline), ..Options::default() };
        let again = predict_with(&compiled.training, topology, costs, &options).map(|(prediction, _)| prediction.step_seconds);
        prop_assert_eq!(again, Ok(step));
    }
    let arena = compiled.training.arenas().into_iter().max().expect("there is a stage");
    // Nor where there is no more room than it needs, and hosts are so far that all waits for them.
    let tight = Request { memory_limit: Some(arena), ..request.clone() };
    let least_there = self::least(&tight, &plan.layout).expect("it is sound").expect("it was compiled");
    prop_assert!(least_there.step <= step, "{} above {step} in {arena}", least_there.step);
    prop_assert!(least.memory <= arena, "{} above {arena}", least.memory);
    Ok(())
}

/// The least step time of all layouts that fit, each simulated: of those that offload, of those that do not fit without, and with both on the hosts
/// of those that fit with neither alone there.
fn by_brute_force(request: &Request<'_>) -> Option<Seconds> {
    let memory = DGX.device_kinds()[0].memory;
    let limit = request.memory_limit.map_or(memory, |limit| limit.min(memory));
    let fitting = |layout: &Layout| {
        let compiled = compile(request.model, request.name, &Plan { layout: layout.clone(), ..request.base.clone() }).ok()?;
        compiled.arenas().iter().all(|&arena| arena <= limit).then_some(compiled)
    };
    // The same with less on the hosts stands before each that offloads.
    let mut fits: Vec<Offload> = Vec::new();
    let mut needed = |layout: &Layout| {
        if layout.offload.is_none() {
            fits.clear();
        }
        let compiled = if fits.iter().any(|less| *less == Offload::None || layout.offload == Offload::Both) {
            None
        } else {
            fitting(layout)
        };
        fits.extend(compiled.is_some().then_some(layout.offload));
        compiled
    };
    layouts(request)
        .expect("the model is sound")
        .iter()
        .filter_map(&mut needed)
        .map(|compiled| predict(&compiled.training, request.topology, request.costs, request.oversubscription, Folding::On))
        .map(|predicted| predicted.expect("it can be simulated").0.step_seconds)
        .reduce(Seconds::min)
}

proptest! {
    #![proptest_config(cases(10))]

    #[test]
    fn the_search_finds_what_trying_everything_finds(
        model in models(), devices in prop_oneof![Just(2usize), Just(4)], batch in prop_oneof![Just(4usize), Just(8)],
        limited in any::<bool>(), is_known in any::<bool>()
    ) {
        let mut costs = CostModel::new(None, &DGX);
        if is_known {
            costs = costs.with_stack(&DGX, "foretell", DataType::Fp32).expect("the library knows it");
        }
        let base = Plan::new(Layout::default(), batch);
        // Of all layouts the best, and not one that is as good as; on four devices in one size of buckets, as compiling all of them takes long.
        let fixed = if devices == 4 { "bucket=25MiB" } else { "" }.parse().expect("well formed");
        let mut request = Request { devices, fixed, tolerance: 0.0, ..Request::new(&model, "model", &DGX, &costs, &base) };
        if limited {
            // Between the smallest and the largest arena: some layouts do not fit.
            let arenas: Vec<Bytes> = layouts(&request)
                .expect("the model is sound")
                .into_iter()
                .filter_map(|layout| compile(&model, "model", &Plan { layout, ..base.clone() }).ok())
                .filter_map(|compiled| compiled.arenas().into_iter().max())
                .collect();
            let (least, most) = (arenas.iter().min().copied(), arenas.iter().max().copied());
            request.memory_limit = least.zip(most).map(|(least, most)| Bytes::new((least.count() + most.count()) / 2));
        }
        let planned = plan(&request).expect("something fits");
        let best = planned.candidates[0].prediction.step_seconds;
        prop_assert_eq!(Some(best), by_brute_force(&request), "{:?}", planned.candidates[0].plan);
        let search = &planned.search;
        let different = search.needless + search.indivisible + search.bounded_out + search.out_of_memory + search.simulated;
        prop_assert_eq!(search.layouts, search.alike + different);
        prop_assert_eq!(different, layouts(&request).expect("the model is sound").len());
        prop_assert!(search.lower_bound_seconds <= search.best_seconds && search.gap >= 0.0);
    }
}

#[test]
fn on_unequal_devices_too_the_search_finds_what_trying_everything_finds() {
    let mut turned = 0;
    for memory in ["32GiB", "30MiB"] {
        let text = format!(
            "name: two\ndevices:\n  slow: {{base: v100-sxm-32g, memory: {memory}}}\n  fast: {{base: a100-sxm-80g}}\nnodes:\n  \
                - {{name: old, count: 1, devices: {{kind: slow, count: 2}}, link: nvlink-mesh-150GB/s, nics: {{count: 1, bandwidth: 100Gbit/s}}}}\n  \
                - {{name: new, count: 1, devices: {{kind: fast, count: 2}}, link: nvswitch-300GB/s, nics: {{count: 1, bandwidth: 100Gbit/s}}}}\n\
                network: {{kind: switch, latency: 5us}}\n"
        );
        let topology = Topology::from_yaml(&text, "two.yaml").expect("it is sound");
        let model = Model::Mlp(Mlp { widths: vec![1024; 9] });
        let costs = CostModel::new(None, &topology);
        let base = Plan { precision: DataType::Fp16, ..Plan::new(Layout::default(), 16384) };
        let request = Request { tolerance: 0.0, ..Request::new(&model, "model", &topology, &costs, &base) };
        let planned = plan(&request).expect("something fits");
        let all = layouts(&request).expect("the model is sound");
        let uneven = all.iter().filter(|layout| layout.cuts.is_some()).count();
        assert!(uneven > 0, "stages on slower devices may have fewer blocks");
        let steps = all.into_iter().filter_map(|layout| {
            let compiled = compile(&model, "model", &Plan { layout, ..base.clone() }).ok()?;
            let (prediction, _) = predict(&compiled.training, &topology, &costs, Oversubscription::Refused, Folding::On).ok()?;
            let arenas = compiled.arenas();
            let mesh = &compiled.training.mesh;
            let fits = (0..mesh.world_size())
                .all(|rank| arenas[mesh.stage_of(Rank(rank))] <= topology.device_kind(DeviceId(rank)).memory);
            fits.then_some(prediction.step_seconds)
        });
        let best = &planned.candidates[0];
        assert_eq!(steps.reduce(Seconds::min), Some(best.prediction.step_seconds), "{memory}");
        assert!(best.prediction.fits);
        turned += usize::from(best.plan.layout.stage_places.is_some());
        let fixed = |text: &str| Request { fixed: text.parse().expect("well formed"), ..request.clone() };
        let found = plan(&fixed("stage_places=1+0,micro_batch=256")).expect("something fits").candidates[0].plan.layout.clone();
        assert_eq!((found.pipeline, found.stage_places), (2, Some(vec![1, 0])));
        assert!(layouts(&fixed("stage_places=0+1")).expect("sound").iter().all(|layout| layout.stage_places.is_none()));
        assert!(plan(&fixed("stage_places=5+0")).is_err(), "there are no such places");
    }
    assert!(turned > 0, "what holds the most lies on the devices with the most memory");
}

#[test]
fn stages_have_meshes_of_their_own_where_these_are_the_best() {
    let text = "name: six\ndevices:\n  slow: {base: v100-sxm-32g}\n  fast: {base: a100-sxm-80g}\nnodes:\n  \
                - {name: old, count: 1, devices: {kind: slow, count: 4}, link: nvlink-mesh-150GB/s, nics: {count: 1, bandwidth: 100Gbit/s}}\n  \
                - {name: new, count: 1, devices: {kind: fast, count: 2}, link: nvswitch-300GB/s, nics: {count: 1, bandwidth: 100Gbit/s}}\n\
                network: {kind: switch, latency: 5us}\n";
    let topology = Topology::from_yaml(text, "six.yaml").expect("it is sound");
    let none = DropoutRate::NONE;
    let model = Model::Gpt(Gpt {
        layers: 6,
        hidden: 1024,
        heads: 16,
        ffn: None,
        vocab: 1024,
        sequence: 256,
        tied_embeddings: false,
        dropout: none,
        attention_dropout: none,
    });
    let costs = CostModel::new(None, &topology).with_stack(&topology, "foretell", DataType::Fp16).expect("the library knows it");
    let base = Plan { precision: DataType::Fp16, ..Plan::new(Layout::default(), 16) };
    let fixed = "recompute=none,virtual_stages=1,context=1".parse().expect("well formed");
    let request = Request { tolerance: 0.0, fixed, ..Request::new(&model, "model", &topology, &costs, &base) };
    let planned = plan(&request).expect("something fits");
    let all = layouts(&request).expect("the model is sound");
    let of_all = |layout: Layout| {
        let compiled = compile(&model, "model", &Plan { layout, ..base.clone() }).ok()?;
        Some(predict(&compiled.training, &topology, &costs, Oversubscription::Refused, Folding::On).ok()?.0.step_seconds)
    };
    assert!(all.iter().any(|layout| layout.stages.is_none()));
    let steps = all.into_iter().filter_map(of_all);
    let best = &planned.candidates[0];
    assert_eq!(steps.reduce(Seconds::min), Some(best.prediction.step_seconds));
    let stages = best.plan.layout.stages.clone().expect("four slow devices and two fast ones want meshes of their own");
    let fixed = "stages=1x4+2x1,micro_batch=4".parse().expect("well formed");
    let fixed = layouts(&Request { fixed, ..request.clone() }).expect("the model is sound");
    let meshes = |layout: &Layout| layout.stages.iter().flatten().map(|stage| (stage.data, stage.tensor)).collect::<Vec<_>>();
    assert!(!fixed.is_empty() && fixed.iter().all(|layout| meshes(layout) == [(1, 4), (2, 1)]), "{stages:?}");
}

#[test]
fn buckets_are_chosen_counted_and_fixed() {
    let costs = CostModel::new(None, &DGX).with_stack(&DGX, "foretell", DataType::Bf16).expect("the library knows it");
    let base = Plan { precision: DataType::Bf16, ..Plan::new(Layout::default(), 64) };
    let best = |width: usize, fixed: &str| {
        let model = Model::Mlp(Mlp { widths: vec![width; 5] });
        let fixed = fixed.parse().expect("well formed");
        let request = Request { tolerance: 0.0, fixed, ..Request::new(&model, "model", &DGX, &costs, &base) };
        plan(&request).expect("something fits")
    };
    let pure = "data=8,tensor=1,pipeline=1,zero=0,recompute=none,micro_batch=8,offload=none";
    let (small, large) = (best(1024, pure), best(4096, pure));
    assert_eq!((small.search.layouts, small.search.alike), (5, 3), "16 MiB of gradients are in one bucket of 25 MiB anyway");
    assert_eq!((large.search.layouts, large.search.alike), (5, 0));
    let fixed = best(4096, &format!("{pure},bucket=1MiB"));
    assert_eq!((fixed.search.layouts, fixed.candidates[0].plan.layout.bucket), (1, Bytes::new(1 << 20)));
    let [usual, chosen] =
        [best(4096, &format!("{pure},bucket=25MiB")), large].map(|planned| planned.candidates[0].prediction.step_seconds);
    assert!(chosen < usual, "{chosen} is not less than {usual}");
}

#[test]
fn no_more_lies_on_the_hosts_than_must() {
    let model = gpt(48, 1024, 512, false);
    let text = "name: one\nnodes:\n  - {name: node, count: 1, devices: {kind: a100-sxm-80g, count: 1}, link: nvswitch-300GB/s, host_memory: 1TiB}\n";
    let topology = Topology::from_yaml(text, "one.yaml").expect("it is sound");
    let costs = CostModel::new(None, &topology).with_stack(&topology, "foretell", DataType::Bf16).expect("the library knows it");
    let base = Plan { precision: DataType::Bf16, optimizer: Optimizer::AdamW, ..Plan::new(Layout::default(), 128) };
    let fixed = "data=1,tensor=1,pipeline=1,zero=0,recompute=none,micro_batch=128,bucket=25MiB".parse().expect("well formed");
    let request = Request { fixed, ..Request::new(&model, "model", &topology, &costs, &base) };
    let all = layouts(&request).expect("the model is sound");
    let forms: Vec<Offload> = all.iter().map(|layout| layout.offload).collect();
    assert_eq!(forms, Offload::ALL);
    let arena_of = |layout: &Layout| {
        let compiled = compile(&model, "model", &Plan { layout: layout.clone(), ..base.clone() }).expect("it divides the model");
        compiled.arenas()[0]
    };
    let arenas: Vec<Bytes> = all.iter().map(arena_of).collect();
    let [none, optimizer, activations, both] = <[Bytes; 4]>::try_from(arenas).expect("there are four");
    assert!(both < optimizer && optimizer < activations && activations < none, "{both} {optimizer} {activations} {none}");
    // With room for one of them, what there is no room for is counted as such, and what need not be looked at with what fits.
    for (limit, fitting, misfits) in [(none, Offload::None, 0), (optimizer, Offload::Optimizer, 2), (both, Offload::Both, 3)] {
        let planned = plan(&Request { memory_limit: Some(limit), ..request.clone() }).expect("one fits");
        let search = &planned.search;
        assert_eq!(planned.candidates[0].plan.layout.offload, fitting, "with {limit}");
        let counted = (search.layouts, search.simulated, search.out_of_memory, search.needless, search.bounded_out);
        assert_eq!(counted, (4, 1, misfits, 3 - misfits, 0), "with {limit}");
    }
    // Where there is room for either, the faster of the two.
    let planned = plan(&Request { memory_limit: Some(activations), ..request.clone() }).expect("one fits");
    let step_of = |fixed: &str| {
        let request = Request { fixed: fixed.parse().expect("well formed"), ..request.clone() };
        plan(&request).expect("it fits").candidates[0].prediction.step_seconds
    };
    let shape = "data=1,tensor=1,pipeline=1,zero=0,recompute=none,micro_batch=128,bucket=25MiB,offload=";
    let steps = ["optimizer", "activations"].map(|offload| step_of(&format!("{shape}{offload}")));
    assert_eq!(planned.candidates[0].prediction.step_seconds, steps[0].min(steps[1]));
    assert!(step_of(&format!("{shape}none")) <= steps[0].min(steps[1]));
}

#[test]
fn what_fits_only_with_the_state_on_the_hosts_is_offloaded_and_what_fits_without_is_not() {
    let model = Model::Mlp(Mlp { widths: vec![4096; 9] });
    let search = |limit: &str, host: &str, fixed: &str| {
        let host = if host.is_empty() { String::new() } else { format!(", host_memory: {host}") };
        let text = format!(
            "name: one\nnodes:\n  - {{name: node, count: 1, devices: {{kind: a100-sxm-80g, count: 2}}, link: nvswitch-300GB/s{host}}}\n"
        );
        let topology = Topology::from_yaml(&text, "one.yaml").expect("it is sound");
        let costs =
            CostModel::new(None, &topology).with_stack(&topology, "foretell", DataType::Bf16).expect("the library knows it");
        let base = Plan { precision: DataType::Bf16, optimizer: Optimizer::AdamW, ..Plan::new(Layout::default(), 64) };
        let memory_limit = Some(limit.parse().expect("a size"));
        let fixed = format!("data=2,tensor=1,pipeline=1,zero=0,recompute=none,micro_batch=32,bucket=25MiB{fixed}")
            .parse()
            .expect("well formed");
        plan(&Request { memory_limit, fixed, ..Request::new(&model, "model", &topology, &costs, &base) })
    };
    let found = |limit: &str, host: &str, fixed: &str| search(limit, host, fixed).expect("something fits");
    // Weights of 256 MiB, gradients of 512 MiB, and a state of 1.5 GiB.
    let resident = found("8GiB", "1TiB", "");
    assert_eq!((resident.search.layouts, resident.search.needless, resident.search.simulated), (4, 3, 1));
    assert_eq!(resident.candidates[0].plan.layout.offload, Offload::None);
    let offloaded = found("2GiB", "1TiB", "");
    assert_eq!((offloaded.search.layouts, offloaded.search.needless, offloaded.search.out_of_memory), (4, 1, 2));
    let best = &offloaded.candidates[0];
    assert_eq!(best.plan.layout.offload, Offload::Optimizer);
    assert!(best.prediction.fits && best.prediction.host_memory_bytes[0] >= Bytes::new(3 << 29));
    assert!(best.prediction.peak_memory_bytes[0] <= Bytes::new(2 << 30));
    assert!(best.prediction.step_seconds > resident.candidates[0].prediction.step_seconds);
    // The user's word, a host with too little, and one of which nothing is known.
    assert_eq!(found("8GiB", "1TiB", ",offload=optimizer").candidates[0].plan.layout.offload, Offload::Optimizer);
    let refused = |limit: &str, host: &str, fixed: &str| search(limit, host, fixed).expect_err("nothing fits").to_string();
    assert!(refused("2GiB", "1TiB", ",offload=none").starts_with("no layout fits: the smallest needs "));
    assert!(refused("2GiB", "2GiB", "").starts_with("no layout fits: the smallest needs "));
    assert!(refused("2GiB", "", "").contains("or write `host_memory: 1TB` of the nodes"));
}

#[test]
fn all_reduces_go_the_way_that_is_asked_for_and_else_the_fastest() {
    let topology = Topology::library("dgx-a100-80g").expect("in the library").with_nodes(16).expect("128 devices");
    let known = CostModel::new(None, &topology).with_stack(&topology, "foretell", DataType::Bf16).expect("the library knows it");
    // 8 KiB, and 24 MiB.
    for widths in [vec![32, 32, 32], vec![1024; 7]] {
        let model = Model::Mlp(Mlp { widths });
        let mut chosen = Vec::new();
        for costs in [&CostModel::new(None, &topology), &known] {
            let base = Plan { precision: DataType::Bf16, ..Plan::new(Layout::default(), 256) };
            let step = |fixed: &str| {
                let fixed = format!("data=128,tensor=1,pipeline=1,zero=0,recompute=none,micro_batch=2,bucket=25MiB{fixed}");
                let fixed = fixed.parse().expect("well formed");
                let planned =
                    plan(&Request { fixed, ..Request::new(&model, "model", &topology, costs, &base) }).expect("it fits");
                (planned.candidates[0].prediction.step_seconds, planned.candidates[0].plan.layout.collective)
            };
            let [open, ring, tree] = ["", ",collective=ring", ",collective=tree"].map(step);
            assert_eq!([open.1, ring.1, tree.1], CollectiveAlgorithm::ALL);
            assert!(ring.0 != tree.0 && open.0 == ring.0.min(tree.0), "{open:?} {ring:?} {tree:?}");
            chosen.push(if ring.0 < tree.0 { CollectiveAlgorithm::Ring } else { CollectiveAlgorithm::Tree });
        }
        let expected = if model == (Model::Mlp(Mlp { widths: vec![32; 3] })) {
            CollectiveAlgorithm::Tree
        } else {
            CollectiveAlgorithm::Ring
        };
        assert!(chosen.contains(&expected), "{chosen:?} of {model:?}");
    }
}

#[test]
fn of_several_number_formats_the_fastest_is_taken() {
    let model = Model::named("gpt2").expect("in the zoo");
    let found = |precision: DataType| {
        let costs = CostModel::new(None, &DGX).with_stack(&DGX, "foretell", precision).expect("the library knows it");
        let base = Plan { precision, ..Plan::new(Layout::default(), 64) };
        let fixed = "pipeline=1,tensor=1,recompute=none".parse().expect("well formed");
        plan(&Request { fixed, top: 2, ..Request::new(&model, "gpt2", &DGX, &costs, &base) }).expect("something fits")
    };
    let (slow, fast) = (found(DataType::Fp32), found(DataType::Bf16));
    let both = slow.clone().merged(fast.clone(), 2);
    assert_eq!(both, fast.clone().merged(slow.clone(), 2));
    assert_eq!(both.candidates, fast.candidates);
    assert_eq!(both.search.layouts, slow.search.layouts + fast.search.layouts);
    assert_eq!((both.search.best_seconds, both.search.gap), (fast.search.best_seconds, fast.search.gap));
}

fn resnet18(top: usize) -> impl Fn() -> Planned + Send + Sync {
    move || {
        let costs = CostModel::new(None, &DGX);
        let model = Model::Resnet(Resnet { depth: 18, stem: Stem::Small, image: 32, channels: 3, classes: 10, width: 16 });
        let base = Plan::new(Layout::default(), 64);
        plan(&Request { top, devices: 4, ..Request::new(&model, "model", &DGX, &costs, &base) }).expect("something fits")
    }
}

#[test]
fn the_answer_does_not_depend_on_the_number_of_threads() {
    let on = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool of threads");
        pool.install(resnet18(5))
    };
    let one = on(1);
    assert_eq!(one.candidates.len(), 5);
    assert_eq!(one, on(2));
    assert_eq!(one, on(2));
}

/// Threads that wait for others take up work meanwhile, which may ask for what they are finding out.
#[test]
fn threads_that_wait_for_each_other_do_not_do_so_for_ever() {
    let (done, is_done) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let model = gpt(8, 64, 64, true);
        let topology = DGX.clone().with_nodes(2).expect("there may be as many");
        let costs =
            CostModel::new(None, &topology).with_stack(&topology, "foretell", DataType::Bf16).expect("the library knows it");
        let base = Plan { precision: DataType::Bf16, ..Plan::new(Layout::default(), 32) };
        let answers = std::iter::once(1).chain([16; 12]).map(|threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool of threads");
            pool.install(|| plan(&Request::new(&model, "model", &topology, &costs, &base)).expect("it can be laid out"))
        });
        let answers: Vec<Planned> = answers.collect();
        done.send(answers.windows(2).all(|pair| pair[0] == pair[1])).expect("somebody waits for it");
    });
    let are_equal = is_done.recv_timeout(std::time::Duration::from_secs(300)).expect("it ends");
    assert!(are_equal);
}

#[test]
fn the_memory_that_was_foretold_is_the_compilers() {
    let best = &resnet18(1)().candidates[0];
    let model = Model::Resnet(Resnet { depth: 18, stem: Stem::Small, image: 32, channels: 3, classes: 10, width: 16 });
    let compiled = compile(&model, "model", &best.plan).expect("it was compiled before");
    assert_eq!(best.prediction.peak_memory_bytes, compiled.arenas());
    let kernels = |stage: &StageProgram| stage.instructions.len();
    assert!(compiled.training.lists.iter().map(kernels).sum::<usize>() > 0);
}

/// Whether the simulation that decided said all of it, or a later one.
#[test]
fn what_is_said_of_the_best_is_what_is_foretold_of_their_programs() {
    let topology = Topology::library("dgx-a100-80g").expect("in the library");
    let model = Model::named("gpt2").expect("in the zoo");
    let base = Plan { precision: DataType::Bf16, ..Plan::new(Layout::default(), 32) };
    for is_known in [false, true] {
        let mut costs = CostModel::new(None, &topology);
        if is_known {
            costs = costs.with_stack(&topology, "foretell", DataType::Bf16).expect("the library knows it");
        }
        let fixed = "tensor=2,micro_batch=4".parse().expect("well formed");
        let request = Request { top: 3, fixed, ..Request::new(&model, "gpt2", &topology, &costs, &base) };
        let planned = plan(&request).expect("something fits");
        assert_eq!(planned.candidates.len(), 3);
        for candidate in planned.candidates {
            let compiled = compile(&model, "gpt2", &candidate.plan).expect("it was compiled before");
            let (mut prediction, _) = predict(&compiled.training, &topology, &costs, Oversubscription::Refused, Folding::On)
                .expect("it was simulated before");
            prediction.peak_memory_bytes = compiled.arenas();
            assert_eq!(candidate.prediction, prediction);
        }
    }
}

fn refusal(change: impl Fn(&mut Request<'_>)) -> PlannerError {
    let costs = CostModel::new(None, &DGX);
    let model = Model::named("mlp").expect("in the zoo");
    let base = Plan::new(Layout::default(), 256);
    let mut request = Request::new(&model, "mlp", &DGX, &costs, &base);
    change(&mut request);
    plan(&request).expect_err("it is to be refused")
}

#[test]
fn what_does_not_fit_is_said_with_the_least_that_would() {
    let error = refusal(|request| request.memory_limit = Some("1MB".parse().expect("a size")));
    assert!(matches!(&error, PlannerError::OutOfMemory { needed, limit, .. } if needed > limit), "{error}");
    let text = error.to_string();
    assert!(text.starts_with("no layout fits: the smallest needs "), "{text}");
    assert!(text.contains("on a device of `a100") && text.contains("which has 977 KiB; hint: use more devices"), "{text}");
}

#[test]
fn what_is_kept_of_a_model_says_at_once_that_it_fits_nowhere() {
    let costs = CostModel::new(None, &DGX);
    let model = gpt(4, 131_072, 256, true);
    let base = Plan { precision: DataType::Bf16, optimizer: Optimizer::AdamW, ..Plan::new(Layout::default(), 512) };
    // Before it would be given up.
    let request = Request { give_up: &|| true, ..Request::new(&model, "huge", &DGX, &costs, &base) };
    let text = plan(&request).expect_err("too large").to_string();
    // 12 blocks' squares of the width and little beside, of six bytes each, over eight devices; state may lie on hosts.
    assert!(text.starts_with("no layout fits: the smallest needs 576 GiB on a device of `a100"), "{text}");
    assert!(
        text.contains("hint: parameters and gradients alone are 4.5 TiB: use more devices than 8, or a smaller model"),
        "{text}"
    );
}

#[test]
fn what_fits_as_it_is_laid_out_is_not_refused_for_what_is_kept_of_it() {
    let costs = CostModel::new(None, &DGX);
    // Next to nothing beside parameters.
    let model = gpt(8, 4096, 64, true);
    for (precision, optimizer, zero, offload) in [
        (DataType::Fp32, Optimizer::Sgd, 3, Offload::None),
        (DataType::Bf16, Optimizer::AdamW, 3, Offload::None),
        (DataType::Bf16, Optimizer::Adam, 2, Offload::Optimizer),
        (DataType::Bf16, Optimizer::Sgd, 0, Offload::None),
    ] {
        let layout = Layout { data: if zero > 0 { 4 } else { 1 }, tensor: 2, zero, offload, ..Layout::default() };
        let base = Plan { precision, optimizer, ..Plan::new(Layout::default(), 4) };
        let compiled = compile(&model, "model", &Plan { layout: layout.clone(), ..base.clone() }).expect("it divides the model");
        let fixed = format!("data={},tensor=2,pipeline=1,zero={zero},micro_batch=1,offload={}", layout.data, offload.name());
        let fixed = fixed.parse().expect("well formed");
        let most = compiled.arenas().into_iter().max();
        let devices = layout.data * 2;
        let request = Request { fixed, devices, memory_limit: most, ..Request::new(&model, "model", &DGX, &costs, &base) };
        let planned = plan(&request);
        assert!(planned.is_ok(), "{precision:?}, ZeRO {zero}: {}", planned.expect_err("it is not Ok"));
    }
}

#[test]
fn a_search_that_is_given_up_before_anything_fits_says_so() {
    let asked = std::sync::atomic::AtomicUsize::new(0);
    let give_up = || asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed) >= 5;
    let costs = CostModel::new(None, &DGX);
    let model = gpt(4, 256, 64, true);
    let base = Plan::new(Layout::default(), 64);
    let request = Request { give_up: &give_up, ..Request::new(&model, "model", &DGX, &costs, &base) };
    let error = plan(&request).expect_err("five families are not all");
    assert!(matches!(error, PlannerError::OutOfTime { layouts, .. } if layouts > 0), "{error}");
    assert!(error.to_string().contains("hint: allow more time, or `--fix` some of the layout"), "{error}");
}

#[test]
fn sizes_beyond_any_machine_are_refused_at_once() {
    let text = refusal(|request| request.devices = usize::MAX).to_string();
    assert!(text.contains("more than 1048576 are not laid out); hint: use fewer nodes"), "{text}");
    let text = refusal(|request| request.fixed = "data=3,tensor=3,pipeline=1".parse().expect("well formed")).to_string();
    assert!(text.contains("divides 8 devices as asked (what is fixed makes 9 ranks); hint: "), "{text}");
    let costs = CostModel::new(None, &DGX);
    let model = Model::named("mlp").expect("in the zoo");
    let base = Plan::new(Layout::default(), usize::MAX);
    let text = plan(&Request::new(&model, "mlp", &DGX, &costs, &base)).expect_err("too many samples").to_string();
    assert!(text.contains("a step has 4294967296 samples at most"), "{text}");
}

#[test]
fn a_profile_of_another_device_says_nothing() {
    let costs = CostModel::new(Some(&profile("another", vec![1.0, 2.0])), &DGX);
    assert!(costs.paces.is_empty() && costs.buffered == Bytes::ZERO);
    let device = &DGX.device_kinds()[0].name;
    let costs = CostModel::new(Some(&profile(device, vec![0.5, f64::NAN, 1.0, 2.0])), &DGX);
    assert_eq!(costs.paces, [1.0, 1.0, 2.0]);
    assert_eq!(costs.buffered, Bytes::new(4096));
}
