//! The costs of a model's operators under a plan: each operator's own work, and the conversions of
//! tensors between operators.

use super::conversions::{ConversionStep, Conversions, TensorUses};
use super::prices::{CollectivePrices, PricedCollective, PricingContext};
use super::problem::{Cost, Factor, Problem};
use crate::space::optimizer_tensors;
use foretell_models::{Kernel, OperatorId, Pass, Role, Tensor, TensorId};
use foretell_program::{Axis, Choice, Choices, Collective, Group, Optimizer, Placement, Plan};
use foretell_simulator::{CostModel, Quantile, SimulationError};
use foretell_units::{Bytes, Picoseconds};
use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};

/// The cost of an operator with one sharding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct OperatorCost {
    /// Forward and backward kernels of all micro-batches, and the update of its parameters.
    work: Picoseconds,
    /// Part of `work`: one micro-batch's backward kernels, which may hide reductions.
    backward: Picoseconds,
    /// Reduction of its parameters' gradients, once a step.
    reduction: Picoseconds,
    /// Its parameters, their gradients and optimizer state, and its outputs.
    memory: Bytes,
}

/// The costs of all shardings of a plan's operators.
pub(super) struct Costs {
    /// The operators of the forward pass: the variables of the problem.
    pub(super) operators: Vec<OperatorId>,
    /// Number of shardings of each operator.
    sizes: Vec<usize>,
    /// The cost of each operator, indexed by operator and sharding.
    own: Vec<Vec<OperatorCost>>,
    /// Conversions between operators.
    between: Vec<Factor>,
}

/// Sums of [`OperatorCost`] over all operators; `work` includes conversions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TotalCost {
    pub(super) work: Picoseconds,
    pub(super) backward: Picoseconds,
    pub(super) reduction: Picoseconds,
}

/// Returns the size of the largest table of a conversion: the number of combinations of choices of
/// the operators that decide it. It grows exponentially with the readers of a tensor.
pub(super) fn largest_table(choices: &Choices) -> usize {
    let uses = TensorUses::new(&choices.graph);
    let size = |conversions: &Conversions| {
        let counts = conversions.deciding_operators.iter().map(|id| choices.of_operator[id.0].len());
        counts.fold(1, usize::saturating_mul)
    };
    Conversions::all(&choices.graph, &uses).iter().map(size).max().unwrap_or(0)
}

impl Costs {
    pub(super) fn new(choices: &Choices, plan: &Plan, context: &PricingContext<'_>) -> Result<Self, SimulationError> {
        let graph = &choices.graph;
        let forward = |id: &OperatorId| graph.operators[id.0].pass == Pass::Forward;
        let operators: Vec<OperatorId> = (0..graph.operators.len()).map(OperatorId).filter(forward).collect();
        let uses = TensorUses::new(graph);
        let prices = CollectivePrices::new(context, &collectives(choices, plan))?;
        let pricer = Pricer { choices, plan, costs: context.costs, prices, kernels: RefCell::default() };
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
                choices.of_operator[id.0].iter().map(|&choice| pricer.operator(id, gradients, choice)).collect()
            })
            .collect();
        let mut between: Vec<Factor> = Conversions::all(graph, &uses)
            .iter()
            .map(|conversions| {
                let deciding = &conversions.deciding_operators;
                let scope: Vec<usize> = deciding.iter().map(|id| place_of[id]).collect();
                let of_operator: Vec<&[Choice]> = deciding.iter().map(|id| choices.of_operator[id.0].as_slice()).collect();
                Factor::tabulate(&sizes, scope, |values| {
                    let choice_of = |id: OperatorId| {
                        let place = deciding.iter().position(|&deciding| deciding == id);
                        let place = place.expect("invariant: a conversion asks its deciding operators");
                        of_operator[place][values[place]]
                    };
                    let mut time = Picoseconds::ZERO;
                    conversions.steps(choices, &uses, &choice_of, &mut |step| time += pricer.step(step));
                    Cost { time: pricer.in_all_micro_batches(time), memory: Bytes::ZERO }
                })
            })
            .collect();
        between.extend(shared_parameters(choices, &uses, &sizes, &place_of));
        Ok(Self { operators, sizes, own, between })
    }

    /// Returns the problem in which a reduction counts with `thousandths` thousandths of its time.
    pub(super) fn problem(&self, thousandths: u64) -> Problem {
        let own = self.own.iter().enumerate().map(|(variable, costs)| {
            let cost = |cost: &OperatorCost| Cost {
                time: cost.work + Picoseconds(cost.reduction.0 / 1000 * thousandths),
                memory: cost.memory,
            };
            Factor { scope: vec![variable], costs: costs.iter().map(cost).collect() }
        });
        Problem { sizes: self.sizes.clone(), factors: own.chain(self.between.iter().cloned()).collect() }
    }

    /// Returns the sums of an assignment.
    pub(super) fn total(&self, values: &[usize]) -> TotalCost {
        let mut total = TotalCost::default();
        for (costs, &value) in self.own.iter().zip(values) {
            total.work += costs[value].work;
            total.backward += costs[value].backward;
            total.reduction += costs[value].reduction;
        }
        total.work += self.between.iter().map(|factor| factor.cost(&self.sizes, values).time).sum();
        total
    }
}

