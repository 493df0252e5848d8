//! Properties of a model that estimates use: times of its kernels and sizes of its tensors.

use crate::space::Request;
use foretell_models::{Graph, GraphOptions, Kernel, Model, Operator, Pass, Role, TensorId, differentiate};
use foretell_units::Seconds;
use std::collections::{BTreeMap, HashMap};

/// The samples of the larger of the two batches at which kernels are timed; the other batch has
/// one.
const LARGE_BATCH: usize = 8;

/// Time of kernels as a linear function of the number of samples.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct GrowingTime {
    /// Seconds that do not depend on the number of samples.
    fixed: f64,
    /// Seconds for each sample.
    per_sample: f64,
}

impl GrowingTime {
    /// Returns the seconds for `samples`, which may be a fraction.
    pub(super) fn time(&self, samples: f64) -> f64 {
        self.fixed + self.per_sample * samples
    }

    fn through(one: f64, large: f64) -> Self {
        let per_sample = ((large - one) / (LARGE_BATCH - 1) as f64).max(0.0);
        Self { fixed: (one - per_sample).max(0.0), per_sample }
    }
}

/// Properties of a model. Times are for the whole model on the slowest device; sizes are bytes for
/// one sample.
#[derive(Clone, Debug, Default)]
pub(super) struct ModelProfile {
    pub(super) blocks: f64,
    pub(super) forward: GrowingTime,
    pub(super) backward: GrowingTime,
    /// Time of attention's forward kernels.
    pub(super) attention: GrowingTime,
    /// Forward and backward time of products of experts.
    pub(super) experts: [GrowingTime; 2],
    /// Number of parameters outside of experts.
    pub(super) parameters: f64,
    /// Number of parameters of experts.
    pub(super) expert_parameters: f64,
    /// Share of the parameters in the larger of the first and the last block.
    share_of_largest_end: f64,
    /// Size of the largest tensor that one block passes to another.
    pub(super) boundary: f64,
    /// Size of the activations of an average block.
    pub(super) activations: f64,
    /// Size of the activations of attention in an average block.
    pub(super) attention_activations: f64,
    /// Size of the activations of the last block.
    pub(super) last_activations: f64,
    /// How often a position is sent to experts in an average block; 0 without experts.
    pub(super) routed: f64,
    /// Keyed by the number of ranks over which all experts are spread: the rows of the fullest rank
    /// over its slots. Without an entry the ratio is 1.
    pub(super) rows_over_slots: BTreeMap<usize, f64>,
    /// Least memory limit of a device, in bytes.
    pub(super) memory_limit: f64,
}

impl ModelProfile {
    pub(super) fn new(request: &Request<'_>, graph: &Graph) -> Self {
        let large =
            request.base.training.graph(request.model, request.name, &GraphOptions { batch: LARGE_BATCH, ..GraphOptions::ONE });
        let one = KernelTimes::of(request, graph);
        let many = large.map_or_else(|_| one.scaled(LARGE_BATCH as f64), |graph| KernelTimes::of(request, &graph));
        let limits = request.topology.device_kinds().iter().map(|kind| kind.memory.value() * (1.0 - request.headroom));
        let limit = limits.chain(request.memory_limit.map(|limit| limit.value())).fold(f64::INFINITY, f64::min);
        let blocks = graph.blocks.len().max(1);
        let mut profile = Self {
            blocks: blocks as f64,
            forward: GrowingTime::through(one.forward, many.forward),
            backward: GrowingTime::through(one.backward, many.backward),
            attention: GrowingTime::through(one.attention, many.attention),
            experts: [0, 1].map(|pass| GrowingTime::through(one.experts[pass], many.experts[pass])),
            routed: routed(request.model),
            rows_over_slots: rows_over_slots(request),
            memory_limit: limit,
            ..Self::default()
        };
        profile.measure_parameters(request, graph);
        profile.measure_activations(request, graph);
        profile
    }

    /// Returns a lower bound on the share of the parameters on the fullest of `stages` stages.
    pub(super) fn fullest_share(&self, stages: usize) -> f64 {
        if stages == 1 { 1.0 } else { self.share_of_largest_end }
    }

    fn measure_parameters(&mut self, request: &Request<'_>, graph: &Graph) {
        let experts = request.model.experts();
        let mut of_block: HashMap<usize, f64> = HashMap::new();
        let mut seen: HashMap<TensorId, ()> = HashMap::new();
        for operator in &graph.operators {
            for input in &operator.inputs {
                let tensor = graph.tensor(input.tensor);
                if !matches!(tensor.role, Role::Parameter(_)) || seen.insert(input.tensor, ()).is_some() {
                    continue;
                }
                let elements = tensor.elements() as f64;
                let is_of_expert =
                    tensor.dimensions.len() > 2 && tensor.dimensions.first().map(|dimension| dimension.extent) == experts;
                if is_of_expert {
                    self.expert_parameters += elements;
                } else {
                    self.parameters += elements;
                    *of_block.entry(operator.block).or_default() += elements;
                }
            }
        }
        let ends = [0, graph.blocks.len().saturating_sub(1)];
        let largest = ends.iter().filter_map(|block| of_block.get(block)).copied().fold(0.0, f64::max);
        self.share_of_largest_end = largest / self.parameters.max(1.0);
    }

