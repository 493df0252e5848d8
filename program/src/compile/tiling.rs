//! Tiles: parts of a model that run a few positions at a time, so that their widest tensors are
//! never whole. The loss is computed from the logits of one tile after the other, and an MLP from
//! its inner features (Bekman et al. 2025, "Arctic Long Sequence Training", section 3.2). The
//! backward pass computes the wide tensors of each tile again.
//!
//! A part is found by its wide tensors: those whose last dimension is the vocabulary, or the inner
//! features of an MLP. All operators that read or write one belong to the part. It must not know
//! passes of a schedule or buffers: [`super::emit`] does.

use crate::mesh::StageMesh;
use crate::plan::{Layout, PlanError};
use crate::strategy::{Sharding, producers};
use foretell_models::{EXPERTS, Graph, LoopId, Operand, Operator, OperatorId, Pass, Role, TensorId};
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;

/// What may be tiled: the field of the layout, the last dimension of its wide tensors, and what a
/// model lacks if it has none.
const KINDS: [(&str, &str, &str); 2] =
    [("loss_chunk", "vocabulary", "no loss over a vocabulary"), ("mlp_chunk", "ffn", "no MLP but those of experts")];

/// A part of a model that runs tile by tile.
#[derive(Debug)]
pub(super) struct TiledPart {
    /// The positions of a rank's micro-batch.
    pub(super) rows: usize,
    /// The most positions of a tile.
    pub(super) at_once: usize,
    /// The part's operators, in the graph's order.
    pub(super) waves: Vec<Wave>,
    wide: BTreeSet<TensorId>,
    /// By operator: the loops over positions.
    loops: FxHashMap<OperatorId, Vec<LoopId>>,
}

/// Operators of a tiled part that run one after the other for a tile, then for the next.
#[derive(Debug)]
pub(super) struct Wave {
    /// The operators, in the graph's order.
    pub(super) own: Vec<OperatorId>,
    /// The one of `own` in whose place all of them run: what they read of others is there by then,
    /// and no other operator has asked for their results.
    pub(super) place: OperatorId,
    /// The forward operators of earlier waves that run again for each tile, since `own` reads their
    /// wide results.
    pub(super) again: Vec<OperatorId>,
}

impl TiledPart {
    /// The number of tiles.
    pub(super) fn tiles(&self) -> usize {
        self.rows.div_ceil(self.at_once)
    }

    /// Whether a tensor is never whole.
    pub(super) fn is_wide(&self, tensor: TensorId) -> bool {
        self.wide.contains(&tensor)
    }

    /// The extents of an operator's loops in a tile of `rows` positions, given those of its rank.
    pub(super) fn tile_extents(&self, id: OperatorId, mut extents: Vec<usize>, rows: usize) -> Vec<usize> {
        for (index, walked) in self.loops[&id].iter().enumerate() {
            extents[walked.0] = if index == 0 { rows } else { 1 };
        }
        extents
    }

    /// The number of an operand's dimensions up to the last one over positions; `None` if it has no
    /// positions.
    pub(super) fn dimensions_of_rows(&self, id: OperatorId, operand: &Operand) -> Option<usize> {
        let loops = &self.loops[&id];
        let is_of_rows = |walked: &Option<LoopId>| walked.is_some_and(|walked| loops.contains(&walked));
        operand.axes.iter().rposition(is_of_rows).map(|last| last + 1)
    }
}

/// A wave of a tiled part, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct WaveId {
    part: usize,
    wave: usize,
}

/// The tiled parts of a lowering.
#[derive(Debug, Default)]
pub(super) struct Tiling {
    parts: Vec<TiledPart>,
    wave_of: FxHashMap<OperatorId, WaveId>,
}