/// Returns factors that forbid two operators from reading a shared parameter, or leaving its
/// gradients, in different placements.
fn shared_parameters(
    choices: &Choices,
    uses: &TensorUses,
    sizes: &[usize],
    place_of: &HashMap<OperatorId, usize>,
) -> Vec<Factor> {
    let graph = &choices.graph;
    let mut factors = Vec::new();
    for (parameter, _) in graph.parameters() {
        let users: Vec<OperatorId> =
            uses.readers[parameter.0].iter().copied().filter(|id| graph.operators[id.0].pass == Pass::Forward).collect();
        let Some((&first, others)) = users.split_first() else { continue };
        let placements = |id: OperatorId, value: usize| {
            let choice = choices.of_operator[id.0][value];
            let operand = graph.operators[id.0].inputs.iter().find(|input| input.tensor == parameter);
            operand.map(|operand| (choice.wanted(operand), choice.produced(operand)))
        };
        for &other in others {
            factors.push(Factor::tabulate(sizes, vec![place_of[&first], place_of[&other]], |values| {
                if placements(first, values[0]) == placements(other, values[1]) { Cost::ZERO } else { Cost::IMPOSSIBLE }
            }));
        }
    }
    factors
}

/// Returns every collective that may have to be priced: those over `tensor` for each size of an
/// activation or an input, and those that reduce gradients.
fn collectives(choices: &Choices, plan: &Plan) -> BTreeSet<PricedCollective> {
    let graph = &choices.graph;
    let mut wanted = BTreeSet::new();
    let mut sizes: BTreeSet<u64> = BTreeSet::new();
    for (index, tensor) in graph.tensors.iter().enumerate() {
        if matches!(tensor.role, Role::Activation | Role::Input(_)) {
            let elements: usize = choices.shape_without_tensor(TensorId(index)).iter().product();
            sizes.insert(bytes(tensor, elements, plan));
        }
    }
    let group = Group::along(Axis::Tensor);
    for bytes in sizes {
        for kind in [Collective::AllReduce, Collective::ReduceScatter, Collective::AllGather] {
            wanted.insert(PricedCollective { kind, group: group.clone(), bytes });
        }
        // An all-to-all moves a rank's shard.
        wanted.insert(PricedCollective {
            kind: Collective::AllToAll,
            group: group.clone(),
            bytes: bytes / choices.ranks() as u64,
        });
    }
    wanted.extend([true, false].into_iter().flat_map(|with_tensor| reductions(choices, plan, with_tensor)));
    wanted
}

