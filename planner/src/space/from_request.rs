//! The search space of a request.

use super::stage_meshes::DeviceRun;
use super::variants::bucket_sizes;
use super::{BlockPattern, DeviceFacts, DeviceKinds, ModelFacts, Request, Space};
use foretell_models::{Extent, Graph, Pass, Role};
use foretell_program::{BUCKET_ALIGNMENT, Offload, Plan, work_of_blocks};
use foretell_simulator::gpu::StackLimits;
use foretell_topologies::{Architecture, DeviceId};
use foretell_units::Bytes;

impl<'a> Space<'a> {
    /// Describes the space of `request`, whose model has the forward graph `graph`.
    pub(crate) fn new(request: &'a Request<'a>, graph: &Graph, kinds: &DeviceKinds) -> Self {
        let base = request.base;
        let has_attention = graph.operators.iter().any(|operator| operator.is_attention());
        let model = ModelFacts {
            blocks: graph.blocks.len(),
            work: work_of_blocks(graph),
            sequence: graph.tokens_per_sample.filter(|_| has_attention),
            experts: request.model.experts(),
            heads: heads(graph, StackLimits::of(&base.stack).is_some_and(|limits| limits.divides_key_heads)),
            has_attention,
            is_recomputable: graph.blocks.iter().any(|block| block.recomputable),
            // Other models have few blocks, and their whole Programs compile quickly.
            pattern: (has_attention || request.model.repeated_layers().is_some())
                .then(|| BlockPattern::of(graph, |parameter| base.training.is_frozen(parameter)))
                .flatten(),
            shares_parameters: shares_parameters(graph),
            bucketed_gradients: bucketed_gradients(graph),
        };
        let devices = DeviceFacts {
            count: request.devices,
            per_node: request
                .topology
                .node_groups()
                .iter()
                .map(|group| group.devices)
                .min()
                .expect("invariant: a topology has nodes"),
            of_first_nodes: of_first_nodes(request),
            speeds: speeds(request),
            kinds: kinds.places(request.devices),
            runs: runs(request, kinds, model.pattern.is_some()),
            memory_differs: kinds.weights().iter().any(|&weight| weight < 1.0),
        };
        Self {
            base: &base.layout,
            fixed: &request.fixed,
            limits: StackLimits::of(&base.stack),
            global_batch: base.global_batch,
            bucket_sizes: bucket_sizes(base.layout.bucket, model.bucketed_gradients, base.stack.is_own(), request.fixed.bucket),
            offloads: offloads(request),
            model,
            devices,
        }
    }
}

/// Returns the devices of the first node and of the first groups of nodes, without repetition.
fn of_first_nodes(request: &Request<'_>) -> Vec<usize> {
    let groups = request.topology.node_groups();
    let mut all = 0;
    let of_groups = groups.iter().map(|group| {
        all += group.devices * group.count;
        all
    });
    let mut counts: Vec<usize> = groups.first().map(|group| group.devices).into_iter().chain(of_groups).collect();
    counts.retain(|&count| (1..request.devices).contains(&count));
    counts.dedup();
    counts
}

/// Returns the bytes of a graph's gradients in buckets on one rank, aligned as the compiler aligns
/// them. With more ranks, no rank has more.
fn bucketed_gradients(graph: &Graph) -> Bytes {
    const SINGLE_PRECISION: usize = 4;
    let elements: usize = graph.parameters().map(|(_, tensor)| tensor.elements().next_multiple_of(BUCKET_ALIGNMENT)).sum();
    Bytes::new((elements * SINGLE_PRECISION) as u64)
}

/// Returns the fewest heads of an attention operator, those of queries, or of keys if
/// `are_of_keys`; `None` without attention.
fn heads(graph: &Graph, are_of_keys: bool) -> Option<usize> {
    let of_attention = graph.operators.iter().filter(|operator| operator.is_attention());
    let heads = of_attention.map(|operator| {
        let counts = |role: Extent| role == Extent::Heads || (role == Extent::Group && !are_of_keys);
        let of_heads = operator.loops.iter().filter(|dimension| counts(dimension.role));
        of_heads.map(|head| head.extent).product()
    });
    heads.min()
}

/// Returns `true` if operators of different blocks read the same parameter.
fn shares_parameters(graph: &Graph) -> bool {
    let mut block_of = vec![None; graph.tensors.len()];
    let forward = graph.operators.iter().filter(|operator| operator.pass == Pass::Forward);
    let mut reads = forward.flat_map(|operator| operator.inputs.iter().map(|input| (input.tensor.0, operator.block)));
    let is_parameter = |tensor: usize| matches!(graph.tensors[tensor].role, Role::Parameter(_));
    reads.any(|(tensor, block)| is_parameter(tensor) && *block_of[tensor].get_or_insert(block) != block)
}

/// Returns the runs of devices of one kind for stages with their own meshes. Empty if all devices
/// are of one kind, or if bounds do not apply: no blocks of the model repeat, or the cost model
/// does not know how long collectives take on every kind.
fn runs(request: &Request<'_>, kinds: &DeviceKinds, has_pattern: bool) -> Vec<DeviceRun> {
    let are_known = kinds.kinds.iter().all(|&kind| request.costs.knows_collectives(kind));
    let speeds = speeds(request);
    if !has_pattern || !are_known || speeds.is_empty() {
        return Vec::new();
    }
    let places = kinds.places(request.devices);
    let mut devices_of_node = Vec::new();
    for group in request.topology.node_groups() {
        devices_of_node.extend(std::iter::repeat_n(group.devices, group.devices * group.count));
    }
    let devices: Vec<usize> = (0..places.len()).collect();
    let runs = devices.chunk_by(|&device, &next| places[device] == places[next]);
    runs.map(|run| DeviceRun { devices: run.len(), node: devices_of_node[run[0]], speed: speeds[run[0]] }).collect()
}

/// Returns the matrix-product rate of each device, in operations per second. Empty if all are of
/// one kind, or if a kind's rate is not known.
fn speeds(request: &Request<'_>) -> Vec<f64> {
    let topology = request.topology;
    let kinds = topology.device_kinds();
    let precision = request.base.precision;
    let peaks: Option<Vec<f64>> = kinds.iter().map(|kind| Some(kind.peak_rate(precision)?.value() * kind.speed())).collect();
    match peaks {
        Some(peaks) if kinds.len() > 1 => {
            (0..request.devices.min(topology.device_count())).map(|device| peaks[topology.kind_index(DeviceId(device))]).collect()
        }
        _ => Vec::new(),
    }
}

/// Returns the offloads to consider for layouts that do not fit otherwise. Empty if the plan or the
/// user decides, if the memory of some host is not known, or if a device's memory is the host's.
fn offloads(request: &Request<'_>) -> &'static [Offload] {
    let Request { topology, base, .. } = request;
    let have_hosts = topology
        .node_groups()
        .iter()
        .all(|group| group.host_memory.is_some() && topology.device_kinds()[group.kind].architecture != Architecture::Cpu);
    let is_open = request.fixed.offload.is_none() && base.layout.offload.is_none() && base.stack.is_own();
    match have_hosts && is_open {
        false => &[],
        true if optimizer_tensors(base) == 0 => &[Offload::Activations],
        true => &[Offload::Optimizer, Offload::Activations, Offload::Both],
    }
}

/// Returns how many single-precision values the optimizer keeps for each parameter: its states, and
/// a master copy if operators read a narrower format.
pub(crate) fn optimizer_tensors(plan: &Plan) -> usize {
    plan.optimizer_states() + usize::from(plan.has_master_copy())
}
