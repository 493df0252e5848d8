//! The problem of a model under a plan: each operator's own work, and the traffic of each tensor, priced.

use super::prices::{Exchange, Ground, Prices};
use super::problem::{Cost, Factor, Problem};
use super::traffic::{Traffic, Uses, Work};
use foretell_models::{Kernel, OperatorId, Pass, Role, Tensor};
use foretell_program::{Axis, Choice, Choices, Collective, Group, Optimizer, Placement, Plan};
use foretell_simulator::{CostModel, Quantile, SimulationError};
use foretell_units::{Bytes, Picoseconds};
use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};

/// What an operator takes, shared out in one way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct OwnCost {
    /// Its kernels, forward and backward, in all micro-batches; and its parameters' update.
    work: Picoseconds,
    /// Of that, what one micro-batch's backward pass takes: what reductions may be hidden behind.
    backward: Picoseconds,
    /// The reduction of its parameters' gradients, once a step.
    reduction: Picoseconds,
    /// Its parameters with what is kept beside them, and its outputs.
    memory: Bytes,
}

/// Everything that a choice of placements costs.
pub(super) struct Costs {
    /// The operators of the forward pass, which are the variables.
    pub(super) operators: Vec<OperatorId>,
    sizes: Vec<usize>,
    own: Vec<Vec<OwnCost>>,
    between: Vec<Factor>,
}

/// What a whole assignment takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Total {
    pub(super) work: Picoseconds,
    pub(super) backward: Picoseconds,
    pub(super) reduction: Picoseconds,
}

impl Costs {
    pub(super) fn new(choices: &Choices, plan: &Plan, ground: &Ground<'_>) -> Result<Self, SimulationError> {
        let graph = &choices.graph;
        let forward = |id: &OperatorId| graph.operators[id.0].pass == Pass::Forward;
        let operators: Vec<OperatorId> = (0..graph.operators.len()).map(OperatorId).filter(forward).collect();
        let uses = Uses::new(graph);
        let prices = Prices::new(ground, &exchanges(choices, plan))?;
        let pricer = Pricer { choices, plan, costs: ground.costs, prices, kernels: RefCell::default() };
        let sizes: Vec<usize> = operators.iter().map(|id| choices.of_operator[id.0].len()).collect();
        let place_of: HashMap<OperatorId, usize> = operators.iter().enumerate().map(|(place, &id)| (id, place)).collect();
        let mut gradients: HashMap<OperatorId, Vec<OperatorId>> = HashMap::new();
        for (index, operator) in graph.operators.iter().enumerate() {
            if let Some(forward) = operator.forward {
                gradients.entry(forward).or_default().push(OperatorId(index));
            }
        }
        let own = operators
            .iter()
            .map(|&id| {
                let gradients = gradients.get(&id).map_or(&[][..], Vec::as_slice);
                choices.of_operator[id.0].iter().map(|&choice| pricer.own(id, gradients, choice)).collect()
            })
            .collect();
        let mut between: Vec<Factor> = Traffic::all(graph, &uses)
            .iter()
            .map(|traffic| {
                let scope: Vec<usize> = traffic.scope.iter().map(|id| place_of[id]).collect();
                let of_operator: Vec<&[Choice]> = traffic.scope.iter().map(|id| choices.of_operator[id.0].as_slice()).collect();
                Factor::tabulate(&sizes, scope, |values| {
                    let of = |id: OperatorId| {
                        let place = traffic.scope.iter().position(|&one| one == id).unwrap_or(0);
                        of_operator[place][values[place]]
                    };
                    let mut time = Picoseconds::ZERO;
                    traffic.work(choices, &uses, &of, &mut |work| time += pricer.work(work));
                    Cost { time: pricer.in_all_micro_batches(time), memory: Bytes::ZERO }
                })
            })
            .collect();
        between.extend(shared_parameters(choices, &uses, &sizes, &place_of));
        Ok(Self { operators, sizes, own, between })
    }

    /// The problem in which a reduction counts so many thousandths of its time.
    pub(super) fn problem(&self, thousandths: u64) -> Problem {
        let own = self.own.iter().enumerate().map(|(variable, costs)| {
            let cost =
                |one: &OwnCost| Cost { time: one.work + Picoseconds(one.reduction.0 / 1000 * thousandths), memory: one.memory };
            Factor { scope: vec![variable], costs: costs.iter().map(cost).collect() }
        });
        Problem { sizes: self.sizes.clone(), factors: own.chain(self.between.iter().cloned()).collect() }
    }