impl Tiling {
    /// Finds the parts that a layout tiles. A part with as few positions as a tile stays whole.
    ///
    /// # Errors
    /// [`PlanError::Invalid`] if the model has no such part (unless `may_lack`, for models that
    /// some blocks were taken out of), or if a part cannot run by tiles.
    pub(super) fn new(
        graph: &Graph,
        sharding: &Sharding,
        mesh: &StageMesh,
        layout: &Layout,
        may_lack: bool,
    ) -> Result<Self, PlanError> {
        let mut tiling = Self::default();
        for ((field, dimension, lacking), size) in KINDS.into_iter().zip([layout.loss_chunk, layout.mlp_chunk]) {
            let Some(at_once) = size else { continue };
            let invalid = |reason, hint: &str| PlanError::Invalid { field, reason, hint: hint.into() };
            if at_once == 0 {
                return Err(invalid("a chunk has no position".into(), "use 1 or more, or leave it out"));
            }
            let components = components(graph, dimension);
            if components.is_empty() && !may_lack {
                return Err(invalid(format!("`{}` has {lacking}", graph.name), "leave it out"));
            }
            for wide in components {
                let part = part(graph, sharding, mesh, wide, at_once)
                    .map_err(|operator| invalid(format!("`{operator}` does not run position by position"), "leave it out"))?;
                if part.tiles() > 1 {
                    let index = tiling.parts.len();
                    for (wave, Wave { own, .. }) in part.waves.iter().enumerate() {
                        tiling.wave_of.extend(own.iter().map(|&id| (id, WaveId { part: index, wave })));
                    }
                    tiling.parts.push(part);
                }
            }
        }
        Ok(tiling)
    }

    /// The wave that an operator belongs to, its number, and its part.
    pub(super) fn wave_of(&self, id: OperatorId) -> Option<(WaveId, &TiledPart, &Wave)> {
        let &wave = self.wave_of.get(&id)?;
        let part = &self.parts[wave.part];
        Some((wave, part, &part.waves[wave.wave]))
    }

    /// The operators of each wave of a forward pass.
    pub(super) fn forward_waves(&self, graph: &Graph) -> impl Iterator<Item = &[OperatorId]> {
        let waves = self.parts.iter().flat_map(|part| &part.waves).map(|wave| wave.own.as_slice());
        waves.filter(|own| own.iter().any(|id| graph.operators[id.0].pass == Pass::Forward))
    }

    /// The forward operators that run again for an operator, tile by tile.
    pub(super) fn again_for(&self, id: OperatorId) -> &[OperatorId] {
        self.wave_of(id).map_or(&[], |(_, _, wave)| &wave.again)
    }

    /// Whether a forward operator runs again, tile by tile.
    pub(super) fn runs_again(&self, id: OperatorId) -> bool {
        self.wave_of(id).is_some_and(|(_, part, _)| part.waves.iter().any(|wave| wave.again.contains(&id)))
    }

    /// Whether a tensor is never whole.
    pub(super) fn is_wide(&self, tensor: TensorId) -> bool {
        self.parts.iter().any(|part| part.is_wide(tensor))
    }

    /// The kernels that tiles make of a micro-batch's operators.
    pub(super) fn kernels(&self) -> usize {
        let of_part = |part: &TiledPart| {
            let operators: usize = part.waves.iter().map(|wave| wave.own.len() + wave.again.len()).sum();
            part.tiles().saturating_mul(operators)
        };
        self.parts.iter().map(of_part).fold(0, usize::saturating_add)
    }
}

/// The activations whose last dimension is `dimension`, in groups that operators connect.
fn components(graph: &Graph, dimension: &str) -> Vec<BTreeSet<TensorId>> {
    let is_wide = |id: TensorId| {
        let tensor = graph.tensor(id);
        tensor.role == Role::Activation
            && tensor.dimensions.last().is_some_and(|last| last.name == dimension)
            && tensor.dimensions.iter().all(|one| one.name != EXPERTS)
    };
    let mut components: Vec<BTreeSet<TensorId>> = Vec::new();
    for operator in &graph.operators {
        let mut joined: BTreeSet<TensorId> = operands(operator).map(|operand| operand.tensor).filter(|&id| is_wide(id)).collect();
        if joined.is_empty() {
            continue;
        }
        components.retain(|known| {
            let is_other = known.is_disjoint(&joined);
            if !is_other {
                joined.extend(known);
            }
            is_other
        });
        components.push(joined);
    }
    components
}

fn operands(operator: &Operator) -> impl Iterator<Item = &Operand> {
    operator.inputs.iter().chain(&operator.outputs)
}

