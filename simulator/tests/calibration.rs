//! Costs that the cost model derives from a profile.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use foretell_models::{Activation, Kernel, WeightLayout};
use foretell_program::*;
use foretell_simulator::{CostModel, Options, Quantile, Source, WhatIf, predict_with, simulate};
use foretell_units::{DataType, Picoseconds, Seconds};

fn sample(seconds: f64) -> Sample {
    let time = Seconds::new;
    Sample { median: time(seconds), p10: time(seconds * 0.9), p90: time(seconds * 1.2), count: 20 }
}

fn matmul(rows: usize) -> Kernel {
    Kernel::Matmul { rows, columns: 512, contracted: 512, weight: WeightLayout::OutIn, bias: true, activation: Activation::None }
}

/// Measured duration of a product: twice that of a perfect device, and a microsecond.
fn product_time(rows: usize) -> f64 {
    2.0 * matmul(rows).flops().value() / 1e12 + 1e-6
}

fn profile() -> Profile {
    let kernel = |kernel, seconds| KernelSample { kernel, accumulate: false, precision: DataType::Fp32, time: sample(seconds) };
    let exchange = |exchange, bytes: u64| ExchangeSample {
        exchange,
        reach: Reach::Node,
        ranks: 2,
        bytes,
        time: sample(20e-6 + bytes as f64 / 0.5e9),
        processor: Seconds::new(bytes as f64 / 2e9),
    };
    let sizes = (10..=24).step_by(2).map(|power| 1u64 << power);
    let kinds = [Exchange::AllReduce, Exchange::SendReceive];
    Profile {
        schema_version: foretell_units::SchemaVersion,
        device: "one".into(),
        machine: MachineIdentity { device: "test".into(), system: "test".into(), devices: 2, cores: None },
        backend: "cpu".into(),
        transport: "shared_memory".into(),
        measured_at: 0,
        instruction_overhead: sample(0.5e-6),
        stream_handoff: sample(4e-6),
        step_overhead: sample(10e-6),
        launch: Seconds::ZERO,
        load_seconds_per_byte: Seconds::new(1e-10),
        communication_share: 0.5,
        communication_growth: None,
        interruption: Seconds::ZERO,
        framework: None,
        buffered_bytes: 0,
        reference: None,
        paces: vec![1.0],
        speeds: Vec::new(),
        input: None,
        storage: None,
        kernels: [64, 256, 1024, 4096]
            .into_iter()
            .map(|rows| kernel(matmul(rows), product_time(rows)))
            .chain([kernel(Kernel::Relu { elements: 1000 }, 7e-6)])
            .collect(),
        exchanges: sizes.flat_map(|bytes| kinds.map(|kind| exchange(kind, bytes))).collect(),
    }
}

#[test]
fn measured_kernels_cost_their_samples() {
    let costs = CostModel::new(Some(&profile()), &node(2));
    let estimate = costs.kernel_time(&matmul(256), false, DataType::Fp32, 0);
    assert_eq!((estimate.source, estimate.median), (Source::Measured, Seconds::new(product_time(256))));
    assert!(estimate.at(Quantile::P10) < estimate.median && estimate.median < estimate.at(Quantile::P90));
}

#[test]
fn sizes_between_samples_are_interpolated() {
    let costs = CostModel::new(Some(&profile()), &node(2));
    for rows in [100, 128, 400, 512, 2000, 3000] {
        let estimate = costs.kernel_time(&matmul(rows), false, DataType::Fp32, 0);
        let error = estimate.median.value() / product_time(rows) - 1.0;
        assert_eq!(estimate.source, Source::Interpolated);
        assert!(error.abs() < 0.1, "{rows} rows: {error}");
        assert!(estimate.p10.value() <= product_time(rows) && product_time(rows) <= estimate.p90.value());
    }
}

#[test]
fn the_source_tells_extrapolation_and_roofline_from_samples() {
    let costs = CostModel::new(Some(&profile()), &node(2));
    let source = |kernel, precision| costs.kernel_time(&kernel, false, precision, 0).source;
    assert_eq!(source(matmul(1 << 20), DataType::Fp32), Source::Extrapolated);
    assert_eq!(source(matmul(256), DataType::Bf16), Source::Roofline);
    assert_eq!(source(Kernel::AdamW { elements: 10, controlled: false, exempt: false }, DataType::Fp32), Source::Roofline);
    // A profile of another kind of device does not apply.
    let other = Profile { device: "another".into(), ..profile() };
    let costs = CostModel::new(Some(&other), &node(2));
    assert_eq!(costs.kernel_time(&matmul(256), false, DataType::Fp32, 0).source, Source::Roofline);
}

