//! One call of a kernel as launches on the backend's stream: its operands, the grid, scratch memory, and which family it goes to.

use super::arguments::{Arguments, NUMBERS, addresses, sizes};
use super::driver::{DeviceAddress, Epilogue, Factor, Last, Launch, Product};
use super::{BucketsOf, CudaBackend, CudaError};
use crate::backend::{BackendError, KernelCall};
use foretell_models::Kernel;
use foretell_units::DataType;

/// Threads of a block.
pub(super) const BLOCK: usize = 256;
/// Blocks a processor of the GPU, for kernels whose threads go on to further elements: enough to keep it busy.
const BLOCKS_OF_A_MULTIPROCESSOR: usize = 16;
/// Blocks of a grid of rows.
const MOST_ROWS: usize = 1 << 20;

/// A call on its way to the device.
pub(super) struct Queue<'a> {
    pub(super) backend: &'a mut CudaBackend,
    pub(super) call: &'a KernelCall<'a>,
    pub(super) tf32: bool,
    number: i64,
}

/// How many blocks, of [`BLOCK`] threads each.
#[derive(Clone, Copy, Debug)]
pub(super) enum Grid {
    /// About a thread for so many elements; each goes on to others.
    Elements(usize),
    /// A block for each row; each may go on to others.
    Rows(usize),
    /// Exactly so many.
    Blocks([usize; 3]),
}

impl Grid {
    fn blocks(self, multiprocessors: usize) -> [usize; 3] {
        let most = multiprocessors.max(1) * BLOCKS_OF_A_MULTIPROCESSOR;
        match self {
            Grid::Elements(elements) => [elements.div_ceil(BLOCK).min(most), 1, 1],
            Grid::Rows(rows) => [rows.min(MOST_ROWS), 1, 1],
            Grid::Blocks(blocks) => blocks,
        }
    }
}

/// How `product.cu` knows what is done last.
fn number_of(last: Last) -> usize {
    match last {
        Last::Nothing => 0,
        Last::Relu => 1,
        Last::Gelu => 2,
        Last::GeluKept(_) => 3,
        Last::GeluSlope(_) => 4,
    }
}

/// One launch of a call: what differs from the call's own operands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work<'a> {
    pub(super) function: &'static str,
    pub(super) grid: Grid,
    pub(super) sizes: &'a [usize],
    pub(super) numbers: &'a [f32],
    /// Bytes of shared memory beside what the kernel itself declares.
    pub(super) shared: usize,
    /// Threads of a block.
    pub(super) threads: usize,
}

impl<'a> Work<'a> {
    pub(super) fn new(function: &'static str, grid: Grid, sizes: &'a [usize]) -> Self {
        Self { function, grid, sizes, numbers: &[], shared: 0, threads: BLOCK }
    }
}

impl<'a> Queue<'a> {
    pub(super) fn new(backend: &'a mut CudaBackend, call: &'a KernelCall<'a>, tf32: bool) -> Self {
        let number = backend.number_of(call.kernel);
        Self { backend, call, tf32, number }
    }

    /// Bytes of a number of the run's precision.
    pub(super) fn width(&self) -> usize {
        self.call.precision.size().count() as usize
    }

    pub(super) fn read(&self, place: usize) -> DeviceAddress {
        self.call.reads.get(place).map_or(DeviceAddress(0), |operand| DeviceAddress::of(operand.pointer))
    }

    pub(super) fn written(&self, place: usize) -> DeviceAddress {
        self.call.writes.get(place).map_or(DeviceAddress(0), |operand| DeviceAddress::of(operand.pointer))
    }

    /// The call's own operands as arguments.
    pub(super) fn arguments(&self, work: &Work<'_>) -> Arguments {
        let mut numbers = [0.0; NUMBERS];
        numbers.iter_mut().zip(work.numbers).for_each(|(place, &number)| *place = number);
        Arguments {
            reads: addresses(self.call.reads.iter().map(|operand| DeviceAddress::of(operand.pointer))),
            writes: addresses(self.call.writes.iter().map(|operand| DeviceAddress::of(operand.pointer))),
            sizes: sizes(work.sizes),
            numbers,
            step: self.backend.step.0,
            fault: self.backend.fault.0,
            scratch: self.backend.scratch.address.0,
            accumulate: i64::from(self.call.accumulate),
            kernel: self.number,
        }
    }

