//! The pieces of the state of training in a rank's buffers, and which rank saves which of them.

use super::{Order, Shard};
use foretell_models::{Graph, TensorId};
use foretell_program::{
    Axis, Buffer, Coordinates, Group, Mesh, Placement, Placements, Program, Rank, StageMesh, StageProgram, StateContents,
    StateValue, TensorShard,
};
use std::collections::BTreeSet;
use std::ops::Range;

/// A run of a shard's elements in a buffer.
#[derive(Clone, Debug)]
pub(crate) struct Piece<'a> {
    pub(crate) buffer: &'a Buffer,
    /// The element of the buffer at which it starts.
    pub(crate) place: usize,
    pub(crate) value: StateValue,
    pub(crate) tensor: TensorId,
    pub(crate) placements: Placements,
    /// The elements' numbers in the rank's shard of the tensor.
    pub(crate) elements: Range<usize>,
    /// The replica whose values these are; 0 if all replicas have the same.
    pub(crate) replica: usize,
    /// The axes whose ranks hold the other parts of the shard.
    axes: &'a [Axis],
    /// The axis whose ranks hold the values of other replicas.
    replicas: Option<Axis>,
}

/// A rank's memory and its place in the mesh.
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

    /// The pieces of a buffer: one for each tensor of which it holds elements.
    pub(crate) fn pieces(&self, buffer: &'a Buffer) -> Vec<Piece<'a>> {
        let Some(StateContents::Tensors { value, members, axes, replicas }) = buffer.state.as_deref() else { return Vec::new() };
        let held: usize = buffer.shape.iter().product();
        let first = self.part_along(axes) * held;
        let piece = |(offset, TensorShard { tensor, placements }): &(usize, TensorShard)| {
            let extents: Vec<usize> = self.graph.tensor(*tensor).dimensions.iter().map(|one| one.extent).collect();
            let length: usize = placements.local_shape(&extents, self.mesh).iter().product();
            // The elements of the shard that lie in this rank's part of the bucket.
            let (from, until) = ((*offset).max(first), (offset + length).min(first + held));
            (from < until).then(|| Piece {
                buffer,
                place: from - first,
                value: *value,
                tensor: *tensor,
                placements: *placements,
                elements: from - offset..until - offset,
                replica: replicas.map_or(0, |axis| self.coordinates.along(axis)),
                axes,
                replicas: *replicas,
            })
        };
        members.iter().filter_map(piece).collect()
    }

    /// The number of this rank's part among equal parts that the ranks of these axes hold.
    fn part_along(&self, axes: &[Axis]) -> usize {
        if axes.is_empty() {
            return 0;
        }
        let members = Group::over(axes.to_vec()).members(self.whole_mesh, self.rank);
        members.iter().position(|member| *member == self.rank).unwrap_or(0)
    }

    /// The places of the elements of a piece in the whole tensor.
    pub(crate) fn shard(&self, piece: &Piece<'_>, order: Order) -> Shard {
        Shard::new(self.graph.tensor(piece.tensor), &piece.placements, self.mesh, self.coordinates, order)
    }

    /// The pieces that this rank saves. Over all ranks they hold each element of the state once.
    ///
    /// Ranks that hold the same elements save equal parts of them. Parameters that several stages
    /// hold are saved by the first of these.
    pub(crate) fn saved_pieces(&self, program: &Program) -> Vec<Piece<'a>> {
        let earlier = program.lists.iter().filter(|list| list.stage < self.list.stage);
        let of_earlier: BTreeSet<(StateValue, TensorId)> = earlier.flat_map(|list| &list.buffers).flat_map(values).collect();
        let own: BTreeSet<(StateValue, TensorId)> = self.list.buffers.iter().flat_map(values).collect();
        let pieces = self.list.buffers.iter().flat_map(|buffer| self.pieces(buffer));
        // Rounded copies need not be saved beside their masters.
        let pieces =
            pieces.filter(|piece| piece.value != StateValue::Parameter || !own.contains(&(StateValue::Master, piece.tensor)));
        // After an exchange, the outer optimizer's parameters are the model's.
        let pieces = pieces.filter(|piece| piece.value != StateValue::OuterParameter);
        let pieces = pieces.filter(|piece| !of_earlier.contains(&(piece.value, piece.tensor)));
        pieces.filter_map(|piece| self.part_of_replica(piece)).collect()
    }

    /// This rank's part of a piece that several ranks hold; `None` if it is empty.
    fn part_of_replica(&self, mut piece: Piece<'a>) -> Option<Piece<'a>> {
        let has_others = |axis: Axis| piece.axes.contains(&axis) || piece.replicas == Some(axis);
        let is_replicated = |&axis: &Axis| piece.placements.get(axis) == Placement::Replicate && !has_others(axis);
        let (mut replicas, mut own) = (1, 0);
        for axis in Axis::WITHIN_STAGE.into_iter().filter(is_replicated) {
            own += self.coordinates.along(axis) * replicas;
            replicas *= self.mesh.size(axis);
        }
        let length = piece.elements.len();
        let (from, until) = (length * own / replicas, length * (own + 1) / replicas);
        piece.place += from;
        piece.elements = piece.elements.start + from..piece.elements.start + until;
        (from < until).then_some(piece)
    }
}

