//! A bound for every layout that a plan file can state: the kernels of a step, divided perfectly.
//!
//! A step has at least the kernels of a layout on one rank with one micro-batch: dividing them adds
//! work, and so do recomputation, buckets, and conversions between layouts. However kernels are
//! divided, all parts together take a known least time
//! ([`least_total_time`](foretell_simulator::CostModel::least_total_time)). The busiest device
//! takes at least its share of that. With two kinds of device, each kind takes the kernels in which
//! it is relatively fastest, and both kinds end at the same time: this is the optimum of a linear
//! program. Nothing in this depends on a mesh, a schedule, cuts, a rank order, buckets, or an
//! algorithm of collectives. Messages, bubbles and idle devices count for nothing.

use super::bound::{ROUNDING, seconds};
use crate::space::{DeviceKinds, Request};
use foretell_program::{Compiler, Layout, Mode, Operation, Plan};
use foretell_units::Seconds;

/// The least work of the kernels of a step.
#[derive(Clone, Debug, Default)]
pub(super) struct KernelWork {
    /// The work in times on each kind of device in use. Empty if the work is not known.
    by_kind: Vec<WorkOfKind>,
    /// The work on two kinds of device, one of which is faster with every kernel.
    on_two_kinds: Option<WorkOnTwoKinds>,
}

/// The work of a step, in times on one kind of device.
#[derive(Clone, Debug)]
struct WorkOfKind {
    /// Least picoseconds in which one device of the kind runs all kernels.
    alone: f64,
    /// For each kind, the largest speed over this kind with any kernel, and the number of its
    /// devices; the fastest kind first.
    speeds: Vec<(f64, usize)>,
}

/// The work of a step on two kinds of device.
#[derive(Clone, Debug)]
struct WorkOnTwoKinds {
    /// Picoseconds of each kernel on a device of the faster kind and of the other. The kernels in
    /// which the faster kind gains the most come first.
    kernels: Vec<[f64; 2]>,
    /// Devices of each kind.
    counts: [usize; 2],
}

impl WorkOnTwoKinds {
    /// `None` if neither kind is faster with every kernel: then it is not known which devices are
    /// best if there are fewer ranks than devices.
    fn new(kernels: &[Vec<f64>], counts: &[usize]) -> Option<Self> {
        let &[first, second] = counts else { return None };
        let pairs = kernels.iter().filter(|times| times.iter().any(|&time| time > 0.0)).map(|times| [times[0], times[1]]);
        let mut pairs: Vec<[f64; 2]> = pairs.collect();
        let mut counts = [first, second];
        if pairs.iter().all(|[first, second]| first >= second) {
            pairs.iter_mut().for_each(|pair| pair.swap(0, 1));
            counts.swap(0, 1);
        } else if !pairs.iter().all(|[first, second]| first <= second) {
            return None;
        }
        // Infinite where the faster kind takes no time. Sort by quotients: rounded quotients have a
        // consistent order, rounded cross products may not.
        let gain = |pair: &[f64; 2]| pair[1] / pair[0];
        pairs.sort_by(|pair, other| gain(other).total_cmp(&gain(pair)));
        Some(Self { kernels: pairs, counts })
    }

    /// Returns the least picoseconds in which the fastest `ranks` devices run all kernels.
    fn least_time_on(&self, ranks: usize) -> f64 {
        // Ranks beyond the devices count as further devices of the faster kind.
        let of_slower = self.counts[1].min(ranks.saturating_sub(self.counts[0]));
        let [faster, slower] = [ranks - of_slower, of_slower].map(|count| count as f64);
        if slower == 0.0 {
            return self.kernels.iter().map(|pair| pair[0]).sum::<f64>() / faster;
        }
        let (mut before, mut after) = (0.0, self.kernels.iter().map(|pair| pair[1]).sum::<f64>());
        for [own, other] in &self.kernels {
            // Both kinds share this kernel, so that they end together.
            let (next_before, next_after) = (before + own, after - other);
            if next_before / faster >= next_after / slower {
                let part = (after / slower - before / faster) / (own / faster + other / slower);
                return (before + part * own) / faster;
            }
            (before, after) = (next_before, next_after);
        }
        before / faster
    }
}

