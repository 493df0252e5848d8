//! Attention and its gradient, and rotary positions.

use super::dispatcher::{BLOCK, BucketTableKey, Dispatcher, Grid, LaunchConfig, order_sizes};
use crate::BackendError;
use crate::cuda::driver::{Arguments, CudaError, MAX_OPERANDS};
use foretell_models::{Attention, Kernel, RingStep, Rope, Zigzag};
use foretell_units::DataType;

/// Rows of a tile, in the kernels without tensor cores.
const TILE: usize = 32;
/// Most features of a head.
const MAX_FEATURES: usize = 256;
/// Fewest features of a head on tensor cores. Smaller heads would leave most of a tile of 64 empty.
const MIN_TENSOR_FEATURES: usize = 32;
/// Most features of a head on tensor cores.
const MAX_TENSOR_FEATURES: usize = 128;
/// Threads of a block on tensor cores: four warps.
const TENSOR_BLOCK: usize = 128;
/// Least compute capability with asynchronous copies, and bf16 on tensor cores.
const TENSOR_CAPABILITY: (u32, u32) = (8, 0);

/// The kernels that attention and its gradient consist of.
#[derive(Clone, Copy)]
enum AttentionKernel {
    Forward,
    QueryGradient,
    KeyGradient,
}

/// Names of a kernel's variants without tensor cores, indexed by the order of positions, then by
/// the padded head size.
macro_rules! functions {
    ($kernel:literal) => {
        [
            [concat!($kernel, "_64"), concat!($kernel, "_128"), concat!($kernel, "_256")],
            [concat!($kernel, "_64_zigzag"), concat!($kernel, "_128_zigzag"), concat!($kernel, "_256_zigzag")],
        ]
    };
}

/// As `functions`, for kernels on tensor cores; the last index says whether attention is plain.
macro_rules! tensor_functions {
    ($kernel:literal) => {
        [
            [
                [concat!($kernel, "_64"), concat!($kernel, "_64_plain")],
                [concat!($kernel, "_128"), concat!($kernel, "_128_plain")],
            ],
            [
                [concat!($kernel, "_64_zigzag"), concat!($kernel, "_64_plain_zigzag")],
                [concat!($kernel, "_128_zigzag"), concat!($kernel, "_128_plain_zigzag")],
            ],
        ]
    };
}

impl AttentionKernel {
    /// Returns the kernel without tensor cores, for heads of `features` features.
    fn function(self, features: usize, order: Option<Zigzag>) -> &'static str {
        let names = match self {
            Self::Forward => functions!("attention"),
            Self::QueryGradient => functions!("attention_query_gradient"),
            Self::KeyGradient => functions!("attention_key_gradient"),
        };
        names[usize::from(order.is_some())][usize::from(features > 64) + usize::from(features > 128)]
    }

    /// Returns the kernel on tensor cores, for heads of `features` features. Plain attention has
    /// neither dropout nor relative positions.
    fn tensor_function(self, features: usize, is_plain: bool, order: Option<Zigzag>) -> &'static str {
        let names = match self {
            Self::Forward => tensor_functions!("attention_tensor"),
            Self::QueryGradient => tensor_functions!("attention_tensor_query_gradient"),
            Self::KeyGradient => tensor_functions!("attention_tensor_key_gradient"),
        };
        names[usize::from(order.is_some())][usize::from(features > 64)][usize::from(is_plain)]
    }

    /// Returns the rows that a block owns, and its bytes of shared memory, on tensor cores. Heads
    /// are padded to `features`, 64 or 128. `attention_tensor_kernels.cuh` declares the same tiles.
    fn tensor_tile(self, features: usize) -> (usize, usize) {
        let row_bytes = 2 * (features + 8);
        // With heads padded to 64 features, a warp's registers hold the sums of two sets of 16
        // rows; with 128, of one.
        let tiles = 128 / features;
        let rows = 64 * tiles;
        match self {
            Self::Forward => (128, (128 + 2 * 64) * row_bytes),
            Self::QueryGradient => (rows, (2 * rows + 4 * 64) * row_bytes),
            Self::KeyGradient => {
                let columns = 64 / tiles;
                let column_bytes = 2 * row_bytes + 2 * size_of::<f32>() + 2 * size_of::<u64>();
                (rows, 2 * rows * row_bytes + 2 * columns * column_bytes)
            }
        }
    }
}

