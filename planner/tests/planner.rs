//! What holds for every search: its bounds are never above the simulator's answer, it finds what trying everything finds, on any number
//! of threads.

use foretell_models::{DropoutRate, Model, Stem};
use foretell_planner::bound::compute_bound;
use foretell_planner::space::layouts;
use foretell_planner::{Planned, PlannerError, Request, plan};
use foretell_program::{
    KernelSample, Layout, MachineIdentity, Optimizer, Plan, Profile, Recompute, Sample, Schedule, StageProgram, compile,
};
use foretell_simulator::{CostModel, Oversubscription, predict};
use foretell_topologies::Topology;
use foretell_units::{Bytes, DataType, Seconds};
use proptest::prelude::*;
use std::sync::LazyLock;

static DGX: LazyLock<Topology> = LazyLock::new(|| Topology::library("dgx-a100-80g").expect("in the library"));

fn models() -> impl Strategy<Value = Model> {
    prop_oneof![
        proptest::collection::vec(prop_oneof![Just(16usize), Just(64), Just(2048)], 3..6)
            .prop_map(|widths| Model::Mlp { widths }),
        Just(Model::Resnet { depth: 18, stem: Stem::Small, image: 8, channels: 1, classes: 10, width: 4 }),
        (1usize..4, prop_oneof![Just(16usize), Just(256)], any::<bool>()).prop_map(|(layers, hidden, tied_embeddings)| {
            Model::Gpt {
                layers,
                hidden,
                heads: 4,
                ffn: None,
                vocab: 64,
                sequence: 16,
                tied_embeddings,
                dropout: DropoutRate::NONE,
                attention_dropout: DropoutRate::NONE,
            }
        }),
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
        pipeline in 1usize..3,
        micro_batch in 1usize..5,
        micro_batches in 1usize..5,
        full in any::<bool>(),
        adam in any::<bool>(),
    ) -> Plan {
        let recompute = if full { Recompute::Full } else { Recompute::None };
        let layout = Layout { data, tensor, pipeline, virtual_stages, micro_batch, schedule, recompute, ..Layout::default() };
        let optimizer = if adam { Optimizer::AdamW } else { Optimizer::Sgd };
        Plan { optimizer, ..Plan::new(layout, data * micro_batch * micro_batches) }
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
        load_seconds_per_byte: Seconds::new(1e-10),
        communication_share: 0.2,
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

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn the_bound_never_exceeds_what_is_simulated(
        model in models(), plan in plans(), paces in proptest::collection::vec(0.5f64..2.0, 0..5), believed in any::<bool>()
    ) {
        let device = &DGX.device_kinds()[0].name;
        let profile = believed.then(|| profile(device, paces));
        let costs = CostModel::new(profile.as_ref(), &DGX);
        let Ok(compiled) = compile(&model, "model", &plan) else { return Ok(()) };
        let (prediction, _) = predict(&compiled.training, &DGX, &costs, Oversubscription::Allowed).expect("it can be simulated");
        let bound = compute_bound(&compiled.training, &DGX, &costs);
        prop_assert!(bound > Seconds::ZERO && bound <= prediction.step_seconds, "{bound} above {}", prediction.step_seconds);
    }
}

/// The least step time of all layouts that fit, each simulated.
fn by_brute_force(request: &Request<'_>, blocks: usize) -> Option<Seconds> {
    let memory = DGX.device_kinds()[0].memory;
    let limit = request.memory_limit.map_or(memory, |limit| limit.min(memory));
    layouts(&request.base.layout, request.devices, blocks, request.base.global_batch, &request.fixed)
        .into_iter()
        .filter_map(|layout| compile(request.model, request.name, &Plan { layout, ..request.base.clone() }).ok())
        .filter(|compiled| compiled.arenas().iter().all(|&arena| arena <= limit))
        .map(|compiled| predict(&compiled.training, request.topology, request.costs, request.oversubscription))
        .map(|predicted| predicted.expect("it can be simulated").0.step_seconds)
        .reduce(Seconds::min)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10, ..ProptestConfig::default() })]

    #[test]
    fn the_search_finds_what_trying_everything_finds(
        model in models(), devices in prop_oneof![Just(2usize), Just(4)], batch in prop_oneof![Just(4usize), Just(8)],
        limited in any::<bool>()
    ) {
        let costs = CostModel::new(None, &DGX);
        let base = Plan::new(Layout::default(), batch);
        let blocks = foretell_models::GraphOptions::ONE;
        let blocks = model.graph("model", &blocks).expect("it is sound").blocks.len();
        let mut request = Request { devices, ..Request::new(&model, "model", &DGX, &costs, &base) };
        if limited {
            // Between the smallest and the largest arena: some layouts do not fit.
            let arenas: Vec<Bytes> = layouts(&base.layout, devices, blocks, batch, &request.fixed)
                .into_iter()
                .filter_map(|layout| compile(&model, "model", &Plan { layout, ..base.clone() }).ok())
                .filter_map(|compiled| compiled.arenas().into_iter().max())
                .collect();
            let (least, most) = (arenas.iter().min().copied(), arenas.iter().max().copied());
            request.memory_limit = least.zip(most).map(|(least, most)| Bytes::new((least.count() + most.count()) / 2));
        }
        let planned = plan(&request).expect("something fits");
        let best = planned.candidates[0].prediction.step_seconds;
        prop_assert_eq!(Some(best), by_brute_force(&request, blocks), "{:?}", planned.candidates[0].plan);
        let search = &planned.search;
        prop_assert_eq!(search.layouts, search.indivisible + search.bounded_out + search.out_of_memory + search.simulated);
        prop_assert!(search.lower_bound_seconds <= search.best_seconds && search.gap >= 0.0);
    }
}