/// The values that a buffer holds, and the tensors that they belong to.
fn values(buffer: &Buffer) -> impl Iterator<Item = (StateValue, TensorId)> + '_ {
    let contents = match buffer.state.as_deref() {
        Some(StateContents::Tensors { value, members, .. }) => Some((*value, members)),
        _ => None,
    };
    contents.into_iter().flat_map(|(value, members)| members.iter().map(move |(_, shard)| (value, shard.tensor)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use foretell_models::{GraphOptions, Mlp, Model, Resnet, Stem};
    use foretell_program::{Layout, Plan, compile};
    use foretell_units::DataType;
    use std::collections::BTreeMap;

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
                let state = RankState::new(&compiled.training, &graph, Rank(rank));
                for piece in state.saved_pieces(&compiled.training) {
                    let kind = match piece.value {
                        StateValue::Optimizer(number) => (true, number),
                        _ => (false, 0),
                    };
                    let elements = graph.tensor(piece.tensor).elements();
                    let times = saved.entry((piece.tensor, kind.0, kind.1)).or_insert_with(|| vec![0; elements]);
                    state.shard(&piece, Order::Public).lines(piece.elements.clone(), &mut |line| {
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
        // Whether replicas keep parameters of their own, and whether there is an outer velocity.
        for (mode, own_parameters, outer) in [(outer, 1, 1), (r#"{"decentralised": {"graph": "ring"}}"#, 4, 0)] {
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
                    let state = RankState::new(&compiled.training, &graph, rank);
                    for piece in state.saved_pieces(&compiled.training) {
                        let elements = graph.tensor(piece.tensor).elements();
                        let key = (piece.tensor, piece.value, piece.replica);
                        let times = saved.entry(key).or_insert_with(|| vec![0; elements]);
                        state.shard(&piece, Order::Public).lines(piece.elements.clone(), &mut |line| {
                            times[line.whole..line.whole + line.count].iter_mut().for_each(|times| *times += 1);
                        });
                    }
                }
                assert!(saved.values().flatten().all(|&times| times == 1), "{:?}", plan.layout);
                let count = |is: &dyn Fn(StateValue) -> bool| saved.keys().filter(|(_, value, _)| is(*value)).count();
                let parameters = graph.parameters().count();
                assert_eq!(count(&|value| value == StateValue::Master), parameters * own_parameters);
                let moments = |value| matches!(value, StateValue::Optimizer(_));
                assert_eq!(count(&moments), parameters * plan.optimizer_states() * replicas);
                assert_eq!(count(&|value| value == StateValue::OuterVelocity), parameters * outer);
            }
        }
    }
}
