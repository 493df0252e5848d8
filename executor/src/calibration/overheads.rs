//! The interpreter's costs beside kernels and communication, measured by running Programs that do
//! next to nothing.

use super::kernel_error;
use super::statistics::summarise;
use crate::backend::cuda::CudaTimer;
use crate::backend::{Backend, CpuBackend, Hyperparameters, KernelCall, Operand};
use crate::clock;
use crate::data::{DataSource, Dataset, SampleShape, Split};
use crate::error::ExecutorError;
use crate::interpreter::{Interpreter, StepRequest};
use crate::job::Overheads;
use crate::member::Member;
use crate::samples::Samples;
use foretell_models::Kernel;
use foretell_program::{
    Axis, Buffer, BufferId, BufferRole, Collective, CollectiveAlgorithm, CollectiveRole, Few, Group, GroupId, Instruction,
    InstructionId, MemoryKind, Mesh, Operation, Phase, Program, Sample, StageProgram, Stream, StreamId,
};
use foretell_units::{Bytes, DataType, Flops, Seconds};
use std::sync::Arc;

/// Instructions of a timed Program.
const INSTRUCTIONS: usize = 400;
/// Steps that each Program runs.
const RUNS: usize = 60;
/// Elements of a kernel that takes next to no time.
const TINY_ELEMENTS: usize = 16;
/// Elements of a kernel that fills a first-level cache, as a step's kernels do. The instruction
/// after it finds its own data farther away.
const USUAL_ELEMENTS: usize = 32 << 10;
/// Approximate number of elements that the kernels of one run touch: a run of larger kernels has
/// fewer of them.
const RUN_ELEMENTS: usize = 16 << 20;
/// Bytes that are written between steps: more than a second-level cache holds.
const BYTES_BETWEEN_STEPS: usize = 2 << 20;

impl Overheads {
    /// Converts measurements from a device that has a fraction of a core's time to a whole core.
    /// Handoffs are mostly waiting, and stay unchanged.
    pub(super) fn scale_to_whole_core(&mut self, fraction: f64) {
        let scaled = |sample: Sample| Sample {
            median: sample.median * fraction,
            p10: sample.p10 * fraction,
            p90: sample.p90 * fraction,
            ..sample
        };
        self.instruction = scaled(self.instruction);
        self.step = scaled(self.step);
    }
}

/// The instructions of a Program that are collectives of this rank alone, on a stream of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Collectives {
    None,
    /// Every second instruction. Each instruction then depends on the one before it.
    Alternate,
    /// One after all kernels. It keeps a GPU from launching the step as one graph
    /// ([`StageProgram::is_alone`]).
    Last,
}

/// Measures the overheads of this rank, while the other ranks do the same. A step touches about
/// `bytes_between` between two handoffs, which displace data from the caches.
pub(super) fn measure(member: &Member, bytes_between: Bytes) -> Result<Overheads, ExecutorError> {
    let empty = time_steps(member, &program(member, 0, TINY_ELEMENTS, Collectives::None)?)?;
    let tiny_kernels = time_steps(member, &program(member, INSTRUCTIONS, TINY_ELEMENTS, Collectives::None)?)?;
    let elements = (bytes_between.count() as usize / size_of::<f32>()).max(USUAL_ELEMENTS);
    let instructions = (RUN_ELEMENTS / elements).clamp(32, INSTRUCTIONS);
    let without_handoffs = time_steps(member, &program(member, instructions, elements, Collectives::None)?)?;
    let with_handoffs = time_steps(member, &program(member, instructions, elements, Collectives::Alternate)?)?;
    let kernel = time_kernel(member)?;
    // The time per instruction, without the step's overhead and the instruction's own work.
    let per_instruction = |total: &Sample, count: usize, work: Seconds| {
        let part = |time: Seconds| ((time - empty.median) / count as f64 - work).max(Seconds::ZERO);
        Sample { median: part(total.median), p10: part(total.p10), p90: part(total.p90), count: total.count }
    };
    let instruction = per_instruction(&tiny_kernels, INSTRUCTIONS, kernel);
    // Half of the instructions are kernels, and each instruction hands over to the next.
    let work = (without_handoffs.median - empty.median) / instructions as f64 / 2.0;
    let handoff = per_instruction(&with_handoffs, instructions, work);
    Ok(Overheads {
        instruction,
        handoff,
        launch: time_launch(member)?,
        step: empty,
        load_seconds_per_byte: Seconds::ZERO,
        communication_share: 0.0,
        communication_growth: None,
    })
}