impl Dispatcher<'_> {
    /// Queues a kernel of this family, or returns `false`.
    ///
    /// # Safety
    /// As for [`super::dispatch`].
    pub(super) unsafe fn attention_kernel(&mut self, kernel: &Kernel) -> Result<bool, BackendError> {
        let index = self.call.group_index;
        // SAFETY: the caller's promise, throughout.
        unsafe {
            match *kernel {
                Kernel::Rope(sizes) => self.rope(&sizes.for_member(index), 1.0)?,
                Kernel::RopeGradient(sizes) => self.rope(&sizes.for_member(index), -1.0)?,
                Kernel::Attention(sizes) | Kernel::AttentionGradient(sizes) => {
                    check_limits(kernel, &sizes)?;
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

    /// Queues the rotation of features; `direction` is 1, or -1 for the gradient.
    unsafe fn rope(&mut self, sizes: &Rope, direction: f32) -> Result<(), CudaError> {
        let half = sizes.rotated_features() / 2;
        let kept = sizes.head_dimension - 2 * half;
        let [ranks, chunk] = order_sizes(sizes.zigzag);
        let all = [sizes.batch, sizes.positions, sizes.heads, half, sizes.position_offset, kept, ranks, chunk];
        let numbers = [sizes.theta as f32, direction];
        let config = LaunchConfig::new("rope", Grid::Elements(sizes.positions * (half + kept)), &all);
        // SAFETY: the caller's promise.
        unsafe { self.launch(LaunchConfig { numbers: &numbers, ..config }) }
    }

    /// `whole` are the kernel's sizes over all ranks of the group.
    unsafe fn attention(&mut self, whole: &Attention) -> Result<(), CudaError> {
        let sizes = member_sizes(whole, self.call.group_index);
        // A ring step whose keys no query sees adds nothing.
        if sizes.query_elements() == 0 || sizes.keys == 0 || sizes.ring.is_some_and(|ring| ring.unseen) {
            return Ok(());
        }
        let (all, numbers) = self.attention_sizes(whole, &sizes);
        let features = sizes.head_dimension;
        let config = LaunchConfig { numbers: &numbers, ..LaunchConfig::new("", Grid::Rows(0), &all) };
        let mut arguments = self.arguments(&config);
        self.unpack_operands(&sizes, &mut arguments.reads, 0);
        if let Some(key) = bucket_table_key(&sizes) {
            arguments.reads[3] = self.read(if sizes.packed { 1 } else { 3 }).0;
            arguments.reads[4] = self.bucket_table(key)?.0;
        }
        let on_tensor_cores = self.on_tensor_cores(AttentionKernel::Forward, &sizes, &arguments, config);
        let config = on_tensor_cores.unwrap_or_else(|| {
            let grid = Grid::Blocks([sizes.queries.div_ceil(TILE), sizes.batch * sizes.heads(), 1]);
            let shared = (2 * TILE * (features + 1) + TILE * (TILE + 1)) * size_of::<f32>();
            LaunchConfig { function: AttentionKernel::Forward.function(features, sizes.zigzag), grid, shared, ..config }
        });
        // SAFETY: the caller's promise.
        unsafe { self.launch_with(config, arguments) }
    }

    /// `whole` are the kernel's sizes over all ranks of the group.
    unsafe fn attention_gradient(&mut self, whole: &Attention) -> Result<(), CudaError> {
        let sizes = member_sizes(whole, self.call.group_index);
        let has_table = sizes.relative.is_some();
        let is_unseen = sizes.ring.is_some_and(|ring| ring.unseen);
        // The relative positions' table is the last write.
        let table = self.call.writes.len() - usize::from(has_table);
        if is_unseen || sizes.query_elements() == 0 || sizes.keys == 0 {
            // In a ring step whose keys no query sees, dq keeps the sum of earlier steps.
            for index in usize::from(is_unseen)..table {
                // SAFETY: the caller's promise.
                unsafe { self.clear(index) }?;
            }
            if has_table && !self.call.accumulate {
                // SAFETY: the caller's promise.
                unsafe { self.clear(table) }?;
            }
            return Ok(());
        }
        let parts = sizes.batch * sizes.queries.div_ceil(TILE);
        let dot_bytes = sizes.rows() * size_of::<f32>();
        let scratch = self.scratch(dot_bytes + parts * sizes.table_elements() * size_of::<f32>())?;
        let (all, numbers) = self.attention_sizes(whole, &sizes);
        let config = LaunchConfig { numbers: &numbers, ..LaunchConfig::new("", Grid::Rows(0), &all) };
        let arguments = self.gradient_arguments(&sizes, &config)?;
        let dots = LaunchConfig { function: "attention_dots", grid: Grid::Elements(sizes.rows() * TILE), ..config };
        let [queries, keys] = gradient_configs(&sizes, config);
        let on_tensor_cores = |kernel| self.on_tensor_cores(kernel, &sizes, &arguments, config);
        // Only the kernel without tensor cores computes the table's gradient together with dq.
        let queries = if has_table { None } else { on_tensor_cores(AttentionKernel::QueryGradient) }.unwrap_or(queries);
        let keys = on_tensor_cores(AttentionKernel::KeyGradient).unwrap_or(keys);
        // SAFETY: the caller's promise; the scratch memory holds the dot products and the table's
        // partial gradients.
        unsafe {
            self.launch_with(dots, arguments)?;
            self.launch_with(queries, arguments)?;
            self.launch_with(keys, arguments)?;
        }
        if !has_table {
            return Ok(());
        }
        let elements = sizes.table_elements();
        let table_sizes = [parts, elements];
        let sum = LaunchConfig::new("attention_table_gradient", Grid::Elements(elements), &table_sizes);
        let mut writes = [0; MAX_OPERANDS];
        writes[0] = self.written(table).0;
        let arguments = Arguments { writes, scratch: scratch.offset(dot_bytes).0, ..self.arguments(&sum) };
        // SAFETY: the caller's promise.
        unsafe { self.launch_with(sum, arguments) }
    }

    /// Returns the arguments that the gradient's kernels share: reads dout, q, k, v, out,
    /// log-sum-exp, table, buckets; writes dq, dk, dv.
    fn gradient_arguments(&mut self, sizes: &Attention, config: &LaunchConfig<'_>) -> Result<Arguments, CudaError> {
        let after_keys = if sizes.packed { 2 } else { 4 };
        let mut arguments = self.arguments(config);
        self.unpack_operands(sizes, &mut arguments.reads, 1);
        (arguments.reads[4], arguments.reads[5]) = (self.read(after_keys).0, self.read(after_keys + 1).0);
        if sizes.packed {
            let packed = self.written(0);
            let row_bytes = sizes.heads() * sizes.head_dimension * self.width();
            arguments.writes[..3].copy_from_slice(&[packed.0, packed.offset(row_bytes).0, packed.offset(2 * row_bytes).0]);
        }
        if let Some(key) = bucket_table_key(sizes) {
            arguments.reads[6] = self.read(after_keys + 2).0;
            arguments.reads[7] = self.bucket_table(key)?.0;
        }
        Ok(arguments)
    }

    /// Returns the launch on tensor cores. `None` if the device lacks them for the precision, if
    /// the kernels do not take such heads, or if shared memory does not suffice.
    fn on_tensor_cores<'w>(
        &self,
        kernel: AttentionKernel,
        sizes: &Attention,
        arguments: &Arguments,
        config: LaunchConfig<'w>,
    ) -> Option<LaunchConfig<'w>> {
        let device = self.backend.driver.device();
        let has_format = matches!(self.call.precision, DataType::Bf16 | DataType::Fp16) && device.capability >= TENSOR_CAPABILITY;
        // Rows are copied 16 bytes at a time.
        let is_aligned = arguments.reads.iter().chain(&arguments.writes).all(|address| address % 16 == 0);
        let has_features =
            (MIN_TENSOR_FEATURES..=MAX_TENSOR_FEATURES).contains(&sizes.head_dimension) && sizes.head_dimension.is_multiple_of(8);
        if !has_format || !is_aligned || !has_features {
            return None;
        }
        let features = if sizes.head_dimension > 64 { 128 } else { 64 };
        let is_plain = sizes.relative.is_none() && sizes.dropout.is_none();
        let (rows, shared) = kernel.tensor_tile(features);
        let blocks = match kernel {
            AttentionKernel::KeyGradient => [sizes.keys.div_ceil(rows), sizes.batch * sizes.key_heads, 1],
            _ => [sizes.queries.div_ceil(rows), sizes.batch * sizes.heads(), 1],
        };
        let function = kernel.tensor_function(features, is_plain, sizes.zigzag);
        let launch = LaunchConfig { function, grid: Grid::Blocks(blocks), shared, threads: TENSOR_BLOCK, ..config };
        (shared <= device.shared_memory).then_some(launch)
    }

    /// If q, k and v are packed in one operand, fills in their addresses, from `reads[from]` on.
    fn unpack_operands(&self, sizes: &Attention, reads: &mut [u64], from: usize) {
        if sizes.packed {
            let (packed, row_bytes) = (self.read(from), sizes.heads() * sizes.head_dimension * self.width());
            reads[from..from + 3].copy_from_slice(&[packed.0, packed.offset(row_bytes).0, packed.offset(2 * row_bytes).0]);
        }
    }

    /// Returns sizes and numbers in the order of `attention.cuh`. `whole` are the kernel's sizes
    /// over all ranks of the group, `sizes` this rank's.
    fn attention_sizes(&self, whole: &Attention, sizes: &Attention) -> ([usize; 24], [f32; 2]) {
        let hidden = sizes.heads() * sizes.head_dimension;
        let (query_stride, key_stride) =
            if sizes.packed { (3 * hidden, 3 * hidden) } else { (hidden, sizes.key_heads * sizes.head_dimension) };
        let scale = if sizes.scaled { 1.0 / (sizes.head_dimension as f32).sqrt() } else { 1.0 };
        let mut dropout_sizes = [0; 9];
        let mut keep_scale = 1.0;
        if let Some(dropout) = whole.dropout {
            let place = whole.place(&dropout, self.call.group_index, self.call.samples_before);
            let (threshold, site) = (dropout.site.rate.threshold() as usize, dropout.site.site);
            dropout_sizes = [1, threshold, site, place.sample, place.query, place.key, place.key_head, place.member, place.group];
            keep_scale = dropout.site.rate.scale();
        }
        let mut all = [0; 24];
        all[..12].copy_from_slice(&[
            sizes.batch,
            sizes.queries,
            sizes.keys,
            sizes.key_heads,
            sizes.group,
            sizes.head_dimension,
            // In a zigzag ring the kernel finds what a query sees by comparing positions, in every
            // step.
            usize::from(sizes.causal || whole.zigzag.is_some()),
            sizes.query_offset,
            query_stride,
            key_stride,
            usize::from(sizes.ring.is_some()),
            usize::from(sizes.ring.is_some_and(RingStep::merges)),
        ]);
        all[12..21].copy_from_slice(&dropout_sizes);
        all[21] = sizes.relative.map_or(0, |relative| relative.buckets);
        if whole.zigzag.is_some() {
            all[16..18].copy_from_slice(&whole.first_indices(self.call.group_index));
            all[22..].copy_from_slice(&order_sizes(whole.zigzag));
        }
        (all, [scale, keep_scale])
    }
}

/// Returns a member's sizes. They keep the zigzag order of the whole sequence: a ring step's kernel
/// needs it to find the positions of its queries and keys.
fn member_sizes(whole: &Attention, index: usize) -> Attention {
    Attention { zigzag: whole.zigzag, ..whole.for_member(index) }
}

/// Returns the gradient's launches by queries and by keys without tensor cores.
fn gradient_configs<'a>(sizes: &Attention, config: LaunchConfig<'a>) -> [LaunchConfig<'a>; 2] {
    let features = sizes.head_dimension;
    let (tile, scores) = (TILE * (features + 1), TILE * (TILE + 1));
    let queries = LaunchConfig {
        function: AttentionKernel::QueryGradient.function(features, sizes.zigzag),
        grid: Grid::Blocks([sizes.queries.div_ceil(TILE), sizes.batch * sizes.heads(), 1]),
        shared: (3 * tile + scores) * size_of::<f32>(),
        ..config
    };
    let keys = LaunchConfig {
        function: AttentionKernel::KeyGradient.function(features, sizes.zigzag),
        grid: Grid::Blocks([sizes.keys.div_ceil(TILE), sizes.batch * sizes.key_heads, 1]),
        shared: (3 * tile + 2 * scores) * size_of::<f32>(),
        ..config
    };
    [queries, keys]
}

/// Refuses sizes that the kernels do not support.
fn check_limits(kernel: &Kernel, sizes: &Attention) -> Result<(), BackendError> {
    let impossible = |reason| Err(BackendError::ImpossibleSizes { kernel: kernel.name(), reason });
    if sizes.head_dimension > MAX_FEATURES {
        return impossible("the CUDA backend takes at most 256 features of a head");
    }
    if sizes.relative.is_some_and(|relative| relative.buckets > BLOCK) {
        return impossible("the CUDA backend takes at most 256 buckets of relative positions");
    }
    if sizes.batch * sizes.heads() > usize::from(u16::MAX) {
        return impossible("the CUDA backend takes at most 65,535 heads over all sequences of a batch");
    }
    Ok(())
}

fn bucket_table_key(sizes: &Attention) -> Option<BucketTableKey> {
    let Attention { queries, keys, query_offset, .. } = *sizes;
    sizes.relative.map(|relative| BucketTableKey { relative, queries, keys, query_offset })
}