#[test]
fn constants_without_cost_do_not_distinguish_kernels() {
    let gradient = |normalizer| Kernel::CrossEntropyGradient { rows: 8, classes: 10, normalizer, parts: 1, scaled: false };
    let time = sample(1e-6);
    let one = KernelSample { kernel: gradient(8), accumulate: false, precision: DataType::Fp32, time };
    let costs = CostModel::new(Some(&Profile { kernels: vec![one], ..profile() }), &node(2));
    assert_eq!(costs.kernel_time(&gradient(64), false, DataType::Fp32, 0).source, Source::Measured);
}

#[test]
fn a_lone_collective_takes_its_measured_time() {
    // The sample has ranks that start together. Stream handoffs come before and after it.
    let topology = node(2);
    let costs = CostModel::new(Some(&profile()), &topology);
    let bytes = 1u64 << 20;
    let mut stage = StageBuilder::new(0);
    let before = stage.compute(1000, &[]);
    let reduce = stage.collective(Collective::AllReduce, Group::along(Axis::Data), bytes, &[before]);
    let after = stage.compute(1000, &[reduce]);
    let simulation = run(&program(2, 1, vec![stage.done()]), &topology, &costs);
    let spans = &simulation.timeline.ranks[0].spans;
    let took = spans[after.0 as usize].start.saturating_sub(spans[before.0 as usize].end);
    assert!(about(took, Seconds::new(20e-6 + bytes as f64 / 0.5e9 + 2.0 * 4e-6)), "{took}");
    assert!(simulation.calibrated, "{:?}", simulation.uncalibrated);
    assert_eq!(spans[0].duration(), Picoseconds(7_500_000), "the kernel and the interpreter's overhead");
    assert_eq!(simulation.timeline.ranks[0].end, spans[after.0 as usize].end + Picoseconds(10_000_000));
}

#[test]
fn an_observed_pace_slows_the_device_and_not_the_wait() {
    let topology = node(2);
    let costs = CostModel::new(Some(&profile()), &topology);
    let mut stage = StageBuilder::new(0);
    let before = stage.compute(1000, &[]);
    stage.collective(Collective::AllReduce, Group::along(Axis::Data), 1 << 20, &[before]);
    let program = program(2, 1, vec![stage.done()]);
    let with = |costs: &CostModel, observed_paces: &[[f64; 2]]| {
        let observed_paces = observed_paces.iter().map(|paces| paces.to_vec()).collect();
        let options = Options { observed_paces, ..Options::default() };
        predict_with(&program, &topology, costs, &options).unwrap().0.step_seconds.value()
    };
    let at = |observed_paces: &[[f64; 2]]| with(&costs, observed_paces);
    let usual = at(&[[1.0, 1.0]]);
    assert_eq!(usual, at(&[]), "the costs are those of the pace 1");
    // The kernel takes 7 us, and the all-reduce keeps the processor busy for a part of its time.
    let slow = at(&[[2.0, 2.0]]) - usual;
    assert!((7e-6..usual - 20e-6).contains(&slow), "twice the pace adds {slow} s to {usual} s");
    // The slower rank decides, and the answer is the median of the steps.
    assert!(at(&[[1.0, 2.0]]) > usual + 6e-6);
    assert!((at(&[[1.0, 1.0], [9.0, 9.0], [1.0, 1.0]]) - usual).abs() < 1e-12);
    assert!(at(&[[0.5, 0.5]]) < usual, "a machine may be faster than at calibration");
    // Changes of pace at calibration are expected in the run, too.
    let varying = CostModel::new(Some(&Profile { paces: vec![1.0, 1.5, 1.5, 2.0], ..profile() }), &topology);
    assert!(with(&varying, &[]) > usual + 3e-6);
    assert_eq!(with(&varying, &[[1.0, 1.0]]), with(&varying, &[]));
    assert!(with(&varying, &[[2.0, 2.0]]) > with(&varying, &[]) + 7e-6);
}

