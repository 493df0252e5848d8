//! Kernels that move elements, look up embeddings, or route tokens to experts.

use super::dispatcher::{Dispatcher, Grid, LaunchConfig};
use crate::cuda::driver::{CudaError, DeviceAddress};
use crate::operands::moved_width;
use foretell_models::{Kernel, Mixture};

/// A strided copy over three counters (outer, middle, inner). All fields count elements.
#[derive(Clone, Copy, Debug, Default)]
struct StridedCopy {
    extents: [usize; 3],
    read_strides: [usize; 3],
    write_strides: [usize; 3],
    read_offset: usize,
    write_offset: usize,
}

impl StridedCopy {
    /// Copies to a dense `[outer, middle, inner]` tensor.
    fn to_dense([outer, middle, inner]: [usize; 3], read_strides: [usize; 3]) -> Self {
        let write_strides = [middle * inner, inner, 1];
        Self { extents: [outer, middle, inner], read_strides, write_strides, ..Self::default() }
    }

    /// Copies from a dense `[outer, middle, inner]` tensor.
    fn from_dense([outer, middle, inner]: [usize; 3], write_strides: [usize; 3]) -> Self {
        let read_strides = [middle * inner, inner, 1];
        Self { extents: [outer, middle, inner], read_strides, write_strides, ..Self::default() }
    }

    /// Returns the same copy in units of `factor` elements; `None` if some run is not a whole
    /// number of units.
    fn in_units_of(self, factor: usize) -> Option<Self> {
        let Self { extents, read_strides, write_strides, read_offset, write_offset } = self;
        let divided =
            [read_strides[0], read_strides[1], write_strides[0], write_strides[1], read_offset, write_offset, extents[2]];
        if read_strides[2] != 1 || write_strides[2] != 1 || divided.iter().any(|length| length % factor != 0) {
            return None;
        }
        let in_units = |[outer, middle, _]: [usize; 3]| [outer / factor, middle / factor, 1];
        Some(Self {
            extents: [extents[0], extents[1], extents[2] / factor],
            read_strides: in_units(read_strides),
            write_strides: in_units(write_strides),
            read_offset: read_offset / factor,
            write_offset: write_offset / factor,
        })
    }
}