/// The host time to launch a GPU kernel in a step that is not one graph; zero without a GPU. The
/// kernels are so small that each is done before the next one is launched.
fn time_launch(member: &Member) -> Result<Seconds, ExecutorError> {
    if member.device.is_none() {
        return Ok(Seconds::ZERO);
    }
    let empty = time_steps(member, &program(member, 0, TINY_ELEMENTS, Collectives::Last)?)?;
    let kernels = time_steps(member, &program(member, INSTRUCTIONS, TINY_ELEMENTS, Collectives::Last)?)?;
    Ok(((kernels.median - empty.median) / INSTRUCTIONS as f64).max(Seconds::ZERO))
}

/// A Program of `count` instructions on `elements` elements each, all on the same buffer, plus the
/// last collective if there is one. Every rank is a pipeline stage of its own.
fn program(member: &Member, count: usize, elements: usize, collectives: Collectives) -> Result<Program, ExecutorError> {
    let size = |axis| if axis == Axis::Pipeline { member.world_size } else { 1 };
    let mesh = Mesh::new(size, &[]).ok_or(ExecutorError::OtherStream)?;
    let bytes = Bytes::new(4 * elements as u64);
    let buffer = Buffer {
        name: "x".into(),
        role: BufferRole::Activation,
        shape: [elements].into(),
        data_type: DataType::Fp32,
        parent: None,
        memory: MemoryKind::Device,
        offset: Bytes::ZERO,
        bytes,
        persistent: true,
        lifetime: None,
        state: None,
    };
    let instruction = |index: usize| {
        let is_collective = index == count || (collectives == Collectives::Alternate && index % 2 == 1);
        let operation = match is_collective {
            true => Operation::Collective {
                kind: Collective::AllReduce,
                group: GroupId(0),
                bytes,
                data_type: DataType::Fp32,
                algorithm: CollectiveAlgorithm::Automatic,
                role: CollectiveRole::Gradients,
            },
            false => Operation::Compute { kernel: Kernel::Relu { elements }, accumulate: false, group: None },
        };
        let waits = index > 0 && (is_collective || collectives == Collectives::Alternate);
        let after = if waits { Few::from_slice(&[InstructionId(index as u32 - 1)]) } else { Few::new() };
        let (reads, writes) = (Few::from_slice(&[BufferId(0)]), Few::from_slice(&[BufferId(0)]));
        let operation = operation.into();
        let stream = StreamId(u16::from(is_collective));
        Instruction { name: 0, operation, stream, after, reads, writes, micro_batch: None, phase: Phase::Forward }
    };
    let stage = |stage| StageProgram {
        stage,
        streams: vec![Stream::Compute, Stream::Group(GroupId(0))],
        groups: vec![Group::along(Axis::Data)],
        peers: Vec::new(),
        buffers: vec![buffer.clone()],
        instructions: (0..count + usize::from(collectives == Collectives::Last)).map(instruction).collect(),
        names: vec!["overhead".into()],
        passes: Vec::new(),
        metrics: Vec::new(),
        arena: bytes,
        host_arena: Bytes::ZERO,
    };
    Ok(Program {
        lists: (0..member.world_size).map(stage).collect(),
        list_of_rank: Program::one_list_per_stage(&mesh),
        mesh,
        precision: DataType::Fp32,
        format: DataType::Fp32,
        samples: 1,
        predictions: 1,
        tokens: None,
        model_flops: Flops::ZERO,
        hardware_flops: Flops::ZERO,
    })
}

/// Times whole steps of a Program, with a warm interpreter and cold caches.
fn time_steps(member: &Member, program: &Program) -> Result<Sample, ExecutorError> {
    let size = program.lists.iter().map(|list| list.arena).fold(Bytes::new(64), Bytes::max);
    let arenas = member.arenas(size, Bytes::ZERO)?;
    let mut other_data = vec![0u8; BYTES_BETWEEN_STEPS];
    let shape = SampleShape::Features { width: 1, classes: 2 };
    let dataset = Arc::new(Dataset::open(&DataSource::Synthetic, &shape, 0)?);
    let samples = Arc::new(Samples::new(dataset, Split::Training, 0, Vec::new()));
    let mut interpreter =
        Interpreter::start(&[program], member.rank, &arenas, Arc::clone(&member.transport), Arc::clone(&samples))?;
    let mut seconds = Vec::new();
    for round in 0..RUNS {
        // A step finds other data in the caches.
        std::hint::black_box(&mut other_data).fill(round as u8);
        let start = clock::now();
        let hyperparameters = Hyperparameters::default();
        interpreter.run(StepRequest {
            program: 0,
            samples: Arc::clone(&samples),
            next: None,
            hyperparameters,
            is_timed: false,
        })?;
        seconds.push((clock::now() - start) as f64 * 1e-9);
    }
    seconds.drain(..RUNS / 4);
    Ok(summarise(seconds))
}