    /// Launches with the call's own operands.
    pub(super) unsafe fn launch(&mut self, work: Work<'_>) -> Result<(), CudaError> {
        let arguments = self.arguments(&work);
        // SAFETY: the caller's promise.
        unsafe { self.launch_with(work, arguments) }
    }

    /// Launches with operands that the caller has put together; nothing where there is nothing to do.
    pub(super) unsafe fn launch_with(&mut self, work: Work<'_>, arguments: Arguments) -> Result<(), CudaError> {
        let blocks = work.grid.blocks(self.backend.driver.device().multiprocessors);
        if blocks.contains(&0) {
            return Ok(());
        }
        let launch = Launch {
            function: work.function,
            precision: self.call.precision,
            grid: blocks.map(|count| u32::try_from(count).unwrap_or(u32::MAX)),
            block: work.threads as u32,
            shared: work.shared as u32,
            arguments,
        };
        // SAFETY: the caller's promise; scratch memory is the backend's, and its stream keeps the order.
        unsafe { self.backend.driver.launch(&launch, self.backend.stream) }
    }

    /// At least so many bytes of scratch memory, whose contents are anything.
    pub(super) fn scratch(&mut self, bytes: usize) -> Result<DeviceAddress, CudaError> {
        if bytes > self.backend.scratch.bytes {
            let address = self.backend.driver.allocate(bytes)?;
            let scratch = &mut self.backend.scratch;
            scratch.outgrown.push(std::mem::replace(&mut scratch.address, address));
            scratch.bytes = bytes;
        }
        Ok(self.backend.scratch.address)
    }

    /// Zeros.
    pub(super) unsafe fn clear(&mut self, place: usize) -> Result<(), CudaError> {
        let Some(operand) = self.call.writes.get(place).filter(|operand| operand.bytes > 0) else { return Ok(()) };
        // SAFETY: the operand is as long, and the caller's to write.
        unsafe { self.backend.driver.clear(DeviceAddress::of(operand.pointer), operand.bytes, self.backend.stream) }
    }

    /// A product. Where the library has no way with what is done beside it, that is done by a kernel of our own afterwards; where it has no way at all,
    /// so is the product. Sums on the way are the library's or nobody's: [`CudaError::ProductNotSupported`], and nothing was queued then.
    pub(super) unsafe fn multiply(&mut self, product: Product) -> Result<(), CudaError> {
        debug_assert!(product.batch == 1 || product.epilogue.is_plain(), "what is done beside a product is done to one");
        let Product { batch, rows, columns, contracted, left, right, epilogue, .. } = product;
        let not_supported = CudaError::ProductNotSupported { rows, columns, contracted };
        if batch * rows * columns == 0 {
            return if epilogue.sums.is_some() { Err(not_supported) } else { Ok(()) };
        }
        let plain = Product { epilogue: Epilogue::default(), ..product };
        let has_sums = epilogue.sums.is_some();
        let ways = [Some(&product), Some(&plain).filter(|_| !epilogue.is_plain() && !has_sums)];
        for way in ways.into_iter().flatten().filter(|_| contracted > 0) {
            // SAFETY: the caller's promise.
            match unsafe { self.backend.driver.multiply(way, self.backend.stream) } {
                Err(CudaError::ProductNotSupported { .. } | CudaError::MissingLibrary { .. }) => {}
                Err(error) => return Err(error),
                Ok(()) if way.epilogue == epilogue => return Ok(()),
                // SAFETY: the caller's promise.
                Ok(()) => return unsafe { self.finish_product(&product) },
            }
        }
        if has_sums {
            return Err(not_supported);
        }
        if let Some(factors) = product.factors {
            // SAFETY: the caller's promise.
            return unsafe { self.multiply_decoded(&product, factors) };
        }
        let is_single = product.output != product.input || self.call.precision == DataType::Fp32;
        let flags = [left.is_transposed, right.is_transposed, epilogue.bias.is_some(), is_single].map(usize::from);
        let [left_pitch, right_pitch, result_pitch] = product.stored().map(|[.., pitch]| pitch);
        let last = number_of(epilogue.last);
        let sizes =
            [rows, columns, contracted, flags[0], flags[1], flags[2], last, flags[3], left_pitch, right_pitch, result_pitch];
        let tiles = rows.div_ceil(16) * columns.div_ceil(16);
        // SAFETY: the caller's promise.
        unsafe { self.launch_product(Work::new("product", Grid::Blocks([tiles, 1, batch]), &sizes), &product) }
    }

