//! Conversions between operators: how a tensor's placement along `tensor` changes between the
//! operators that make it and those that read it, and the sums of gradients that several readers
//! send back.
//!
//! A sum of gradients depends on the placements of everything that is added, so tensors that are
//! added are looked at together ([`Conversions::all`]).
//!
//! This repeats, for one axis, how the compiler's strategy and emission choose conversions when a
//! plan names every operator. The test `priced_conversions_are_those_that_the_compiler_emits` keeps
//! the two equal.

use foretell_models::{Graph, Kernel, Operand, Operator, OperatorId, Pass, Role, TensorId};
use foretell_program::{Action, Choice, Choices, Collective, Placement, moves};
use std::collections::{BTreeMap, BTreeSet};

/// One step of a conversion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConversionStep {
    Kernel(Kernel),
    /// A collective over `tensor` with the number of elements and the tensor.
    Collective(Collective, usize, TensorId),
}

/// Tensors that are converted together.
#[derive(Clone, Debug)]
pub(super) struct Conversions {
    tensors: BTreeSet<TensorId>,
    /// The operators that make, read or add them, in graph order.
    operators: Vec<OperatorId>,
    /// The operators of the forward pass whose shardings decide the conversions.
    pub(super) deciding_operators: Vec<OperatorId>,
}

/// The operators that make and read each tensor.
pub(super) struct TensorUses {
    pub(super) makers: Vec<Option<OperatorId>>,
    pub(super) readers: Vec<Vec<OperatorId>>,
}

impl TensorUses {
    pub(super) fn new(graph: &Graph) -> Self {
        let mut makers = vec![None; graph.tensors.len()];
        let mut readers = vec![Vec::new(); graph.tensors.len()];
        for (index, operator) in graph.operators.iter().enumerate() {
            for input in &operator.inputs {
                if readers[input.tensor.0].last() != Some(&OperatorId(index)) {
                    readers[input.tensor.0].push(OperatorId(index));
                }
            }
            for output in &operator.outputs {
                makers[output.tensor.0] = Some(OperatorId(index));
            }
        }
        Self { makers, readers }
    }
}

/// Returns `true` if an operator adds gradients of one tensor.
fn is_gradient_sum(operator: &Operator) -> bool {
    operator.pass != Pass::Forward && operator.forward.is_none()
}

impl Conversions {
    /// Returns the conversions of a graph: those of each activation and input on its own, except
    /// that the operands and the result of a gradient sum are together.
    pub(super) fn all(graph: &Graph, uses: &TensorUses) -> Vec<Self> {
        let may_be_converted = |tensor: &usize| {
            matches!(graph.tensors[*tensor].role, Role::Activation | Role::Input(_)) && !uses.readers[*tensor].is_empty()
        };
        // Union-find over tensors that are added to each other.
        let mut parents: Vec<usize> = (0..graph.tensors.len()).collect();
        for operator in graph.operators.iter().filter(|operator| is_gradient_sum(operator)) {
            let operands = operator.inputs.iter().chain(&operator.outputs).map(|operand| operand.tensor.0);
            let roots: Vec<usize> = operands.map(|tensor| root(&mut parents, tensor)).collect();
            let least = roots.iter().copied().min().expect("invariant: a sum has a result");
            roots.into_iter().for_each(|root| parents[root] = least);
        }
        let mut sets: BTreeMap<usize, BTreeSet<TensorId>> = BTreeMap::new();
        for tensor in (0..graph.tensors.len()).filter(may_be_converted) {
            sets.entry(root(&mut parents, tensor)).or_default().insert(TensorId(tensor));
        }
        sets.into_values().map(|tensors| Self::of(graph, uses, tensors)).collect()
    }

    fn of(graph: &Graph, uses: &TensorUses, tensors: BTreeSet<TensorId>) -> Self {
        let of_tensor = |tensor: &TensorId| uses.readers[tensor.0].iter().copied().chain(uses.makers[tensor.0]);
        let operators: BTreeSet<OperatorId> = tensors.iter().flat_map(of_tensor).collect();
        let decides = |id: &OperatorId| match graph.operators[id.0].pass {
            Pass::Forward => Some(*id),
            _ => graph.operators[id.0].forward,
        };
        let deciding: BTreeSet<OperatorId> = operators.iter().filter_map(decides).collect();
        Self { tensors, operators: operators.into_iter().collect(), deciding_operators: deciding.into_iter().collect() }
    }

    /// Passes every conversion step of one micro-batch to `emit`, in order. `choice_of` returns the
    /// sharding of each deciding operator.
    pub(super) fn steps(
        &self,
        choices: &Choices,
        uses: &TensorUses,
        choice_of: &dyn Fn(OperatorId) -> Choice,
        emit: &mut dyn FnMut(ConversionStep),
    ) {
        Walk { conversions: self, choices, uses, choice_of, emit, states: BTreeMap::new(), sums: BTreeMap::new() }.run();
    }
}