/// The duration of a tiny kernel by itself.
fn time_kernel(member: &Member) -> Result<Seconds, ExecutorError> {
    let arena = member.arena(Bytes::new(64))?;
    let operand = Operand { pointer: arena.at(Bytes::ZERO, Bytes::new(64)).expect("invariant: the arena is as long"), bytes: 64 };
    let mut backend = CpuBackend::new();
    let kernel = Kernel::Relu { elements: TINY_ELEMENTS };
    let hyperparameters = Hyperparameters::default();
    let call = KernelCall {
        kernel: &kernel,
        reads: &[operand],
        writes: &[operand],
        accumulate: false,
        hyperparameters: &hyperparameters,
        group_index: 0,
        samples_before: 0,
        precision: DataType::Fp32,
    };
    if let Some(driver) = arena.driver() {
        // SAFETY: the operand is the whole arena, and a ReLU may work in place.
        let seconds = unsafe { CudaTimer::new(driver)?.time(&[call], Seconds::new(0.01), 5..100) };
        let seconds = seconds.map_err(|source| kernel_error(&kernel, source))?;
        return Ok(summarise(seconds).median);
    }
    let start = clock::now();
    for _ in 0..INSTRUCTIONS {
        // SAFETY: the operand is the whole arena, and a ReLU may work in place.
        unsafe { backend.run(&call) }.map_err(|source| kernel_error(&kernel, source))?;
    }
    Ok(Seconds::new((clock::now() - start) as f64 * 1e-9 / INSTRUCTIONS as f64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cuda::Driver;
    use crate::backend::cuda::tests::device::{DriverCall, TestDevice};
    use crate::transport::{Announcement, ControlClient, ControlServer, RunKey, Segment, SegmentShape, SharedMemory, WaitPolicy};
    use foretell_program::Rank;
    use std::net::{Ipv4Addr, SocketAddr};
    use std::time::Duration;

    /// The only rank of a run, and the launcher's end of its connection, which must outlive it.
    fn single_rank(device: Option<Arc<TestDevice>>) -> (Member, ControlServer) {
        let key = RunKey::generate().expect("a key");
        let server = ControlServer::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), &key, 1).expect("it listens");
        let (address, wait) = (server.address(), Duration::from_secs(30));
        let announcement = Announcement { address: None, machine: "test".into() };
        let control = std::thread::scope(|scope| {
            let joining = scope.spawn(|| ControlClient::join(address, &key, 0, &announcement, wait));
            server.wait_for_ranks(wait).expect("the rank joins");
            joining.join().expect("it ends").expect("it joins").0
        });
        let segment = Segment::create(&SegmentShape::new(vec![0], crate::interpreter::STREAM_COUNT)).expect("shared memory");
        let transport = Arc::new(SharedMemory::attach(&segment, 0, 1, WaitPolicy::default()).expect("the rank attaches"));
        let device = device.map(|device| device as Arc<dyn Driver>);
        (
            Member {
                rank: Rank(0),
                world_size: 1,
                control: Arc::new(control),
                transport,
                device,
                cpus: Vec::new(),
                disk: Arc::new(crate::disk::SystemDisk),
                gate: Arc::default(),
            },
            server,
        )
    }

    #[test]
    fn launches_are_timed_in_steps_that_are_not_one_graph() {
        for make in [TestDevice::new as fn() -> Option<Arc<TestDevice>>, TestDevice::with_collectives] {
            let Some(device) = make() else { return };
            let (member, _server) = single_rank(Some(Arc::clone(&device)));
            assert!(time_launch(&member).expect("it is timed") > Seconds::ZERO);
            let calls = device.take_calls();
            let kernels = calls.iter().filter(|call| matches!(call, DriverCall::Launch { .. })).count();
            assert!(kernels >= RUNS * INSTRUCTIONS, "{kernels} kernels were launched one by one");
            assert!(!calls.iter().any(|call| matches!(call, DriverCall::Graph { .. })), "a step was one graph");
            // Without a collective, steps are graphs after the warm-up.
            let kernels_only = program(&member, 8, TINY_ELEMENTS, Collectives::None).expect("a Program");
            time_steps(&member, &kernels_only).expect("it is timed");
            let graphs = device.take_calls().iter().filter(|call| matches!(call, DriverCall::Graph { .. })).count();
            assert_eq!(graphs, RUNS - 2);
        }
    }

    #[test]
    fn a_cpu_has_no_launch_overhead() {
        let (member, _server) = single_rank(None);
        let measured = measure(&member, Bytes::ZERO).expect("it is timed");
        assert_eq!(measured.launch, Seconds::ZERO);
        assert!(measured.step.median > Seconds::ZERO);
    }
}