/// The part with these wide tensors, or the name of an operator that cannot run by tiles.
fn part(
    graph: &Graph,
    sharding: &Sharding,
    mesh: &StageMesh,
    wide: BTreeSet<TensorId>,
    at_once: usize,
) -> Result<TiledPart, String> {
    let touches = |operator: &Operator| operands(operator).any(|operand| wide.contains(&operand.tensor));
    let ids: Vec<OperatorId> = (0..graph.operators.len()).map(OperatorId).filter(|id| touches(&graph.operators[id.0])).collect();
    let mut part = TiledPart { rows: 0, at_once, waves: Vec::new(), wide, loops: FxHashMap::default() };
    for &id in &ids {
        let refuse = || Err(graph.operators[id.0].name.clone());
        let Some((loops, rows)) = rows_of(graph, sharding, mesh, id, &part.wide) else { return refuse() };
        if part.rows != 0 && part.rows != rows {
            return refuse();
        }
        part.rows = rows;
        part.loops.insert(id, loops);
    }
    part.waves = waves(graph, &ids, &part.wide)?;
    Ok(part)
}

/// The loops over positions of an operator and their product on a rank. `None` if it cannot run by
/// tiles: its results at a position depend on others, its operands do not have the positions first,
/// or it reads a wide tensor in other placements than its producer leaves.
fn rows_of(
    graph: &Graph,
    sharding: &Sharding,
    mesh: &StageMesh,
    id: OperatorId,
    wide: &BTreeSet<TensorId>,
) -> Option<(Vec<LoopId>, usize)> {
    let operator = &graph.operators[id.0];
    let extents = sharding.local_extents(graph, id, mesh);
    let of_wide = operands(operator).find(|operand| wide.contains(&operand.tensor))?;
    let loops: Vec<LoopId> = of_wide.axes.split_last()?.1.iter().copied().collect::<Option<_>>()?;
    let mixes_positions = loops.iter().any(|walked| operator.depends_on_part_of(operator.loops[walked.0].role));
    if operator.has_dropout() || mixes_positions || !is_in_place(sharding, id, operator, wide) {
        return None;
    }
    for (operand, is_output) in
        operator.inputs.iter().map(|input| (input, false)).chain(operator.outputs.iter().map(|output| (output, true)))
    {
        let first = operand.axes.iter().position(|walked| *walked == loops.first().copied());
        match first {
            // The positions come first, but for dimensions of which the rank has one index.
            Some(first) => {
                let own = operand.axes.get(first..first + loops.len())?;
                let has_all = own.iter().zip(&loops).all(|(walked, own)| *walked == Some(*own));
                let placements = if is_output { sharding.output_placements(id, operand) } else { sharding.wanted(id, operand) };
                let shape: Vec<usize> = graph.tensor(operand.tensor).dimensions.iter().map(|one| one.extent).collect();
                if !has_all || placements.local_shape(&shape, mesh)[..first].iter().any(|&extent| extent != 1) {
                    return None;
                }
            }
            None => {
                let has_some = operand.axes.iter().flatten().any(|walked| loops.contains(walked));
                if has_some || (is_output && !is_sum(graph, operand)) {
                    return None;
                }
            }
        }
    }
    let rows = loops.iter().map(|walked| extents[walked.0]).product();
    Some((loops, rows))
}

/// Whether an output is a sum, to which each tile adds.
pub(super) fn is_sum(graph: &Graph, output: &Operand) -> bool {
    matches!(graph.tensor(output.tensor).role, Role::Sum | Role::ParameterGradient(_))
}

/// Whether an operator reads wide tensors as their producers leave them: nothing moves them between
/// ranks.
fn is_in_place(sharding: &Sharding, id: OperatorId, operator: &Operator, wide: &BTreeSet<TensorId>) -> bool {
    let is_wide = |operand: &&Operand| wide.contains(&operand.tensor);
    operator.inputs.iter().filter(is_wide).all(|input| sharding.wanted(id, input) == sharding.settled(input.tensor))
        && operator
            .outputs
            .iter()
            .filter(is_wide)
            .all(|output| sharding.produced(output.tensor) == sharding.settled(output.tensor))
}

