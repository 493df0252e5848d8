//! Finds a rotation of the mesh, a cyclic shift along one axis, that is a symmetry: each rank and
//! the rank that it is moved onto run the same list, at the same pace, on equivalent nodes.
//!
//! The topology says which nodes are equivalent ([`Topology::interchangeable_nodes`]). Whether the
//! flows of a collective are symmetric, too, is known only when it is lowered: those of a ring are,
//! those of a tree are not.

use crate::network::MeshRotation;
use foretell_program::{Axis, GroupId, Program, StageProgram};
use foretell_topologies::Topology;
use std::collections::BTreeSet;

/// Returns the rotation along the longest axis that allows one. Assumes that rank `i` runs on the
/// topology's device `i`. `paces` are the paces of the ranks. `uneven` has, for each list, the
/// groups in which kernels cost more on one member than on another.
pub(super) fn find_rotation(
    program: &Program,
    topology: &Topology,
    paces: &[f64],
    uneven: &[BTreeSet<GroupId>],
) -> Option<MeshRotation> {
    let nodes = topology.interchangeable_nodes()?;
    let along = |&axis: &Axis| {
        let rotation = MeshRotation::along(axis, &program.mesh, nodes)?;
        (has_even_kernels(&rotation, program, uneven) && leaves_unchanged(&rotation, program, paces)).then_some(rotation)
    };
    Axis::WITHIN_STAGE.iter().filter_map(along).max_by_key(MeshRotation::period)
}

/// Whether kernels cost the same on all ranks of an orbit.
fn has_even_kernels(rotation: &MeshRotation, program: &Program, uneven: &[BTreeSet<GroupId>]) -> bool {
    let is_rotated = |list: &StageProgram, group: &GroupId| {
        list.groups.get(group.0 as usize).is_some_and(|group| group.axes.contains(&rotation.axis))
    };
    program.lists.iter().zip(uneven).all(|(list, uneven)| !uneven.iter().any(|group| is_rotated(list, group)))
}

/// Whether all ranks of an orbit run the same list at the same pace and send messages to
/// corresponding ranks.
fn leaves_unchanged(rotation: &MeshRotation, program: &Program, paces: &[f64]) -> bool {
    let of_rank = &program.list_of_rank;
    program.lists.iter().flat_map(|list| &list.peers).all(|peer| peer.ranks.is_none())
        && of_rank.len() == program.mesh.world_size()
        && rotation.leaves_unchanged(of_rank)
        && rotation.leaves_unchanged(paces)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::CostModel;
    use crate::lowering::{LoweredList, uneven_groups};
    use crate::network::Collectives;
    use crate::{Folding, Options, simulate};
    use foretell_models::Model;
    use foretell_program::{Plan, compile_training};

    fn nodes_of(devices: usize, network: &str) -> Topology {
        let text = format!(
            "name: test\n\
             devices:\n  one: {{architecture: gpu, memory: 1GiB, memory_bandwidth: 1GB/s, peak: {{fp32: 1GFLOP/s}}, link: 1GB/s}}\n\
             nodes:\n  - {{name: node, count: 8, devices: {{kind: one, count: {devices}}}, link: nvswitch-1GB/s, \
             nics: {{count: 1, bandwidth: 1GB/s}}}}\n\
             network: {network}\n"
        );
        Topology::from_yaml(&text, "test.yaml").expect("a topology")
    }

    fn program_of(layout: &str) -> Program {
        let model = r#"{"family": "gpt", "layers": 2, "hidden": 64, "heads": 4, "vocab": 128, "sequence": 4096}"#;
        let model: Model = serde_json::from_str(model).expect("a model");
        let plan: Plan = serde_json::from_str(&format!(r#"{{"global_batch": 8, "layout": {{{layout}}}}}"#)).expect("a plan");
        compile_training(&model, "m", &plan).expect("it can be laid out")
    }

    /// The axis and the period of the rotation that is found. The third rank has a pace of its own.
    fn rotation_of(layout: &str, topology: &Topology, pace_of_the_third: f64) -> Option<(Axis, usize)> {
        let program = program_of(layout);
        let mut paces = vec![1.0; program.mesh.world_size()];
        if let Some(third) = paces.get_mut(2) {
            *third = pace_of_the_third;
        }
        let uneven: Vec<_> =
            program.lists.iter().map(|list| uneven_groups(list, &LoweredList::new(list).expect("a sound list"))).collect();
        find_rotation(&program, topology, &paces, &uneven).map(|rotation| (rotation.axis, rotation.period()))
    }

    #[test]
    fn the_rotation_is_along_the_longest_axis_that_moves_whole_nodes() {
        let switch = "{kind: switch, latency: 10us}";
        assert_eq!(rotation_of(r#""data": 8, "micro_batch": 1"#, &nodes_of(1, switch), 1.0), Some((Axis::Data, 8)));
        assert_eq!(rotation_of(r#""data": 4, "tensor": 2, "micro_batch": 1"#, &nodes_of(2, switch), 1.0), Some((Axis::Data, 4)));
        // It would move half a node; a rank has another pace; nodes have different neighbours.
        assert_eq!(rotation_of(r#""data": 8, "micro_batch": 1"#, &nodes_of(2, switch), 1.0), None);
        assert_eq!(rotation_of(r#""data": 8, "micro_batch": 1"#, &nodes_of(1, switch), 1.1), None);
        let leaves = "{kind: fat-tree, nodes_per_leaf: 2, uplinks: 2, latency: 10us}";
        assert_eq!(rotation_of(r#""data": 8, "micro_batch": 1"#, &nodes_of(1, leaves), 1.0), None);
        // Causal attention is uneven along `context` in contiguous parts: the last sees the most
        // keys.
        let parts = |order: &str| format!(r#""data": 2, "context": 4, "context_order": "{order}", "micro_batch": 1"#);
        assert_eq!(rotation_of(&parts("contiguous"), &nodes_of(1, switch), 1.0), Some((Axis::Data, 2)));
        assert_eq!(rotation_of(&parts("zigzag"), &nodes_of(1, switch), 1.0), Some((Axis::Context, 4)));
    }

    #[test]
    fn ranks_with_uneven_parts_are_not_folded_onto_each_other() {
        let topology = nodes_of(1, "{kind: switch, latency: 10us}");
        let contiguous = r#""context_order": "contiguous", "micro_batch": 1"#;
        let zigzag = r#""micro_batch": 1"#;
        let ring = r#""context_method": "ring", "micro_batch": 1"#;
        let layouts = [contiguous, zigzag, ring]
            .map(|rest| [r#""context": 4"#, r#""data": 2, "context": 4"#].map(|mesh| [mesh, rest].join(", ")));
        for layout in layouts.as_flattened().iter().map(String::as_str) {
            let program = program_of(layout);
            let costs = CostModel::new(None, &topology);
            let step = |folding| {
                let options = Options { folding, collectives: Collectives::Steps, ..Options::default() };
                simulate(&program, &topology, &costs, &options).expect("it fits").step
            };
            assert_eq!(step(Folding::On), step(Folding::Off), "{layout}");
        }
    }
}