#[test]
fn unmeasured_group_sizes_are_listed_as_uncalibrated() {
    let topology = node(4);
    let costs = CostModel::new(Some(&profile()), &topology);
    let mut stage = StageBuilder::new(0);
    stage.collective(Collective::AllReduce, Group::along(Axis::Data), 4096, &[]);
    stage.collective(Collective::AllGather, Group::along(Axis::Data), 4096, &[]);
    let program = program(4, 1, vec![stage.done()]);
    let simulation = simulate(&program, &topology, &costs, &Options::default()).unwrap();
    assert_eq!(simulation.uncalibrated, ["all_gather of 4 ranks", "all_reduce of 4 ranks"]);
}

#[test]
fn worse_quantiles_are_slower() {
    let topology = node(2);
    let costs = CostModel::new(Some(&profile()), &topology);
    let mut stage = StageBuilder::new(0);
    let compute = stage.compute(1000, &[]);
    stage.collective(Collective::AllReduce, Group::along(Axis::Data), 1 << 16, &[compute]);
    let program = program(2, 1, vec![stage.done()]);
    let step = |quantile| {
        let options = Options { quantile, ..Options::default() };
        simulate(&program, &topology, &costs, &options).unwrap().step
    };
    assert!(step(Quantile::P10) < step(Quantile::Median) && step(Quantile::Median) < step(Quantile::P90));
}

#[test]
fn the_breakdown_has_optimizer_and_data() {
    let topology = node(1);
    let costs = ideal(&topology);
    let mut stage = StageBuilder::new(0);
    let load = stage.load(1_000_000);
    stage.compute(1000, &[load]);
    stage.update(1000, &[]);
    let simulation = run(&program(1, 1, vec![stage.done()]), &topology, &costs);
    let breakdown = simulation.breakdown;
    assert!(about(breakdown.data.into(), Seconds::new(1e-3)), "{breakdown:?}");
    assert!(about(breakdown.compute.into(), kernel(&costs, 1000)));
    assert!(breakdown.optimizer > Seconds::ZERO && breakdown.bubble == Seconds::ZERO);
}

fn lab(name: &str) -> foretell_topologies::Topology {
    foretell_topologies::Topology::library(name).unwrap()
}

#[test]
fn a_device_with_part_of_a_core_is_slower_by_that_part() {
    let hetero = lab("lab-hetero");
    let kind = |name: &str| hetero.device_kinds().iter().position(|kind| kind.name == name).unwrap();
    let time = |profile: &Profile, name: &str| {
        CostModel::new(Some(profile), &hetero).kernel_time(&matmul(256), false, DataType::Fp32, kind(name))
    };
    // Samples of the whole device apply to the half one, scaled. So do samples of this machine's
    // cores, which a lab consists of.
    for device in ["whole-core", "local-core"] {
        let measured = Profile { device: device.into(), ..profile() };
        assert_eq!(time(&measured, "whole-core").median, Seconds::new(product_time(256)));
        assert_eq!(time(&measured, "half-core").median, Seconds::new(product_time(256) / 0.5));
        assert_eq!(time(&measured, "half-core").source, Source::Measured);
    }
    // The measured speed takes precedence over the file's quota.
    let speeds = vec![RelativeSpeed { device: "half-core".into(), speed: 0.4 }];
    let measured = Profile { device: "whole-core".into(), speeds, ..profile() };
    assert_eq!(time(&measured, "half-core").median, Seconds::new(product_time(256) / 0.4));
    assert_eq!(time(&measured, "whole-core").median, Seconds::new(product_time(256)));
}

#[test]
fn a_labs_devices_share_their_machines_cores() {
    let racks = lab("lab-4x1g-200m");
    let step = |cores| {
        let machine = MachineIdentity { cores, ..profile().machine };
        let costs = CostModel::new(Some(&Profile { device: "cpu-core".into(), machine, ..profile() }), &racks);
        let mut stage = StageBuilder::new(0);
        stage.compute(1000, &[]);
        run(&program(4, 1, vec![stage.done()]), &racks, &costs).step
    };
    let less_overhead = |step: Picoseconds| step.saturating_sub(Picoseconds(10_000_000)).0;
    let (alone, two, four) = (less_overhead(step(Some(4))), less_overhead(step(Some(2))), less_overhead(step(Some(1))));
    assert_eq!((two, four), (2 * alone, 4 * alone));
    assert_eq!(less_overhead(step(None)), alone);
}