/// The waves of a part's operators `ids`, or the name of an operator that belongs to none.
fn waves(graph: &Graph, ids: &[OperatorId], wide: &BTreeSet<TensorId>) -> Result<Vec<Wave>, String> {
    let makers = producers(graph);
    let mut waves: Vec<GrowingWave> = Vec::new();
    let first = ids.first().expect("invariant: an operator makes the wide tensors").0;
    for (index, operator) in graph.operators.iter().enumerate().skip(first) {
        let id = OperatorId(index);
        if ids.binary_search(&id).is_err() {
            waves.iter_mut().for_each(|wave| wave.pass_by(operator));
            continue;
        }
        if !waves.last_mut().is_some_and(|wave| wave.take(graph, &makers, id, wide)) {
            waves.push(GrowingWave::new(graph, id, wide));
        }
    }
    let is_forward = |id: &OperatorId| graph.operators[id.0].pass == Pass::Forward;
    let mut found = Vec::with_capacity(waves.len());
    for GrowingWave { wave, .. } in waves {
        let again = makers_of_wide(graph, &makers, &wave.own, wide);
        // Only forward operators run again, and what they leave beside wide tensors is there.
        let leaves_more = |id: &&OperatorId| graph.operators[id.0].outputs.iter().any(|output| !wide.contains(&output.tensor));
        let is_elsewhere = |id: &&OperatorId| graph.operators[id.0].block != graph.operators[first].block;
        let cannot = again.iter().find(|id| !is_forward(id) || leaves_more(id)).or_else(|| wave.own.iter().find(is_elsewhere));
        if let Some(id) = cannot {
            return Err(graph.operators[id.0].name.clone());
        }
        found.push(Wave { again, ..wave });
    }
    Ok(found)
}

/// A wave while operators are added to it, in the graph's order.
struct GrowingWave {
    wave: Wave,
    /// The results of the wave that are not wide, and what others have made of them.
    results: BTreeSet<TensorId>,
    /// Whether an operator outside of the wave has read one of them.
    is_read: bool,
}

impl GrowingWave {
    fn new(graph: &Graph, first: OperatorId, wide: &BTreeSet<TensorId>) -> Self {
        let wave = Wave { own: Vec::new(), place: first, again: Vec::new() };
        let mut growing = Self { wave, results: BTreeSet::new(), is_read: false };
        growing.add(graph, first, wide);
        growing
    }

    /// Adds the next operator of the part, if it can run in the wave.
    fn take(&mut self, graph: &Graph, makers: &[Option<OperatorId>], id: OperatorId, wide: &BTreeSet<TensorId>) -> bool {
        let [operator, first, place] = [id, self.wave.own[0], self.wave.place].map(|id| &graph.operators[id.0]);
        let narrow = || operator.inputs.iter().map(|input| input.tensor).filter(|tensor| !wide.contains(tensor));
        let is_of_one_pass = (operator.pass == Pass::Forward) == (first.pass == Pass::Forward);
        if !is_of_one_pass || narrow().any(|tensor| self.results.contains(&tensor)) {
            return false;
        }
        let is_made_later = |tensor: TensorId| {
            let is_activation = graph.tensor(tensor).role == Role::Activation;
            is_activation && makers[tensor.0].is_some_and(|maker| maker >= self.wave.place)
        };
        // A schedule may run all gradients of weights after those of inputs.
        let is_before_place = operator.pass == Pass::InputGradient && place.pass == Pass::WeightGradient;
        if narrow().any(is_made_later) || is_before_place {
            let is_too_late = operator.pass == Pass::WeightGradient && place.pass == Pass::InputGradient;
            if self.is_read || is_too_late {
                return false;
            }
            self.wave.place = id;
        }
        self.add(graph, id, wide);
        true
    }

    fn add(&mut self, graph: &Graph, id: OperatorId, wide: &BTreeSet<TensorId>) {
        let outputs = graph.operators[id.0].outputs.iter().map(|output| output.tensor);
        self.results.extend(outputs.filter(|&tensor| graph.tensor(tensor).role == Role::Activation && !wide.contains(&tensor)));
        self.wave.own.push(id);
    }

    /// Notes an operator that is not of the part.
    fn pass_by(&mut self, operator: &Operator) {
        if operator.inputs.iter().any(|input| self.results.contains(&input.tensor)) {
            self.is_read = true;
            self.results.extend(operator.outputs.iter().map(|output| output.tensor));
        }
    }
}

/// The operators that make the wide tensors that `own` needs and does not make itself, and those
/// that they need in turn.
fn makers_of_wide(
    graph: &Graph,
    makers: &[Option<OperatorId>],
    own: &[OperatorId],
    wide: &BTreeSet<TensorId>,
) -> Vec<OperatorId> {
    let mut needed: BTreeSet<OperatorId> = BTreeSet::new();
    let mut readers = own.to_vec();
    while let Some(id) = readers.pop() {
        for input in graph.operators[id.0].inputs.iter().filter(|input| wide.contains(&input.tensor)) {
            let maker = makers[input.tensor.0].filter(|maker| !own.contains(maker));
            readers.extend(maker.filter(|&maker| needed.insert(maker)));
        }
    }
    needed.into_iter().collect()
}