/// Returns the representative of a tensor's set, with path halving.
fn root(parents: &mut [usize], mut tensor: usize) -> usize {
    while parents[tensor] != tensor {
        parents[tensor] = parents[parents[tensor]];
        tensor = parents[tensor];
    }
    tensor
}

/// The placements that a tensor has at some point of a walk.
#[derive(Clone, Debug)]
struct TensorState {
    /// Placement that its maker leaves.
    produced: Placement,
    /// Placement after its partial sums are reduced, or `produced` if they may stay partial.
    settled: Placement,
    /// Placements in which it is available.
    available: Vec<Placement>,
}

/// A walk over the operators of some conversions, in graph order.
struct Walk<'a> {
    conversions: &'a Conversions,
    choices: &'a Choices,
    uses: &'a TensorUses,
    choice_of: &'a dyn Fn(OperatorId) -> Choice,
    emit: &'a mut dyn FnMut(ConversionStep),
    states: BTreeMap<TensorId, TensorState>,
    /// Placement of the operands and the result of each gradient sum.
    sums: BTreeMap<OperatorId, Placement>,
}

impl Walk<'_> {
    fn run(&mut self) {
        let (conversions, choices) = (self.conversions, self.choices);
        let is_input = |tensor: &&TensorId| matches!(choices.graph.tensor(**tensor).role, Role::Input(_));
        // Every rank loads complete samples, and cuts out its shard if it needs only that.
        for &tensor in conversions.tensors.iter().filter(is_input) {
            let whole = Placement::Replicate;
            self.states.insert(tensor, TensorState { produced: whole, settled: whole, available: vec![whole] });
        }
        let mut is_forward = true;
        for &id in &conversions.operators {
            let operator = &choices.graph.operators[id.0];
            if is_forward && operator.pass != Pass::Forward {
                is_forward = false;
                self.keep_smallest_placements();
            }
            if is_gradient_sum(operator) {
                self.add(id, operator);
            }
            for input in operator.inputs.iter().filter(|input| conversions.tensors.contains(&input.tensor)) {
                let wanted = self.wanted(id, input);
                self.fetch(input.tensor, wanted);
            }
            for output in operator.outputs.iter().filter(|output| conversions.tensors.contains(&output.tensor)) {
                let produced = self.produced(id, output);
                let settled = self.settle(output.tensor, produced);
                self.states.insert(output.tensor, TensorState { produced, settled, available: vec![settled] });
                self.convert(output.tensor, produced, settled);
            }
        }
    }

    fn choice(&self, id: OperatorId) -> Choice {
        (self.choice_of)(self.choices.graph.operators[id.0].forward.unwrap_or(id))
    }

    fn wanted(&self, id: OperatorId, input: &Operand) -> Placement {
        match self.sums.get(&id) {
            Some(&placement) => placement,
            None => self.choice(id).wanted(input),
        }
    }

    fn produced(&self, id: OperatorId, output: &Operand) -> Placement {
        match self.sums.get(&id) {
            Some(&placement) => placement,
            None => self.choice(id).produced(output),
        }
    }

    /// Decides the placement of a gradient sum, and emits the addition.
    fn add(&mut self, id: OperatorId, operator: &Operator) {
        let settled = |tensor: TensorId| self.states.get(&tensor).map_or(Placement::Replicate, |state| state.settled);
        let total = operator.outputs.first().expect("invariant: a sum has a result").tensor;
        let mut all = operator.inputs.iter().map(|input| settled(input.tensor));
        let first = all.next().expect("invariant: a sum has operands");
        let placement = if first == Placement::Partial && all.all(|other| other == first) {
            first
        } else {
            // The dimension along which all readers read it sharded; else that of the first sharded
            // operand.
            let divides = |dimension: &usize| {
                let shape = self.choices.shape_without_tensor(total);
                shape.get(*dimension).is_some_and(|extent| extent.is_multiple_of(self.choices.ranks()))
            };
            let of_operands = || operator.inputs.iter().find_map(|input| sharded_dimension(settled(input.tensor)));
            let dimension = self.wanted_by_all(total).or_else(of_operands).filter(divides);
            dimension.map_or(Placement::Replicate, Placement::Shard)
        };
        self.sums.insert(id, placement);
        let elements = self.shape(total, placement).iter().product();
        (self.emit)(ConversionStep::Kernel(Kernel::Add { elements }));
    }

    /// Returns the dimension along which all readers read a gradient sharded, if they agree.
    fn wanted_by_all(&self, tensor: TensorId) -> Option<usize> {
        let graph = &self.choices.graph;
        let mut agreed = None;
        for &id in &self.uses.readers[tensor.0] {
            let operator = &graph.operators[id.0];
            let input = operator.inputs.iter().find(|input| input.tensor == tensor)?;
            let wanted = if is_gradient_sum(operator) {
                self.wanted_by_all(operator.outputs.first()?.tensor)
            } else {
                sharded_dimension(self.choice(id).wanted(input))
            };
            if wanted.is_none() || agreed.is_some_and(|dimension| wanted != Some(dimension)) {
                return None;
            }
            agreed = wanted;
        }
        agreed
    }

    /// Returns a tensor's placement after its partial sums are reduced; `Partial` if they may stay
    /// partial.
    fn settle(&self, tensor: TensorId, produced: Placement) -> Placement {
        if produced != Placement::Partial {
            return produced;
        }
        let graph = &self.choices.graph;
        let readers = &self.uses.readers[tensor.0];
        let adds = |id: &OperatorId| matches!(graph.operators[id.0].kind, Kernel::Add { .. });
        let adds_partial_sums = |id: &OperatorId| {
            let inputs = &graph.operators[id.0].inputs;
            inputs.iter().all(|input| input.tensor == tensor || self.will_be_produced(input.tensor) == produced)
        };
        if !readers.is_empty() && readers.iter().all(|id| adds(id) && adds_partial_sums(id)) {
            return produced;
        }
        let is_forward = self.uses.makers[tensor.0].is_none_or(|id| graph.operators[id.0].pass == Pass::Forward);
        let wanted = if is_forward { self.wanted_forward(tensor) } else { self.wanted_by_all(tensor) };
        wanted.map_or(Placement::Replicate, Placement::Shard)
    }

    /// Returns the dimension along which all forward readers read a tensor sharded, if they agree.
    fn wanted_forward(&self, tensor: TensorId) -> Option<usize> {
        let graph = &self.choices.graph;
        let readers = self.uses.readers[tensor.0].iter().filter(|id| graph.operators[id.0].pass == Pass::Forward);
        let mut wanted = readers.map(|id| {
            let input = graph.operators[id.0].inputs.iter().find(|input| input.tensor == tensor)?;
            sharded_dimension(self.choice(*id).wanted(input))
        });
        let first = wanted.next()??;
        wanted.all(|other| other == Some(first)).then_some(first)
    }

    /// Returns the placement that a tensor's maker leaves, even before the walk has reached the
    /// maker.
    fn will_be_produced(&self, tensor: TensorId) -> Placement {
        let known = || self.states.get(&tensor).map_or(Placement::Replicate, |state| state.produced);
        let Some(maker) = self.uses.makers[tensor.0] else { return known() };
        let operator = &self.choices.graph.operators[maker.0];
        if operator.forward.is_some() {
            let output = operator.outputs.iter().find(|output| output.tensor == tensor);
            return self.choice(maker).produced(output.expect("invariant: a tensor is among its maker's results"));
        }
        if is_gradient_sum(operator) {
            let mut operands = operator.inputs.iter().map(|input| self.will_be_produced(input.tensor));
            let first = operands.next().expect("invariant: a sum has operands");
            return if operands.all(|other| other == first) { first } else { known() };
        }
        known()
    }

    /// Makes a tensor available in the placement `wanted`.
    fn fetch(&mut self, tensor: TensorId, wanted: Placement) {
        let Some(state) = self.states.get_mut(&tensor) else { return };
        if state.available.contains(&wanted) {
            return;
        }
        let from = *state.available.first().expect("invariant: a tensor is available in some placement");
        // An all-reduce overwrites its input.
        if from == Placement::Partial && wanted == Placement::Replicate {
            state.available.remove(0);
        }
        state.available.push(wanted);
        self.convert(tensor, from, wanted);
    }

    /// Emits the steps between two placements of a tensor.
    fn convert(&mut self, tensor: TensorId, from: Placement, to: Placement) {
        let shape = self.shape(tensor, from);
        let mut before: usize = shape.iter().product();
        let steps = moves(&shape, from, to, self.choices.ranks()).expect("invariant: no reader wants partial sums");
        for step in steps {
            let after: usize = step.shape.iter().product();
            (self.emit)(match step.action {
                Action::Rearrange(kernel) => ConversionStep::Kernel(kernel),
                Action::Collective(kind) => ConversionStep::Collective(kind, before.max(after), tensor),
            });
            before = after;
        }
    }

    /// Drops, at the end of the forward pass, the available placements of each tensor that are
    /// larger than the smallest: only the smallest are kept for the backward pass.
    fn keep_smallest_placements(&mut self) {
        for (&tensor, state) in &mut self.states {
            let elements = |placement: Placement| -> usize { shape(self.choices, tensor, placement).iter().product() };
            let least = state.available.iter().map(|&placements| elements(placements)).min().unwrap_or(0);
            state.available.retain(|&placements| elements(placements) == least);
        }
    }

    fn shape(&self, tensor: TensorId, placement: Placement) -> Vec<usize> {
        shape(self.choices, tensor, placement)
    }
}

fn sharded_dimension(placement: Placement) -> Option<usize> {
    match placement {
        Placement::Shard(dimension) => Some(dimension),
        _ => None,
    }
}

/// Returns the shape of one rank's shard of a tensor.
fn shape(choices: &Choices, tensor: TensorId, placement: Placement) -> Vec<usize> {
    let mut shape = choices.shape_without_tensor(tensor);
    if let Placement::Shard(dimension) = placement {
        shape[dimension] /= choices.ranks();
    }
    shape
}