#[test]
fn samples_within_a_rack_do_not_apply_across_racks() {
    let racks = lab("lab-4x1g-200m");
    let far = |sample: ExchangeSample| ExchangeSample {
        reach: Reach::Fabric,
        time: Sample { median: sample.time.median * 9.0, p90: sample.time.median * 9.5, ..sample.time },
        ..sample
    };
    let near: Vec<ExchangeSample> =
        profile().exchanges.into_iter().map(|sample| ExchangeSample { reach: Reach::Switch, ..sample }).collect();
    let both = near.iter().copied().chain(near.iter().map(|&sample| far(sample))).collect();
    let costs = CostModel::new(Some(&Profile { device: "cpu-core".into(), exchanges: both, ..profile() }), &racks);
    let bytes = 1u64 << 20;
    // Ranks are numbered stage by stage: 0 and 1 are in one rack, 2 and 3 in the other.
    let step = |data, pipeline| {
        let stages = (0..pipeline).map(|number| {
            let mut stage = StageBuilder::new(number);
            stage.collective(Collective::AllReduce, Group::along(Axis::Data), bytes, &[]);
            stage.done()
        });
        run(&program(data, 1, stages.collect()), &racks, &costs)
    };
    let within = step(2, 2);
    assert!(within.calibrated, "{:?}", within.uncalibrated);
    assert!(about(within.step, Seconds::new(20e-6 + bytes as f64 / 0.5e9 + 10e-6)), "{}", within.step);
    // There is no sample of four ranks, but one of two ranks equally far apart.
    let across = step(4, 1);
    assert_eq!(across.uncalibrated, ["all_reduce of 4 ranks"]);
    assert!(across.step.0 > 9 * within.step.0, "{} and {}", across.step, within.step);
}

#[test]
fn bursts_above_a_links_rate_leave_a_backlog() {
    // A lone message takes half of the time that the link's rate implies.
    let topology = cluster(2, 1, "nvswitch-1GB/s");
    let bytes = 1_000_000u64;
    let message = ExchangeSample {
        exchange: Exchange::SendReceive,
        reach: Reach::Switch,
        ranks: 2,
        bytes,
        time: sample(0.5e-3),
        processor: Seconds::ZERO,
    };
    let profile = Profile { exchanges: vec![message], buffered_bytes: 0, ..profile() };
    let mut costs = CostModel::new(Some(&profile), &topology);
    costs.links = foretell_simulator::LinkEfficiency::IDEAL;
    let step = |messages: usize| {
        let (mut first, mut second) = (StageBuilder::new(0), StageBuilder::new(1));
        for _ in 0..messages {
            first.send(1, bytes, &[]);
            second.receive(0, bytes, &[]);
        }
        let simulation = run(&program(1, 1, vec![first.done(), second.done()]), &topology, &costs);
        Seconds::from(simulation.step).value() - 10e-6
    };
    assert!((step(1) - 0.5e-3).abs() < 1e-6, "{}", step(1));
    // Consecutive messages pass at the link's rate, apart from the backlog at the end.
    assert!((8.2e-3..10e-3).contains(&step(10)), "{}", step(10));
}

