//! The pieces of the state of training in a rank's buffers, and those that an instruction saves.

use super::{ElementOrder, Shard};
use foretell_models::{Graph, TensorId, Zigzag};
use foretell_program::{
    Axis, Buffer, Coordinates, Group, Instruction, Mesh, Operation, Placements, Program, Rank, StageMesh, StageProgram,
    StateContents, StateValue, TensorShard,
};
use std::ops::Range;

/// A run of a shard's elements in a buffer.
#[derive(Clone, Debug)]
pub(crate) struct Piece<'a> {
    pub(crate) buffer: &'a Buffer,
    /// Index in the buffer of the first element.
    pub(crate) place: usize,
    pub(crate) value: StateValue,
    pub(crate) tensor: TensorId,
    pub(crate) placements: Placements,
    /// The order in which the rows for a sequence's positions are stored, if it is not ascending.
    pub(crate) zigzag: Option<Zigzag>,
    /// Indices of the elements in the rank's shard of the tensor.
    pub(crate) elements: Range<usize>,
    /// The replica whose values these are; 0 if all replicas have the same.
    pub(crate) replica: usize,
}

/// A rank's memory and its coordinates in the mesh.
#[derive(Clone, Copy)]
pub(crate) struct RankState<'a> {
    pub(crate) list: &'a StageProgram,
    pub(crate) graph: &'a Graph,
    pub(crate) mesh: &'a StageMesh,
    pub(crate) coordinates: Coordinates,
    whole_mesh: &'a Mesh,
    rank: Rank,
}

impl<'a> RankState<'a> {
    /// The state of `rank`. `graph` is the model's, for any batch.
    pub(crate) fn new(program: &'a Program, graph: &'a Graph, rank: Rank) -> Self {
        let coordinates = program.mesh.coordinates(rank);
        let mesh = program.mesh.stage_at(coordinates);
        Self { list: program.list_of(rank), graph, mesh, coordinates, whole_mesh: &program.mesh, rank }
    }

