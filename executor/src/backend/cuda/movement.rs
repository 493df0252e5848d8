//! What only moves numbers, looks them up, or takes tokens to the slots of experts.

use super::CudaError;
use super::driver::DeviceAddress;
use super::queue::{Grid, Queue, Work};
use crate::backend::operands::moved_width;
use foretell_models::{Kernel, Mixture};

/// A move of `extents` numbers, whose places follow from three counters.
#[derive(Clone, Copy, Debug, Default)]
struct Move {
    extents: [usize; 3],
    read_strides: [usize; 3],
    write_strides: [usize; 3],
    read_from: usize,
    write_from: usize,
}

impl Move {
    /// `[outer, middle, inner]` to as dense a tensor in that order.
    fn dense([outer, middle, inner]: [usize; 3], read_strides: [usize; 3]) -> Self {
        let write_strides = [middle * inner, inner, 1];
        Self { extents: [outer, middle, inner], read_strides, write_strides, ..Self::default() }
    }

    /// From a dense tensor in that order.
    fn from_dense([outer, middle, inner]: [usize; 3], write_strides: [usize; 3]) -> Self {
        let read_strides = [middle * inner, inner, 1];
        Self { extents: [outer, middle, inner], read_strides, write_strides, ..Self::default() }
    }

    /// The same in larger units, where each run of the innermost counter is whole units; `factor` numbers are one.
    fn in_units_of(self, factor: usize) -> Option<Self> {
        let Self { extents, read_strides, write_strides, read_from, write_from } = self;
        let outer = [read_strides[0], read_strides[1], write_strides[0], write_strides[1], read_from, write_from, extents[2]];
        if read_strides[2] != 1 || write_strides[2] != 1 || outer.iter().any(|places| places % factor != 0) {
            return None;
        }
        let fewer = |[outer, middle, _]: [usize; 3], inner: usize| [outer / factor, middle / factor, inner];
        Some(Self {
            extents: [extents[0], extents[1], extents[2] / factor],
            read_strides: fewer(read_strides, 1),
            write_strides: fewer(write_strides, 1),
            read_from: read_from / factor,
            write_from: write_from / factor,
        })
    }
}