/// Returns the collectives that reduce one bucket of gradients, under the plan's ZeRO stage: over
/// the axes that shard samples and, if `with_tensor`, over `tensor`.
fn reductions(choices: &Choices, plan: &Plan, with_tensor: bool) -> Vec<PricedCollective> {
    let is_more = |axis: &Axis| choices.mesh.size(*axis) > 1;
    let (sharded, unsharded) =
        if plan.layout.zero > 0 { (Axis::ZERO.to_vec(), vec![Axis::Data]) } else { (Vec::new(), Axis::BATCH.to_vec()) };
    let sharded: Vec<Axis> = sharded.into_iter().filter(is_more).collect();
    let shards = sharded.iter().map(|axis| choices.mesh.size(*axis) as u64).product::<u64>();
    let others = unsharded.into_iter().chain(with_tensor.then_some(Axis::Tensor));
    let axes: Vec<Axis> = others.filter(is_more).collect();
    let bytes = plan.layout.bucket.count();
    let mut all = Vec::new();
    if shards > 1 {
        let along = |kind, bytes| PricedCollective { kind, group: Group::over(sharded.clone()), bytes };
        // Gradients are in single precision, parameters in the plan's storage format.
        all.push(along(Collective::ReduceScatter, bytes));
        all.push(along(Collective::AllGather, bytes / 4 * plan.storage().size().count()));
    }
    if !axes.is_empty() {
        all.push(PricedCollective { kind: Collective::AllReduce, group: Group::over(axes), bytes: bytes / shards });
    }
    all
}

fn bytes(tensor: &Tensor, elements: usize, plan: &Plan) -> u64 {
    elements as u64 * tensor.storage.data_type(plan.storage()).size().count()
}

/// Prices kernels and collectives.
struct Pricer<'a> {
    choices: &'a Choices,
    plan: &'a Plan,
    costs: &'a CostModel,
    prices: CollectivePrices,
    /// Kernels priced so far, by kernel and whether it accumulates.
    kernels: RefCell<HashMap<(Kernel, bool), Picoseconds>>,
}