    /// The pieces of a buffer: one for each tensor that has elements in it.
    pub(crate) fn pieces(&self, buffer: &'a Buffer) -> Vec<Piece<'a>> {
        let Some(StateContents::Tensors { members, .. }) = buffer.state.as_deref() else { return Vec::new() };
        (0..members.len()).filter_map(|member| self.piece(buffer, member)).collect()
    }

    /// The piece of tensor `member` in a buffer; `None` if the buffer has no element of it on this
    /// rank.
    fn piece(&self, buffer: &'a Buffer, member: usize) -> Option<Piece<'a>> {
        let Some(StateContents::Tensors { value, members, axes, replicas }) = buffer.state.as_deref() else { return None };
        let (offset, TensorShard { tensor, placements, zigzag }) = members.get(member)?;
        let held: usize = buffer.shape.iter().product();
        let first = self.part_along(axes) * held;
        let extents: Vec<usize> = self.graph.tensor(*tensor).dimensions.iter().map(|dimension| dimension.extent).collect();
        let length: usize = placements.local_shape(&extents, self.mesh).iter().product();
        // The elements of the shard that lie in this rank's part of the bucket.
        let (from, until) = ((*offset).max(first), (offset + length).min(first + held));
        (from < until).then(|| Piece {
            buffer,
            place: from - first,
            value: *value,
            tensor: *tensor,
            placements: *placements,
            zigzag: *zigzag,
            elements: from - offset..until - offset,
            replica: replicas.map_or(0, |axis| self.coordinates.along(axis)),
        })
    }

    /// This rank's index among the ranks that share a buffer in equal parts along `axes`.
    fn part_along(&self, axes: &[Axis]) -> usize {
        if axes.is_empty() {
            return 0;
        }
        let members = Group::over(axes.to_vec()).members(self.whole_mesh, self.rank);
        members.iter().position(|member| *member == self.rank).expect("invariant: a rank is in its own group")
    }

    /// The shard that maps the elements of a piece to the whole tensor.
    pub(crate) fn shard(&self, piece: &Piece<'_>, order: ElementOrder) -> Shard {
        let shard = Shard::new(self.graph.tensor(piece.tensor), &piece.placements, self.mesh, self.coordinates, order);
        shard.with_positions(self.graph.tensor(piece.tensor), piece.zigzag)
    }

    /// The pieces that an instruction of this list saves on this rank; none if it saves nothing.
    pub(crate) fn saved_pieces(&self, instruction: &'a Instruction) -> Vec<Piece<'a>> {
        let Operation::Save { members, sharers, .. } = &*instruction.operation else { return Vec::new() };
        let reads = instruction.reads.iter().map(|&id| self.list.buffer(id));
        let pieces = reads.flat_map(|buffer| members.iter().filter_map(move |&member| self.piece(buffer, member)));
        pieces.filter_map(|piece| self.own_part(piece, sharers)).collect()
    }

    /// This rank's part of a piece that all ranks along `sharers` hold; `None` if it is empty.
    fn own_part(&self, mut piece: Piece<'a>, sharers: &[Axis]) -> Option<Piece<'a>> {
        let (mut copies, mut own) = (1, 0);
        for &axis in sharers {
            own += self.coordinates.along(axis) * copies;
            copies *= self.mesh.size(axis);
        }
        let length = piece.elements.len();
        let (from, until) = (length * own / copies, length * (own + 1) / copies);
        piece.place += from;
        piece.elements = piece.elements.start + from..piece.elements.start + until;
        (from < until).then_some(piece)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foretell_models::{GraphOptions, Mlp, Model, Resnet, Stem};
    use foretell_program::{Layout, Plan, compile};
    use foretell_units::DataType;
    use std::collections::BTreeMap;

    /// All pieces that a rank saves, no instruction more than the Program says.
    fn saved_pieces<'a>(state: &RankState<'a>) -> Vec<Piece<'a>> {
        let mut all = Vec::new();
        for instruction in &state.list.instructions {
            let pieces = state.saved_pieces(instruction);
            let bytes: usize = pieces.iter().map(|piece| 4 * piece.elements.len()).sum();
            match *instruction.operation {
                // Each piece of a shared buffer is rounded to whole elements.
                Operation::Save { bytes: most, .. } => assert!(bytes as u64 <= most.count() + 4 * pieces.len() as u64),
                _ => assert!(pieces.is_empty()),
            }
            all.extend(pieces);
        }
        all
    }

    fn plans() -> Vec<Plan> {
        let mut plans = Vec::new();
        for precision in [DataType::Fp32, DataType::Bf16] {
            for zero in 0..4 {
                let layout = |data, tensor, pipeline, shard_group| Layout {
                    data,
                    tensor,
                    pipeline,
                    shard_group,
                    zero,
                    micro_batch: 2,
                    ..Layout::default()
                };
                let with_context = Layout { context: 2, ..layout(2, 1, 1, None) };
                let by_context = Layout { placement: Some(vec![Axis::Data, Axis::Context]), ..with_context.clone() };
                let layouts = [
                    layout(4, 1, 1, None),
                    layout(2, 2, 1, None),
                    layout(1, 2, 2, None),
                    layout(4, 1, 1, Some(2)),
                    with_context,
                    by_context,
                ];
                for layout in layouts {
                    if zero > 0 || layout.shard_group.is_none() {
                        plans.push(Plan { precision, ..Plan::new(layout.clone(), 8) });
                    }
                    if zero == 0 && layout.shard_group.is_none() {
                        let mode = serde_json::from_str(r#"{"parameter_server": {"servers": 3}}"#).expect("a mode");
                        plans.push(Plan { precision, mode, ..Plan::new(layout, 8) });
                    }
                }
            }
        }
        plans
    }

    #[test]
    fn over_all_ranks_each_element_of_the_state_is_saved_once() {
        let gpt = r#"{"family": "gpt", "layers": 2, "hidden": 16, "heads": 4, "vocab": 64, "sequence": 8}"#;
        let models: [Model; 3] = [
            serde_json::from_str(gpt).expect("a model"),
            Model::Mlp(Mlp { widths: vec![12, 9, 6] }),
            Model::Resnet(Resnet { depth: 18, stem: Stem::Small, image: 16, channels: 1, classes: 10, width: 4 }),
        ];
        let mut layouts = 0;
        for (model, plan) in models.iter().flat_map(|model| plans().into_iter().map(move |plan| (model, plan))) {
            let graph = model.graph("model", &GraphOptions::ONE).expect("a valid model");
            // Widths that a layout does not divide cannot be laid out so.
            let Ok(compiled) = compile(model, "model", &plan) else { continue };
            layouts += 1;
            let mut saved: BTreeMap<(TensorId, bool, usize), Vec<u32>> = BTreeMap::new();
            for rank in 0..compiled.training.mesh.world_size() {
                let state = RankState::new(&compiled.saving, &graph, Rank(rank));
                for piece in saved_pieces(&state) {
                    let kind = match piece.value {
                        StateValue::Optimizer(number) => (true, number),
                        _ => (false, 0),
                    };
                    let elements = graph.tensor(piece.tensor).elements();
                    let times = saved.entry((piece.tensor, kind.0, kind.1)).or_insert_with(|| vec![0; elements]);
                    state.shard(&piece, ElementOrder::Public).lines(piece.elements.clone(), &mut |line| {
                        times[line.whole..line.whole + line.count].iter_mut().for_each(|times| *times += 1);
                    });
                }
            }
            assert!(saved.values().flatten().all(|&times| times == 1), "{:?}", plan.layout);
            let parameters = graph.parameters().count() * (1 + plan.optimizer_states());
            let running = graph.tensors.iter().filter(|tensor| tensor.public_batch_count().is_some()).count();
            assert_eq!(saved.len(), parameters + running, "{:?}", plan.layout);
        }
        assert!(layouts > 60, "{layouts} layouts");
    }

    #[test]
    fn each_replica_saves_the_state_that_it_alone_has_once() {
        let model = Model::Mlp(Mlp { widths: vec![12, 9, 6] });
        let graph = model.graph("model", &GraphOptions::ONE).expect("a valid model");
        let outer = r#"{"local_sgd": {"every": 2, "outer": {"optimizer": "nesterov"}}}"#;
        let ring = r#"{"decentralised": {"graph": "ring"}}"#;
        let compressed = r#"{"parameter_server": {"servers": 3, "compression": "int8"}}"#;
        // The copies of each parameter, of the outer velocity, of each optimizer value, and of what
        // rounding has lost.
        for (mode, own_parameters, outer, own_moments, residuals) in
            [(outer, 1, 1, 4, 0), (ring, 4, 0, 4, 0), (compressed, 1, 0, 1, 4)]
        {
            for (tensor, shard_group) in [(1, None), (2, None), (1, Some(2))] {
                let replicas = 4;
                let layout = Layout {
                    data: replicas * shard_group.unwrap_or(1),
                    tensor,
                    zero: usize::from(shard_group.is_some()),
                    shard_group,
                    ..Layout::default()
                };
                let mode = serde_json::from_str(mode).expect("a mode");
                let plan = Plan { mode, precision: DataType::Bf16, ..Plan::new(layout, 8) };
                let Ok(compiled) = compile(&model, "model", &plan) else { continue };
                let mut saved: BTreeMap<(TensorId, StateValue, usize), Vec<u32>> = BTreeMap::new();
                for rank in (0..compiled.training.mesh.world_size()).map(Rank) {
                    let state = RankState::new(&compiled.saving, &graph, rank);
                    for piece in saved_pieces(&state) {
                        let elements = graph.tensor(piece.tensor).elements();
                        let key = (piece.tensor, piece.value, piece.replica);
                        let times = saved.entry(key).or_insert_with(|| vec![0; elements]);
                        state.shard(&piece, ElementOrder::Public).lines(piece.elements.clone(), &mut |line| {
                            times[line.whole..line.whole + line.count].iter_mut().for_each(|times| *times += 1);
                        });
                    }
                }
                assert!(saved.values().flatten().all(|&times| times == 1), "{:?}", plan.layout);
                let count = |is: &dyn Fn(StateValue) -> bool| saved.keys().filter(|(_, value, _)| is(*value)).count();
                let parameters = graph.parameters().count();
                assert_eq!(count(&|value| value == StateValue::Master), parameters * own_parameters);
                let moments = |value| matches!(value, StateValue::Optimizer(_));
                assert_eq!(count(&moments), parameters * plan.optimizer_states() * own_moments);
                assert_eq!(count(&|value| value == StateValue::OuterVelocity), parameters * outer);
                assert_eq!(count(&|value| value == StateValue::Residual), parameters * residuals);
            }
        }
    }
}
