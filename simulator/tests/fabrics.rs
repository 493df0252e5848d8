//! Effects of a fabric on communication: oversubscription, colliding flows, and jobs that share
//! links.
#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/flow_network.rs"]
mod flow_network;

use common::*;
use flow_network::deadlines::Deadlines;
use flow_network::{Flow, FlowNetwork};
use foretell_program::{Axis, Collective, Group, Program};
use foretell_simulator::{Folding, Job, LinkEfficiency, Options, Quantile, simulate, simulate_jobs};
use foretell_topologies::{DeviceId, NodeId, Topology};
use foretell_units::diagnostic::one_line;
use foretell_units::{Bytes, Picoseconds, Seconds};
use proptest::prelude::*;
use std::collections::BTreeMap;

/// A ring shift of `bytes` among `ranks` ranks, one per node.
fn shift(ranks: usize, bytes: u64) -> Program {
    let mut stage = StageBuilder::new(0);
    stage.collective(Collective::Shift, Group::along(Axis::Data), bytes, &[]);
    program(ranks, 1, vec![stage.done()])
}

/// A fat tree of hosts with one device and 1 GB/s each, two under a leaf.
fn tree(nodes: usize, more: &str) -> Topology {
    cluster_on(&format!("{{kind: fat-tree, nodes_per_leaf: 2, latency: 10us, {more}}}"), nodes, 1, "nvswitch-1GB/s")
}

fn seconds(simulation: &foretell_simulator::Simulation) -> f64 {
    Seconds::from(simulation.step).value()
}

#[test]
fn oversubscription_slows_only_traffic_between_leaves() {
    let bytes = 100_000_000;
    let step = |topology: &Topology, ranks: usize| seconds(&run(&shift(ranks, bytes), topology, &ideal(topology)));
    // With four hosts, one flow leaves each leaf and one enters. That is half of what the hosts
    // could send.
    for (oversubscription, longer) in [(1, 1.0), (2, 1.0), (4, 2.0), (8, 4.0)] {
        let topology = tree(4, &format!("oversubscription: {oversubscription}"));
        assert!((step(&topology, 4) - 0.1 * longer).abs() < 1e-4, "{oversubscription}: {}", step(&topology, 4));
        assert!((step(&topology, 2) - 0.1).abs() < 1e-4, "under one leaf");
    }
}

/// Returns the end of each flow between hosts of a tree, in seconds, when all start at once.
fn ends(topology: &Topology, flows: &[(usize, usize)]) -> Vec<f64> {
    let mut network = FlowNetwork::new(topology, &LinkEfficiency::IDEAL);
    for &(from, to) in flows {
        network.start(&Flow { from: DeviceId(from), to: DeviceId(to), bytes: Bytes::new(100_000_000) }).unwrap();
    }
    let mut ends = vec![0.0; flows.len()];
    while let Some((flow, end)) = network.next_end() {
        ends[flow.0 as usize] = Seconds::from(end).value();
    }
    ends
}

#[test]
fn two_flows_into_one_network_interface_share_it() {
    let pair = Topology::library("dgx-h100").unwrap().with_nodes(2).unwrap();
    let mut network = FlowNetwork::new(&pair, &LinkEfficiency::IDEAL);
    for from in [0, 1] {
        network.start(&Flow { from: DeviceId(from), to: DeviceId(8), bytes: Bytes::new(50_000_000) }).unwrap();
    }
    let (_, first) = network.next_end().unwrap();
    // The interface has 50 GB/s.
    assert!((Seconds::from(first).value() - 2e-3).abs() < 1e-5);
}

#[test]
fn flows_that_meet_on_an_uplink_share_it_and_others_do_not() {
    // Two flows from one leaf to another, over two spines of 1 GB/s each.
    let flows = [(0, 2), (1, 3)];
    let stated = |paths: [usize; 2]| {
        let routes = flows.iter().zip(paths);
        let routes = routes.map(|((from, to), path)| format!("{{from: node-{from}, to: node-{to}, path: {path}}}"));
        tree(4, &format!("uplinks: 2, routes: [{}]", routes.collect::<Vec<_>>().join(", ")))
    };
    let about = |times: Vec<f64>, expected: f64| times.iter().all(|time| (time - expected).abs() < 1e-4);
    assert!(about(ends(&stated([0, 1]), &flows), 0.1));
    assert!(about(ends(&stated([1, 1]), &flows), 0.2));
    assert!(about(ends(&tree(4, "uplinks: 2, routing: spread"), &flows), 0.1));
    // With routes chosen by hash, the two collide in half of all cases.
    let met = (0..200).filter(|seed| about(ends(&tree(4, &format!("uplinks: 2, seed: {seed}")), &flows), 0.2)).count();
    assert!((70..130).contains(&met), "{met} of 200");
}

