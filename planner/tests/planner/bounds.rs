//! Bounds never exceed what is simulated and compiled, and are close to it.

use crate::common::{
    DGX, GptSizes, MIXED, bound_cases, cases, models, models_of_unequal_layers, own_costs, plans, profile, schedule, short_gpt,
    simulated_step, splitting_schedule,
};
use foretell_models::Model;
use foretell_planner::{Request, deadline, lower_bounds};
use foretell_program::{
    Axis, Layout, MomentFormat, Offload, Plan, PlannedWorkload, Recompute, Schedule, Stack, StageLayout, compile,
};
use foretell_simulator::{CostModel, Folding, Options, Oversubscription, SimulationError, memory_use, predict, predict_with};
use foretell_topologies::Topology;
use foretell_units::{DataType, Picoseconds, Seconds};
use proptest::prelude::*;
use std::sync::Arc;

/// Checks that the bounds of a plan do not exceed its simulation and its memory.
fn check_bounds(model: &Model, plan: &Plan, topology: &Topology, costs: &CostModel) -> Result<(), TestCaseError> {
    let Ok(compiled) = compile(model, "model", plan) else { return Ok(()) };
    let (prediction, _) =
        predict(&compiled.training, topology, costs, Oversubscription::Allowed, Folding::On).expect("it can be simulated");
    let base = Plan { layout: Layout::default(), ..plan.clone() };
    let request = Request { oversubscription: Oversubscription::Allowed, ..Request::new(model, "model", topology, costs, &base) };
    let bounds = lower_bounds(&request, &plan.layout).expect("it is sound").expect("it was compiled");
    let step = prediction.step_seconds;
    prop_assert!(bounds.step > Seconds::ZERO && bounds.step <= step, "{} above {step}", bounds.step);
    // With the step itself as deadline, a simulation runs to its end.
    if let Some(deadline) = deadline(&request, &plan.layout, &compiled.training, step).expect("it is sound").map(Arc::new) {
        let options = Options { oversubscription: Oversubscription::Allowed, deadline: Some(deadline), ..Options::default() };
        let again = predict_with(&compiled.training, topology, costs, &options).map(|(prediction, _)| prediction.step_seconds);
        prop_assert_eq!(again, Ok(step));
    }
    // Devices with more memory than others have a smaller weight.
    let memory = memory_use(&compiled.training, None, topology, costs);
    let needed = memory.needed_by_stage.into_iter().max().expect("there is a stage");
    prop_assert!(bounds.memory <= needed, "{} above {needed}", bounds.memory);
    // Without free memory, more passes wait for copies to the hosts.
    let tight = Request { memory_limit: Some(needed), ..request.clone() };
    let bounds = lower_bounds(&tight, &plan.layout).expect("it is sound").expect("it was compiled");
    prop_assert!(bounds.step <= step, "{} above {step} in {needed}", bounds.step);
    Ok(())
}

/// Software stacks whose memory differs: the arena, and state and activations of several formats.
fn stacks() -> impl Strategy<Value = &'static str> {
    proptest::sample::select(vec![
        "foretell",
        "megatron-core",
        "megatron-deepspeed-sailor",
        "torchtitan",
        "deepspeed-3d",
        "internevo",
        "fsdp",
        "maxtext",
        "nemo",
        "deepspeed-zero",
        "ddp",
    ])
}

