//! Training on the GPU interpreter without a GPU.
//!
//! The test device does queued work as late as its streams allow, so a missing wait shows as a
//! wrong loss.

use crate::arena::Arenas;
use crate::backend::cuda::Driver;
use crate::backend::cuda::tests::device::{DriverCall, InjectedFault, TestDevice};
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

/// The metrics of each step of one rank.
type Reports = Vec<Vec<(MetricKind, f64)>>;

/// The steps of a run that are timed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum TimedSteps {
    None,
    FirstTwo,
}

/// Trains as one rank, on the CPU without a device.
fn train_rank(
    model: &Model,
    plan: &Plan,
    rank: Rank,
    transport: Arc<dyn Transport>,
    device: Option<Arc<TestDevice>>,
    timed: TimedSteps,
) -> Reports {
    let compiled = compile(model, "model", plan).expect("the plan compiles");
    let mesh = compiled.training.mesh.clone();
    let coordinates = mesh.coordinates(rank);
    let driver = device.map(|device| device as Arc<dyn Driver>);
    let arenas = Arenas::new(compiled.arena_of(rank), compiled.host_arena_of(rank), driver.as_ref()).expect("small arenas");
    let graph = model.graph("model", &GraphOptions::ONE).expect("a valid model");
    let stage = mesh.stage_at(coordinates);
    let dataset = Arc::new(Dataset::open(&DataSource::Synthetic, &model.sample(), 1).expect("synthetic data"));
    let order = dataset.epoch_order(0);
    let samples = |step| {
        let indices = order.batch(step, plan.global_batch).expect("enough samples");
        Arc::new(Samples { dataset: Arc::clone(&dataset), split: Split::Training, indices })
    };
    let programs = [&compiled.training, &compiled.evaluation];
    let mut interpreter = Interpreter::start(&programs, rank, &arenas, transport, samples(0)).expect("the streams start");
    initialise(compiled.training.list_of(rank), &graph, stage, coordinates, &arenas, 1).expect("parameters are initialised");
    let mut reports = Vec::new();
    let mut upcoming = samples(0);
    for step in 0..STEPS {
        let next = samples(step + 1);
        let is_timed = timed == TimedSteps::FirstTwo && step < 2;
        let hyperparameters = hyperparameters(plan, 1, step);
        let request = StepRequest { program: 0, samples: upcoming, next: Some(Arc::clone(&next)), hyperparameters, is_timed };
        interpreter.run(request).expect("the step runs");
        upcoming = next;
        reports.push(interpreter.metrics(0, &mesh, rank).expect("metrics"));
        let spans = interpreter.spans(0).expect("spans");
        assert!(arenas.driver().is_none() || spans.is_empty() != is_timed, "step {step}");
    }
    reports
}

/// Aborts the other ranks if this one panics, as the launcher does with processes.
struct AbortOnPanic<'a> {
    rank: usize,
    transport: Arc<dyn Transport>,
    devices: &'a [Option<Arc<TestDevice>>],
}

impl Drop for AbortOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.transport.abort(Some(self.rank));
            self.devices.iter().flatten().filter_map(|device| device.collectives()).for_each(|collectives| collectives.abort());
        }
    }
}

/// The loss of every step, summed over all ranks. `device` creates one device per rank.
fn train(model: &Model, plan: &Plan, device: impl Fn() -> Option<Arc<TestDevice>>, timed: TimedSteps) -> Vec<f64> {
    let world = compile(model, "model", plan).expect("the plan compiles").training.mesh.world_size();
    let segment = Segment::create(&SegmentShape::new((0..world).collect(), STREAM_COUNT)).expect("shared memory");
    let devices: Vec<_> = (0..world).map(|_| device()).collect();
    let rank = |rank: usize| {
        let transport = SharedMemory::attach(&segment, rank, world, WaitPolicy::default()).expect("the rank attaches");
        let transport: Arc<dyn Transport> = Arc::new(transport);
        let _abort = AbortOnPanic { rank, transport: Arc::clone(&transport), devices: &devices };
        train_rank(model, plan, Rank(rank), transport, devices[rank].clone(), timed)
    };
    let ranks: Vec<Reports> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..world).map(|number| scope.spawn(move || rank(number))).collect();
        running.into_iter().map(|rank| rank.join().expect("the rank ends")).collect()
    });
    let loss = |step: usize| {
        let metrics = ranks.iter().flat_map(|reports| &reports[step]);
        metrics.filter(|(kind, _)| *kind == MetricKind::Loss).map(|(_, value)| value).sum()
    };
    (0..STEPS).map(loss).collect()
}

