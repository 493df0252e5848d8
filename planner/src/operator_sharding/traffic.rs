//! What a tensor costs between those that make it and those that read it: the conversions along `tensor`, by the compiler's own moves, and the
//! additions of gradients that several readers send back.
//!
//! Gradients that are added are looked at together with their sums ([`Traffic::all`]): how a sum lies depends on all of them. This says again, of one
//! axis, what `foretell_program`'s strategy and emission do where a plan asks for every operator; a test holds the two together
//! (`what_is_exchanged_is_what_the_compiler_lays_out`).

use foretell_models::{Graph, Kernel, Operand, Operator, OperatorId, OperatorKind, Pass, Role, TensorId};
use foretell_program::{Action, Choice, Choices, Collective, Placement, moves};
use std::collections::{BTreeMap, BTreeSet};

/// Some work between operators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    Kernel(Kernel),
    /// Over the ranks of `tensor`, of so many elements of a tensor.
    Exchange(Collective, usize, TensorId),
}

/// Tensors that are exchanged together, and the operators whose choices decide how.
#[derive(Clone, Debug)]
pub(super) struct Traffic {
    tensors: BTreeSet<TensorId>,
    /// Those that make, read or add them, in the graph's order.
    operators: Vec<OperatorId>,
    /// The operators of the forward pass whose choices matter.
    pub(super) scope: Vec<OperatorId>,
}

/// Who makes and who reads each tensor.
pub(super) struct Uses {
    pub(super) makers: Vec<Option<OperatorId>>,
    pub(super) readers: Vec<Vec<OperatorId>>,
}

impl Uses {
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

/// Whether an operator adds gradients of one tensor.
pub(super) fn is_sum(operator: &Operator) -> bool {
    operator.pass != Pass::Forward && operator.forward.is_none()
}

impl Traffic {
    /// All traffic of a graph: of each activation and each input on its own, but that of gradients which are added, and their sum, together.
    pub(super) fn all(graph: &Graph, uses: &Uses) -> Vec<Self> {
        let is_exchanged = |tensor: &usize| {
            matches!(graph.tensors[*tensor].role, Role::Activation | Role::Input(_)) && !uses.readers[*tensor].is_empty()
        };
        // The representative of what a tensor is looked at together with: operands of one sum.
        let mut together: Vec<usize> = (0..graph.tensors.len()).collect();
        fn root(together: &mut [usize], mut tensor: usize) -> usize {
            while together[tensor] != tensor {
                together[tensor] = together[together[tensor]];
                tensor = together[tensor];
            }
            tensor
        }
        for operator in graph.operators.iter().filter(|operator| is_sum(operator)) {
            let operands = operator.inputs.iter().chain(&operator.outputs).map(|operand| operand.tensor.0);
            let roots: Vec<usize> = operands.map(|tensor| root(&mut together, tensor)).collect();
            let least = roots.iter().copied().min().unwrap_or(0);
            roots.into_iter().for_each(|one| together[one] = least);
        }
        let mut sets: BTreeMap<usize, BTreeSet<TensorId>> = BTreeMap::new();
        for tensor in (0..graph.tensors.len()).filter(is_exchanged) {
            sets.entry(root(&mut together, tensor)).or_default().insert(TensorId(tensor));
        }
        sets.into_values().map(|tensors| Self::of(graph, uses, tensors)).collect()
    }

    fn of(graph: &Graph, uses: &Uses, tensors: BTreeSet<TensorId>) -> Self {
        let of_tensor = |tensor: &TensorId| uses.readers[tensor.0].iter().copied().chain(uses.makers[tensor.0]);
        let operators: BTreeSet<OperatorId> = tensors.iter().flat_map(of_tensor).collect();
        let decides = |id: &OperatorId| match graph.operators[id.0].pass {
            Pass::Forward => Some(*id),
            _ => graph.operators[id.0].forward,
        };
        let scope: BTreeSet<OperatorId> = operators.iter().filter_map(decides).collect();
        Self { tensors, operators: operators.into_iter().collect(), scope: scope.into_iter().collect() }
    }

