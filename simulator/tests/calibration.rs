//! What the cost model makes of a profile.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use foretell_models::{Kernel, WeightLayout};
use foretell_program::*;
use foretell_simulator::{CostModel, Options, Quantile, Source, simulate};
use foretell_units::{DataType, Picoseconds, Seconds};

fn sample(seconds: f64) -> Sample {
    let time = Seconds::new;
    Sample { median: time(seconds), p10: time(seconds * 0.9), p90: time(seconds * 1.2), count: 20 }
}

fn matmul(rows: usize) -> Kernel {
    Kernel::Matmul { rows, columns: 512, contracted: 512, weight: WeightLayout::OutIn, bias: true, relu: false }
}

/// Products take twice what a perfect device would, and a microsecond.
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
        device: "one".into(),
        machine: MachineIdentity { device: "test".into(), system: "test".into(), devices: 2, cores: None },
        backend: "cpu".into(),
        transport: "shared_memory".into(),
        measured_at: 0,
        instruction_overhead: sample(0.5e-6),
        stream_handoff: sample(4e-6),
        step_overhead: sample(10e-6),
        load_seconds_per_byte: Seconds::new(1e-10),
        communication_share: 0.5,
        buffered_bytes: 0,
        paces: vec![1.0],
        speeds: Vec::new(),
        kernels: [64, 256, 1024, 4096]
            .into_iter()
            .map(|rows| kernel(matmul(rows), product_time(rows)))
            .chain([kernel(Kernel::Relu { elements: 1000 }, 7e-6)])
            .collect(),
        exchanges: sizes.flat_map(|bytes| kinds.map(|kind| exchange(kind, bytes))).collect(),
    }
}

#[test]
fn what_was_measured_is_answered_as_measured() {
    let costs = CostModel::new(Some(&profile()), &node(2));
    let estimate = costs.kernel_time(&matmul(256), false, DataType::Fp32, 0);
    assert_eq!((estimate.source, estimate.median), (Source::Measured, Seconds::new(product_time(256))));
    assert!(estimate.at(Quantile::P10) < estimate.median && estimate.median < estimate.at(Quantile::P90));
}

#[test]
fn what_lies_between_is_interpolated_in_the_kernels_own_sizes() {
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
fn far_from_the_samples_and_without_any_it_says_so() {
    let costs = CostModel::new(Some(&profile()), &node(2));
    let source = |kernel, precision| costs.kernel_time(&kernel, false, precision, 0).source;
    assert_eq!(source(matmul(1 << 20), DataType::Fp32), Source::Extrapolated);
    assert_eq!(source(matmul(256), DataType::Bf16), Source::Roofline);
    assert_eq!(source(Kernel::AdamW { elements: 10, controlled: false }, DataType::Fp32), Source::Roofline);
    // A profile of other devices says nothing.
    let other = Profile { device: "another".into(), ..profile() };
    let costs = CostModel::new(Some(&other), &node(2));
    assert_eq!(costs.kernel_time(&matmul(256), false, DataType::Fp32, 0).source, Source::Roofline);
}

#[test]
fn constants_that_cost_nothing_do_not_make_a_kernel_another() {
    let gradient = |normalizer| Kernel::CrossEntropyGradient { rows: 8, classes: 10, normalizer, parts: 1, scaled: false };
    let time = sample(1e-6);
    let one = KernelSample { kernel: gradient(8), accumulate: false, precision: DataType::Fp32, time };
    let costs = CostModel::new(Some(&Profile { kernels: vec![one], ..profile() }), &node(2));
    assert_eq!(costs.kernel_time(&gradient(64), false, DataType::Fp32, 0).source, Source::Measured);
}

#[test]
fn an_exchange_alone_takes_what_was_measured() {
    // The sample is from a kernel's end to the beginning of the one that waits: handoffs included.
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
    assert!(about(took, Seconds::new(20e-6 + bytes as f64 / 0.5e9)), "{took}");
    assert!(simulation.calibrated, "{:?}", simulation.uncalibrated);
    assert_eq!(spans[0].duration(), Picoseconds(7_500_000), "the kernel and the interpreter's overhead");
    assert_eq!(simulation.timeline.ranks[0].end, spans[after.0 as usize].end + Picoseconds(10_000_000));
}

#[test]
fn an_unmeasured_group_size_is_named() {
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
fn optimizer_and_data_have_their_part_of_the_breakdown() {
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
