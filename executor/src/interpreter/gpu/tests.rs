//! Whole trainings on a GPU's interpreter, without a GPU: on a device that does what its streams are told as late as it may, so that a wait
//! that is missing shows in the loss.

use crate::arena::Arenas;
use crate::backend::cuda::Driver;
use crate::backend::cuda::tests::device::{Fault, TestDevice, Told};
use crate::data::{DataSource, Dataset, Split};
use crate::hyperparameters::hyperparameters;
use crate::initialise::initialise;
use crate::interpreter::{Interpreter, STREAM_COUNT, StepRequest};
use crate::samples::Samples;
use crate::transport::{Segment, SegmentShape, SharedMemory, Transport, WaitPolicy};
use foretell_models::{GraphOptions, Model};
use foretell_program::{Layout, MetricKind, Offload, Optimizer, Plan, Rank, Recompute, Stack, compile};
use foretell_units::{Bytes, DataType};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const STEPS: usize = 6;

/// What one rank's steps reported.
type Reports = Vec<Vec<(MetricKind, f64)>>;

/// Which of a run's steps are timed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum TimedSteps {
    None,
    First,
}

/// Trains as one rank, on a device if there is one.
fn train_rank(
    model: &Model,
    plan: &Plan,
    rank: Rank,
    transport: Arc<dyn Transport>,
    device: Option<Arc<TestDevice>>,
    timed: TimedSteps,
) -> Reports {
    let compiled = compile(model, "model", plan).expect("it can be laid out");
    let mesh = compiled.training.mesh.clone();
    let coordinates = mesh.coordinates(rank);
    let driver = device.map(|device| device as Arc<dyn Driver>);
    let arenas = Arenas::new(compiled.arena_of(rank), compiled.host_arena_of(rank), driver.as_ref()).expect("small arenas");
    let graph = model.graph("model", &GraphOptions::ONE).expect("it is a model");
    let stage = mesh.stage_at(coordinates);
    let dataset = Arc::new(Dataset::open(&DataSource::Synthetic, &model.sample(), 1).expect("synthetic data"));
    let order = dataset.epoch_order(0);
    let samples = |step| {
        let indices = order.batch(step, plan.global_batch).expect("so many samples");
        Arc::new(Samples { dataset: Arc::clone(&dataset), split: Split::Training, indices })
    };
    let programs = [&compiled.training, &compiled.evaluation];
    let mut interpreter = Interpreter::start(&programs, rank, &arenas, transport, samples(0)).expect("the streams start");
    initialise(compiled.training.list_of(rank), &graph, stage, coordinates, &arenas, 1).expect("it is filled");
    let mut reports = Vec::new();
    let mut upcoming = samples(0);
    for step in 0..STEPS {
        let next = samples(step + 1);
        let is_timed = timed == TimedSteps::First && step < 2;
        let hyperparameters = hyperparameters(plan, 1, step);
        let all = StepRequest { program: 0, samples: upcoming, next: Some(Arc::clone(&next)), hyperparameters, is_timed };
        interpreter.run(all).expect("the step is done");
        upcoming = next;
        reports.push(interpreter.metrics(0, &mesh, rank).expect("metrics"));
        let spans = interpreter.spans(0).expect("spans");
        assert!(arenas.driver().is_none() || spans.is_empty() != is_timed, "{is_timed}");
    }
    reports
}

/// Has the others end with a rank that panics, as the launcher does with processes.
struct EndsOthers<'a> {
    rank: usize,
    transport: Arc<dyn Transport>,
    devices: &'a [Option<Arc<TestDevice>>],
}

impl Drop for EndsOthers<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.transport.abort(Some(self.rank));
            self.devices.iter().flatten().filter_map(|device| device.collectives()).for_each(|collectives| collectives.abort());
        }
    }
}