impl Pricer<'_> {
    fn micro_batches(&self) -> u64 {
        self.plan.micro_batches().expect("invariant: the plan was validated with its choices") as u64
    }

    fn in_all_micro_batches(&self, time: Picoseconds) -> Picoseconds {
        Picoseconds(time.0.saturating_mul(self.micro_batches()))
    }

    /// Returns a kernel's time on the slowest kind of device, since ranks wait for each other. In
    /// fp8 plans products are priced in bf16: the graph has no quantisation yet.
    fn kernel(&self, kernel: Kernel, accumulate: bool) -> Picoseconds {
        *self.kernels.borrow_mut().entry((kernel, accumulate)).or_insert_with(|| {
            let on_kind = |kind| {
                let time = self.costs.kernel_time(&kernel, accumulate, self.plan.storage(), kind).at(Quantile::Median);
                Picoseconds::from(time + self.costs.parameters(kind).instruction_overhead.at(Quantile::Median))
            };
            (0..self.costs.kind_count()).map(on_kind).max().expect("invariant: a topology has a kind of device")
        })
    }

    fn step(&self, step: ConversionStep) -> Picoseconds {
        match step {
            ConversionStep::Kernel(kernel) => self.kernel(kernel, false),
            ConversionStep::Collective(kind, elements, tensor) => {
                let bytes = bytes(self.choices.graph.tensor(tensor), elements, self.plan);
                self.prices.of(&PricedCollective { kind, group: Group::along(Axis::Tensor), bytes })
            }
        }
    }

    /// Returns the cost of an operator with these gradient operators, sharded by `choice`.
    fn operator(&self, id: OperatorId, gradients: &[OperatorId], choice: Choice) -> OperatorCost {
        let graph = &self.choices.graph;
        let operator = &graph.operators[id.0];
        let extents = self.choices.local_extents(id, choice);
        let forward = self.kernel(operator.kernel(&extents), false);
        let backward = gradients
            .iter()
            .map(|gradient| {
                let operator = &graph.operators[gradient.0];
                let accumulates = operator.pass == Pass::WeightGradient && self.micro_batches() > 1;
                self.kernel(operator.kernel(&extents), accumulates)
            })
            .sum();
        let mut own = OperatorCost { work: self.in_all_micro_batches(forward + backward), backward, ..OperatorCost::default() };
        for operand in &operator.inputs {
            if matches!(graph.tensor(operand.tensor).role, Role::Parameter(_)) {
                let elements = self.elements(operand.tensor, choice.wanted(operand));
                let with_tensor = choice.partial_axes(operand).contains(&Axis::Tensor);
                own.work += self.update(elements);
                own.reduction += self.reduction(elements, with_tensor);
                let kept = optimizer_tensors(self.plan) as u64 + 1;
                own.memory += Bytes::new(elements as u64 * (self.plan.storage().size().count() + 4 * kept));
            }
        }
        for operand in operator.outputs.iter().filter(|output| graph.tensor(output.tensor).role == Role::Activation) {
            let elements = self.elements(operand.tensor, choice.produced(operand));
            own.memory += Bytes::new(bytes(graph.tensor(operand.tensor), elements, self.plan));
        }
        own
    }

    /// Returns the elements of one rank's shard of a tensor.
    fn elements(&self, tensor: TensorId, placement: Placement) -> usize {
        let shape = self.choices.shape_without_tensor(tensor);
        let whole: usize = shape.iter().product();
        match placement {
            Placement::Shard(_) => whole / self.choices.ranks(),
            Placement::Replicate | Placement::Partial => whole,
        }
    }

    /// Returns the share of a full bucket's update that `elements` elements take.
    fn update(&self, elements: usize) -> Picoseconds {
        let bucket = (self.plan.layout.bucket.count() / 4) as usize;
        let shards = self.choices.mesh.size(Axis::Shard);
        let (whole, controlled, exempt) = (bucket.max(1), false, false);
        let kernels = match self.plan.optimizer {
            Optimizer::Sgd => {
                let (momentum, nesterov) = (self.plan.training.momentum != 0.0, self.plan.training.nesterov);
                vec![Kernel::Sgd { elements: whole, momentum, nesterov, controlled, exempt }]
            }
            Optimizer::Adam | Optimizer::AdamW => vec![Kernel::AdamW { elements: whole, controlled, exempt }],
            Optimizer::Lamb => vec![
                Kernel::LambDirection { elements: whole, controlled, exempt },
                Kernel::LambStep { elements: whole, controlled },
            ],
            // Orthogonalisation is left out: every rank does it for whole matrices, however they
            // are sharded.
            Optimizer::Muon => vec![
                Kernel::MuonDirection { elements: whole, controlled },
                Kernel::MuonStep { elements: whole, longest: 1, controlled, exempt },
            ],
        };
        let share = |kernel| share_of(self.kernel(kernel, false), elements / shards, bucket);
        kernels.into_iter().map(share).fold(Picoseconds(0), |sum, share| sum + share)
    }

    /// Returns the share of a full bucket's reduction that `elements` elements take.
    fn reduction(&self, elements: usize, with_tensor: bool) -> Picoseconds {
        let bucket = (self.plan.layout.bucket.count() / 4) as usize;
        let whole = reductions(self.choices, self.plan, with_tensor).iter().map(|collective| self.prices.of(collective)).sum();
        share_of(whole, elements, bucket)
    }
}

/// Returns `part` of `parts` equal parts of a duration.
fn share_of(whole: Picoseconds, part: usize, parts: usize) -> Picoseconds {
    Picoseconds((u128::from(whole.0) * part as u128 / parts.max(1) as u128) as u64)
}