    /// What an assignment takes, reductions apart.
    pub(super) fn total(&self, values: &[usize]) -> Total {
        let mut total = Total::default();
        for (costs, &value) in self.own.iter().zip(values) {
            total.work += costs[value].work;
            total.backward += costs[value].backward;
            total.reduction += costs[value].reduction;
        }
        total.work += self.between.iter().map(|factor| factor.cost(&self.sizes, values).time).sum();
        total
    }
}

/// A parameter that several operators use lies one way, and its gradients are left one way.
fn shared_parameters(choices: &Choices, uses: &Uses, sizes: &[usize], place_of: &HashMap<OperatorId, usize>) -> Vec<Factor> {
    let graph = &choices.graph;
    let mut factors = Vec::new();
    for (parameter, _) in graph.parameters() {
        let users: Vec<OperatorId> =
            uses.readers[parameter.0].iter().copied().filter(|id| graph.operators[id.0].pass == Pass::Forward).collect();
        let Some((&first, others)) = users.split_first() else { continue };
        let lies = |id: OperatorId, value: usize| {
            let choice = choices.of_operator[id.0][value];
            let operand = graph.operators[id.0].inputs.iter().find(|input| input.tensor == parameter);
            operand.map(|operand| (choice.wanted(operand), choice.produced(operand)))
        };
        for &other in others {
            factors.push(Factor::tabulate(sizes, vec![place_of[&first], place_of[&other]], |values| {
                if lies(first, values[0]) == lies(other, values[1]) { Cost::ZERO } else { Cost::IMPOSSIBLE }
            }));
        }
    }
    factors
}

/// Every exchange whose price may be asked for: of each tensor along `tensor`, and of gradients.
fn exchanges(choices: &Choices, plan: &Plan) -> BTreeSet<Exchange> {
    let graph = &choices.graph;
    let mut wanted = BTreeSet::new();
    let mut sizes: BTreeSet<u64> = BTreeSet::new();
    for (index, tensor) in graph.tensors.iter().enumerate() {
        if tensor.role == Role::Activation {
            let elements: usize = choices.shape_without_tensor(foretell_models::TensorId(index)).iter().product();
            sizes.insert(bytes(tensor, elements, plan));
        }
    }
    let group = Group::along(Axis::Tensor);
    for bytes in sizes {
        for kind in [Collective::AllReduce, Collective::ReduceScatter, Collective::AllGather] {
            wanted.insert(Exchange { kind, group: group.clone(), bytes });
        }
        // Between two cuts a rank has a part before and after.
        wanted.insert(Exchange { kind: Collective::AllToAll, group: group.clone(), bytes: bytes / choices.ranks() as u64 });
    }
    wanted.extend([true, false].into_iter().flat_map(|with_tensor| reductions(choices, plan, with_tensor)));
    wanted
}

/// What reduces a bucket of gradients that are parts of sums along the axes of samples, and along `tensor` or not: as `zero` has it.
fn reductions(choices: &Choices, plan: &Plan, with_tensor: bool) -> Vec<Exchange> {
    let shards = choices.mesh.size(Axis::Shard) as u64;
    let is_more = |axis: &Axis| choices.mesh.size(*axis) > 1;
    let others = [Axis::Expert, Axis::Data].into_iter().chain(with_tensor.then_some(Axis::Tensor));
    let axes: Vec<Axis> = others.filter(is_more).collect();
    let bytes = plan.layout.bucket.count();
    let mut all = Vec::new();
    if shards > 1 {
        let along = |kind, bytes| Exchange { kind, group: Group::along(Axis::Shard), bytes };
        // Gradients are in single precision, parameters in the run's.
        all.push(along(Collective::ReduceScatter, bytes));
        all.push(along(Collective::AllGather, bytes / 4 * plan.storage().size().count()));
    }
    if !axes.is_empty() {
        all.push(Exchange { kind: Collective::AllReduce, group: Group::over(axes), bytes: bytes / shards });
    }
    all
}

fn bytes(tensor: &Tensor, elements: usize, plan: &Plan) -> u64 {
    elements as u64 * tensor.storage.data_type(plan.storage()).size().count()
}

struct Pricer<'a> {
    choices: &'a Choices,
    plan: &'a Plan,
    costs: &'a CostModel,
    prices: Prices,
    /// What was asked already: kernels repeat.
    kernels: RefCell<HashMap<(Kernel, bool), Picoseconds>>,
}