#[test]
fn jobs_that_share_a_leafs_uplinks_slow_each_other() {
    // Each job shifts data around three hosts. The first job has a whole leaf and half of the next,
    // where the second begins.
    let topology = tree(6, "oversubscription: 2");
    let costs = ideal(&topology);
    let program = shift(3, 100_000_000);
    let job = |first_node: usize| Job { program: &program, costs: &costs, first_node: NodeId(first_node) };
    let foretell = |jobs: &[Job<'_>]| -> Vec<f64> {
        let with = |folding| simulate_jobs(jobs, &topology, Quantile::Median, folding).unwrap();
        let (folded, all) = (with(Folding::On), with(Folding::Off));
        for (one, other) in folded.iter().zip(&all) {
            assert!(one.step.0.abs_diff(other.step.0) < 100, "{} {}", one.step, other.step);
            assert_eq!(one.timeline.ranks.len(), 3);
        }
        all.iter().map(seconds).collect()
    };
    let alone: Vec<f64> = [0, 3].map(|node| foretell(&[job(node)])[0]).to_vec();
    assert!(alone.iter().all(|step| (step - 0.1).abs() < 1e-4), "{alone:?}");
    let beside = foretell(&[job(0), job(3)]);
    assert!(beside.iter().all(|step| (step - 0.2).abs() < 1e-4), "{beside:?}");
    // With twice the uplinks, the jobs do not slow each other.
    let wide = tree(6, "");
    let apart = simulate_jobs(&[job(0), job(3)], &wide, Quantile::Median, Folding::On).unwrap();
    assert!(apart.iter().all(|simulation| (seconds(simulation) - 0.1).abs() < 1e-4));
}

#[test]
fn jobs_on_one_node_or_on_none_are_refused() {
    let topology = cluster(3, 2, "nvswitch-1GB/s");
    let costs = ideal(&topology);
    let program = shift(3, 1000);
    let refused = |first_nodes: &[usize]| {
        let jobs: Vec<Job<'_>> =
            first_nodes.iter().map(|&node| Job { program: &program, costs: &costs, first_node: NodeId(node) }).collect();
        one_line(&simulate_jobs(&jobs, &topology, Quantile::Median, Folding::On).unwrap_err())
    };
    let shared = "jobs 0 and 1 both run on node `node-1`; hint: begin one of them on another node";
    assert_eq!(refused(&[0, 1]), shared);
    assert_eq!(refused(&[2]), "3 ranks need as many devices, and `test` has 2; hint: use more nodes, or oversubscribe");
    assert!(refused(&[7]).contains("`test` has 0"));
    assert!(simulate_jobs(&[], &topology, Quantile::Median, Folding::On).unwrap().is_empty());
}