/// Returns meshes for 2 to 4 stages on [`MIXED`]. They divide micro-batches of eight samples.
fn stage_meshes() -> impl Strategy<Value = Vec<StageLayout>> {
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
    fn bounds_never_exceed_the_simulation(
        model in models(), plan in plans(), paces in proptest::collection::vec(0.5f64..2.0, 0..5), is_profiled in any::<bool>(),
        stack in proptest::option::of(stacks())
    ) {
        let device = &DGX.device_kinds()[0].name;
        let profile = is_profiled.then(|| profile(device, paces));
        let costs = CostModel::new(profile.as_ref(), &DGX);
        let costs = match stack {
            Some(stack) => costs.with_stack(&DGX, stack, plan.unstated_format()).expect("the library knows it"),
            None => costs,
        };
        check_bounds(&model, &plan, &DGX, &costs)?;
    }

    #[test]
    fn bounds_never_exceed_the_simulation_where_layers_differ(
        model in models_of_unequal_layers(), plan in plans(), stack in proptest::option::of(stacks())
    ) {
        let costs = CostModel::new(None, &DGX);
        let costs = match stack {
            Some(stack) => costs.with_stack(&DGX, stack, plan.unstated_format()).expect("the library knows it"),
            None => costs,
        };
        // An encoder-decoder whose pipeline offloads activations may deadlock.
        let offload = if matches!(model, Model::T5(_)) { Offload::None } else { plan.layout.offload };
        let plan = Plan { layout: Layout { offload, ..plan.layout.clone() }, ..plan };
        check_bounds(&model, &plan, &DGX, &costs)?;
    }

    /// Larger models, whose bytes exceed what bounds leave to rounding.
    #[test]
    fn bounds_never_exceed_the_memory_of_a_stack(
        layers in 5usize..10, hidden in prop_oneof![Just(1024usize), Just(4096)], vocab in prop_oneof![Just(1024usize), Just(51_200)],
        sequence in prop_oneof![Just(128usize), Just(2048)], tied_embeddings in any::<bool>(), plan in plans(), stack in stacks(),
        no_master_copy in any::<bool>(), half_moments in any::<bool>()
    ) {
        let model = GptSizes { layers, hidden, heads: 16, vocab, sequence, tied_embeddings }.model();
        let moments = if half_moments { MomentFormat::Half } else { MomentFormat::Single };
        let workload = PlannedWorkload { no_master_copy, moments, ..plan.workload.clone() };
        let plan = Plan { stack: Stack::new(stack), workload, ..plan };
        let costs = CostModel::new(None, &DGX).with_plan(&DGX, &plan, &model).expect("the library knows it");
        check_bounds(&model, &plan, &DGX, &costs)?;
    }

    /// With slow links to the hosts, most passes wait for copies.
    #[test]
    fn bounds_never_exceed_the_simulation_with_slow_host_links(
        layers in 5usize..10, hidden in prop_oneof![Just(16usize), Just(256)], plan in plans(), both in any::<bool>(),
        rate in prop_oneof![Just("20MB/s"), Just("500MB/s"), Just("10GB/s")]
    ) {
        let text = format!(
            "name: far\ndevices:\n  far: {{base: a100-sxm-80g, host_link: {rate}}}\nnodes:\n  - {{name: node, count: 1, \
                devices: {{kind: far, count: 8}}, link: nvswitch-300GB/s, nics: {{count: 8, bandwidth: 200Gbit/s}}, host_memory: 1TiB}}\n"
        );
        let topology = Topology::from_yaml(&text, "far.yaml").expect("it is sound");
        let costs = own_costs(&topology, plan.unstated_format());
        let layout = Layout { offload: if both { Offload::Both } else { Offload::Activations }, ..plan.layout.clone() };
        check_bounds(&short_gpt(layers, hidden, 64, false), &Plan { layout, ..plan }, &topology, &costs)?;
    }

    #[test]
    fn bounds_never_exceed_the_simulation_for_any_cuts(
        layers in 5usize..10, hidden in prop_oneof![Just(16usize), Just(256)], plan in plans(), mixed in any::<bool>(),
        places in prop::collection::vec(0usize..100, 12), recomputed in prop::collection::vec(0usize..4, 6)
    ) {
        // Each chunk has one block, and the others are anywhere.
        let chunks = plan.layout.pipeline * plan.layout.virtual_stages;
        let mut cuts = vec![1; chunks];
        (chunks..layers + 2).zip(places).for_each(|(_, place)| cuts[place % chunks] += 1);
        let recompute = Recompute::FullLayersOfStages(recomputed[..plan.layout.pipeline].to_vec());
        let plan = Plan { layout: Layout { cuts: Some(cuts), recompute, ..plan.layout.clone() }, ..plan };
        let topology: &Topology = if mixed { &MIXED } else { &DGX };
        let costs = CostModel::new(None, topology);
        check_bounds(&short_gpt(layers, hidden, 64, false), &plan, topology, &costs)?;
    }

    #[test]
    fn bounds_never_exceed_the_simulation_on_unequal_devices(
        model in models(), plan in plans(), stack in stacks()
    ) {
        let costs = CostModel::new(None, &MIXED).with_stack(&MIXED, stack, plan.unstated_format()).expect("the library knows it");
        check_bounds(&model, &plan, &MIXED, &costs)?;
    }

    #[test]
    fn bounds_never_exceed_the_simulation_for_meshes_of_stages(
        layers in 5usize..10, hidden in prop_oneof![Just(16usize), Just(256)], plan in plans(), stages in stage_meshes(),
        stack in stacks()
    ) {
        let model = short_gpt(layers, hidden, 64, false);
        let schedule = plan.layout.schedule.of_one_chunk();
        let (micro_batch, pipeline, micro_batches) = (8 / stages[0].data, stages.len(), plan.micro_batches().expect("they divide"));
        let base = Layout { data: 1, tensor: 1, placement: None, stage_places: None, virtual_stages: 1, ..plan.layout.clone() };
        let layout = Layout { stages: Some(stages), pipeline, micro_batch, schedule, ..base };
        let plan = Plan { layout, global_batch: 8 * micro_batches, ..plan };
        let costs = CostModel::new(None, &MIXED).with_stack(&MIXED, stack, plan.unstated_format()).expect("the library knows it");
        check_bounds(&model, &plan, &MIXED, &costs)?;
    }
}