fn model(text: &str) -> Model {
    serde_json::from_str(text).expect("a valid model")
}

fn assert_near(case: &str, losses: &[f64], expected: &[f64], tolerance: f64) {
    for (step, (loss, expected)) in losses.iter().zip(expected).enumerate() {
        let close = (loss - expected).abs() <= tolerance * expected.abs();
        assert!(close, "{case}: the loss of step {step} is {loss}, expected {expected}");
    }
}

const MODELS: [&str; 5] = [
    r#"{"family": "mlp", "widths": [64, 32, 10]}"#,
    r#"{"family": "gpt", "layers": 2, "hidden": 16, "heads": 4, "vocab": 128, "sequence": 12, "dropout": 0.2, "attention_dropout": 0.3}"#,
    r#"{"family": "llama", "layers": 1, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": 130, "sequence": 8}"#,
    r#"{"family": "resnet", "depth": 18, "stem": "small", "image": 16, "channels": 1, "classes": 10, "width": 4}"#,
    r#"{"family": "resnet", "depth": 18, "stem": "small", "image": 16, "channels": 1, "classes": 10, "width": 4}"#,
];
/// The precision of each model. The last one is bf16, in which cuDNN runs the convolutions.
const PRECISIONS: [DataType; 5] = [DataType::Fp32, DataType::Fp32, DataType::Bf16, DataType::Fp32, DataType::Bf16];

#[test]
fn one_rank_trains_as_on_the_cpu_captured_or_not_and_timed_or_not() {
    if TestDevice::new().is_none() {
        return;
    }
    for (text, precision) in MODELS.into_iter().zip(PRECISIONS) {
        let model = model(text);
        let is_resnet = text.contains("resnet");
        let plan = Plan { precision, ..Plan::new(Layout { micro_batch: 2, ..Layout::default() }, 4) };
        let on_cpu = train(&model, &plan, || None, TimedSteps::None);
        // In a ResNet rounding can flip a ReLU.
        let tolerance = if precision == DataType::Fp32 && !is_resnet { 1e-3 } else { 2e-2 };
        for timed in [TimedSteps::None, TimedSteps::FirstTwo] {
            let device = TestDevice::new().expect("there is a test device");
            let on_device = train(&model, &plan, || Some(Arc::clone(&device)), timed);
            // In a ResNet with so few samples per batch, rounding errors double each step.
            let compared = if is_resnet { 3 } else { STEPS };
            assert_near(text, &on_device[..compared], &on_cpu[..compared], tolerance);
            let calls = device.take_calls();
            let uses_cudnn = calls.iter().any(|call| matches!(call, DriverCall::Convolve { .. }));
            assert_eq!(uses_cudnn, is_resnet && precision == DataType::Bf16, "cuDNN runs the bf16 convolutions");
            assert_captured(&calls);
            assert_eq!(train(&model, &plan, TestDevice::new, timed), on_device, "a second run gives the same bits");
        }
    }
}