impl KernelWork {
    /// Counts the kernels of a step. The work stays unknown if the mode is not synchronous, if
    /// kernels were measured, or if one rank cannot run the model.
    pub(super) fn new(request: &Request<'_>, compiler: &Compiler<'_>, kinds: &DeviceKinds) -> Self {
        let (base, costs) = (request.base, request.costs);
        if !matches!(base.mode, Mode::Synchronous) {
            return Self::default();
        }
        // If one rank cannot run the global batch at once, try fewer samples, which are no more
        // work.
        let halves = std::iter::successors(Some(base.global_batch), |samples| Some(samples / 2).filter(|&half| half > 0));
        let compiled = |samples: usize| {
            let layout = Layout { micro_batch: samples, ..Layout::default() };
            let plan = Plan { layout, global_batch: samples, ..base.clone() };
            compiler.unplaced_until(&plan, &|| request.give_up.is_raised()).ok()
        };
        let Some(program) = halves.take(8).find_map(compiled) else { return Self::default() };
        let kernels = program.lists.iter().flat_map(|list| &list.instructions).filter_map(|instruction| {
            let Operation::Compute { kernel, accumulate, .. } = *instruction.operation else { return None };
            let on_kind = |&kind: &usize| costs.least_total_time(&kernel, accumulate, program.precision, kind);
            Some(kinds.kinds.iter().map(on_kind).map(|time| Some(time?.value() * 1e12)).collect::<Option<Vec<f64>>>())
        });
        let Some(kernels) = kernels.collect::<Option<Vec<Vec<f64>>>>() else { return Self::default() };
        let counts = device_counts(kinds, request.devices);
        let of_kind = |reference: usize| WorkOfKind {
            alone: kernels.iter().map(|times| times[reference]).sum(),
            speeds: speeds(&kernels, reference, &counts),
        };
        let on_two_kinds = WorkOnTwoKinds::new(&kernels, &counts);
        Self { by_kind: (0..kinds.kinds.len()).map(of_kind).collect(), on_two_kinds }
    }

    /// Returns the least time of all kernels on the fastest `ranks` devices.
    pub(super) fn least_time_on(&self, ranks: usize) -> Seconds {
        let on_fastest = |work: &WorkOfKind| {
            let (mut left, mut speed) = (ranks, 0.0);
            // Ranks may share devices: each rank beyond the device count counts as another fastest
            // device.
            let beyond = work.speeds.first().map(|&(fastest, _)| (fastest, usize::MAX));
            for (own, count) in work.speeds.iter().copied().chain(beyond) {
                let taken = left.min(count);
                if taken > 0 {
                    speed += own * taken as f64;
                    left -= taken;
                }
            }
            if speed > 0.0 { work.alone / speed } else { 0.0 }
        };
        let on_two_kinds = self.on_two_kinds.iter().map(|work| work.least_time_on(ranks));
        seconds(self.by_kind.iter().map(on_fastest).chain(on_two_kinds).fold(0.0, f64::max) * ROUNDING)
    }
}

/// Returns how many of the first `devices` devices are of each kind.
fn device_counts(kinds: &DeviceKinds, devices: usize) -> Vec<usize> {
    if kinds.kinds.len() == 1 {
        return vec![devices];
    }
    let mut counts = vec![0; kinds.kinds.len()];
    for place in kinds.places(devices) {
        counts[place] += 1;
    }
    counts
}

/// For each kind: its largest speed relative to kind `reference` over all kernels, and its device
/// count; the fastest kind first.
fn speeds(kernels: &[Vec<f64>], reference: usize, counts: &[usize]) -> Vec<(f64, usize)> {
    let fastest = |kind: usize| {
        let known = kernels.iter().filter(|times| times[reference] > 0.0);
        known.map(|times| times[reference] / times[kind]).fold(0.0, f64::max)
    };
    let mut speeds: Vec<(f64, usize)> = counts.iter().enumerate().map(|(kind, &count)| (fastest(kind), count)).collect();
    speeds.sort_by(|speed, other| other.0.total_cmp(&speed.0));
    speeds
}