proptest! {
    #![proptest_config(cases(64))]

    /// So a search compiles a layout once and simulates it in several rank orders.
    #[test]
    fn programs_do_not_depend_on_the_devices_of_ranks(model in models(), plan in plans()) {
        let usual = Plan { layout: Layout { placement: None, stage_places: None, ..plan.layout.clone() }, ..plan.clone() };
        let (Ok(usual), Ok(wanted)) = (compile(&model, "model", &usual), compile(&model, "model", &plan)) else { return Ok(()) };
        let mut laid_out = usual.training;
        prop_assert!(laid_out.reorder_ranks(wanted.training.mesh.clone()));
        prop_assert_eq!(format!("{laid_out:?}"), format!("{:?}", wanted.training));
    }
}

/// The bounds leave out only what they cannot know: messages that slow kernels down, and links that
/// several groups share.
#[test]
fn bounds_are_close_to_the_simulation() {
    let model = GptSizes { layers: 32, hidden: 4096, heads: 32, vocab: 51200, sequence: 2048, tied_embeddings: true }.model();
    let topology = DGX.clone().with_nodes(8).expect("there may be as many");
    let costs = own_costs(&topology, DataType::Bf16);
    let base = Plan { precision: DataType::Bf16, ..Plan::new(Layout::default(), 32) };
    let request = Request::new(&model, "model", &topology, &costs, &base);
    let four_chunks = Layout {
        tensor: 4,
        pipeline: 8,
        data: 2,
        sequence_parallel: true,
        schedule: schedule(|schedule| schedule.allows_any_chunks()),
        virtual_stages: 4,
        ..Layout::default()
    };
    let pipeline_inside = Layout { placement: Some(vec![Axis::Tensor, Axis::Pipeline]), ..four_chunks.clone() };
    let two_chunks = Layout {
        pipeline: 8,
        data: 8,
        schedule: schedule(|schedule| schedule.splits_backward() && schedule.allows(2)),
        virtual_stages: 2,
        ..Layout::default()
    };
    for (layout, share) in [(four_chunks, 0.965), (pipeline_inside, 0.935), (two_chunks, 0.96)] {
        let program =
            compile(&model, "model", &Plan { layout: layout.clone(), ..base.clone() }).expect("it divides the model").training;
        let (prediction, _) =
            predict(&program, &topology, &costs, Oversubscription::Refused, Folding::On).expect("it can be simulated");
        let bound = lower_bounds(&request, &layout).expect("it is sound").expect("it was compiled").step;
        let step = prediction.step_seconds;
        assert!(bound <= step && bound >= step * share, "{bound} of {step}: {:.4}", bound / step);
        // With a deadline shortly before its end, the simulation stops and says why.
        let just_missed = deadline(&request, &layout, &program, step * 0.99).expect("it is sound").expect("it is bounded");
        let options = Options { deadline: Some(Arc::new(just_missed)), ..Options::default() };
        let stopped = predict_with(&program, &topology, &costs, &options).expect_err("it is past the deadline");
        let is_certain = |at_least: Picoseconds| step * 0.99 < Seconds::from(at_least) && Seconds::from(at_least) <= step;
        assert!(matches!(stopped, SimulationError::PastDeadline { at_least } if is_certain(at_least)), "{stopped}, {step}");
    }
}

