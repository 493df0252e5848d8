//! Benchmark of contended random flows with max-min fair shares, on a fat tree of 1,024 hosts and
//! on one core.
//!
//! 1,024 flows are live at any time. Each flow goes from a random host to another random host, with
//! a random size, uniform between 1 and 100 MB. The next flow starts when one ends. So every host
//! has one flow out and one flow in on average, and many hosts have several.
//!
//! The result is the time until 10,000 flows end, after a warm-up of 10,000 flows. It includes
//! routes, latencies, events and the shares of links. There are three trees:
//!
//! - Full bisection. A hash puts each flow on one of 64 paths, so that flows collide.
//! - The same with every leaf oversubscribed four times.
//! - The oversubscribed tree with each flow spread evenly over all paths.
//!
//! `cargo bench -p foretell-simulator --bench flows`

#[path = "../tests/common/flow_network.rs"]
mod flow_network;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use flow_network::{Flow, FlowNetwork};
use foretell_simulator::LinkEfficiency;
use foretell_topologies::{DeviceId, Topology};
use foretell_units::Bytes;

const LIVE: usize = 1024;
const FLOWS: u64 = 10_000;

/// A pseudorandom number generator: SplitMix64 (Steele, Lea and Flood 2014).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % limit
    }

    fn flow(&mut self, hosts: usize) -> Flow {
        let from = self.below(hosts as u64) as usize;
        let to = (from + 1 + self.below(hosts as u64 - 1) as usize) % hosts;
        Flow { from: DeviceId(from), to: DeviceId(to), bytes: Bytes::new(1_000_000 + self.below(99_000_000)) }
    }
}

/// Runs until `flows` flows have ended. Each is replaced by another.
fn run(network: &mut FlowNetwork<'_>, random: &mut Random, hosts: usize, flows: u64) {
    for _ in 0..flows {
        network.next_end().expect("flows are live");
        network.start(&random.flow(hosts)).expect("all hosts are joined");
    }
}

fn contended_random_flows(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("contended_random_flows_1024_hosts");
    group.throughput(Throughput::Elements(FLOWS)).sample_size(10);
    let trees = [
        ("full_ecmp", "{}"),
        ("oversubscribed_4_ecmp", "{oversubscription: [4, 1]}"),
        ("oversubscribed_4_spread", "{oversubscription: [4, 1], routing: spread}"),
    ];
    for (name, network) in trees {
        let text = format!("{{base: fat-tree-1024, network: {network}}}");
        let topology = Topology::from_yaml(&text, name).expect("a sound topology");
        let hosts = topology.device_count();
        let warm = || {
            let mut random = Random(1);
            let mut network = FlowNetwork::new(&topology, &LinkEfficiency::IDEAL);
            for _ in 0..LIVE {
                network.start(&random.flow(hosts)).expect("all hosts are joined");
            }
            run(&mut network, &mut random, hosts, FLOWS);
            (network, random)
        };
        let (mut network, mut random) = warm();
        let (before, began) = (network.rate_changes(), network.now());
        run(&mut network, &mut random, hosts, FLOWS);
        let seconds = foretell_units::Seconds::from(network.now().saturating_sub(began)).value();
        eprintln!(
            "{name}: {:.1} changes of rate for each flow; {:.0} flows end in a simulated second",
            (network.rate_changes() - before) as f64 / FLOWS as f64,
            FLOWS as f64 / seconds
        );
        group.bench_function(name, |bencher| {
            bencher.iter_batched(
                warm,
                |(mut network, mut random)| run(&mut network, &mut random, hosts, FLOWS),
                BatchSize::PerIteration,
            );
        });
    }
    group.finish();
}

criterion_group!(benches, contended_random_flows);
criterion_main!(benches);
