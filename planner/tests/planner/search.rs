//! Searches find what brute force finds, on any number of threads, and predict what they return.

use crate::common::{
    DGX, assert_every_layout_is_counted_once, bound_cases, cases, distinct_layouts, fixed, models, own_costs, short_gpt,
};
use foretell_models::{LstmSeq2seq, Mlp, Model, Resnet, Stem};
use foretell_planner::{Objective, Request, SearchResult, layouts, plan};
use foretell_program::{CollectiveAlgorithm, Layout, Offload, Optimizer, Plan, Recompute, Schedule, StageProgram, compile};
use foretell_simulator::{CostModel, Folding, Oversubscription, predict};
use foretell_topologies::Topology;
use foretell_units::{Bytes, DataType, Seconds};
use proptest::prelude::*;

/// Returns the least step time of all layouts that fit, each simulated. Offloaded forms count only
/// if the layout does not fit without; the one that offloads both, only if neither other form fits.
fn brute_force(request: &Request<'_>) -> Option<Seconds> {
    let memory = DGX.device_kinds()[0].memory;
    let limit = request.memory_limit.map_or(memory, |limit| limit.min(memory));
    let fitting = |layout: &Layout| {
        let compiled = compile(request.model, request.name, &Plan { layout: layout.clone(), ..request.base.clone() }).ok()?;
        compiled.arenas().iter().all(|&arena| arena <= limit).then_some(compiled)
    };
    // Forms of a layout follow one another, those that offload less first.
    let mut fitting_forms: Vec<Offload> = Vec::new();
    let mut needed = |layout: &Layout| {
        if layout.offload.is_none() {
            fitting_forms.clear();
        }
        let is_needless = fitting_forms.iter().any(|less| *less == Offload::None || layout.offload == Offload::Both);
        let compiled = if is_needless { None } else { fitting(layout) };
        fitting_forms.extend(compiled.is_some().then_some(layout.offload));
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
    // Without the file of failures: those of bounds take minutes by brute force.
    #![proptest_config(ProptestConfig { failure_persistence: None, ..cases(bound_cases().div_ceil(32)) })]

    #[test]
    fn a_search_finds_what_brute_force_finds(
        model in models(), devices in prop_oneof![Just(2usize), Just(4)], batch in prop_oneof![Just(4usize), Just(8)],
        limited in any::<bool>(), is_profiled in any::<bool>()
    ) {
        let costs = if is_profiled { own_costs(&DGX, DataType::Fp32) } else { CostModel::new(None, &DGX) };
        let base = Plan::new(Layout::default(), batch);
        // On four devices with one bucket size, since compiling every layout takes long.
        let fixed = fixed(if devices == 4 { "bucket=25MiB" } else { "" });
        let mut request = Request { devices, fixed, tolerance: 0.0, ..Request::new(&model, "model", &DGX, &costs, &base) };
        if limited {
            // Halfway between the smallest and the largest arena, so that some layouts do not fit.
            let arenas: Vec<Bytes> = layouts(&request)
                .expect("the model is sound")
                .into_iter()
                .filter_map(|layout| compile(&model, "model", &Plan { layout, ..base.clone() }).ok())
                .filter_map(|compiled| compiled.arenas().into_iter().max())
                .collect();
            let (least, most) = (arenas.iter().min().copied(), arenas.iter().max().copied());
            request.memory_limit = least.zip(most).map(|(least, most)| Bytes::new((least.count() + most.count()) / 2));
        }
        let planned = plan(&request).expect("some layout fits");
        let best = planned.candidates[0].prediction.step_seconds;
        prop_assert_eq!(Some(best), brute_force(&request), "{:?}", planned.candidates[0].plan);
        let search = &planned.search;
        assert_every_layout_is_counted_once(&planned);
        prop_assert_eq!(distinct_layouts(&planned), layouts(&request).expect("the model is sound").len());
        prop_assert!(search.lower_bound_seconds <= search.best_seconds && search.gap >= 0.0);
    }
}

#[test]
fn the_bucket_size_is_searched_unless_it_is_fixed() {
    let costs = own_costs(&DGX, DataType::Bf16);
    let base = Plan { precision: DataType::Bf16, ..Plan::new(Layout::default(), 64) };
    let best = |width: usize, choices: &str| {
        let model = Model::Mlp(Mlp { widths: vec![width; 5] });
        let request = Request { tolerance: 0.0, fixed: fixed(choices), ..Request::new(&model, "model", &DGX, &costs, &base) };
        plan(&request).expect("some layout fits")
    };
    let shape = "data=8,tensor=1,pipeline=1,zero=0,recompute=none,micro_batch=8,offload=none";
    let (small, large) = (best(1024, shape), best(4096, shape));
    assert_eq!((small.search.layouts, small.search.alike), (5, 3), "16 MiB of gradients fill one bucket of 25 MiB");
    assert_eq!((large.search.layouts, large.search.alike), (5, 0));
    let one_size = best(4096, &format!("{shape},bucket=1MiB"));
    assert_eq!((one_size.search.layouts, one_size.candidates[0].plan.layout.bucket), (1, Bytes::new(1 << 20)));
    let [usual, chosen] =
        [best(4096, &format!("{shape},bucket=25MiB")), large].map(|planned| planned.candidates[0].prediction.step_seconds);
    assert!(chosen < usual, "{chosen} is not less than {usual}");
}

#[test]
fn all_reduces_use_the_fixed_algorithm_or_else_the_fastest() {
    let topology = Topology::library("dgx-a100-80g").expect("in the library").with_nodes(16).expect("128 devices");
    let profiled = own_costs(&topology, DataType::Bf16);
    let small = Model::Mlp(Mlp { widths: vec![32; 3] });
    let large = Model::Mlp(Mlp { widths: vec![1024; 7] });
    for (model, expected) in [(small, CollectiveAlgorithm::Tree), (large, CollectiveAlgorithm::Ring)] {
        let mut chosen = Vec::new();
        for costs in [&CostModel::new(None, &topology), &profiled] {
            let base = Plan { precision: DataType::Bf16, ..Plan::new(Layout::default(), 256) };
            let step = |choice: &str| {
                let shape = "data=128,tensor=1,pipeline=1,zero=0,recompute=none,micro_batch=2,bucket=25MiB";
                let fixed = fixed(&format!("{shape}{choice}"));
                let planned =
                    plan(&Request { fixed, ..Request::new(&model, "model", &topology, costs, &base) }).expect("it fits");
                (planned.candidates[0].prediction.step_seconds, planned.candidates[0].plan.layout.collective)
            };
            let [open, ring, tree] = ["", ",collective=ring", ",collective=tree"].map(step);
            assert_eq!([open.1, ring.1, tree.1], CollectiveAlgorithm::ALL);
            assert!(ring.0 != tree.0 && open.0 == ring.0.min(tree.0), "{open:?} {ring:?} {tree:?}");
            chosen.push(if ring.0 < tree.0 { CollectiveAlgorithm::Ring } else { CollectiveAlgorithm::Tree });
        }
        assert!(chosen.contains(&expected), "{chosen:?} of {model:?}");
    }
}

#[test]
fn merged_searches_return_the_fastest_of_both() {
    let model = Model::named("gpt2").expect("in the zoo");
    let found = |precision: DataType| {
        let costs = own_costs(&DGX, precision);
        let base = Plan { precision, ..Plan::new(Layout::default(), 64) };
        let fixed = fixed("pipeline=1,tensor=1,recompute=none");
        plan(&Request { fixed, top: 2, ..Request::new(&model, "gpt2", &DGX, &costs, &base) }).expect("some layout fits")
    };
    let (slow, fast) = (found(DataType::Fp32), found(DataType::Bf16));
    let both = slow.clone().merged(fast.clone(), 2);
    assert_eq!(both, fast.clone().merged(slow.clone(), 2));
    assert_eq!(both.candidates, fast.candidates);
    assert_eq!(both.search.layouts, slow.search.layouts + fast.search.layouts);
    assert_eq!((both.search.best_seconds, both.search.gap), (fast.search.best_seconds, fast.search.gap));
    // A search may prefer a layout that is not its fastest. It stays the first.
    let mut preferring = fast.clone();
    preferring.candidates.swap(0, 1);
    let both = slow.merged(preferring.clone(), 2);
    assert_eq!(both.candidates, preferring.candidates);
}

#[test]
fn the_slow_end_of_the_interval_may_be_minimised() {
    let model = Model::named("gpt2").expect("in the zoo");
    let base = Plan { precision: DataType::Bf16, ..Plan::new(Layout::default(), 64) };
    for costs in [own_costs(&DGX, DataType::Bf16), CostModel::new(None, &DGX)] {
        let fixed = fixed("pipeline=1,tensor=1,recompute=none");
        let request = Request { fixed, objective: Objective::SlowEnd, ..Request::new(&model, "gpt2", &DGX, &costs, &base) };
        let planned = plan(&request).expect("some layout fits");
        let best = &planned.candidates[0].prediction;
        assert_eq!(planned.value, best.step_seconds_p90.value());
        assert!(best.step_seconds_p90 > best.step_seconds && planned.search.gap >= 0.0);
        assert_eq!(planned.search.best_seconds, planned.value);
        assert!(planned.search.lower_bound_seconds <= planned.value);
        assert!(planned.search.all_devices_seconds.is_none_or(|seconds| seconds >= planned.search.lower_bound_seconds));
    }
}

fn resnet18() -> Model {
    Model::Resnet(Resnet { depth: 18, stem: Stem::Small, image: 32, channels: 3, classes: 10, width: 16 })
}

fn search_resnet18(top: usize) -> SearchResult {
    let (model, costs) = (resnet18(), CostModel::new(None, &DGX));
    let base = Plan::new(Layout::default(), 64);
    plan(&Request { top, devices: 4, ..Request::new(&model, "model", &DGX, &costs, &base) }).expect("some layout fits")
}

#[test]
fn the_answer_does_not_depend_on_the_number_of_threads() {
    let on = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool of threads");
        pool.install(|| search_resnet18(5))
    };
    let one = on(1);
    assert_eq!(one.candidates.len(), 5);
    assert_eq!(one, on(2));
    assert_eq!(one, on(2));
}

