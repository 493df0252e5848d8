//! One kernel call on its way to the device: operands, grids, arguments and scratch memory. It
//! knows no kernel.

use super::CudaBackend;
use crate::KernelCall;
use crate::cuda::driver::{Arguments, CudaError, DeviceAddress, Launch, MAX_NUMBERS, addresses, sizes};
use foretell_models::{RelativePositions, Zigzag};

/// Threads of a block.
pub(super) const BLOCK: usize = 256;
/// Blocks for each multiprocessor, in kernels whose threads loop over elements: enough to keep it
/// busy.
const BLOCKS_PER_MULTIPROCESSOR: usize = 16;
/// Most blocks of a grid that has one block for each row.
const MAX_ROW_BLOCKS: usize = 1 << 20;

/// Everything that a table of relative-position buckets depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct BucketTableKey {
    pub(super) relative: RelativePositions,
    pub(super) queries: usize,
    pub(super) keys: usize,
    pub(super) query_offset: usize,
}

/// Turns one kernel call into work on the backend's stream.
pub(super) struct Dispatcher<'a> {
    pub(super) backend: &'a mut CudaBackend,
    pub(super) call: &'a KernelCall<'a>,
    /// Whether tensor cores may round single-precision operands to tf32.
    pub(super) tf32: bool,
    /// The kernel's number in an [`IndexFault`](crate::cuda::driver::IndexFault).
    number: i64,
}

/// The grid of a launch. If it has fewer threads than there are elements, each thread loops.
#[derive(Clone, Copy, Debug)]
pub(super) enum Grid {
    /// One thread for each element, in blocks of [`BLOCK`] threads; at most
    /// [`BLOCKS_PER_MULTIPROCESSOR`] blocks for each multiprocessor.
    Elements(usize),
    /// One block for each row, at most [`MAX_ROW_BLOCKS`].
    Rows(usize),
    /// Exactly this many blocks in each dimension.
    Blocks([usize; 3]),
}

impl Grid {
    fn blocks(self, multiprocessors: usize) -> [usize; 3] {
        let limit = multiprocessors.max(1) * BLOCKS_PER_MULTIPROCESSOR;
        match self {
            Grid::Elements(elements) => [elements.div_ceil(BLOCK).min(limit), 1, 1],
            Grid::Rows(rows) => [rows.min(MAX_ROW_BLOCKS), 1, 1],
            Grid::Blocks(blocks) => blocks,
        }
    }
}

/// One launch, without its operands.
#[derive(Clone, Copy, Debug)]
pub(super) struct LaunchConfig<'a> {
    pub(super) function: &'static str,
    pub(super) grid: Grid,
    pub(super) sizes: &'a [usize],
    pub(super) numbers: &'a [f32],
    /// Bytes of dynamic shared memory.
    pub(super) shared: usize,
    /// Threads of a block.
    pub(super) threads: usize,
}

impl<'a> LaunchConfig<'a> {
    /// A launch with blocks of [`BLOCK`] threads, without numbers or dynamic shared memory.
    pub(super) fn new(function: &'static str, grid: Grid, sizes: &'a [usize]) -> Self {
        Self { function, grid, sizes, numbers: &[], shared: 0, threads: BLOCK }
    }
}

impl<'a> Dispatcher<'a> {
    /// Prepares to dispatch a checked call, whose precision is not tf32.
    pub(super) fn new(backend: &'a mut CudaBackend, call: &'a KernelCall<'a>, tf32: bool) -> Self {
        let number = backend.kernel_number(call.kernel);
        Self { backend, call, tf32, number }
    }

    /// Returns the bytes of a number in the run's precision.
    pub(super) fn width(&self) -> usize {
        self.call.precision.size().count() as usize
    }

    /// Returns the address of an operand that is read; null if the call has no such operand.
    pub(super) fn read(&self, index: usize) -> DeviceAddress {
        self.call.reads.get(index).map_or(DeviceAddress::NULL, |operand| DeviceAddress::from_pointer(operand.pointer))
    }

    /// Returns the address of an operand that is written; null if the call has no such operand.
    pub(super) fn written(&self, index: usize) -> DeviceAddress {
        self.call.writes.get(index).map_or(DeviceAddress::NULL, |operand| DeviceAddress::from_pointer(operand.pointer))
    }

