//! What the interpreter costs beside kernels and communication, found by having it interpret Programs that do next to nothing.

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

/// Instructions of the Programs that are timed.
const INSTRUCTIONS: usize = 400;
/// Runs of each.
const RUNS: usize = 60;
/// Elements of a kernel that takes next to no time.
const TINY: usize = 16;
/// Those of one that takes a first-level cache for itself, as a step's kernels do: what runs next finds its own things further away.
const USUAL: usize = 32 << 10;
/// Elements that the kernels of a run touch, about: of larger ones there are fewer.
const RUN_ELEMENTS: usize = 16 << 20;
/// Written between steps: beyond a second-level cache.
const BETWEEN_STEPS: usize = 2 << 20;

impl Overheads {
    /// What was measured on a device that has a share of a core's time, as a whole core would take it. What a hand-over takes is mostly
    /// waiting, and stays.
    pub(crate) fn at_speed(&mut self, share: f64) {
        let whole =
            |sample: Sample| Sample { median: sample.median * share, p10: sample.p10 * share, p90: sample.p90 * share, ..sample };
        self.instruction = whole(self.instruction);
        self.step = whole(self.step);
    }
}

/// Which of a Program's instructions are a collective of this rank alone, on a stream of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Exchanges {
    None,
    /// Every second one, each of which waits for the one before it.
    Alternate,
    /// One after all kernels: the step is not alone any more ([`StageProgram::is_alone`]), and a GPU's is not launched as one.
    Last,
}

/// Measures on this rank; the others do the same at the same time. `between` is about what a step touches between two hand-overs: so much
/// further away is what the next one needs.
pub(crate) fn measure(member: &Member, between: Bytes) -> Result<Overheads, ExecutorError> {
    let empty = run(member, &program(member, 0, TINY, Exchanges::None)?)?;
    let straight = run(member, &program(member, INSTRUCTIONS, TINY, Exchanges::None)?)?;
    let elements = (between.count() as usize / size_of::<f32>()).max(USUAL);
    let handed = (RUN_ELEMENTS / elements).clamp(32, INSTRUCTIONS);
    let usual = run(member, &program(member, handed, elements, Exchanges::None)?)?;
    let handing = run(member, &program(member, handed, elements, Exchanges::Alternate)?)?;
    let kernel = time_kernel(member)?;
    let each = |total: &Sample, count: usize, less: Seconds| {
        let part = |time: Seconds| ((time - empty.median) / count as f64 - less).max(Seconds::ZERO);
        Sample { median: part(total.median), p10: part(total.p10), p90: part(total.p90), count: total.count }
    };
    let instruction = each(&straight, INSTRUCTIONS, kernel);
    // Every second instruction is the other stream's: each hands over to the next.
    let handoff = each(&handing, handed, (usual.median - empty.median) / handed as f64 / 2.0);
    Ok(Overheads {
        instruction,
        handoff,
        launch: launch(member)?,
        step: empty,
        load_seconds_per_byte: Seconds::ZERO,
        communication_share: 0.0,
        communication_growth: None,
    })
}

/// What a GPU's host takes to launch a kernel of a step that it does not launch as one; nothing where there is no GPU. A kernel that does next to nothing
/// is done sooner than the next one is launched.
fn launch(member: &Member) -> Result<Seconds, ExecutorError> {
    if member.device.is_none() {
        return Ok(Seconds::ZERO);
    }
    let none = run(member, &program(member, 0, TINY, Exchanges::Last)?)?;
    let all = run(member, &program(member, INSTRUCTIONS, TINY, Exchanges::Last)?)?;
    Ok(((all.median - none.median) / INSTRUCTIONS as f64).max(Seconds::ZERO))
}