    /// The work of one micro-batch where operators are shared out as `of` says.
    pub(super) fn work(&self, choices: &Choices, uses: &Uses, of: &dyn Fn(OperatorId) -> Choice, each: &mut dyn FnMut(Work)) {
        let mut walk = Walk { traffic: self, choices, uses, of, each, states: BTreeMap::new(), sums: BTreeMap::new() };
        walk.go();
    }
}

/// How a tensor lies by now.
#[derive(Clone, Debug)]
struct State {
    produced: Placement,
    settled: Placement,
    variants: Vec<Placement>,
}

struct Walk<'a> {
    traffic: &'a Traffic,
    choices: &'a Choices,
    uses: &'a Uses,
    of: &'a dyn Fn(OperatorId) -> Choice,
    each: &'a mut dyn FnMut(Work),
    states: BTreeMap<TensorId, State>,
    /// Of each sum of gradients how all that is added, and the sum, lie.
    sums: BTreeMap<OperatorId, Placement>,
}

impl Walk<'_> {
    fn go(&mut self) {
        let (traffic, choices) = (self.traffic, self.choices);
        // Whole samples are read; who wants a part cuts it out.
        for &tensor in traffic.tensors.iter().filter(|tensor| matches!(choices.graph.tensor(**tensor).role, Role::Input(_))) {
            let whole = Placement::Replicate;
            self.states.insert(tensor, State { produced: whole, settled: whole, variants: vec![whole] });
        }
        let mut is_forward = true;
        for &id in &traffic.operators {
            let operator = &choices.graph.operators[id.0];
            if is_forward && operator.pass != Pass::Forward {
                is_forward = false;
                self.forget_larger_variants();
            }
            if is_sum(operator) {
                self.add(id, operator);
            }
            for input in operator.inputs.iter().filter(|input| traffic.tensors.contains(&input.tensor)) {
                let wanted = self.wanted(id, input);
                self.fetch(input.tensor, wanted);
            }
            for output in operator.outputs.iter().filter(|output| traffic.tensors.contains(&output.tensor)) {
                let produced = self.produced(id, output);
                let settled = self.settle(output.tensor, produced);
                self.states.insert(output.tensor, State { produced, settled, variants: vec![settled] });
                self.convert(output.tensor, produced, settled);
            }
        }
    }

    fn choice(&self, id: OperatorId) -> Choice {
        (self.of)(self.choices.graph.operators[id.0].forward.unwrap_or(id))
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

    /// Decides how a sum is made, and adds.
    fn add(&mut self, id: OperatorId, operator: &Operator) {
        let settled = |tensor: TensorId| self.states.get(&tensor).map_or(Placement::Replicate, |state| state.settled);
        let total = operator.outputs.first().map_or(TensorId(0), |output| output.tensor);
        let mut all = operator.inputs.iter().map(|input| settled(input.tensor));
        let first = all.next().unwrap_or_default();
        let placement = if first == Placement::Partial && all.all(|other| other == first) {
            first
        } else {
            // As the sum is wanted; else as the first of what is added lies that is cut.
            let divides = |dimension: &usize| {
                let shape = self.choices.shape_without_tensor(total);
                shape.get(*dimension).is_some_and(|extent| extent.is_multiple_of(self.choices.ranks()))
            };
            let cut = || {
                operator.inputs.iter().find_map(|input| match settled(input.tensor) {
                    Placement::Shard(dimension) => Some(dimension),
                    _ => None,
                })
            };
            self.wanted_by_all(total).or_else(cut).filter(divides).map_or(Placement::Replicate, Placement::Shard)
        };
        self.sums.insert(id, placement);
        let elements = self.shape(total, placement).iter().product();
        (self.each)(Work::Kernel(Kernel::Add { elements }));
    }

    /// The dimension along which all readers of a gradient want it to be cut, if they agree.
    fn wanted_by_all(&self, tensor: TensorId) -> Option<usize> {
        let graph = &self.choices.graph;
        let mut agreed = None;
        for &id in &self.uses.readers[tensor.0] {
            let operator = &graph.operators[id.0];
            let input = operator.inputs.iter().find(|input| input.tensor == tensor)?;
            let wanted = if is_sum(operator) {
                self.wanted_by_all(operator.outputs.first()?.tensor)
            } else {
                match self.choice(id).wanted(input) {
                    Placement::Shard(dimension) => Some(dimension),
                    _ => None,
                }
            };
            if wanted.is_none() || agreed.is_some_and(|dimension| wanted != Some(dimension)) {
                return None;
            }
            agreed = wanted;
        }
        agreed
    }

    /// How a tensor lies once sums that are made at once are made.
    fn settle(&self, tensor: TensorId, produced: Placement) -> Placement {
        if produced != Placement::Partial {
            return produced;
        }
        let graph = &self.choices.graph;
        let readers = &self.uses.readers[tensor.0];
        let adds = |id: &OperatorId| graph.operators[id.0].kind == OperatorKind::Add;
        let lies_alike = |id: &OperatorId| {
            let inputs = &graph.operators[id.0].inputs;
            inputs.iter().all(|input| input.tensor == tensor || self.will_be_produced(input.tensor) == produced)
        };
        if !readers.is_empty() && readers.iter().all(|id| adds(id) && lies_alike(id)) {
            return produced;
        }
        let is_forward = self.uses.makers[tensor.0].is_none_or(|id| graph.operators[id.0].pass == Pass::Forward);
        let wanted = if is_forward { self.wanted_forward(tensor) } else { self.wanted_by_all(tensor) };
        wanted.map_or(Placement::Replicate, Placement::Shard)
    }

    /// The dimension along which all who read a tensor in the forward pass want it to be cut, if they agree.
    fn wanted_forward(&self, tensor: TensorId) -> Option<usize> {
        let graph = &self.choices.graph;
        let readers = self.uses.readers[tensor.0].iter().filter(|id| graph.operators[id.0].pass == Pass::Forward);
        let mut wanted = readers.map(|id| {
            let input = graph.operators[id.0].inputs.iter().find(|input| input.tensor == tensor)?;
            match self.choice(*id).wanted(input) {
                Placement::Shard(dimension) => Some(dimension),
                _ => None,
            }
        });
        let first = wanted.next()??;
        wanted.all(|other| other == Some(first)).then_some(first)
    }

    fn will_be_produced(&self, tensor: TensorId) -> Placement {
        let known = || self.states.get(&tensor).map_or(Placement::Replicate, |state| state.produced);
        let Some(maker) = self.uses.makers[tensor.0] else { return known() };
        let operator = &self.choices.graph.operators[maker.0];
        if operator.forward.is_some() {
            let output = operator.outputs.iter().find(|output| output.tensor == tensor);
            return output.map_or(Placement::Replicate, |output| self.choice(maker).produced(output));
        }
        if is_sum(operator) {
            let mut parts = operator.inputs.iter().map(|input| self.will_be_produced(input.tensor));
            let first = parts.next().unwrap_or_default();
            return if parts.all(|other| other == first) { first } else { known() };
        }
        known()
    }

    fn fetch(&mut self, tensor: TensorId, wanted: Placement) {
        let Some(state) = self.states.get_mut(&tensor) else { return };
        if state.variants.contains(&wanted) {
            return;
        }
        let from = state.variants.first().copied().unwrap_or_default();
        // A sum is made in the place of its summands.
        if from == Placement::Partial && wanted == Placement::Replicate {
            state.variants.remove(0);
        }
        state.variants.push(wanted);
        self.convert(tensor, from, wanted);
    }

    fn convert(&mut self, tensor: TensorId, from: Placement, to: Placement) {
        let shape = self.shape(tensor, from);
        let mut before: usize = shape.iter().product();
        for step in moves(&shape, from, to, self.choices.ranks()).unwrap_or_default() {
            let after: usize = step.shape.iter().product();
            (self.each)(match step.action {
                Action::Rearrange(kernel) => Work::Kernel(kernel),
                Action::Collective(kind) => Work::Exchange(kind, before.max(after), tensor),
            });
            before = after;
        }
    }

    /// After the forward pass what was made of a tensor that is kept and is larger than that is given up.
    fn forget_larger_variants(&mut self) {
        for (&tensor, state) in &mut self.states {
            let elements = |placement: Placement| -> usize { shape(self.choices, tensor, placement).iter().product() };
            let least = state.variants.iter().map(|&one| elements(one)).min().unwrap_or(0);
            state.variants.retain(|&one| elements(one) == least);
        }
    }

    fn shape(&self, tensor: TensorId, placement: Placement) -> Vec<usize> {
        shape(self.choices, tensor, placement)
    }
}

/// A rank's part of a tensor.
fn shape(choices: &Choices, tensor: TensorId, placement: Placement) -> Vec<usize> {
    let mut shape = choices.shape_without_tensor(tensor);
    if let Placement::Shard(dimension) = placement {
        shape[dimension] /= choices.ranks();
    }
    shape
}