    /// What is done to a product's result, apart from it.
    unsafe fn finish_product(&mut self, product: &Product) -> Result<(), CudaError> {
        let Product { rows, columns, epilogue, .. } = *product;
        let pitch = product.result_pitch.unwrap_or(columns);
        let sizes = [rows, columns, usize::from(epilogue.bias.is_some()), number_of(epilogue.last), pitch];
        // SAFETY: the caller's promise.
        unsafe { self.launch_product(Work::new("finish_product", Grid::Elements(rows * columns), &sizes), product) }
    }

    /// A kernel of `product.cu`, whose operands are a product's.
    unsafe fn launch_product(&mut self, work: Work<'_>, product: &Product) -> Result<(), CudaError> {
        let Product { left, right, epilogue, .. } = *product;
        let mut arguments = self.arguments(&work);
        let nowhere = DeviceAddress(0);
        let (given, kept) = match epilogue.last {
            Last::GeluSlope(given) => (given, nowhere),
            Last::GeluKept(kept) => (nowhere, kept),
            Last::Nothing | Last::Relu | Last::Gelu => (nowhere, nowhere),
        };
        arguments.reads = addresses([left.address, right.address, epilogue.bias.unwrap_or(nowhere), given]);
        arguments.writes = addresses([product.result, kept]);
        arguments.accumulate = i64::from(product.accumulate);
        // SAFETY: the caller's promise.
        unsafe { self.launch_with(work, arguments) }
    }

    /// A product of matrices of the call's precision, each of which is as the caller says.
    pub(super) fn product(
        &self,
        [rows, columns, contracted]: [usize; 3],
        left: Factor,
        right: Factor,
        result: DeviceAddress,
    ) -> Product {
        let input = self.call.precision;
        let (epilogue, factors) = (Epilogue::default(), None);
        let (batch, accumulate, tf32) = (1, false, self.tf32);
        let (output, result_pitch) = (input, None);
        Product {
            batch,
            rows,
            columns,
            contracted,
            left,
            right,
            result,
            result_pitch,
            input,
            output,
            accumulate,
            epilogue,
            tf32,
            factors,
        }
    }

    /// For each distance between a query and a key its bucket, in the device's memory.
    pub(super) fn buckets(&mut self, of: BucketsOf) -> Result<DeviceAddress, CudaError> {
        if let Some(&known) = self.backend.tables.get(&of) {
            return Ok(known);
        }
        let last = (of.query_offset + of.queries).saturating_sub(1) as isize;
        let distances = (of.queries + of.keys).saturating_sub(1);
        let buckets: Vec<i32> = (0..distances).map(|place| of.relative.bucket(place as isize - last) as i32).collect();
        let bytes = size_of_val(buckets.as_slice());
        let address = self.backend.driver.allocate(bytes.max(1))?;
        // SAFETY: the memory was just allocated, of that size; the numbers live until the stream is done.
        unsafe { self.backend.driver.copy_in(address, buckets.as_ptr().cast(), bytes, self.backend.stream) }?;
        self.backend.driver.synchronize(self.backend.stream)?;
        self.backend.tables.insert(of, address);
        Ok(address)
    }

    /// Queues what a kernel does.
    ///
    /// # Safety
    /// The call's operands are checked, and valid in the device's memory.
    pub(super) unsafe fn enqueue(&mut self, kernel: &Kernel) -> Result<(), BackendError> {
        // SAFETY: the caller's promise.
        let is_known = unsafe {
            self.product_kernel(kernel)?
                || self.eight_bit_kernel(kernel)?
                || self.elementwise_kernel(kernel)?
                || self.norm_kernel(kernel)?
                || self.image_kernel(kernel)?
                || self.attention_kernel(kernel)?
                || self.movement_kernel(kernel)?
                || self.training_kernel(kernel)?
                || self.recurrent_kernel(kernel)?
        };
        debug_assert!(is_known, "{kernel:?} is of no family");
        Ok(())
    }
}