/// Returns the relative slowdown of a kernel and of a communication when they overlap. Each is
/// measured beside one three times as long, without other costs.
fn slowed(share: f64, growth: Option<f64>) -> [f64; 2] {
    let (bytes, elements, exchange, topology) = (1 << 20, 1000, 1e-3, node(2));
    let step = |kernel: f64, is_beside: [bool; 2]| {
        let time = |seconds| Sample { p10: Seconds::new(seconds), p90: Seconds::new(seconds), ..sample(seconds) };
        // The time of the smallest communication is latency, during which it slows nothing.
        let reduce = [(8, 1e-9), (bytes, exchange)].map(|(bytes, seconds)| ExchangeSample {
            bytes,
            time: time(seconds),
            processor: Seconds::new(seconds * share),
            ..profile().exchanges[0]
        });
        let relu = KernelSample { kernel: Kernel::Relu { elements }, time: time(kernel), ..profile().kernels[0] };
        let profile = Profile {
            schema_version: foretell_units::SchemaVersion,
            instruction_overhead: time(0.0),
            stream_handoff: time(0.0),
            step_overhead: time(0.0),
            communication_share: share,
            communication_growth: growth,
            kernels: vec![relu],
            exchanges: reduce.to_vec(),
            ..profile()
        };
        let costs = CostModel::new(Some(&profile), &topology);
        let mut stage = StageBuilder::new(0);
        let exchanged =
            is_beside[0].then(|| stage.collective(Collective::AllReduce, Group::along(Axis::Data), bytes, &[]).0 as usize);
        let computed = is_beside[1].then(|| stage.compute(elements, &[]).0 as usize);
        let simulation = run(&program(2, 1, vec![stage.done()]), &topology, &costs);
        let took = |place: Option<usize>| {
            place.map_or(0.0, |place| Seconds::from(simulation.timeline.ranks[0].spans[place].duration()).value())
        };
        [took(exchanged), took(computed)]
    };
    let (short, long) = (exchange / 3.0, exchange * 3.0);
    let [_, kernel] = step(short, [true, true]);
    let [reduce, _] = step(long, [true, true]);
    assert!((step(short, [false, true])[1] - short).abs() < 1e-9 && (step(long, [true, false])[0] - exchange).abs() < 1e-9);
    [kernel / short - 1.0, reduce / exchange - 1.0]
}

#[test]
fn overlap_slows_kernels_and_communication_as_measured() {
    for slowdown in [Slowdown { kernel: 0.2, exchange: 0.5 }, Slowdown { kernel: 0.4, exchange: 0.0 }, Slowdown::default()] {
        let (share, growth) = slowdown.share_and_growth();
        let [kernel, exchange] = slowed(share, Some(growth));
        assert!((kernel - slowdown.kernel).abs() < 1e-3 && (exchange - slowdown.exchange).abs() < 1e-3, "{kernel} {exchange}");
    }
    // An operating system that shares a processor gives a communication that needs a quarter of it
    // all of that.
    let [kernel, exchange] = slowed(0.25, None);
    assert!((kernel - 1.0 / 3.0).abs() < 1e-3 && exchange.abs() < 1e-3, "{kernel} {exchange}");
}

#[test]
fn launches_count_where_the_host_falls_behind() {
    const KERNELS: usize = 100;
    let topology = node(2);
    // Profiles in the older format have no launch duration.
    let text = serde_json::to_string(&profile()).unwrap();
    assert!(!text.contains("\"launch\""));
    assert_eq!(serde_json::from_str::<Profile>(&text).unwrap().launch, Seconds::ZERO);
    let step = |elements: usize, launch: f64, is_alone: bool, question: &str| {
        let costs = CostModel::new(Some(&Profile { launch: Seconds::new(launch), ..profile() }), &topology);
        let mut stage = StageBuilder::new(0);
        let last = (0..KERNELS).map(|_| stage.compute(elements, &[])).last().unwrap();
        if !is_alone {
            stage.collective(Collective::AllReduce, Group::along(Axis::Data), 1 << 10, &[last]);
        }
        let costs = question.parse::<WhatIf>().unwrap().costs(&costs);
        Seconds::from(run(&program(2, 1, vec![stage.done()]), &topology, &costs).step).value()
    };
    let added = |elements: usize, is_alone: bool, question: &str| {
        step(elements, 20e-6, is_alone, question) - step(elements, 0.0, is_alone, question)
    };
    // A kernel takes 7 us and its overhead 0.5 us. The last runs once all are launched.
    let behind = KERNELS as f64 * 20e-6 - (KERNELS - 1) as f64 * 7.5e-6;
    assert!((added(1000, false, "launch*1") - behind).abs() < 1e-7, "{}", added(1000, false, "launch*1"));
    // Half of the launch, and half of the interpreter's overhead.
    let behind = KERNELS as f64 * 10e-6 - (KERNELS - 1) as f64 * 7.25e-6;
    assert!((added(1000, false, "launch*0.5") - behind).abs() < 1e-7, "{}", added(1000, false, "launch*0.5"));
    assert!(added(1000, true, "launch*1").abs() < 1e-12);
    // Kernels that outlast their launches wait only for the first launch.
    assert!((added(100_000, false, "launch*1") - 20e-6).abs() < 1e-7, "{}", added(100_000, false, "launch*1"));
}
