//! Emitting tiled parts: all operators of a wave for one tile, then for the next. Wide tensors have
//! a buffer for each tile; every other operand is a view of a whole buffer.

use super::StageEmitter;
use super::list::Label;
use crate::compile::tiling::{TiledPart, Wave, is_sum};
use crate::program::{BufferId, BufferRole, Phase};
use foretell_models::{Operand, OperatorId, TensorId};
use rustc_hash::FxHashMap;

/// The whole buffers that an operator of a wave reads and writes; `None` for wide tensors.
struct WholeOperands {
    id: OperatorId,
    phase: Phase,
    reads: Vec<Option<BufferId>>,
    /// The outputs that the operator writes in this pass, each with its buffer.
    writes: Vec<(usize, Option<BufferId>)>,
    /// Whether the first tile adds to sums.
    accumulate: bool,
}

impl StageEmitter<'_> {
    /// Emits the wave of an operator in a tiled part, if the wave runs in its place. Returns
    /// whether the operator is in such a part.
    pub(super) fn tiled_operator(&mut self, id: OperatorId, micro_batch: usize, phase: Phase) -> bool {
        let stage = self.stage;
        let Some((number, part, wave)) = stage.lowering.tiling.wave_of(id) else { return false };
        let is_whole = |output: &&Operand| stage.lowering.is_activation(output.tensor) && !part.is_wide(output.tensor);
        let is_there = |output: &Operand| {
            self.live.contains(output.tensor, micro_batch) || self.offloaded.contains(output.tensor, micro_batch)
        };
        // Results that were kept are not computed again.
        let mut outputs = wave.own.iter().flat_map(|&id| &stage.operator(id).outputs).filter(is_whole);
        let runs = wave.place == id && !(phase == Phase::Recompute && outputs.all(is_there));
        if runs {
            self.wave(part, wave, micro_batch, phase);
            self.emitted_waves.insert((number, micro_batch));
        }
        true
    }

    /// The operators whose work is done now that an operator's turn is over: those of a wave that
    /// has yet to run are done when it has.
    pub(super) fn done_after(&mut self, id: OperatorId, micro_batch: usize) -> Vec<OperatorId> {
        let Some((number, ..)) = self.stage.lowering.tiling.wave_of(id) else { return vec![id] };
        if self.emitted_waves.contains(&(number, micro_batch)) {
            let waiting = self.waiting.remove(&(number, micro_batch)).unwrap_or_default();
            return waiting.into_iter().chain([id]).collect();
        }
        self.waiting.entry((number, micro_batch)).or_default().push(id);
        Vec::new()
    }

    fn wave(&mut self, part: &TiledPart, wave: &Wave, micro_batch: usize, phase: Phase) {
        let stage = self.stage;
        let again = wave.again.iter().map(|&id| (id, Phase::Recompute));
        let operators: Vec<(OperatorId, Phase)> = again.chain(wave.own.iter().map(|&id| (id, phase))).collect();
        let whole: Vec<WholeOperands> =
            operators.into_iter().map(|(id, phase)| self.whole_operands(part, id, micro_batch, phase)).collect();
        for tile in 0..part.tiles() {
            let start = tile * part.at_once;
            let rows = part.at_once.min(part.rows - start);
            let mut wide: FxHashMap<TensorId, BufferId> = FxHashMap::default();
            for operands in &whole {
                self.tile(part, operands, (tile, start, rows), &mut wide, micro_batch);
            }
        }
        for &id in &wave.own {
            let outputs = &stage.operator(id).outputs;
            let is_whole = |output: &&Operand| stage.lowering.is_activation(output.tensor) && !part.is_wide(output.tensor);
            for output in outputs.iter().filter(is_whole) {
                self.finish_output(output.tensor, micro_batch, phase);
            }
        }
    }

    /// Fetches what an operator reads, and makes the buffers that it writes, but for wide tensors.
    fn whole_operands(&mut self, part: &TiledPart, id: OperatorId, micro_batch: usize, phase: Phase) -> WholeOperands {
        let stage = self.stage;
        let operator = stage.operator(id);
        let mut reads = Vec::with_capacity(operator.inputs.len());
        for input in &operator.inputs {
            let wanted = stage.lowering.sharding.wanted(id, input);
            reads.push((!part.is_wide(input.tensor)).then(|| self.fetch(input.tensor, micro_batch, wanted, phase)));
        }
        let mut writes = Vec::with_capacity(operator.outputs.len());
        let mut accumulate = false;
        for (index, output) in operator.outputs.iter().enumerate() {
            if part.is_wide(output.tensor) {
                writes.push((index, None));
            } else if let Some((buffer, has_contents)) = self.output_buffer(output, micro_batch, phase) {
                accumulate |= has_contents;
                writes.push((index, Some(buffer)));
            }
        }
        WholeOperands { id, phase, reads, writes, accumulate }
    }

    /// Emits one operator for one tile.
    fn tile(
        &mut self,
        part: &TiledPart,
        whole: &WholeOperands,
        (tile, start, rows): (usize, usize, usize),
        wide: &mut FxHashMap<TensorId, BufferId>,
        micro_batch: usize,
    ) {
        let stage = self.stage;
        let &WholeOperands { id, phase, .. } = whole;
        let operator = stage.operator(id);
        let mut reads: Vec<BufferId> = Vec::with_capacity(operator.inputs.len());
        for (input, buffer) in operator.inputs.iter().zip(&whole.reads) {
            reads.push(match buffer {
                Some(buffer) => self.rows_of(part, (id, input), *buffer, (start, rows)),
                None => wide[&input.tensor],
            });
        }
        let mut writes: Vec<BufferId> = Vec::with_capacity(whole.writes.len());
        for &(index, buffer) in &whole.writes {
            let output = &operator.outputs[index];
            writes.push(match buffer {
                Some(buffer) => self.rows_of(part, (id, output), buffer, (start, rows)),
                None => {
                    let buffer = self.wide_tile(part, (id, output), rows);
                    wide.insert(output.tensor, buffer);
                    buffer
                }
            });
        }
        let extents = stage.lowering.sharding.local_extents(&stage.lowering.graph, id, &stage.lowering.mesh);
        let kernel = operator.kernel(&part.tile_extents(id, extents, rows));
        let adds = |output: &Operand| is_sum(&stage.lowering.graph, output);
        let accumulate = whole.accumulate || (tile > 0 && operator.outputs.iter().any(adds));
        let label = Label { name: &operator.name, micro_batch: Some(micro_batch), phase };
        self.compute(id, kernel, label, accumulate, reads, &writes);
    }

    /// A view of a tile's rows in a whole buffer, or the buffer itself if it has no positions.
    fn rows_of(
        &mut self,
        part: &TiledPart,
        (id, operand): (OperatorId, &Operand),
        buffer: BufferId,
        (start, rows): (usize, usize),
    ) -> BufferId {
        let Some(dimensions) = part.dimensions_of_rows(id, operand) else { return buffer };
        let shape = self.list.buffer(buffer).shape.clone();
        let row: usize = shape[dimensions..].iter().product();
        let tile = [&[rows], &shape[dimensions..]].concat();
        self.list.add_view(self.stage.name(operand.tensor), buffer, start * row, tile)
    }

    /// A buffer for a tile of a wide tensor.
    fn wide_tile(&mut self, part: &TiledPart, (id, output): (OperatorId, &Operand), rows: usize) -> BufferId {
        let (stage, lowering) = (self.stage, self.stage.lowering);
        let produced = lowering.sharding.produced(output.tensor);
        let shape = produced.local_shape(&lowering.shape(output.tensor), &lowering.mesh);
        let dimensions = part.dimensions_of_rows(id, output).expect("invariant: wide tensors have positions");
        let data_type = lowering.graph.tensor(output.tensor).storage.data_type(stage.plan.storage());
        let tile = [&[rows], &shape[dimensions..]].concat();
        self.list.add_buffer(stage.name(output.tensor), BufferRole::Activation, tile, data_type)
    }
}
