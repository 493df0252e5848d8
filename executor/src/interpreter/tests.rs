//! A failing stream wakes the streams that wait for other ranks.

use super::*;
use crate::data::{DataSource, Dataset, SampleShape, Split};
use crate::transport::{Segment, SegmentShape, SharedMemory, WaitPolicy};
use foretell_models::{InputKind, Kernel};
use foretell_program::{
    Axis, Buffer, BufferId, BufferRole, Collective, CollectiveAlgorithm, CollectiveRole, Few, GroupId, Instruction, MemoryKind,
    Operation, Phase, StageProgram, Stream, StreamId,
};
use foretell_units::{Bytes, DataType, Flops};
use std::time::{Duration, Instant};

const BYTES: Bytes = Bytes::new(64);

/// A Program for two ranks with two independent instructions on different streams: an all-reduce of
/// both ranks, and `other`.
fn program(stream: Stream, other: Operation) -> Program {
    let buffer = Buffer {
        name: "x".into(),
        role: BufferRole::Gradient,
        shape: [16].into(),
        data_type: DataType::Fp32,
        parent: None,
        memory: MemoryKind::Device,
        offset: Bytes::ZERO,
        bytes: BYTES,
        persistent: true,
        lifetime: None,
        state: None,
    };
    let all_reduce = Operation::Collective {
        kind: Collective::AllReduce,
        group: GroupId(0),
        bytes: BYTES,
        data_type: DataType::Fp32,
        algorithm: CollectiveAlgorithm::Automatic,
        role: CollectiveRole::Gradients,
    };
    let instruction = |stream: u16, operation: Operation| {
        // A kernel fails here, because it has no operand to read.
        let reads = if matches!(operation, Operation::Compute { .. }) { Few::new() } else { Few::from_slice(&[BufferId(0)]) };
        let writes = Few::from_slice(&[BufferId(0)]);
        let operation = operation.into();
        let stream = StreamId(stream);
        Instruction { name: 0, operation, stream, after: Few::new(), reads, writes, micro_batch: None, phase: Phase::Forward }
    };
    let stage = StageProgram {
        stage: 0,
        streams: vec![Stream::Group(GroupId(0)), stream],
        peers: Vec::new(),
        groups: vec![Group::along(Axis::Data)],
        buffers: vec![buffer],
        instructions: vec![instruction(0, all_reduce), instruction(1, other)],
        names: vec!["failing".into()],
        passes: Vec::new(),
        metrics: Vec::new(),
        arena: BYTES,
        host_arena: Bytes::ZERO,
    };
    Program {
        lists: vec![stage],
        list_of_rank: vec![0, 0],
        mesh: Mesh::new(|axis| if axis == Axis::Data { 2 } else { 1 }, &[]).expect("two ranks"),
        precision: DataType::Fp32,
        format: DataType::Fp32,
        samples: 1,
        predictions: 1,
        tokens: None,
        model_flops: Flops::ZERO,
        hardware_flops: Flops::ZERO,
    }
}

/// Runs rank 0 while rank 1 is alive but never joins the all-reduce. Returns the error.
fn run_alone(program: &Program) -> ExecutorError {
    let segment = Segment::create(&SegmentShape::new(vec![0, 1], super::STREAM_COUNT)).expect("shared memory");
    let attach = |rank| SharedMemory::attach(&segment, rank, 2, WaitPolicy::default()).expect("the rank attaches");
    let (transport, _other_rank) = (Arc::new(attach(0)), attach(1));
    let arenas = Arenas::new(BYTES, Bytes::ZERO, None).expect("a small arena");
    let shape = SampleShape::Features { width: 1, classes: 2 };
    let dataset = Arc::new(Dataset::open(&DataSource::Synthetic, &shape, 0).expect("synthetic data"));
    let samples = Arc::new(Samples::new(dataset, Split::Training, 0, vec![0]));
    let mut interpreter =
        Interpreter::start(&[program], Rank(0), &arenas, transport, Arc::clone(&samples)).expect("the streams start");
    let start = Instant::now();
    let error = interpreter.run(StepRequest {
        program: 0,
        samples,
        next: None,
        hyperparameters: Hyperparameters::default(),
        is_timed: false,
    });
    drop(interpreter);
    assert!(start.elapsed() < Duration::from_secs(5), "it waited for {:?}", start.elapsed());
    error.expect_err("the step fails")
}

#[test]
fn a_failing_kernel_wakes_streams_that_wait_for_other_ranks() {
    let kernel = Kernel::Relu { elements: 16 };
    let error = run_alone(&program(Stream::Compute, Operation::Compute { kernel, accumulate: false, group: None }));
    assert!(matches!(error, ExecutorError::Kernel { .. }), "{error}");
}

/// Without checked arithmetic, this is an ordinary error instead of a panic.
#[cfg(debug_assertions)]
#[test]
fn a_panicking_stream_is_named_and_wakes_the_others() {
    let load = Operation::Load { input: InputKind::Features, first_sample: usize::MAX, samples: 1, order: None };
    let error = run_alone(&program(Stream::Load, load));
    assert!(matches!(error, ExecutorError::Panicked { .. }), "{error}");
    assert!(error.to_string().starts_with("the load stream panicked: "), "{error}");
}
