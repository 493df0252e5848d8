//! Models, topologies and strategies that several tests share.

use foretell_models::{DropoutRate, Gpt, Mlp, Model, Resnet, Stem};
use foretell_planner::{Fixed, SearchResult};
use foretell_program::{
    Axis, CollectiveAlgorithm, KernelSample, Layout, MachineIdentity, Offload, Optimizer, Overlap, Plan, Profile, Recompute,
    Sample, Schedule, compile,
};
use foretell_simulator::{CostModel, Folding, Oversubscription, predict};
use foretell_topologies::Topology;
use foretell_units::{Bytes, DataType, Seconds};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use std::sync::LazyLock;

pub static DGX: LazyLock<Topology> = LazyLock::new(|| Topology::library("dgx-a100-80g").expect("in the library"));

/// Two nodes of fast devices and three of slow ones with less memory.
pub static MIXED: LazyLock<Topology> = LazyLock::new(|| {
    let text = "name: mixed\ndevices:\n  slow: {base: a100-sxm-80g, memory: 40GiB}\n  fast: {base: h100-sxm-80g}\nnodes:\n  \
                - {name: new, count: 2, devices: {kind: fast, count: 4}, link: nvswitch-450GB/s, nics: {count: 4, bandwidth: 400Gbit/s}}\n  \
                - {name: old, count: 3, devices: {kind: slow, count: 4}, link: nvswitch-300GB/s, nics: {count: 4, bandwidth: 200Gbit/s}}\n\
                network: {kind: switch, latency: 5us}\n";
    Topology::from_yaml(text, "mixed.yaml").expect("it is sound")
});

/// The sizes of a GPT model without dropout.
#[derive(Clone, Copy)]
pub struct GptSizes {
    pub layers: usize,
    pub hidden: usize,
    pub heads: usize,
    pub vocab: usize,
    pub sequence: usize,
    pub tied_embeddings: bool,
}

impl GptSizes {
    pub fn model(self) -> Model {
        let Self { layers, hidden, heads, vocab, sequence, tied_embeddings } = self;
        let (dropout, attention_dropout) = (DropoutRate::NONE, DropoutRate::NONE);
        Model::Gpt(Gpt { layers, hidden, heads, ffn: None, vocab, sequence, tied_embeddings, dropout, attention_dropout })
    }
}

/// Returns a GPT model on sequences of 16 positions.
pub fn short_gpt(layers: usize, hidden: usize, vocab: usize, tied_embeddings: bool) -> Model {
    GptSizes { layers, hidden, heads: 4, vocab, sequence: 16, tied_embeddings }.model()
}

/// Returns the first schedule with a property.
pub fn schedule(has_property: impl Fn(&Schedule) -> bool) -> Schedule {
    Schedule::ALL.into_iter().find(has_property).expect("some schedule has the property")
}

/// Returns the schedule with one chunk a stage and weight gradients apart.
pub fn splitting_schedule() -> Schedule {
    schedule(|schedule| schedule.splits_backward() && schedule.allows(1))
}

pub fn fixed(text: &str) -> Fixed {
    text.parse().expect("well formed")
}

/// Returns the costs of our own software stack.
pub fn own_costs(topology: &Topology, precision: DataType) -> CostModel {
    CostModel::new(None, topology).with_stack(topology, "foretell", precision).expect("the library knows it")
}

/// Returns the step time that the simulator predicts for a plan, or `None` if the plan does not
/// divide the model.
pub fn simulated_step(model: &Model, plan: &Plan, topology: &Topology, costs: &CostModel) -> Option<Seconds> {
    let compiled = compile(model, "model", plan).ok()?;
    let predicted = predict(&compiled.training, topology, costs, Oversubscription::Refused, Folding::On);
    Some(predicted.expect("it can be simulated").0.step_seconds)
}

/// Checks that a search has counted every layout once.
pub fn assert_every_layout_is_counted_once(planned: &SearchResult) {
    let search = &planned.search;
    assert_eq!(search.layouts, search.alike + distinct_layouts(planned), "{search:?}");
}

/// Returns how many layouts with different Programs a search has counted.
pub fn distinct_layouts(planned: &SearchResult) -> usize {
    let search = &planned.search;
    search.needless + search.indivisible + search.bounded_out + search.out_of_memory + search.simulated
}