/// The loss of every step, summed over all ranks.
fn train(model: &Model, plan: &Plan, devices: impl Fn() -> Option<Arc<TestDevice>>, timed: TimedSteps) -> Vec<f64> {
    let world = compile(model, "model", plan).expect("it can be laid out").training.mesh.world_size();
    let segment = Segment::create(&SegmentShape::new((0..world).collect(), STREAM_COUNT)).expect("shared memory");
    let devices: Vec<_> = (0..world).map(|_| devices()).collect();
    let rank = |rank: usize| {
        let transport = SharedMemory::attach(&segment, rank, world, WaitPolicy::default()).expect("the rank attaches");
        let transport: Arc<dyn Transport> = Arc::new(transport);
        let _end = EndsOthers { rank, transport: Arc::clone(&transport), devices: &devices };
        train_rank(model, plan, Rank(rank), transport, devices[rank].clone(), timed)
    };
    let ranks: Vec<Reports> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..world).map(|number| scope.spawn(move || rank(number))).collect();
        running.into_iter().map(|rank| rank.join().expect("the rank ends")).collect()
    });
    let loss = |step: usize| {
        let of_step = ranks.iter().flat_map(|reports| &reports[step]);
        of_step.filter(|(kind, _)| *kind == MetricKind::Loss).map(|(_, value)| value).sum()
    };
    (0..STEPS).map(loss).collect()
}

fn model(text: &str) -> Model {
    serde_json::from_str(text).expect("it is a model")
}

fn assert_near(what: &str, found: &[f64], expected: &[f64], tolerance: f64) {
    for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
        let close = (found - expected).abs() <= tolerance * expected.abs();
        assert!(close, "{what}: the loss of step {step} is {found}, and {expected} on the CPU");
    }
}

const MODELS: [&str; 5] = [
    r#"{"family": "mlp", "widths": [64, 32, 10]}"#,
    r#"{"family": "gpt", "layers": 2, "hidden": 16, "heads": 4, "vocab": 128, "sequence": 12, "dropout": 0.2, "attention_dropout": 0.3}"#,
    r#"{"family": "llama", "layers": 1, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": 130, "sequence": 8}"#,
    r#"{"family": "resnet", "depth": 18, "stem": "small", "image": 16, "channels": 1, "classes": 10, "width": 4}"#,
    r#"{"family": "resnet", "depth": 18, "stem": "small", "image": 16, "channels": 1, "classes": 10, "width": 4}"#,
];
/// The last in sixteen bits, in which the library makes convolutions.
const PRECISIONS: [DataType; 5] = [DataType::Fp32, DataType::Fp32, DataType::Bf16, DataType::Fp32, DataType::Bf16];

#[test]
fn one_rank_trains_as_on_the_cpu_captured_or_not_and_timed_or_not() {
    if TestDevice::new().is_none() {
        return;
    }
    for (text, precision) in MODELS.into_iter().zip(PRECISIONS) {
        let model = model(text);
        let plan = Plan { precision, ..Plan::new(Layout { micro_batch: 2, ..Layout::default() }, 4) };
        let on_cpu = train(&model, &plan, || None, TimedSteps::None);
        // In a ResNet rounding can turn a ReLU over, as in the law of the executor.
        let tolerance = if precision == DataType::Fp32 && !text.contains("resnet") { 1e-3 } else { 2e-2 };
        for timed in [TimedSteps::None, TimedSteps::First] {
            let device = TestDevice::new().expect("it was there before");
            let on_device = train(&model, &plan, || Some(Arc::clone(&device)), timed);
            // Of a ResNet with so few samples a batch rounding doubles from step to step: the first steps of either communication of running tell.
            let compared = if text.contains("resnet") { 3 } else { STEPS };
            assert_near(text, &on_device[..compared], &on_cpu[..compared], tolerance);
            let told = device.told();
            let by_library = told.iter().any(|told| matches!(told, Told::Convolve { .. }));
            assert_eq!(by_library, text.contains("resnet") && precision == DataType::Bf16, "whose the convolutions are");
            let graphs = told.iter().filter(|told| matches!(told, Told::Graph { .. })).count();
            assert_eq!(graphs, STEPS - 2, "all steps but the first two are launched at once");
            assert_eq!(told.iter().filter(|told| matches!(told, Told::Captured)).count(), 2, "each turn is captured once");
            // Who waits for the stream of loads in a step that is one graph may do so while it is captured, which breaks the capture.
            let captured = told.iter().position(|told| matches!(told, Told::Captured)).expect("it was captured");
            let streams = |told: &Told| match told {
                Told::Graph { stream } => Some(*stream),
                _ => None,
            };
            let compute = told.iter().find_map(streams).expect("it was launched");
            let strangers = |told: &&Told| matches!(told, Told::Synchronize { stream } if *stream != compute);
            assert_eq!(told[captured..].iter().filter(strangers).count(), 0, "another stream than the graph's is waited for");
            // The same again, to the bit.
            assert_eq!(train(&model, &plan, TestDevice::new, timed), on_device);
        }
    }
}