/// `count` instructions on so many elements one after the other, and the exchange after them if there is one.
fn program(member: &Member, count: usize, elements: usize, exchanges: Exchanges) -> Result<Program, ExecutorError> {
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
        initial: None,
    };
    let instruction = |index: usize| {
        let other = index == count || (exchanges == Exchanges::Alternate && index % 2 == 1);
        let operation = match other {
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
        let waits = index > 0 && (other || exchanges == Exchanges::Alternate);
        let after = if waits { Few::from_slice(&[InstructionId(index as u32 - 1)]) } else { Few::new() };
        let (reads, writes) = (Few::from_slice(&[BufferId(0)]), Few::from_slice(&[BufferId(0)]));
        let operation = operation.into();
        let stream = StreamId(u16::from(other));
        Instruction { name: 0, operation, stream, after, reads, writes, micro_batch: None, phase: Phase::Forward }
    };
    let stage = |stage| StageProgram {
        stage,
        streams: vec![Stream::Compute, Stream::Group(GroupId(0))],
        groups: vec![Group::along(Axis::Data)],
        peers: Vec::new(),
        buffers: vec![buffer.clone()],
        instructions: (0..count + usize::from(exchanges == Exchanges::Last)).map(instruction).collect(),
        names: vec!["overhead".into()],
        passes: Vec::new(),
        metrics: Vec::new(),
        arena: bytes,
        host_arena: Bytes::ZERO,
    };
    Ok(Program {
        lists: (0..member.world_size).map(stage).collect(),
        list_of_rank: Program::one_list_a_stage(&mesh),
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

/// Times whole steps of a Program.
fn run(member: &Member, program: &Program) -> Result<Sample, ExecutorError> {
    let size = program.lists.iter().map(|list| list.arena).fold(Bytes::new(64), Bytes::max);
    let arenas = member.arenas(size, Bytes::ZERO)?;
    let mut other = vec![0u8; BETWEEN_STEPS];
    let shape = SampleShape::Features { width: 1, classes: 2 };
    let dataset = Arc::new(Dataset::open(&DataSource::Synthetic, &shape, 0)?);
    let samples = Arc::new(Samples { dataset, split: Split::Training, indices: Vec::new() });
    let mut interpreter =
        Interpreter::start(&[program], member.rank, &arenas, Arc::clone(&member.transport), Arc::clone(&samples))?;
    let mut seconds = Vec::new();
    for round in 0..RUNS {
        // A step finds the caches full of what the one before did.
        std::hint::black_box(&mut other).fill(round as u8);
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

fn time_kernel(member: &Member) -> Result<Seconds, ExecutorError> {
    let arena = member.arena(Bytes::new(64))?;
    let operand = Operand { pointer: arena.at(Bytes::ZERO, Bytes::new(64)).unwrap_or(std::ptr::null_mut()), bytes: 64 };
    let mut backend = CpuBackend::new();
    let kernel = Kernel::Relu { elements: TINY };
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
        // SAFETY: the operand is the whole arena, and ReLU may work in place.
        let seconds = unsafe { CudaTimer::new(driver)?.time(&[call], Seconds::new(0.01), 5..100) };
        let seconds = seconds.map_err(|source| kernel_error(&kernel, source))?;
        return Ok(summarise(seconds).median);
    }
    let start = clock::now();
    for _ in 0..INSTRUCTIONS {
        // SAFETY: the operand is the whole arena, and ReLU may work in place.
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

    /// The only rank of a run; the launcher's end of its connection is to outlive it.
    fn alone(device: Option<Arc<TestDevice>>) -> (Member, ControlServer) {
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
        (Member { rank: Rank(0), world_size: 1, control: Arc::new(control), transport, device }, server)
    }

    #[test]
    fn launches_are_timed_in_steps_that_are_launched_kernel_by_kernel() {
        for make in [TestDevice::new as fn() -> Option<Arc<TestDevice>>, TestDevice::direct] {
            let Some(device) = make() else { return };
            let (member, _server) = alone(Some(Arc::clone(&device)));
            assert!(launch(&member).expect("it is timed") > Seconds::ZERO);
            let told = device.take_calls();
            let kernels = told.iter().filter(|told| matches!(told, DriverCall::Launch { .. })).count();
            assert!(kernels >= RUNS * INSTRUCTIONS, "{kernels} kernels were launched one by one");
            assert!(!told.iter().any(|told| matches!(told, DriverCall::Graph { .. })), "a step was launched as one");
            // What an instruction takes of a step that is launched as one is another question.
            let straight = program(&member, 8, TINY, Exchanges::None).expect("a Program");
            run(&member, &straight).expect("it is timed");
            let graphs = device.take_calls().iter().filter(|told| matches!(told, DriverCall::Graph { .. })).count();
            assert_eq!(graphs, RUNS - 2);
        }
    }

    #[test]
    fn a_processor_launches_nothing() {
        let (member, _server) = alone(None);
        let measured = measure(&member, Bytes::ZERO).expect("it is timed");
        assert_eq!(measured.launch, Seconds::ZERO);
        assert!(measured.step.median > Seconds::ZERO);
    }
}