/// A thread that waits for others runs further tasks meanwhile. One of them may ask for the value
/// that the thread is computing.
#[test]
fn threads_that_wait_for_each_other_do_not_deadlock() {
    let (done, is_done) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let model = short_gpt(8, 64, 64, true);
        let topology = DGX.clone().with_nodes(2).expect("there may be as many");
        let costs = own_costs(&topology, DataType::Bf16);
        let base = Plan { precision: DataType::Bf16, ..Plan::new(Layout::default(), 32) };
        let answers = std::iter::once(1).chain([16; 12]).map(|threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool of threads");
            pool.install(|| plan(&Request::new(&model, "model", &topology, &costs, &base)).expect("it can be laid out"))
        });
        let answers: Vec<SearchResult> = answers.collect();
        done.send(answers.windows(2).all(|pair| pair[0] == pair[1])).expect("the test still waits");
    });
    let are_equal = is_done.recv_timeout(std::time::Duration::from_secs(300)).expect("it ends");
    assert!(are_equal);
}

#[test]
fn predicted_memory_is_the_compilers() {
    let best = &search_resnet18(1).candidates[0];
    let compiled = compile(&resnet18(), "model", &best.plan).expect("it was compiled before");
    assert_eq!(best.prediction.peak_memory_bytes, compiled.arenas());
    let instructions = |stage: &StageProgram| stage.instructions.len();
    assert!(compiled.training.lists.iter().map(instructions).sum::<usize>() > 0);
}