#[cfg(test)]
mod tests {
    use super::*;
    use foretell_models::Model;
    use foretell_program::{ContextMethod, Program, Recompute, StageProgram};
    use foretell_simulator::{CostModel, LeastTimes, Oversubscription, least_times};
    use foretell_topologies::Topology;
    use foretell_units::{Bytes, DataType};

    /// Returns the time that the kernels of all ranks of a Program take together, in picoseconds.
    fn kernels_of_all_ranks(program: &Program, topology: &Topology, costs: &CostModel) -> f64 {
        let times = least_times(program, topology, costs, Oversubscription::Allowed, Layout::default().bucket);
        let times = times.expect("it can be timed");
        let of_list = |(list, times): (&StageProgram, &LeastTimes)| -> f64 {
            let kernels = list.instructions.iter().zip(&times.durations);
            let is_kernel = |operation: &Operation| matches!(operation, Operation::Compute { .. });
            kernels.filter(|(kernel, _)| is_kernel(&kernel.operation)).map(|(_, duration)| duration.0 as f64).sum()
        };
        let of_lists: Vec<f64> = program.lists.iter().zip(&times).map(of_list).collect();
        program.list_of_rank.iter().map(|&list| of_lists[list as usize]).sum()
    }

    fn layouts(batch: usize) -> Vec<Layout> {
        let mut found = Vec::new();
        let meshes =
            [(1, 1, 1, 1), (2, 1, 1, 1), (8, 1, 1, 1), (4, 2, 1, 1), (1, 4, 1, 1), (2, 1, 2, 1), (1, 1, 4, 1), (1, 1, 1, 4)];
        let others = [(0, Recompute::None, 1 << 20), (1, Recompute::Full, 400 << 20), (3, Recompute::None, 1 << 10)];
        for (tensor, pipeline, context, expert) in meshes {
            for (data, micro_batch) in [(1, batch), (1, 1), (2, 2)] {
                for (zero, recompute, bucket) in others.clone() {
                    let (sequence_parallel, context_method) = (zero == 1, ContextMethod::ALL[zero % 3]);
                    let bucket = Bytes::new(bucket);
                    let mesh = Layout { data, tensor, pipeline, context, expert, micro_batch, ..Layout::default() };
                    found.push(Layout { zero, recompute, bucket, sequence_parallel, context_method, ..mesh });
                }
            }
        }
        found
    }