/// A search need not compile a layout to learn that it does not fit.
#[test]
fn memory_bounds_are_close_to_what_a_stack_holds() {
    let model = GptSizes { layers: 32, hidden: 4096, heads: 32, vocab: 51200, sequence: 2048, tied_embeddings: true }.model();
    let topology = DGX.clone().with_nodes(8).expect("there may be as many");
    let base = Plan { precision: DataType::Bf16, ..Plan::new(Layout::default(), 64) };
    let data_parallel = Layout { data: 64, zero: 1, ..Layout::default() };
    let sharded = Layout { data: 64, zero: 3, recompute: Recompute::Full, ..Layout::default() };
    let tensor = Layout { data: 8, tensor: 8, sequence_parallel: true, micro_batch: 4, ..Layout::default() };
    let pipeline = Layout { data: 4, tensor: 4, pipeline: 4, zero: 1, sequence_parallel: true, ..Layout::default() };
    // Activations that a stack keeps beyond the Program's, and copies of logits, are in no bound.
    let shares = [
        ("foretell", [0.99, 0.38, 0.93, 0.88]),
        ("megatron-core", [0.97, 0.38, 0.97, 0.97]),
        ("megatron-deepspeed-sailor", [0.68, 0.38, 0.62, 0.65]),
        ("torchtitan", [0.75, 0.38, 0.63, 0.7]),
    ];
    for (stack, shares) in shares {
        let costs = CostModel::new(None, &topology).with_stack(&topology, stack, DataType::Bf16).expect("the library knows it");
        let request = Request::new(&model, "model", &topology, &costs, &base);
        for (layout, share) in [&data_parallel, &sharded, &tensor, &pipeline].into_iter().zip(shares) {
            let plan = Plan { layout: layout.clone(), ..base.clone() };
            let program = compile(&model, "model", &plan).expect("it divides the model").training;
            let needed =
                memory_use(&program, None, &topology, &costs).needed_by_stage.into_iter().max().expect("there is a stage");
            let bound = lower_bounds(&request, layout).expect("it is sound").expect("it was compiled").memory;
            assert!(bound <= needed && bound.value() >= share * needed.value(), "{stack}: {bound} of {needed} in {layout:?}");
        }
    }
}

/// With long sequences and narrow layers, copies to the hosts and back take most of the step.
#[test]
fn bounds_count_offloaded_activations() {
    let model = GptSizes { layers: 32, hidden: 256, heads: 8, vocab: 512, sequence: 1024, tied_embeddings: false }.model();
    let costs = own_costs(&DGX, DataType::Bf16);
    // The bounds without and with offloading, as shares of the simulated step.
    let shares = |layout: &Layout, micro_batches: usize| {
        let plan =
            Plan { precision: DataType::Bf16, ..Plan::new(layout.clone(), layout.data * layout.micro_batch * micro_batches) };
        let base = Plan { layout: Layout::default(), ..plan.clone() };
        let request = Request::new(&model, "model", &DGX, &costs, &base);
        let step = simulated_step(&model, &plan, &DGX, &costs).expect("it divides the model");
        let with = |offload| {
            let layout = Layout { offload, ..layout.clone() };
            lower_bounds(&request, &layout).expect("it is sound").expect("it was compiled").step / step
        };
        (with(Offload::None), with(layout.offload))
    };
    let one_stage = Layout { micro_batch: 32, offload: Offload::Activations, ..Layout::default() };
    let two_stages = Layout { pipeline: 2, micro_batch: 8, ..one_stage.clone() };
    for (layout, micro_batches, share) in [(&one_stage, 1, 0.9), (&one_stage, 3, 0.9), (&two_stages, 8, 0.7)] {
        let (without, with) = shares(layout, micro_batches);
        assert!(with <= 1.0 && with >= share && with > 1.5 * without, "{with} beside {without}");
    }
}

/// The ranks of `context` wait for the one with the end of the sequence: causal attention has the
/// most work there.
#[test]
fn bounds_count_the_busiest_part_of_a_sequence() {
    let model = GptSizes { layers: 8, hidden: 256, heads: 8, vocab: 512, sequence: 32_768, tied_embeddings: false }.model();
    let costs = own_costs(&DGX, DataType::Bf16);
    for context in [2, 4] {
        let layout = Layout { context, micro_batch: 1, ..Layout::default() };
        let plan = Plan { precision: DataType::Bf16, ..Plan::new(layout.clone(), 2) };
        let base = Plan { layout: Layout::default(), ..plan.clone() };
        let step = simulated_step(&model, &plan, &DGX, &costs).expect("it divides the model");
        let request = Request::new(&model, "model", &DGX, &costs, &base);
        let share = lower_bounds(&request, &layout).expect("it is sound").expect("it was compiled").step / step;
        assert!((0.95..=1.0).contains(&share), "{context}: {share}");
    }
}