/// With a profile the simulation that decides also gives the prediction. Without one a later
/// simulation does.
#[test]
fn candidates_have_the_predictions_of_their_programs() {
    let topology = Topology::library("dgx-a100-80g").expect("in the library");
    let model = Model::named("gpt2").expect("in the zoo");
    let base = Plan { precision: DataType::Bf16, ..Plan::new(Layout::default(), 32) };
    for costs in [CostModel::new(None, &topology), own_costs(&topology, DataType::Bf16)] {
        let fixed = fixed("tensor=2,micro_batch=4");
        let request = Request { top: 3, fixed, ..Request::new(&model, "gpt2", &topology, &costs, &base) };
        let planned = plan(&request).expect("some layout fits");
        assert!(!planned.candidates.is_empty());
        for candidate in planned.candidates {
            let compiled = compile(&model, "gpt2", &candidate.plan).expect("it was compiled before");
            let (mut prediction, _) = predict(&compiled.training, &topology, &costs, Oversubscription::Refused, Folding::On)
                .expect("it was simulated before");
            prediction.peak_memory_bytes = compiled.arenas();
            assert_eq!(candidate.prediction, prediction);
        }
    }
}

/// The classifier of a recurrent model is one large product, and its layers are many small kernels.
/// Cuts by arithmetic give the classifier two thirds of the devices.
#[test]
fn pipelines_of_recurrent_models_are_cut_by_time() {
    let sizes = LstmSeq2seq {
        layers: 8,
        hidden: 1024,
        embedding: None,
        source_vocab: 32_000,
        target_vocab: 32_000,
        source_sequence: 32,
        target_sequence: 32,
    };
    let (model, costs) = (Model::LstmSeq2seq(sizes), own_costs(&DGX, DataType::Bf16));
    let base = Plan { precision: DataType::Bf16, ..Plan::new(Layout::default(), 24) };
    let request = Request { devices: 6, searches_locally: true, ..Request::new(&model, "model", &DGX, &costs, &base) };
    let by_hand = |cuts: &str| {
        let cuts = format!("data=1,tensor=1,pipeline=6,schedule=zb-h1,micro_batch=24,{cuts}");
        let fixed = Request { fixed: fixed(&cuts), searches_locally: false, ..request.clone() };
        plan(&fixed).expect("it fits").search.best_seconds
    };
    let (by_time, usual) = (by_hand("cuts=4+2+3+3+4+3"), by_hand("zero=0"));
    assert!(by_time < usual, "{by_time} {usual}");
    let found = plan(&request).expect("it fits").search.best_seconds;
    assert!(found <= by_time * 1.05, "{found} {by_time}");
}