impl Queue<'_> {
    /// Queues a kernel of this family; whether it is one.
    ///
    /// # Safety
    /// As for [`Queue::enqueue`].
    pub(super) unsafe fn movement_kernel(&mut self, kernel: &Kernel) -> Result<bool, CudaError> {
        let index = self.call.group_index;
        let part_index = |parts: usize| if parts > 1 { index } else { 0 };
        // SAFETY: the caller's promise, in all that follows.
        unsafe {
            match *kernel {
                Kernel::Slice { outer, parts, inner } => {
                    let read_from = index * inner;
                    self.relocate(Move { read_from, ..Move::dense([outer, 1, inner], [parts * inner, 0, 1]) })?;
                }
                Kernel::Interleave { outer, parts, inner } => {
                    self.relocate(Move::dense([outer, parts, inner], [inner, outer * inner, 1]))?;
                }
                Kernel::Deinterleave { outer, parts, inner } => {
                    self.relocate(Move::dense([parts, outer, inner], [inner, parts * inner, 1]))?;
                }
                Kernel::TakeColumns { rows, columns, start, part } => {
                    self.relocate(Move { read_from: start, ..Move::dense([rows, 1, part], [columns, 0, 1]) })?;
                }
                Kernel::PutColumns { rows, columns, start, part } => {
                    self.relocate(Move { write_from: start, ..Move::from_dense([rows, 1, part], [columns, 0, 1]) })?;
                }
                Kernel::Split { rows, parts, columns } => {
                    for part in 0..parts {
                        let place = Move::dense([rows, 1, columns], [parts * columns, 0, 1]);
                        self.relocate_between(Move { read_from: part * columns, ..place }, self.read(0), self.written(part))?;
                    }
                }
                Kernel::Join { rows, parts, columns } => {
                    for part in 0..parts {
                        let place = Move::from_dense([rows, 1, columns], [parts * columns, 0, 1]);
                        self.relocate_between(Move { write_from: part * columns, ..place }, self.read(part), self.written(0))?;
                    }
                }
                Kernel::Prepend { batch, positions, features } => {
                    let row = (positions + 1) * features;
                    let others = Move::from_dense([batch, positions, features], [row, features, 1]);
                    self.relocate(Move { write_from: features, ..others })?;
                    let first = Move { read_strides: [0, 0, 1], ..Move::from_dense([batch, 1, features], [row, 0, 1]) };
                    self.relocate_between(first, self.read(1), self.written(0))?;
                }
                Kernel::PrependInputGradient { batch, positions, features } => {
                    let place = Move::dense([batch, positions, features], [(positions + 1) * features, features, 1]);
                    self.relocate(Move { read_from: features, ..place })?;
                }
                Kernel::PrependWeightGradient { batch, positions, features } => {
                    self.sum_columns(batch, features, (positions + 1) * features, 0)?;
                }
                Kernel::First { batch, positions, features } => {
                    self.relocate(Move::dense([batch, 1, features], [positions * features, 0, 1]))?;
                }
                Kernel::FirstGradient { batch, positions, features } => {
                    self.clear(0)?;
                    self.relocate(Move::from_dense([batch, 1, features], [positions * features, 0, 1]))?;
                }
                Kernel::Embedding { tokens, vocabulary, hidden, parts } => {
                    let sizes = [tokens, hidden, part_index(parts) * vocabulary, vocabulary, parts * vocabulary];
                    self.launch(Work::new("embedding", Grid::Rows(tokens), &sizes))?;
                }
                Kernel::EmbeddingWeightGradient { tokens, vocabulary, hidden, parts } => {
                    if !self.call.accumulate {
                        self.clear(0)?;
                    }
                    let sizes = [tokens, hidden, part_index(parts) * vocabulary, vocabulary, parts * vocabulary];
                    self.launch(Work::new("embedding_gradient", Grid::Blocks([tokens, 1, 1]), &sizes))?;
                }
                Kernel::Route { tokens, experts, top } => {
                    self.launch(Work::new("route", Grid::Elements(tokens), &[tokens, experts, top]))?;
                }
                Kernel::RouteGradient { tokens, experts, top } => {
                    self.launch(Work::new("route_gradient", Grid::Elements(tokens), &[tokens, experts, top]))?;
                }
                Kernel::Dispatch(ref sizes) => self.dispatch(sizes)?,
                Kernel::DispatchGradient(ref sizes) => self.gather_slots(sizes, false)?,
                Kernel::Combine(ref sizes) => self.gather_slots(sizes, true)?,
                Kernel::CombineInputGradient(ref sizes) => {
                    self.clear(0)?;
                    self.launch(Work::new("combine_input_gradient", Grid::Rows(sizes.choices()), &of_choices(sizes)))?;
                }
                Kernel::CombineGateGradient(ref sizes) => {
                    self.launch(Work::new("combine_gate_gradient", Grid::Rows(sizes.choices()), &of_choices(sizes)))?;
                }
                _ => return Ok(false),
            }
        }
        Ok(true)
    }

    unsafe fn dispatch(&mut self, sizes: &Mixture) -> Result<(), CudaError> {
        self.scratch(sizes.experts * size_of::<f32>())?;
        let all = of_choices(sizes);
        // SAFETY: the caller's promise; the scratch has a number for each expert.
        unsafe {
            self.clear(0)?;
            self.launch(Work::new("dispatch_places", Grid::Blocks([sizes.experts, 1, 1]), &all))?;
            self.launch(Work::new("dispatch_rows", Grid::Rows(sizes.choices()), &all))?;
            if self.call.writes.len() > 2 {
                self.launch(Work::new("dispatch_dropped", Grid::Rows(1), &[sizes.experts]))?;
            }
        }
        Ok(())
    }

    unsafe fn gather_slots(&mut self, sizes: &Mixture, has_gates: bool) -> Result<(), CudaError> {
        let Mixture { tokens, experts, capacity, top, hidden } = *sizes;
        let all = [tokens, experts, capacity, top, hidden, usize::from(has_gates)];
        // SAFETY: the caller's promise.
        unsafe { self.launch(Work::new("gather_slots", Grid::Rows(tokens), &all)) }
    }

    unsafe fn relocate(&mut self, places: Move) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.relocate_between(places, self.read(0), self.written(0)) }
    }

    /// Moves numbers in the largest units that all of them are whole of.
    unsafe fn relocate_between(&mut self, places: Move, from: DeviceAddress, to: DeviceAddress) -> Result<(), CudaError> {
        let width = moved_width(self.call).unwrap_or_else(|| self.width());
        let is_aligned = (from.0 | to.0).is_multiple_of(16);
        let (function, places) = match places.in_units_of(16 / width).filter(|_| is_aligned) {
            Some(places) => ("move_16", places),
            None => (if width == 4 { "move_4" } else { "move_2" }, places),
        };
        let Move { extents, read_strides, write_strides, read_from, write_from } = places;
        let mut sizes = [0; 11];
        sizes[..3].copy_from_slice(&extents);
        sizes[3..6].copy_from_slice(&read_strides);
        sizes[6..9].copy_from_slice(&write_strides);
        (sizes[9], sizes[10]) = (read_from, write_from);
        let work = Work::new(function, Grid::Elements(extents.iter().product()), &sizes);
        let mut arguments = self.arguments(&work);
        (arguments.reads[0], arguments.writes[0]) = (from.0, to.0);
        // SAFETY: the caller's promise.
        unsafe { self.launch_with(work, arguments) }
    }
}

fn of_choices(sizes: &Mixture) -> [usize; 5] {
    [sizes.choices(), sizes.experts, sizes.capacity, sizes.top, sizes.hidden]
}