/// Returns the number of random cases of each property of bounds. `FORETELL_BOUND_CASES=10000 cargo
/// test --release -p foretell-planner --test planner bound` tries more than usual.
pub fn bound_cases() -> u32 {
    std::env::var("FORETELL_BOUND_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(64)
}

/// Runs a property test on so many cases, after those that failed once.
pub fn cases(cases: u32) -> ProptestConfig {
    let failed = FileFailurePersistence::Direct("tests/planner.proptest-regressions");
    ProptestConfig { cases, failure_persistence: Some(Box::new(failed)), ..ProptestConfig::default() }
}

pub fn models() -> impl Strategy<Value = Model> {
    prop_oneof![
        proptest::collection::vec(prop_oneof![Just(16usize), Just(64), Just(2048)], 3..6)
            .prop_map(|widths| Model::Mlp(Mlp { widths })),
        Just(Model::Resnet(Resnet { depth: 18, stem: Stem::Small, image: 8, channels: 1, classes: 10, width: 4 })),
        (1usize..9, prop_oneof![Just(16usize), Just(256)], prop_oneof![Just(64usize), Just(8192)], any::<bool>())
            .prop_map(|(layers, hidden, vocab, tied_embeddings)| { short_gpt(layers, hidden, vocab, tied_embeddings) }),
    ]
}

/// Returns models whose layers differ: windows in turn with full attention, mixtures behind dense
/// layers or in turn with them, a module that predicts one more token, an encoder before a decoder.
pub fn models_of_unequal_layers() -> impl Strategy<Value = Model> {
    let decoder = |layers: usize, hidden: usize, parts: String| {
        let sizes = format!(r#""layers": {layers}, "hidden": {hidden}, "heads": 4, "ffn": 64, "vocab": 64, "sequence": 16"#);
        serde_json::from_str(&format!(r#"{{"family": "decoder", {sizes}, {parts}}}"#)).expect("the sizes are sound")
    };
    let mixtures = |parts: &str| format!(r#""mixtures": {{"experts": 4, "top_k": 2, "ffn": 32, {parts}}}"#);
    let hidden = || prop_oneof![Just(16usize), Just(256)];
    prop_oneof![
        (10usize..18, hidden(), 2usize..4).prop_map(move |(layers, hidden, every)| {
            decoder(layers, hidden, format!(r#""window": 4, "full_attention_every": {every}"#))
        }),
        (7usize..12, hidden(), 1usize..4).prop_map(move |(layers, hidden, first)| decoder(
            layers,
            hidden,
            mixtures(&format!(r#""first": {first}"#))
        )),
        (10usize..14, hidden()).prop_map(move |(layers, hidden)| decoder(layers, hidden, mixtures(r#""every": 2"#))),
        (5usize..9, hidden()).prop_map(move |(layers, hidden)| decoder(layers, hidden, r#""prediction_modules": 1"#.into())),
        (5usize..8, hidden()).prop_map(|(layers, hidden)| {
            let sizes = format!(r#""layers": {layers}, "hidden": {hidden}, "heads": 4, "ffn": 64, "vocab": 64"#);
            let text = format!(r#"{{"family": "t5", {sizes}, "source_sequence": 16, "target_sequence": 8}}"#);
            serde_json::from_str(&text).expect("the sizes are sound")
        }),
    ]
}

/// Returns every schedule with a number of chunks a stage that it can order: 2 if it is open.
pub fn schedules_with_chunks() -> Vec<(Schedule, usize)> {
    let chunks = |schedule: Schedule| if schedule.allows_any_chunks() { 2 } else { *schedule.chunks().start() };
    Schedule::ALL.map(|schedule| (schedule, chunks(schedule))).to_vec()
}

prop_compose! {
    pub fn plans()(
        data in 1usize..4,
        tensor in prop_oneof![Just(1usize), Just(2)],
        (schedule, virtual_stages) in proptest::sample::select(schedules_with_chunks()),
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
        pipeline_inside in any::<bool>(),
        kib in proptest::sample::select(vec![1u64, 8, 16, 64, 1 << 10, 3 << 10, 25 << 10, 100 << 10, 400 << 10]),
        without_overlap in any::<[bool; 3]>(),
        rotated in 0usize..6,
        precision in proptest::sample::select(vec![DataType::Fp32, DataType::Fp32, DataType::Bf16, DataType::Fp8]),
        (offload, collective) in (
            proptest::sample::select(Offload::ALL.to_vec()), proptest::sample::select(CollectiveAlgorithm::ALL.to_vec())
        ),
    ) -> Plan {
        let placement = pipeline_inside.then(|| vec![Axis::Tensor, Axis::Pipeline]);
        let stage_places = (rotated > 0).then(|| (0..pipeline).map(|stage| (stage + rotated) % pipeline).collect());
        let bucket = Bytes::new(kib << 10);
        // Later stages recompute fewer of their blocks.
        let recompute = if matches!(recompute, Recompute::FullLayersOfStages(_)) {
            Recompute::FullLayersOfStages((0..pipeline).map(|stage| (pipeline - stage) % 4).collect())
        } else {
            recompute
        };
        let mesh = Layout { data, tensor, pipeline, virtual_stages, micro_batch, schedule, recompute, ..Layout::default() };
        let layout = Layout { zero, sequence_parallel, placement, stage_places, bucket, offload, collective, ..mesh };
        let optimizer = if adam { Optimizer::AdamW } else { Optimizer::Sgd };
        let [tensor, gradients, parameters] = without_overlap.map(|without| !without);
        let overlap = Overlap { tensor, gradients, parameters, ..Overlap::default() };
        Plan { optimizer, overlap, precision, ..Plan::new(layout, data * micro_batch * micro_batches) }
    }
}

/// Returns a profile with these paces of the device, as a user might write one by hand: some are
/// faster than the kernel sample.
pub fn profile(device: &str, paces: Vec<f64>) -> Profile {
    let sample =
        |median: f64| Sample { median: Seconds::new(median), p10: Seconds::new(median), p90: Seconds::new(median), count: 9 };
    Profile {
        schema_version: foretell_units::SchemaVersion,
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
        framework: None,
        buffered_bytes: 4096,
        reference: None,
        paces,
        speeds: Vec::new(),
        input: None,
        storage: None,
        kernels: vec![KernelSample {
            kernel: foretell_models::Kernel::Relu { elements: 1 << 20 },
            accumulate: false,
            precision: DataType::Fp32,
            time: sample(1e-5),
        }],
        exchanges: Vec::new(),
    }
}