proptest! {
    #[test]
    fn deadlines_return_the_earliest_entry(
        changes in proptest::collection::vec((0u32..20, proptest::option::of(0u64..50)), 0..200),
    ) {
        let mut deadlines = Deadlines::default();
        let mut known: BTreeMap<u32, u64> = BTreeMap::new();
        for (entry, time) in changes {
            match time {
                Some(time) => {
                    deadlines.set(entry, Picoseconds(time));
                    known.insert(entry, time);
                }
                None => {
                    deadlines.remove(entry);
                    known.remove(&entry);
                }
            }
            let first = known.iter().map(|(&entry, &time)| (Picoseconds(time), entry)).min();
            prop_assert_eq!(deadlines.first(), first);
        }
        while let Some((time, entry)) = deadlines.first() {
            prop_assert_eq!(known.remove(&entry), Some(time.0));
            deadlines.remove(entry);
        }
        prop_assert!(known.is_empty());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    /// A job that runs alone equals its plain simulation, and other jobs never make it faster.
    #[test]
    fn a_job_beside_others_is_no_faster_than_alone(
        jobs in proptest::collection::vec((1usize..4, 1u64..50), 1..4),
        oversubscription in prop_oneof![Just(1.0), Just(2.0), Just(5.0)],
        routing in prop_oneof![Just("spread"), Just("ecmp")],
        seed in 0u64..20,
    ) {
        let topology = tree(12, &format!("oversubscription: {oversubscription}, uplinks: 2, routing: {routing}, seed: {seed}"));
        let costs = ideal(&topology);
        let programs: Vec<Program> = jobs.iter().map(|&(ranks, size)| shift(ranks + 1, size * 1_000_000)).collect();
        let mut next = 0;
        let placed: Vec<Job<'_>> = programs.iter().zip(&jobs).map(|(program, (ranks, _))| {
            let job = Job { program, costs: &costs, first_node: NodeId(next) };
            next += ranks + 1;
            job
        }).take_while(|job| job.first_node.0 + job.program.mesh.world_size() <= 12).collect();
        let first = simulate(&programs[0], &topology, &costs, &Options::default()).unwrap();
        let alone = simulate_jobs(&placed[..1], &topology, Quantile::Median, Folding::On).unwrap();
        prop_assert_eq!(first.step, alone[0].step);
        prop_assert_eq!(first.breakdown, alone[0].breakdown);
        let together = simulate_jobs(&placed, &topology, Quantile::Median, Folding::Off).unwrap();
        let folded = simulate_jobs(&placed, &topology, Quantile::Median, Folding::On).unwrap();
        for ((job, beside), folded) in placed.iter().zip(&together).zip(&folded) {
            let alone = &simulate_jobs(std::slice::from_ref(job), &topology, Quantile::Median, Folding::On).unwrap()[0];
            prop_assert!(beside.step + Picoseconds(100) >= alone.step, "{} {}", beside.step, alone.step);
            prop_assert!(beside.step.0.abs_diff(folded.step.0) <= 100);
        }
    }
}

/// A node of eight V100s as a DGX-1 is wired: pairs with one NVLink of 25 GB/s, two, or none.
fn dgx_1() -> Topology {
    let wires = "[[0,1,1,2,2,0,0,0],[1,0,2,1,0,2,0,0],[1,2,0,2,0,0,1,0],[2,1,2,0,0,0,0,1],[2,0,0,0,0,1,1,2],[0,2,0,0,1,0,2,1],\
                 [0,0,1,0,1,2,0,2],[0,0,0,1,2,1,2,0]]";
    let text = format!(
        "name: dgx-1\nnodes:\n  - {{name: dgx, devices: {{kind: v100-sxm-32g, count: 8}}, link: {{kind: nvlink-mesh, bandwidth: 150GB/s, \
         unlinked: 10GB/s, wires: {wires}}}}}\n"
    );
    Topology::from_yaml(&text, "dgx-1").unwrap()
}

#[test]
fn pairs_with_fewer_wires_are_slower_by_data_sheet_and_by_a_gpus_profile() {
    let (dgx, bytes) = (dgx_1(), 1_000_000_000);
    let own = ideal(&dgx);
    let profiled =
        foretell_simulator::CostModel::new(None, &dgx).with_stack(&dgx, "megatron-core", foretell_units::DataType::Fp16).unwrap();
    for costs in [&own, &profiled] {
        // The first two devices share one wire, the next two have two, and the whole node uses all.
        let of = |kind: Collective, ranks: usize| {
            let mut stage = StageBuilder::new(0);
            stage.collective(kind, Group::along(Axis::Data), bytes, &[]);
            seconds(&run(&program(ranks, 1, vec![stage.done()]), &dgx, costs))
        };
        assert!(of(Collective::AllReduce, 2) >= 0.04, "a pair of one wire: {}", of(Collective::AllReduce, 2));
        assert!(of(Collective::AllReduce, 8) < 0.04, "all wires: {}", of(Collective::AllReduce, 8));
        // Device 3 and 4 have no wire.
        assert!(of(Collective::Shift, 8) >= 0.1, "over PCIe: {}", of(Collective::Shift, 8));
    }
}