/// At the start of a pipeline, forward passes leave more activations than the link to the host
/// takes. Without free memory the next pass waits.
#[test]
fn bounds_count_waits_for_the_link_to_the_host() {
    let model = GptSizes { layers: 32, hidden: 2048, heads: 16, vocab: 512, sequence: 1024, tied_embeddings: false }.model();
    let holding_all = Layout {
        pipeline: 4,
        micro_batch: 2,
        offload: Offload::Activations,
        schedule: schedule(|schedule| schedule.holds_all_micro_batches()),
        ..Layout::default()
    };
    let eight_chunks =
        Layout { schedule: schedule(|schedule| schedule.allows_any_chunks()), virtual_stages: 8, ..holding_all.clone() };
    let mut gained: f64 = 0.0;
    for rate in [12, 16, 20, 24, 28, 32, 40] {
        let text = format!(
            "name: near\ndevices:\n  near: {{base: a100-sxm-80g, host_link: {rate}GB/s}}\nnodes:\n  - {{name: node, count: 1, \
                devices: {{kind: near, count: 8}}, link: nvswitch-300GB/s, nics: {{count: 8, bandwidth: 200Gbit/s}}, host_memory: 1TiB}}\n"
        );
        let topology = Topology::from_yaml(&text, "near.yaml").expect("it is sound");
        let costs = own_costs(&topology, DataType::Bf16);
        for layout in [&holding_all, &eight_chunks] {
            let plan = Plan { precision: DataType::Bf16, ..Plan::new(layout.clone(), 48) };
            let program = compile(&model, "model", &plan).expect("it divides the model").training;
            let (prediction, _) =
                predict(&program, &topology, &costs, Oversubscription::Refused, Folding::On).expect("it can be simulated");
            let base = Plan { layout: Layout::default(), ..plan.clone() };
            let share = |memory_limit| {
                let request = Request { memory_limit, ..Request::new(&model, "model", &topology, &costs, &base) };
                let bounds = lower_bounds(&request, layout).expect("it is sound").expect("it was compiled");
                bounds.step / prediction.step_seconds
            };
            let (unlimited, tight) = (share(None), share(program.arenas().into_iter().max()));
            assert!(unlimited <= tight && tight <= 1.0, "{rate} GB/s, {}: {unlimited} and {tight}", layout.schedule);
            gained = gained.max(tight / unlimited);
        }
    }
    assert!(gained > 1.05, "{gained}");
}

/// A pass may recompute before its gradient arrives. So on its way back a micro-batch waits only
/// for the work after that.
#[test]
fn bounds_let_recomputation_overlap_with_the_wait_for_a_gradient() {
    let model = short_gpt(5, 16, 64, true);
    let layout = Layout { pipeline: 5, micro_batch: 2, recompute: Recompute::Full, ..Layout::default() };
    let profile = profile(&DGX.device_kinds()[0].name, vec![1.0; 4]);
    let costs = CostModel::new(Some(&profile), &DGX);
    check_bounds(&model, &Plan::new(layout, 2), &DGX, &costs).expect("no bound exceeds the simulation");
}

/// The ends of a short pipeline, which share a table, may lie in one node where those of a
/// truncated model with four stages do not.
#[test]
fn bounds_hold_where_the_ends_of_a_pipeline_share_a_node() {
    let topology = DGX.clone().with_nodes(4).expect("there may be as many");
    let costs = own_costs(&topology, DataType::Fp32);
    for (data, tensor, pipeline) in [(4, 1, 2), (2, 2, 2), (2, 1, 2), (2, 1, 3), (1, 4, 2), (4, 2, 3)] {
        for (schedule, zero) in [(Schedule::default(), 0), (splitting_schedule(), 1)] {
            for placement in [None, Some(vec![Axis::Tensor, Axis::Pipeline])] {
                let layout = Layout { data, tensor, pipeline, schedule, zero, placement, ..Layout::default() };
                let model = short_gpt(6, 256, 65536, true);
                check_bounds(&model, &Plan::new(layout, data * pipeline), &topology, &costs)
                    .expect("no bound exceeds the simulation");
            }
        }
    }
}
