//! What bounds and spaces know of a request's model and devices before any layout.

use crate::devices::Devices;
use crate::own_meshes::Run;
use crate::request::Request;
use foretell_models::{Graph, Pass, Role};
use foretell_program::BUCKET_ALIGNMENT;
use foretell_topologies::DeviceId;
use foretell_units::Bytes;

/// Room that a graph's gradients take in buckets of one rank, as the compiler aligns them; with more ranks they take no more on any.
pub(crate) fn room_in_buckets(graph: &Graph) -> Bytes {
    const SINGLE_PRECISION: usize = 4;
    let elements: usize = graph.parameters().map(|(_, tensor)| tensor.elements().next_multiple_of(BUCKET_ALIGNMENT)).sum();
    Bytes::new((elements * SINGLE_PRECISION) as u64)
}

/// Whether operators of different blocks read the same parameter.
pub(crate) fn shares_parameters(graph: &Graph) -> bool {
    let mut block_of = vec![None; graph.tensors.len()];
    let reads = graph.operators.iter().filter(|operator| operator.pass == Pass::Forward);
    let mut read = reads.flat_map(|operator| operator.inputs.iter().map(|input| (input.tensor.0, operator.block)));
    let is_parameter = |tensor: usize| matches!(graph.tensors[tensor].role, Role::Parameter(_));
    read.any(|(tensor, block)| is_parameter(tensor) && *block_of[tensor].get_or_insert(block) != block)
}

/// The runs of devices of one kind, where there are several and it is known what exchanges take on all of them.
pub(crate) fn runs(request: &Request<'_>, devices: &Devices, is_stack: bool) -> Vec<Run> {
    let are_known = devices.kinds.iter().all(|&kind| request.costs.knows_collectives(kind));
    let speeds = speeds(request);
    if !is_stack || !are_known || speeds.is_empty() {
        return Vec::new();
    }
    let places = devices.places(request.devices);
    let mut node_of = Vec::new();
    for group in request.topology.node_groups() {
        node_of.extend(std::iter::repeat_n(group.devices, group.devices * group.count));
    }
    let numbers: Vec<usize> = (0..places.len()).collect();
    let runs = numbers.chunk_by(|&one, &next| places[one] == places[next]);
    runs.map(|run| Run { devices: run.len(), node: node_of[run[0]], speed: speeds[run[0]] }).collect()
}

/// How fast each device is at matrix products; empty where all are of one kind.
pub(crate) fn speeds(request: &Request<'_>) -> Vec<f64> {
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