/// Checks that all steps but the first two were launched as graphs, of which there is one per
/// buffer set, and that no other stream was waited for since the first capture. Waiting for the
/// load stream while it is being captured would break the capture.
fn assert_captured(calls: &[DriverCall]) {
    let launches: Vec<_> = calls
        .iter()
        .filter_map(|call| match call {
            DriverCall::Graph { stream } => Some(*stream),
            _ => None,
        })
        .collect();
    assert_eq!(launches.len(), STEPS - 2);
    let is_capture = |call: &&DriverCall| matches!(call, DriverCall::Captured);
    assert_eq!(calls.iter().filter(is_capture).count(), 2);
    let first_capture = calls.iter().position(|call| is_capture(&call)).expect("a capture");
    let waits_elsewhere = |call: &&DriverCall| matches!(call, DriverCall::Synchronize { stream } if *stream != launches[0]);
    assert_eq!(calls[first_capture..].iter().filter(waits_elsewhere).count(), 0, "another stream was waited for");
}

#[test]
fn fused_kernels_train_as_separate_ones() {
    let model = model(MODELS[1]);
    for layout in [
        Layout { micro_batch: 2, ..Layout::default() },
        Layout { micro_batch: 1, recompute: Recompute::Full, ..Layout::default() },
        Layout { micro_batch: 1, tensor: 2, ..Layout::default() },
    ] {
        let own = Plan::new(layout, 4);
        // This stack does not fuse GELUs and bias gradients.
        let other = Plan { stack: Stack::new("megatron-core"), ..own.clone() };
        let [fused, separate] = [own, other].map(|plan| train(&model, &plan, || None, TimedSteps::None));
        assert_near("fused", &fused, &separate, 1e-5);
    }
}

/// Checks that layouts of two ranks train as one rank does, on devices that `device` creates.
fn assert_layouts_train_as_one_rank(device: fn() -> Option<Arc<TestDevice>>) {
    let layouts = [
        Layout { data: 2, ..Layout::default() },
        Layout { tensor: 2, sequence_parallel: true, ..Layout::default() },
        Layout { pipeline: 2, micro_batch: 2, ..Layout::default() },
        Layout { data: 2, zero: 3, ..Layout::default() },
        Layout { context: 2, ..Layout::default() },
        Layout { data: 2, zero: 1, offload: Offload::Optimizer, bucket: Bytes::new(1 << 12), ..Layout::default() },
        // Ranks of the tensor axis have different samples, so dropout depends on the rank's
        // position.
        Layout {
            tensor: 2,
            operators: serde_json::from_str(r#"{"*": "batch"}"#).expect("a valid sharding"),
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
fn gpu_ranks_that_communicate_through_the_host_train_as_one_rank() {
    if TestDevice::new().is_some() {
        assert_layouts_train_as_one_rank(TestDevice::new);
    }
}

#[test]
fn gpu_ranks_that_communicate_directly_train_as_one_rank() {
    if TestDevice::with_collectives().is_some() {
        assert_layouts_train_as_one_rank(TestDevice::with_collectives);
    }
}

#[test]
fn a_failing_kernel_on_one_rank_ends_all_ranks() {
    let makers: [fn() -> Option<Arc<TestDevice>>; 2] = [TestDevice::new, TestDevice::with_collectives];
    if TestDevice::new().is_none() {
        return;
    }
    for (make, failing) in makers.into_iter().flat_map(|make| [(make, 0), (make, 1)]) {
        for fault in [InjectedFault::Missing("adamw"), InjectedFault::Breaks("adamw"), InjectedFault::Breaks("attention_dots")] {
            let (ended, end) = std::sync::mpsc::channel();
            std::thread::spawn(move || {
                let made = AtomicU64::new(0);
                let device = || match made.fetch_add(1, Ordering::SeqCst) == failing {
                    true => make()?.with_fault(fault),
                    false => make(),
                };
                let plan = Plan { optimizer: Optimizer::AdamW, ..Plan::new(Layout { data: 2, ..Layout::default() }, 4) };
                let training = || train(&model(MODELS[1]), &plan, device, TimedSteps::None);
                let has_failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(training)).is_err();
                ended.send(has_failed).expect("the test waits");
            });
            // The ranks end within a second. Without an abort they would wait for minutes.
            let has_failed = end.recv_timeout(std::time::Duration::from_secs(60)).expect("the ranks end");
            assert!(has_failed, "{fault:?} on rank {failing}");
        }
    }
}