    fn measure_activations(&mut self, request: &Request<'_>, graph: &Graph) {
        let element = request.base.storage().size().value();
        let bytes = |tensor: TensorId| graph.tensor(tensor).elements() as f64 * element;
        let is_activation = |tensor: TensorId| graph.tensor(tensor).role == Role::Activation;
        let mut block_of: HashMap<TensorId, usize> = HashMap::new();
        let last = graph.blocks.len().saturating_sub(1);
        let (mut all, mut of_attention) = (0.0, 0.0);
        for operator in &graph.operators {
            for output in operator.outputs.iter().filter(|output| is_activation(output.tensor)) {
                block_of.insert(output.tensor, operator.block);
                let size = bytes(output.tensor);
                if operator.block == last {
                    self.last_activations += size;
                } else {
                    all += size;
                    of_attention += if operator.is_attention() { size } else { 0.0 };
                }
            }
            for input in operator.inputs.iter().filter(|input| is_activation(input.tensor)) {
                if block_of.get(&input.tensor).is_some_and(|&block| block != operator.block) {
                    self.boundary = self.boundary.max(bytes(input.tensor));
                }
            }
        }
        let others = (graph.blocks.len().saturating_sub(1)).max(1) as f64;
        (self.activations, self.attention_activations) = (all / others, of_attention / others);
    }
}

/// Returns how often a position is sent to experts in an average block. Empty slots are sent too.
fn routed(model: &Model) -> f64 {
    let mixtures = model.as_decoder().and_then(|decoder| decoder.mixtures);
    mixtures.map_or(0.0, |mixtures| mixtures.top_k as f64 * f64::from(mixtures.capacity_factor) / mixtures.every as f64)
}

/// Returns the rows of the fullest rank over its slots, keyed by the numbers of ranks over which
/// experts can be spread.
fn rows_over_slots(request: &Request<'_>) -> BTreeMap<usize, f64> {
    let experts = request.model.experts().unwrap_or(1);
    let ranks = (2..=experts).filter(|&ranks| experts.is_multiple_of(ranks));
    ranks.map(|ranks| (ranks, request.costs.rows_over_slots(ranks))).filter(|&(_, rows)| rows > 1.0).collect()
}

fn is_of_experts(kind: Kernel) -> bool {
    use Kernel::{ExpertMatmul, ExpertMatmulInputGradient, ExpertMatmulWeightGradient};
    matches!(kind, ExpertMatmul { .. } | ExpertMatmulInputGradient { .. } | ExpertMatmulWeightGradient { .. })
}

/// Returns the seconds that a kernel takes on the slowest kind of device.
pub(crate) fn kernel_seconds(request: &Request<'_>, kernel: &Kernel) -> f64 {
    let kinds = 0..request.topology.device_kinds().len();
    let time = |kind| request.costs.kernel_time(kernel, false, request.base.precision, kind).median;
    kinds.map(time).reduce(Seconds::max).expect("invariant: a topology has a kind of device").value()
}

/// Seconds of the kernels of a graph.
#[derive(Clone, Copy, Debug, Default)]
struct KernelTimes {
    forward: f64,
    backward: f64,
    attention: f64,
    experts: [f64; 2],
}

impl KernelTimes {
    fn of(request: &Request<'_>, graph: &Graph) -> Self {
        let mut times = Self::default();
        let mut known: HashMap<Kernel, f64> = HashMap::new();
        let both = differentiate(graph, 1, |name| request.base.training.is_frozen(name));
        let mut time_of = |operator: &Operator| {
            let kernel = operator.kernel(&operator.extents());
            *known.entry(kernel).or_insert_with(|| kernel_seconds(request, &kernel))
        };
        for operator in &both.operators {
            let time = time_of(operator);
            if is_of_experts(operator.kind) {
                times.experts[usize::from(operator.pass != Pass::Forward)] += time;
            }
            if operator.pass == Pass::Forward {
                times.forward += time;
                times.attention += if operator.is_attention() { time } else { 0.0 };
            } else {
                times.backward += time;
            }
        }
        times
    }

    fn scaled(&self, factor: f64) -> Self {
        let Self { forward, backward, attention, experts } = *self;
        let experts = experts.map(|time| time * factor);
        Self { forward: forward * factor, backward: backward * factor, attention: attention * factor, experts }
    }
}