    /// The kernels of every layout take at least the bound together. For large models, one rank
    /// takes little more than the bound.
    #[test]
    fn kernels_of_no_layout_take_less_than_the_bound() {
        let topology = Topology::library("dgx-a100-80g").expect("in the library").with_nodes(4).expect("there may be as many");
        let named = |name: &str| Model::named(name).expect("in the zoo");
        let of = |text: &str| serde_json::from_str::<Model>(text).expect("it is sound");
        // Each model with the least share that the bound has of the kernels on one rank. Launches
        // take most of the time of recurrent ones, whose batch is small.
        let models = [
            (of(r#"{"family": "gpt", "layers": 4, "hidden": 8192, "heads": 64, "vocab": 51200, "sequence": 2048}"#), 0.95),
            // Its vocabulary is odd; parts of it may have even sizes.
            (of(r#"{"family": "gpt", "layers": 4, "hidden": 2048, "heads": 16, "vocab": 50257, "sequence": 1024}"#), 0.5),
            (
                of(r#"{"family": "llama", "layers": 4, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 32000,
                        "sequence": 4096}"#),
                0.92,
            ),
            (
                of(
                    r#"{"family": "moe", "layers": 4, "hidden": 4096, "heads": 32, "ffn": 14336, "vocab": 32000, "sequence": 2048,
                        "experts": 8, "top_k": 2}"#,
                ),
                0.9,
            ),
            (
                of(r#"{"family": "t5", "layers": 2, "hidden": 1024, "heads": 16, "ffn": 4096, "vocab": 32128,
                        "source_sequence": 512, "target_sequence": 128}"#),
                0.6,
            ),
            (named("resnet50"), 0.45),
            (named("vgg16"), 0.6),
            (named("lstm-seq2seq"), 0.08),
        ];
        for (number, (model, least_share)) in models.iter().enumerate() {
            let (compiler, kinds) = (Compiler::new(model, "model"), DeviceKinds::new(&topology, 32, None, 0.0));
            let base = Plan { precision: DataType::Bf16, ..Plan::new(Layout::default(), 8) };
            let compiled = |layout: Layout| Some((layout.clone(), compiler.unplaced(&Plan { layout, ..base.clone() }).ok()?));
            let one_rank = compiled(Layout { micro_batch: 8, ..Layout::default() }).expect("one rank runs every model").1;
            let programs: Vec<(Layout, Program)> = layouts(8).into_iter().filter_map(compiled).collect();
            assert!(programs.len() > 20, "{} layouts of model {number}", programs.len());
            for stack in ["foretell", "megatron-core", "ddp"] {
                let costs = CostModel::new(None, &topology).with_stack(&topology, stack, base.precision).expect("in the library");
                let request = Request::new(model, "model", &topology, &costs, &base);
                let bound = KernelWork::new(&request, &compiler, &kinds).by_kind[0].alone;
                let of_one_rank = kernels_of_all_ranks(&one_rank, &topology, &costs);
                assert!(bound >= least_share * of_one_rank, "model {number} under {stack}: {bound} beside {of_one_rank}");
                for (layout, program) in &programs {
                    let all = kernels_of_all_ranks(program, &topology, &costs);
                    assert!(bound <= all, "model {number} under {stack}: {bound} above {all} of {layout:?}");
                }
            }
        }
    }

    #[test]
    fn devices_of_two_kinds_do_their_shares_of_the_work() {
        // The second kind is twice as fast with one kernel, and as fast with the other.
        let kernels = vec![vec![4.0, 2.0], vec![3.0, 3.0]];
        let of_kind = |reference: usize| WorkOfKind {
            alone: kernels.iter().map(|times| times[reference]).sum(),
            speeds: speeds(&kernels, reference, &[2, 1]),
        };
        let work = KernelWork { by_kind: vec![of_kind(0), of_kind(1)], on_two_kinds: None };
        let picoseconds = |ranks| work.least_time_on(ranks).value() * 1e12;
        // By the first kind: 7 in all, at speeds 2, 1 and 1. By the second: 5, at speeds 1, 1, 1.
        assert!((picoseconds(1) - 5.0).abs() < 1e-6, "{}", picoseconds(1));
        assert!((picoseconds(3) - 7.0 / 4.0).abs() < 1e-6, "{}", picoseconds(3));
        assert_eq!(KernelWork::default().least_time_on(3), Seconds::ZERO);
        // The fast device runs seven eighths of the first kernel, and the others all that is left.
        let both = WorkOnTwoKinds::new(&kernels, &[2, 1]).expect("the second kind is faster with every kernel");
        assert!((both.least_time_on(3) - 1.75).abs() < 1e-9, "{}", both.least_time_on(3));
        assert!(WorkOnTwoKinds::new(&[vec![1.0, 2.0], vec![2.0, 1.0]], &[1, 1]).is_none());
    }

    /// No division of kernels among devices is faster, and one is as fast.
    #[test]
    fn the_work_on_two_kinds_is_the_optimum_of_the_linear_program() {
        let kernels = vec![vec![1.0, 3.0], vec![2.0, 3.0], vec![4.0, 5.0], vec![0.5, 2.0]];
        for (faster, slower) in [(1, 1), (2, 1), (1, 3), (4, 9)] {
            let work = WorkOnTwoKinds::new(&kernels, &[faster, slower]).expect("the first kind is faster");
            let least = work.least_time_on(faster + slower);
            let mut best = f64::INFINITY;
            let steps = 20i32;
            for parts in 0..(steps + 1).pow(4) {
                let part = |kernel: u32| f64::from(parts / (steps + 1).pow(kernel) % (steps + 1)) / f64::from(steps);
                let on = |kind: usize, share: &dyn Fn(u32) -> f64| -> f64 {
                    (0..4u32).map(|kernel| share(kernel) * kernels[kernel as usize][kind]).sum()
                };
                let time = (on(0, &part) / faster as f64).max(on(1, &|kernel| 1.0 - part(kernel)) / slower as f64);
                best = best.min(time);
            }
            assert!(least <= best + 1e-12 && best <= 1.1 * least, "{least} beside {best} on {faster} and {slower}");
        }
    }
}