#[test]
fn layouts_that_are_shown_differ_in_more_than_details() {
    let details = |layout: &Layout| {
        let Layout { virtual_stages, bucket, collective, .. } = Layout::default();
        let recompute = match &layout.recompute {
            Recompute::FullLayers(_) | Recompute::FullLayersOfStages(_) => Recompute::FullLayers(0),
            other => other.clone(),
        };
        Layout { virtual_stages, bucket, collective, cuts: None, placement: None, recompute, ..layout.clone() }
    };
    let shown = search_resnet18(5).candidates;
    for (place, one) in shown.iter().enumerate() {
        for other in &shown[..place] {
            assert_ne!(details(&one.plan.layout), details(&other.plan.layout));
        }
    }
    let buckets =
        |top| search_resnet18(top).candidates.iter().any(|candidate| candidate.plan.layout.bucket != Layout::default().bucket);
    assert!(buckets(200), "who asks for many gets them all");
}

#[test]
fn layouts_that_differ_only_in_vain_recomputation_are_returned_once() {
    let (model, costs) = (Model::named("mlp").expect("in the zoo"), CostModel::new(None, &DGX));
    let base = Plan::new(Layout::default(), 64);
    let planned = plan(&Request { devices: 2, top: 8, ..Request::new(&model, "mlp", &DGX, &costs, &base) }).expect("it fits");
    let seen: Vec<(Layout, Seconds)> =
        planned.candidates.iter().map(|candidate| (candidate.plan.layout.clone(), candidate.prediction.step_seconds)).collect();
    let same = |(left, step): &(Layout, Seconds), (right, other_step): &(Layout, Seconds)| {
        step == other_step && Layout { recompute: right.recompute.clone(), ..left.clone() } == *right
    };
    for (place, one) in seen.iter().enumerate() {
        assert!(!seen[..place].iter().any(|other| same(one, other)), "{one:?}");
    }
    assert_eq!(seen.len(), 8);
}

/// The search asks a short step first whether a layout with many micro-batches fits.
#[test]
fn a_short_step_holds_no_more_than_a_whole_one() {
    let model = short_gpt(8, 32, 64, true);
    let mut compared = 0;
    for schedule in Schedule::ALL {
        for (pipeline, chunks) in [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)] {
            for (micro_batches, zero, recompute) in [(17, 0, Recompute::None), (24, 1, Recompute::Full), (30, 1, Recompute::None)]
            {
                let few = schedule.equivalent_micro_batches(pipeline, micro_batches);
                let arenas = |count: usize| {
                    let layout = Layout {
                        data: 2,
                        pipeline,
                        virtual_stages: chunks,
                        schedule,
                        zero,
                        recompute: recompute.clone(),
                        ..Layout::default()
                    };
                    let plan = Plan { layout, optimizer: Optimizer::AdamW, ..Plan::new(Layout::default(), 2 * count) };
                    compile(&model, "gpt", &plan).ok().map(|compiled| compiled.arenas())
                };
                let (Some(short), Some(whole)) = (arenas(few), arenas(micro_batches)) else { continue };
                compared += 1;
                let holds_less = short.iter().zip(&whole).all(|(short, whole)| short <= whole);
                assert!(holds_less, "{schedule} {pipeline} x {chunks}, {few} of {micro_batches}: {short:?} beside {whole:?}");
            }
        }
    }
    assert!(compared > 30, "{compared} layouts");
}