    /// Returns a launch's arguments with the call's own operands.
    pub(super) fn arguments(&self, config: &LaunchConfig<'_>) -> Arguments {
        let mut numbers = [0.0; MAX_NUMBERS];
        numbers.iter_mut().zip(config.numbers).for_each(|(slot, &number)| *slot = number);
        Arguments {
            reads: addresses(self.call.reads.iter().map(|operand| DeviceAddress::from_pointer(operand.pointer))),
            writes: addresses(self.call.writes.iter().map(|operand| DeviceAddress::from_pointer(operand.pointer))),
            sizes: sizes(config.sizes),
            numbers,
            step: self.backend.step.0,
            fault: self.backend.fault.0,
            scratch: self.backend.scratch.address.0,
            accumulate: i64::from(self.call.accumulate),
            kernel: self.number,
        }
    }

    /// Queues a launch with the call's own operands.
    pub(super) unsafe fn launch(&mut self, config: LaunchConfig<'_>) -> Result<(), CudaError> {
        let arguments = self.arguments(&config);
        // SAFETY: the caller's promise.
        unsafe { self.launch_with(config, arguments) }
    }

    /// Queues a launch with the given arguments. An empty grid queues nothing.
    pub(super) unsafe fn launch_with(&mut self, config: LaunchConfig<'_>, arguments: Arguments) -> Result<(), CudaError> {
        let blocks = config.grid.blocks(self.backend.driver.device().multiprocessors);
        if blocks.contains(&0) {
            return Ok(());
        }
        let launch = Launch {
            function: config.function,
            precision: self.call.precision,
            grid: blocks.map(|count| u32::try_from(count).unwrap_or(u32::MAX)),
            block: config.threads as u32,
            shared: config.shared as u32,
            arguments,
        };
        // SAFETY: the caller's promise. Scratch memory is the backend's, and used in stream order.
        unsafe { self.backend.driver.launch(&launch, self.backend.stream) }
    }

    /// Queues a launch that reads one address and writes one.
    pub(super) unsafe fn launch_between(
        &mut self,
        config: LaunchConfig<'_>,
        from: DeviceAddress,
        to: DeviceAddress,
    ) -> Result<(), CudaError> {
        let mut arguments = self.arguments(&config);
        (arguments.reads[0], arguments.writes[0]) = (from.0, to.0);
        // SAFETY: the caller's promise.
        unsafe { self.launch_with(config, arguments) }
    }

    /// Returns at least `bytes` of scratch memory. Its contents are undefined, and the next call
    /// may move it.
    pub(super) fn scratch(&mut self, bytes: usize) -> Result<DeviceAddress, CudaError> {
        if bytes > self.backend.scratch.bytes {
            let address = self.backend.driver.allocate(bytes)?;
            let scratch = &mut self.backend.scratch;
            scratch.outgrown.push(std::mem::replace(&mut scratch.address, address));
            scratch.bytes = bytes;
        }
        Ok(self.backend.scratch.address)
    }

    /// Queues filling a written operand with zeros.
    pub(super) unsafe fn clear(&mut self, index: usize) -> Result<(), CudaError> {
        let Some(operand) = self.call.writes.get(index).filter(|operand| operand.bytes > 0) else { return Ok(()) };
        let address = DeviceAddress::from_pointer(operand.pointer);
        // SAFETY: the operand has this length, and the call may write it.
        unsafe { self.backend.driver.clear(address, operand.bytes, self.backend.stream) }
    }

    /// Returns a table in device memory with the bucket of each distance between a query and a key,
    /// the smallest distance first. It is computed and uploaded once for each key.
    pub(super) fn bucket_table(&mut self, key: BucketTableKey) -> Result<DeviceAddress, CudaError> {
        if let Some(&known) = self.backend.bucket_tables.get(&key) {
            return Ok(known);
        }
        let last = (key.query_offset + key.queries).saturating_sub(1) as isize;
        let distances = (key.queries + key.keys).saturating_sub(1);
        let buckets: Vec<i32> = (0..distances).map(|index| key.relative.bucket(index as isize - last) as i32).collect();
        let bytes = size_of_val(buckets.as_slice());
        let address = self.backend.driver.allocate(bytes.max(1))?;
        // SAFETY: the memory was just allocated, with this size. The buckets live until the stream
        // is done.
        unsafe { self.backend.driver.copy_in(address, buckets.as_ptr().cast(), bytes, self.backend.stream) }?;
        self.backend.driver.synchronize(self.backend.stream)?;
        self.backend.bucket_tables.insert(key, address);
        Ok(address)
    }
}

/// Returns the ranks and the chunk of an order of positions; zeros without one.
pub(super) fn order_sizes(order: Option<Zigzag>) -> [usize; 2] {
    order.map_or([0; 2], |order| [order.ranks.get() as usize, order.chunk.get() as usize])
}