impl Pricer<'_> {
    fn micro_batches(&self) -> u64 {
        self.plan.micro_batches().unwrap_or(1) as u64
    }

    fn in_all_micro_batches(&self, time: Picoseconds) -> Picoseconds {
        Picoseconds(time.0.saturating_mul(self.micro_batches()))
    }

    /// On the slowest kind of device: ranks wait for each other. Products of plans with operands of eight bits are priced as bf16's: the
    /// graph is the one before these.
    fn kernel(&self, kernel: Kernel, accumulate: bool) -> Picoseconds {
        *self.kernels.borrow_mut().entry((kernel, accumulate)).or_insert_with(|| {
            let of_kind = |kind| {
                let time = self.costs.kernel_time(&kernel, accumulate, self.plan.storage(), kind).at(Quantile::Median);
                Picoseconds::from(time + self.costs.parameters(kind).instruction_overhead.at(Quantile::Median))
            };
            (0..self.costs.kind_count()).map(of_kind).max().unwrap_or_default()
        })
    }

    fn work(&self, work: Work) -> Picoseconds {
        match work {
            Work::Kernel(kernel) => self.kernel(kernel, false),
            Work::Exchange(kind, elements, tensor) => {
                let bytes = bytes(self.choices.graph.tensor(tensor), elements, self.plan);
                self.prices.of(&Exchange { kind, group: Group::along(Axis::Tensor), bytes })
            }
        }
    }

    fn own(&self, id: OperatorId, gradients: &[OperatorId], choice: Choice) -> OwnCost {
        let graph = &self.choices.graph;
        let operator = &graph.operators[id.0];
        let extents = self.choices.local_extents(id, choice);
        let forward = self.kernel(operator.kernel(&extents), false);
        let backward = gradients
            .iter()
            .map(|gradient| {
                let operator = &graph.operators[gradient.0];
                let adds = operator.pass == Pass::WeightGradient && self.micro_batches() > 1;
                self.kernel(operator.kernel(&extents), adds)
            })
            .sum();
        let mut own = OwnCost { work: self.in_all_micro_batches(forward + backward), backward, ..OwnCost::default() };
        for operand in &operator.inputs {
            if matches!(graph.tensor(operand.tensor).role, Role::Parameter(_)) {
                let elements = self.elements(operand.tensor, choice.wanted(operand));
                let with_tensor = choice.partial_axes(operand).contains(&Axis::Tensor);
                own.work += self.update(elements);
                own.reduction += self.reduction(elements, with_tensor);
                let kept = self.plan.optimizer_states() as u64 + u64::from(self.plan.storage().size() < Bytes::new(4)) + 1;
                own.memory += Bytes::new(elements as u64 * (self.plan.storage().size().count() + 4 * kept));
            }
        }
        for operand in operator.outputs.iter().filter(|output| graph.tensor(output.tensor).role == Role::Activation) {
            let elements = self.elements(operand.tensor, choice.produced(operand));
            own.memory += Bytes::new(bytes(graph.tensor(operand.tensor), elements, self.plan));
        }
        own
    }

    /// Elements of a rank's part of a tensor.
    fn elements(&self, tensor: foretell_models::TensorId, placement: Placement) -> usize {
        let shape = self.choices.shape_without_tensor(tensor);
        let whole: usize = shape.iter().product();
        match placement {
            Placement::Shard(_) => whole / self.choices.ranks(),
            _ => whole,
        }
    }

    /// A bucket's update, as far as it is of so many elements.
    fn update(&self, elements: usize) -> Picoseconds {
        let bucket = (self.plan.layout.bucket.count() / 4) as usize;
        let shards = self.choices.mesh.size(Axis::Shard);
        let of = |elements| match self.plan.optimizer {
            Optimizer::Sgd => Kernel::Sgd {
                elements,
                momentum: self.plan.training.momentum != 0.0,
                nesterov: self.plan.training.nesterov,
                controlled: false,
            },
            Optimizer::Adam | Optimizer::AdamW => Kernel::AdamW { elements, controlled: false },
        };
        share_of(self.kernel(of(bucket.max(1)), false), elements / shards, bucket)
    }

    /// A bucket's reduction, as far as it is of so many elements.
    fn reduction(&self, elements: usize, with_tensor: bool) -> Picoseconds {
        let bucket = (self.plan.layout.bucket.count() / 4) as usize;
        let whole = reductions(self.choices, self.plan, with_tensor).iter().map(|exchange| self.prices.of(exchange)).sum();
        share_of(whole, elements, bucket)
    }
}

/// So many of so many parts of a duration.
fn share_of(whole: Picoseconds, part: usize, of: usize) -> Picoseconds {
    Picoseconds((u128::from(whole.0) * part as u128 / of.max(1) as u128) as u64)
}