#[test]
fn what_is_fused_trains_as_what_is_not() {
    let model = model(MODELS[1]);
    for layout in [
        Layout { micro_batch: 2, ..Layout::default() },
        Layout { micro_batch: 1, recompute: Recompute::Full, ..Layout::default() },
        Layout { micro_batch: 1, tensor: 2, ..Layout::default() },
    ] {
        let own = Plan::new(layout, 4);
        // Another stack's Program has its GELUs and its biases' gradients apart.
        let other = Plan { stack: Stack::new("megatron-core"), ..own.clone() };
        let [fused, apart] = [own, other].map(|plan| train(&model, &plan, || None, TimedSteps::None));
        assert_near("fused", &fused, &apart, 1e-5);
    }
}

/// Layouts of two ranks against one, on devices that `device` makes.
fn layouts_train_as_one_rank_does(device: fn() -> Option<Arc<TestDevice>>) {
    let layouts = [
        Layout { data: 2, ..Layout::default() },
        Layout { tensor: 2, sequence_parallel: true, ..Layout::default() },
        Layout { pipeline: 2, micro_batch: 2, ..Layout::default() },
        Layout { data: 2, zero: 3, ..Layout::default() },
        Layout { context: 2, ..Layout::default() },
        Layout { data: 2, zero: 1, offload: Offload::Optimizer, bucket: Bytes::new(1 << 12), ..Layout::default() },
        // Ranks that know by their place among others which samples they have: dropout drops the same of them.
        Layout {
            tensor: 2,
            operators: serde_json::from_str(r#"{"*": "batch"}"#).expect("it is known"),
            micro_batch: 2,
            ..Layout::default()
        },
    ];
    let model = model(MODELS[1]);
    let one = Plan::new(Layout { micro_batch: 2, ..Layout::default() }, 4);
    let on_cpu = train(&model, &one, || None, TimedSteps::None);
    for layout in layouts {
        let plan = Plan::new(layout.clone(), 4);
        let on_devices = train(&model, &plan, device, TimedSteps::None);
        assert_near(&format!("{layout:?}"), &on_devices, &on_cpu, 1e-3);
    }
}

#[test]
fn ranks_that_reach_each_other_through_the_host_train_as_one_does() {
    if TestDevice::new().is_some() {
        layouts_train_as_one_rank_does(TestDevice::new);
    }
}

#[test]
fn ranks_that_reach_each_other_from_device_to_device_train_as_one_does() {
    if TestDevice::direct().is_some() {
        layouts_train_as_one_rank_does(TestDevice::direct);
    }
}

#[test]
fn a_kernel_that_fails_on_one_rank_ends_all_ranks() {
    let makers: [fn() -> Option<Arc<TestDevice>>; 2] = [TestDevice::new, TestDevice::direct];
    if TestDevice::new().is_none() {
        return;
    }
    for (make, lost) in makers.into_iter().flat_map(|make| [(make, 0), (make, 1)]) {
        for fault in [Fault::Missing("adamw"), Fault::Breaks("adamw"), Fault::Breaks("attention_products")] {
            let (ended, end) = std::sync::mpsc::channel();
            std::thread::spawn(move || {
                let made = AtomicU64::new(0);
                let device = || match made.fetch_add(1, Ordering::SeqCst) == lost {
                    true => make()?.failing(fault),
                    false => make(),
                };
                let plan = Plan { optimizer: Optimizer::AdamW, ..Plan::new(Layout { data: 2, ..Layout::default() }, 4) };
                let trained = || train(&model(MODELS[1]), &plan, device, TimedSteps::None);
                ended.send(std::panic::catch_unwind(std::panic::AssertUnwindSafe(trained)).is_err()).expect("somebody waits");
            });
            // It takes a second; who waits for a rank that is gone does so for minutes.
            let has_failed = end.recv_timeout(std::time::Duration::from_secs(60)).expect("the ranks end");
            assert!(has_failed, "{fault:?} on rank {lost}");
        }
    }
}