fn resnet18(top: usize) -> impl Fn() -> Planned + Send + Sync {
    move || {
        let costs = CostModel::new(None, &DGX);
        let model = Model::Resnet { depth: 18, stem: Stem::Small, image: 32, channels: 3, classes: 10, width: 16 };
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

#[test]
fn the_memory_that_was_foretold_is_the_compilers() {
    let best = &resnet18(1)().candidates[0];
    let model = Model::Resnet { depth: 18, stem: Stem::Small, image: 32, channels: 3, classes: 10, width: 16 };
    let compiled = compile(&model, "model", &best.plan).expect("it was compiled before");
    assert_eq!(best.prediction.peak_memory_bytes, compiled.arenas());
    let kernels = |stage: &StageProgram| stage.instructions.len();
    assert!(compiled.training.lists.iter().map(kernels).sum::<usize>() > 0);
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
fn sizes_beyond_any_machine_are_refused_at_once() {
    let text = refusal(|request| request.devices = usize::MAX).to_string();
    assert!(text.contains("more than 1048576 are not laid out); hint: use fewer nodes"), "{text}");
    let text = refusal(|request| request.fixed = "data=3,tensor=3,pipeline=1".parse().expect("well formed")).to_string();
    assert!(text.contains("divides 8 devices as asked; hint: "), "{text}");
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

/// `cargo test --release -p foretell-planner -- --ignored --nocapture`: how long the searches of the manual take here.
#[test]
#[ignore = "a measurement, of the release profile"]
fn how_long_searches_take() {
    let costs = CostModel::new(None, &DGX);
    for (name, batch, optimizer) in [("resnet50", 256, Optimizer::Sgd), ("gpt2-xl", 64, Optimizer::AdamW)] {
        let model = Model::named(name).expect("in the zoo");
        let base = Plan { precision: DataType::Bf16, optimizer, ..Plan::new(Layout::default(), batch) };
        for _ in 0..3 {
            let start = std::time::Instant::now();
            let planned = plan(&Request::new(&model, name, &DGX, &costs, &base)).expect("something fits");
            println!("{name}: {:.2} s, {:?}", start.elapsed().as_secs_f64(), planned.search);
        }
    }
}