impl Dispatcher<'_> {
    /// Queues a kernel of this family, or returns `false`.
    ///
    /// # Safety
    /// As for [`super::dispatch`].
    pub(super) unsafe fn movement_kernel(&mut self, kernel: &Kernel) -> Result<bool, CudaError> {
        // SAFETY: the caller's promise, throughout.
        unsafe {
            if self.copy_kernel(kernel)? {
                return Ok(true);
            }
            let index = self.call.group_index;
            let first_row = |parts: usize, vocabulary: usize| if parts > 1 { index * vocabulary } else { 0 };
            match *kernel {
                Kernel::Embedding { tokens, vocabulary, hidden, parts } => {
                    let sizes = [tokens, hidden, first_row(parts, vocabulary), vocabulary, parts * vocabulary];
                    self.launch(LaunchConfig::new("embedding", Grid::Rows(tokens), &sizes))?;
                }
                Kernel::EmbeddingWeightGradient { tokens, vocabulary, hidden, parts } => {
                    if !self.call.accumulate {
                        self.clear(0)?;
                    }
                    let sizes = [tokens, hidden, first_row(parts, vocabulary), vocabulary, parts * vocabulary];
                    self.launch(LaunchConfig::new("embedding_gradient", Grid::Blocks([tokens, 1, 1]), &sizes))?;
                }
                Kernel::Route { tokens, experts, top } => {
                    self.launch(LaunchConfig::new("route", Grid::Elements(tokens), &[tokens, experts, top]))?;
                }
                Kernel::RouteGradient { tokens, experts, top } => {
                    self.launch(LaunchConfig::new("route_gradient", Grid::Elements(tokens), &[tokens, experts, top]))?;
                }
                Kernel::Dispatch(ref sizes) => self.dispatch_tokens(sizes)?,
                Kernel::DispatchGradient(ref sizes) => self.gather_slots(sizes, false)?,
                Kernel::Combine(ref sizes) => self.gather_slots(sizes, true)?,
                Kernel::CombineInputGradient(ref sizes) => {
                    self.clear(0)?;
                    let grid = Grid::Rows(sizes.choices());
                    self.launch(LaunchConfig::new("combine_input_gradient", grid, &choice_sizes(sizes)))?;
                }
                Kernel::CombineGateGradient(ref sizes) => {
                    let grid = Grid::Rows(sizes.choices());
                    self.launch(LaunchConfig::new("combine_gate_gradient", grid, &choice_sizes(sizes)))?;
                }
                _ => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Queues a kernel that is one or more strided copies, or returns `false`.
    unsafe fn copy_kernel(&mut self, kernel: &Kernel) -> Result<bool, CudaError> {
        // SAFETY: the caller's promise, throughout.
        unsafe {
            match *kernel {
                Kernel::Slice { outer, parts, inner } => {
                    let read_offset = self.call.group_index * inner;
                    let copy = StridedCopy::to_dense([outer, 1, inner], [parts * inner, 0, 1]);
                    self.copy(StridedCopy { read_offset, ..copy })?;
                }
                Kernel::Interleave { outer, parts, inner } => {
                    self.copy(StridedCopy::to_dense([outer, parts, inner], [inner, outer * inner, 1]))?;
                }
                Kernel::Deinterleave { outer, parts, inner } => {
                    self.copy(StridedCopy::to_dense([parts, outer, inner], [inner, parts * inner, 1]))?;
                }
                Kernel::TakeColumns { rows, columns, start, part } => {
                    let copy = StridedCopy::to_dense([rows, 1, part], [columns, 0, 1]);
                    self.copy(StridedCopy { read_offset: start, ..copy })?;
                }
                Kernel::PutColumns { rows, columns, start, part } => {
                    let copy = StridedCopy::from_dense([rows, 1, part], [columns, 0, 1]);
                    self.copy(StridedCopy { write_offset: start, ..copy })?;
                }
                Kernel::Split { rows, parts, columns } => {
                    for part in 0..parts {
                        let copy = StridedCopy::to_dense([rows, 1, columns], [parts * columns, 0, 1]);
                        let copy = StridedCopy { read_offset: part * columns, ..copy };
                        self.copy_between(copy, self.read(0), self.written(part))?;
                    }
                }
                Kernel::Join { rows, parts, columns } => {
                    for part in 0..parts {
                        let copy = StridedCopy::from_dense([rows, 1, columns], [parts * columns, 0, 1]);
                        let copy = StridedCopy { write_offset: part * columns, ..copy };
                        self.copy_between(copy, self.read(part), self.written(0))?;
                    }
                }
                Kernel::Prepend { batch, positions, features } => {
                    let row = (positions + 1) * features;
                    let rest = StridedCopy::from_dense([batch, positions, features], [row, features, 1]);
                    self.copy(StridedCopy { write_offset: features, ..rest })?;
                    let first = StridedCopy::from_dense([batch, 1, features], [row, 0, 1]);
                    let first = StridedCopy { read_strides: [0, 0, 1], ..first };
                    self.copy_between(first, self.read(1), self.written(0))?;
                }
                Kernel::PrependInputGradient { batch, positions, features } => {
                    let row = (positions + 1) * features;
                    let copy = StridedCopy::to_dense([batch, positions, features], [row, features, 1]);
                    self.copy(StridedCopy { read_offset: features, ..copy })?;
                }
                Kernel::PrependWeightGradient { batch, positions, features } => {
                    self.sum_columns(batch, features, (positions + 1) * features, 0)?;
                }
                Kernel::First { batch, positions, features } => {
                    self.copy(StridedCopy::to_dense([batch, 1, features], [positions * features, 0, 1]))?;
                }
                Kernel::FirstGradient { batch, positions, features } => {
                    self.clear(0)?;
                    self.copy(StridedCopy::from_dense([batch, 1, features], [positions * features, 0, 1]))?;
                }
                _ => return Ok(false),
            }
        }
        Ok(true)
    }

    unsafe fn dispatch_tokens(&mut self, sizes: &Mixture) -> Result<(), CudaError> {
        self.scratch(sizes.experts * size_of::<f32>())?;
        let all = choice_sizes(sizes);
        // SAFETY: the caller's promise; the scratch memory holds one number for each expert.
        unsafe {
            self.clear(0)?;
            self.launch(LaunchConfig::new("dispatch_slots", Grid::Blocks([sizes.experts, 1, 1]), &all))?;
            self.launch(LaunchConfig::new("dispatch_rows", Grid::Rows(sizes.choices()), &all))?;
            if self.call.writes.len() > 2 {
                self.launch(LaunchConfig::new("dispatch_dropped", Grid::Rows(1), &[sizes.experts]))?;
            }
        }
        Ok(())
    }

    unsafe fn gather_slots(&mut self, sizes: &Mixture, has_gates: bool) -> Result<(), CudaError> {
        let Mixture { tokens, experts, capacity, top, hidden } = *sizes;
        let all = [tokens, experts, capacity, top, hidden, usize::from(has_gates)];
        // SAFETY: the caller's promise.
        unsafe { self.launch(LaunchConfig::new("gather_slots", Grid::Rows(tokens), &all)) }
    }

    /// Queues a copy from the first read to the first write.
    unsafe fn copy(&mut self, copy: StridedCopy) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.copy_between(copy, self.read(0), self.written(0)) }
    }

    /// Queues a copy in units of 16 bytes if possible, else element by element.
    unsafe fn copy_between(&mut self, copy: StridedCopy, from: DeviceAddress, to: DeviceAddress) -> Result<(), CudaError> {
        let width = moved_width(self.call).unwrap_or_else(|| self.width());
        let is_aligned = (from.0 | to.0).is_multiple_of(16);
        let (function, copy) = match copy.in_units_of(16 / width).filter(|_| is_aligned) {
            Some(copy) => ("copy_16", copy),
            None => (if width == 4 { "copy_4" } else { "copy_2" }, copy),
        };
        let StridedCopy { extents, read_strides, write_strides, read_offset, write_offset } = copy;
        let mut sizes = [0; 11];
        sizes[..3].copy_from_slice(&extents);
        sizes[3..6].copy_from_slice(&read_strides);
        sizes[6..9].copy_from_slice(&write_strides);
        (sizes[9], sizes[10]) = (read_offset, write_offset);
        let config = LaunchConfig::new(function, Grid::Elements(extents.iter().product()), &sizes);
        // SAFETY: the caller's promise.
        unsafe { self.launch_between(config, from, to) }
    }
}

/// Returns the sizes of kernels that loop over the tokens' choices of experts.
fn choice_sizes(sizes: &Mixture) -> [usize; 5] {
    [sizes.choices(), sizes.experts, sizes.capacity, sizes.top, sizes.hidden]
}
