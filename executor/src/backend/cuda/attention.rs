//! Attention and its gradient, and rotary positions.

use super::arguments::Arguments;
use super::queue::{BLOCK, Grid, Queue, Work};
use super::{BucketsOf, CudaError};
use crate::backend::BackendError;
use foretell_models::{Attention, Kernel, KeyStep, Rope};
use foretell_units::DataType;

/// Rows of a tile.
const TILE: usize = 32;
/// The most features of a head that the kernels are made for.
const MOST_FEATURES: usize = 256;

/// The names of a kernel for heads of up to 64, 128 and 256 features.
struct Names([&'static str; 3]);

const FORWARD: Names = Names(["attention_64", "attention_128", "attention_256"]);
const QUERIES: Names = Names(["attention_query_gradient_64", "attention_query_gradient_128", "attention_query_gradient_256"]);
const KEYS: Names = Names(["attention_key_gradient_64", "attention_key_gradient_128", "attention_key_gradient_256"]);

/// The names of a kernel on tensor cores for heads of up to 64 and of up to 128 features, each with and without dropout and relative
/// positions.
struct TensorNames([[&'static str; 2]; 2]);

const TENSOR_FORWARD: TensorNames =
    TensorNames([["attention_tensor_64", "attention_tensor_64_plain"], ["attention_tensor_128", "attention_tensor_128_plain"]]);
const TENSOR_QUERIES: TensorNames = TensorNames([
    ["attention_tensor_query_gradient_64", "attention_tensor_query_gradient_64_plain"],
    ["attention_tensor_query_gradient_128", "attention_tensor_query_gradient_128_plain"],
]);
const TENSOR_KEYS: TensorNames = TensorNames([
    ["attention_tensor_key_gradient_64", "attention_tensor_key_gradient_64_plain"],
    ["attention_tensor_key_gradient_128", "attention_tensor_key_gradient_128_plain"],
]);
/// Heads of fewer features would leave most of a tile of 64 empty.
const FEWEST_TENSOR_FEATURES: usize = 32;
/// The most features of a head that tensor cores' kernels are made for.
const MOST_TENSOR_FEATURES: usize = 128;
/// Threads of a block on tensor cores: four warps.
const TENSOR_BLOCK: usize = 128;
/// The compute capability from which on there are asynchronous copies, and bf16 on tensor cores.
const TENSOR_CAPABILITY: (u32, u32) = (8, 0);

/// One of the kernels on tensor cores: `attention_tensor.cu` has the same tiles.
#[derive(Clone, Copy)]
enum OnTensorCores {
    Forward,
    Queries,
    Keys,
}

impl OnTensorCores {
    /// Its name, rows of its own of a block, and the bytes of shared memory, for heads that are filled up to so many features.
    fn of(self, features: usize, is_plain: bool) -> (&'static str, usize, usize) {
        let row = 2 * (features + 8);
        // Sixteen rows of a warp twice, where the sums of a head leave registers for them.
        let rows = 64 * (128 / features);
        let (names, rows, shared) = match self {
            OnTensorCores::Forward => (TENSOR_FORWARD, 128, (128 + 2 * 64) * row),
            OnTensorCores::Queries => (TENSOR_QUERIES, rows, (2 * rows + 4 * 64) * row),
            OnTensorCores::Keys => {
                let columns = 64 / (128 / features);
                (TENSOR_KEYS, rows, 2 * rows * row + 2 * columns * (2 * row + 2 * size_of::<f32>() + size_of::<u64>()))
            }
        };
        (names.0[usize::from(features > 64)][usize::from(is_plain)], rows, shared)
    }
}

impl Names {
    fn of(&self, features: usize) -> &'static str {
        self.0[usize::from(features > 64) + usize::from(features > 128)]
    }
}

impl Queue<'_> {
    /// Queues a kernel of this family; whether it is one.
    ///
    /// # Safety
    /// As for [`Queue::enqueue`].
    pub(super) unsafe fn attention_kernel(&mut self, kernel: &Kernel) -> Result<bool, BackendError> {
        let index = self.call.group_index;
        // SAFETY: the caller's promise, in all that follows.
        unsafe {
            match *kernel {
                Kernel::Rope(sizes) => self.rope(&sizes.for_member(index), 1.0)?,
                Kernel::RopeGradient(sizes) => self.rope(&sizes.for_member(index), -1.0)?,
                Kernel::Attention(sizes) | Kernel::AttentionGradient(sizes) => {
                    let impossible = |reason| BackendError::ImpossibleSizes { kernel: kernel.name(), reason };
                    if sizes.head_dimension > MOST_FEATURES {
                        return Err(impossible("the CUDA backend's heads have 256 features at most"));
                    }
                    if sizes.relative.is_some_and(|relative| relative.buckets > BLOCK) {
                        return Err(impossible("the CUDA backend's relative positions have 256 buckets at most"));
                    }
                    if sizes.batch * sizes.heads() > usize::from(u16::MAX) {
                        return Err(impossible("the CUDA backend takes 65,535 heads of sequences at a time"));
                    }
                    match kernel {
                        Kernel::Attention(_) => self.attention(&sizes)?,
                        _ => self.attention_gradient(&sizes)?,
                    }
                }
                _ => return Ok(false),
            }
        }
        Ok(true)
    }

    unsafe fn rope(&mut self, sizes: &Rope, direction: f32) -> Result<(), CudaError> {
        let half = sizes.head_dimension / 2;
        let all = [sizes.batch, sizes.positions, sizes.heads, half, sizes.position_offset];
        let work = Work::new("rope", Grid::Elements(sizes.positions * half), &all);
        // SAFETY: the caller's promise.
        unsafe { self.launch(Work { numbers: &[sizes.theta as f32, direction], ..work }) }
    }

    unsafe fn attention(&mut self, whole: &Attention) -> Result<(), CudaError> {
        let sizes = whole.for_member(self.call.group_index);
        // What is not seen adds nothing.
        if sizes.query_elements() == 0 || sizes.keys == 0 || sizes.ring.is_some_and(|ring| ring.unseen) {
            return Ok(());
        }
        let (all, numbers) = self.attention_sizes(whole, &sizes);
        let features = sizes.head_dimension;
        let work = Work { numbers: &numbers, ..Work::new("", Grid::Rows(0), &all) };
        let mut arguments = self.arguments(&work);
        self.spread(&sizes, &mut arguments.reads, 0);
        if let Some(of) = buckets_of(&sizes) {
            arguments.reads[3] = self.read(if sizes.packed { 1 } else { 3 }).0;
            arguments.reads[4] = self.buckets(of)?.0;
        }
        let work = self.on_tensor_cores(OnTensorCores::Forward, &sizes, &arguments, work).unwrap_or_else(|| {
            let grid = Grid::Blocks([sizes.queries.div_ceil(TILE), sizes.batch * sizes.heads(), 1]);
            let shared = (2 * TILE * (features + 1) + TILE * (TILE + 1)) * size_of::<f32>();
            Work { function: FORWARD.of(features), grid, shared, ..work }
        });
        // SAFETY: the caller's promise.
        unsafe { self.launch_with(work, arguments) }
    }

    unsafe fn attention_gradient(&mut self, whole: &Attention) -> Result<(), CudaError> {
        let sizes = whole.for_member(self.call.group_index);
        let has_table = sizes.relative.is_some();
        let is_unseen = sizes.ring.is_some_and(|ring| ring.unseen);
        let (heads, features) = (sizes.heads(), sizes.head_dimension);
        let table = self.call.writes.len() - usize::from(has_table);
        if is_unseen || sizes.query_elements() == 0 || sizes.keys == 0 {
            for place in usize::from(is_unseen)..table {
                // SAFETY: the caller's promise.
                unsafe { self.clear(place) }?;
            }
            if has_table && !self.call.accumulate {
                // SAFETY: the caller's promise.
                unsafe { self.clear(table) }?;
            }
            return Ok(());
        }
        let (query_tiles, key_tiles) = (sizes.queries.div_ceil(TILE), sizes.keys.div_ceil(TILE));
        let parts = sizes.batch * query_tiles;
        let of_products = sizes.rows() * size_of::<f32>();
        let scratch = self.scratch(of_products + parts * sizes.table_elements() * size_of::<f32>())?;
        let (all, numbers) = self.attention_sizes(whole, &sizes);
        let work = Work { numbers: &numbers, ..Work::new("", Grid::Rows(0), &all) };
        let after = if sizes.packed { 2 } else { 4 };
        let mut arguments = self.arguments(&work);
        self.spread(&sizes, &mut arguments.reads, 1);
        (arguments.reads[4], arguments.reads[5]) = (self.read(after).0, self.read(after + 1).0);
        if sizes.packed {
            let place = self.written(0);
            let row = heads * features * self.width();
            arguments.writes[..3].copy_from_slice(&[place.0, place.after(row).0, place.after(2 * row).0]);
        }
        if let Some(of) = buckets_of(&sizes) {
            arguments.reads[6] = self.read(after + 2).0;
            arguments.reads[7] = self.buckets(of)?.0;
        }
        let (tile, square) = (TILE * (features + 1), TILE * (TILE + 1));
        let products = Work { function: "attention_products", grid: Grid::Elements(sizes.rows() * TILE), ..work };
        let queries = Work {
            function: QUERIES.of(features),
            grid: Grid::Blocks([query_tiles, sizes.batch * heads, 1]),
            shared: (3 * tile + square) * size_of::<f32>(),
            ..work
        };
        let keys = Work {
            function: KEYS.of(features),
            grid: Grid::Blocks([key_tiles, sizes.batch * sizes.key_heads, 1]),
            shared: (3 * tile + 2 * square) * size_of::<f32>(),
            ..work
        };
        // The table's gradient is the plain kernel's, beside that of the queries.
        let on_tensor_cores = |which| self.on_tensor_cores(which, &sizes, &arguments, work);
        let queries = if has_table { None } else { on_tensor_cores(OnTensorCores::Queries) }.unwrap_or(queries);
        let keys = on_tensor_cores(OnTensorCores::Keys).unwrap_or(keys);
        // SAFETY: the caller's promise; the scratch is as large as the products and the table's parts.
        unsafe {
            self.launch_with(products, arguments)?;
            self.launch_with(queries, arguments)?;
            self.launch_with(keys, arguments)?;
        }
        if !has_table {
            return Ok(());
        }
        let elements = sizes.table_elements();
        let of_table = [parts, elements];
        let sums = Work::new("attention_table_gradient", Grid::Elements(elements), &of_table);
        let mut writes = [0; super::arguments::OPERANDS];
        writes[0] = self.written(table).0;
        let arguments = Arguments { writes, scratch: scratch.after(of_products).0, ..self.arguments(&sums) };
        // SAFETY: the caller's promise.
        unsafe { self.launch_with(sums, arguments) }
    }

    /// The launch on tensor cores; none where they have no such format, or their kernels no such heads or no room.
    fn on_tensor_cores<'w>(
        &self,
        which: OnTensorCores,
        sizes: &Attention,
        arguments: &Arguments,
        work: Work<'w>,
    ) -> Option<Work<'w>> {
        let device = self.backend.driver.device();
        let has_format = matches!(self.call.precision, DataType::Bf16 | DataType::Fp16) && device.capability >= TENSOR_CAPABILITY;
        // Rows are copied by sixteen bytes.
        let is_aligned = arguments.reads.iter().chain(&arguments.writes).all(|address| address % 16 == 0);
        let has_features = (FEWEST_TENSOR_FEATURES..=MOST_TENSOR_FEATURES).contains(&sizes.head_dimension)
            && sizes.head_dimension.is_multiple_of(8);
        if !has_format || !is_aligned || !has_features {
            return None;
        }
        let features = if sizes.head_dimension > 64 { 128 } else { 64 };
        let is_plain = sizes.relative.is_none() && sizes.dropout.is_none();
        let (function, rows, shared) = which.of(features, is_plain);
        let blocks = match which {
            OnTensorCores::Keys => [sizes.keys.div_ceil(rows), sizes.batch * sizes.key_heads, 1],
            _ => [sizes.queries.div_ceil(rows), sizes.batch * sizes.heads(), 1],
        };
        let launch = Work { function, grid: Grid::Blocks(blocks), shared, threads: TENSOR_BLOCK, ..work };
        (shared <= device.shared_memory).then_some(launch)
    }

    /// Where q, k and v are, from a read on; of packed ones inside of it.
    fn spread(&self, sizes: &Attention, reads: &mut [u64], from: usize) {
        if sizes.packed {
            let (place, row) = (self.read(from), sizes.heads() * sizes.head_dimension * self.width());
            reads[from..from + 3].copy_from_slice(&[place.0, place.after(row).0, place.after(2 * row).0]);
        }
    }

    /// As `attention.cu` lists them. `whole` is the kernel's own, `sizes` what of it is this rank's.
    fn attention_sizes(&self, whole: &Attention, sizes: &Attention) -> ([usize; 22], [f32; 2]) {
        let hidden = sizes.heads() * sizes.head_dimension;
        let (query_stride, key_stride) =
            if sizes.packed { (3 * hidden, 3 * hidden) } else { (hidden, sizes.key_heads * sizes.head_dimension) };
        let scale = if sizes.scaled { 1.0 / (sizes.head_dimension as f32).sqrt() } else { 1.0 };
        let mut dropped = [0; 9];
        let mut keep = 1.0;
        if let Some(dropout) = whole.dropout {
            let place = whole.place(&dropout, self.call.group_index, self.call.samples_before);
            let (threshold, site) = (dropout.site.rate.threshold() as usize, dropout.site.site);
            dropped = [1, threshold, site, place.sample, place.query, place.key, place.key_head, place.member, place.group];
            keep = dropout.site.rate.scale();
        }
        let mut all = [0; 22];
        all[..12].copy_from_slice(&[
            sizes.batch,
            sizes.queries,
            sizes.keys,
            sizes.key_heads,
            sizes.group,
            sizes.head_dimension,
            usize::from(sizes.causal),
            sizes.query_offset,
            query_stride,
            key_stride,
            usize::from(sizes.ring.is_some()),
            usize::from(sizes.ring.is_some_and(KeyStep::merges)),
        ]);
        all[12..21].copy_from_slice(&dropped);
        all[21] = sizes.relative.map_or(0, |relative| relative.buckets);
        (all, [scale, keep])
    }
}

fn buckets_of(sizes: &Attention) -> Option<BucketsOf> {
    let Attention { queries, keys, query_offset, .. } = *sizes;
    sizes.relative.map(|relative| BucketsOf { relative, queries, keys, query_offset })
}
