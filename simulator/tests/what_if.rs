//! What-if questions, compared with simulations of the changed cluster and with closed forms.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use foretell_program::{
    Axis, Collective, Exchange, ExchangeSample, Group, KernelSample, MachineIdentity, Profile, Program, Reach, Sample,
};
use foretell_simulator::{CostModel, WhatIf};
use foretell_topologies::Topology;
use foretell_units::{DataType, Picoseconds, Seconds};

fn asked(program: &Program, topology: &Topology, costs: &CostModel, text: &str) -> Picoseconds {
    let what_if: WhatIf = text.parse().unwrap();
    run(program, &what_if.topology(topology).unwrap(), &what_if.costs(costs)).step
}

/// Kernels, then an all-reduce within nodes and one across them.
fn mixed() -> Program {
    let mut stage = StageBuilder::new(0);
    let first = stage.compute(1_000_000, &[]);
    let near = stage.collective(Collective::AllReduce, Group::along(Axis::Tensor), 8_000_000, &[first]);
    let far = stage.collective(Collective::AllReduce, Group::along(Axis::Data), 8_000_000, &[near]);
    stage.update(1_000_000, &[far]);
    program(2, 2, vec![stage.done()])
}

#[test]
fn what_if_answers_equal_those_of_the_changed_cluster() {
    let program = mixed();
    let written = |memory: &str, link: &str, nic: &str, latency: &str| {
        let text = format!(
            "name: test\ndevices:\n  one: {{architecture: gpu, memory: 1GiB, memory_bandwidth: {memory}, peak: {{fp32: 1TFLOP/s}}}}\n\
             nodes:\n  - {{name: node, count: 2, devices: {{kind: one, count: 2}}, link: {{kind: nvlink-mesh, bandwidth: {link}, latency: 2us}}, \
             nics: {{count: 1, bandwidth: {nic}}}}}\nnetwork: {{kind: fat-tree, oversubscription: 2, nodes_per_leaf: 1, latency: {latency}}}\n"
        );
        let topology = Topology::from_yaml(&text, "test.yaml").unwrap();
        let costs = CostModel::new(None, &topology);
        (topology, costs)
    };
    let (topology, costs) = written("1GB/s", "1GB/s", "1GB/s", "10us");
    for (question, other) in [
        ("memory_bandwidth*2", written("2GB/s", "1GB/s", "1GB/s", "10us")),
        ("intra_node.bandwidth*4", written("1GB/s", "4GB/s", "1GB/s", "10us")),
        ("inter_node.bandwidth/2", written("1GB/s", "1GB/s", "500MB/s", "10us")),
        ("inter_node.latency*3", written("1GB/s", "1GB/s", "1GB/s", "30us")),
        ("bandwidth*2, inter_node.latency*2", written("1GB/s", "2GB/s", "2GB/s", "20us")),
        ("host.launch*1", written("1GB/s", "1GB/s", "1GB/s", "10us")),
    ] {
        let (answer, expected) = (asked(&program, &topology, &costs, question), run(&program, &other.0, &other.1).step);
        // Sums of the launch and the rest round differently.
        assert!(about(answer, Seconds::from(expected)), "{question}: {answer} and not {expected}");
        assert!(
            question.ends_with("*1") || answer != asked(&program, &topology, &costs, "latency*1"),
            "{question} changes something"
        );
    }
}

#[test]
fn launch_overhead_is_separate_from_kernel_speed() {
    let topology = node(1);
    let costs = ideal(&topology);
    let mut stage = StageBuilder::new(0);
    for _ in 0..10 {
        stage.compute(1_000_000, &[]);
    }
    let program = program(1, 1, vec![stage.done()]);
    let [whole, launched, faster, neither] = ["latency*1", "host.launch*0", "device.speed*1e12", "device.speed*1e12,launch*0"]
        .map(|question| asked(&program, &topology, &costs, question));
    // Ten launches of 4 us, which the data sheet assumes.
    assert!(about(whole.saturating_sub(launched), Seconds::new(40e-6)), "{whole} {launched}");
    assert!(about(faster, Seconds::new(40e-6)), "{faster}");
    assert!(about(neither, Seconds::ZERO), "{neither}");
}

#[test]
fn measured_costs_scale_as_the_data_sheet_does() {
    let topology = node(2);
    let sample = |seconds: f64| {
        let median = Seconds::new(seconds);
        Sample { median, p10: median, p90: median, count: 9 }
    };
    let exchange = |bytes, seconds| ExchangeSample {
        exchange: Exchange::AllReduce,
        reach: Reach::Node,
        ranks: 2,
        bytes,
        time: sample(seconds),
        processor: Seconds::ZERO,
    };
    let kernel = foretell_models::Kernel::Relu { elements: 1_000_000 };
    let profile = Profile {
        schema_version: foretell_units::SchemaVersion,
        device: "one".into(),
        machine: MachineIdentity { device: "test".into(), system: "test".into(), devices: 2, cores: None },
        backend: "cpu".into(),
        transport: "shared_memory".into(),
        measured_at: 0,
        kernels: vec![KernelSample { kernel, accumulate: false, precision: DataType::Fp32, time: sample(3e-3) }],
        exchanges: vec![exchange(1, 1e-5), exchange(1 << 20, 5e-3)],
        instruction_overhead: sample(1e-6),
        stream_handoff: sample(0.0),
        step_overhead: sample(0.0),
        launch: Seconds::ZERO,
        load_seconds_per_byte: Seconds::ZERO,
        communication_share: 0.0,
        communication_growth: None,
        framework: None,
        buffered_bytes: 0,
        reference: None,
        interruption: Seconds::ZERO,
        paces: Vec::new(),
        speeds: Vec::new(),
        input: None,
        storage: None,
    };
    let costs = CostModel::new(Some(&profile), &topology);
    let mut stage = StageBuilder::new(0);
    let first = stage.compute(1_000_000, &[]);
    stage.collective(Collective::AllReduce, Group::along(Axis::Data), 1 << 20, &[first]);
    let program = program(2, 1, vec![stage.done()]);
    for (question, seconds) in [
        ("host.launch*1", 3e-3 + 1e-6 + 5e-3),
        // By the data sheet, this kernel is bound by memory.
        ("memory_bandwidth*3", 1e-3 + 1e-6 + 5e-3),
        ("device.peak*3", 3e-3 + 1e-6 + 5e-3),
        ("device.speed*3", 1e-3 + 1e-6 + 5e-3),
        ("host.launch*0", 3e-3 + 5e-3),
        ("intra_node.bandwidth*2", 3e-3 + 1e-6 + 1e-5 + 4.99e-3 / 2.0),
        ("latency*0", 3e-3 + 1e-6 + 4.99e-3),
        ("inter_node.bandwidth*2", 3e-3 + 1e-6 + 5e-3),
    ] {
        let answer = asked(&program, &topology, &costs, question);
        assert!(about(answer, Seconds::new(seconds)), "{question}: {answer} and not {seconds}");
    }
}

#[test]
fn fitted_costs_scale_to_the_changed_cluster() {
    let library = || Topology::library("dgx-a100-80g").unwrap().with_nodes(2).unwrap();
    let costs =
        |topology: &Topology| CostModel::new(None, topology).with_stack(topology, "megatron-core", DataType::Bf16).unwrap();
    let mut stage = StageBuilder::new(0);
    let first = stage.compute(100_000_000, &[]);
    let near = stage.collective(Collective::AllReduce, Group::along(Axis::Tensor), 80_000_000, &[first]);
    stage.collective(Collective::AllReduce, Group::along(Axis::Data), 80_000_000, &[near]);
    let mut program = program(2, 8, vec![stage.done()]);
    program.precision = DataType::Bf16;
    let changed = |nodes: &str| {
        let text = format!(
            "name: changed\ndevices:\n  a100-sxm-80g: {{base: a100-sxm-80g, memory_bandwidth: 4078GB/s}}\nnodes:\n  - {nodes}\n"
        );
        Topology::from_yaml(&format!("{text}network: {{kind: fat-tree, nodes_per_leaf: 20, latency: 5us}}\n"), "changed.yaml")
            .unwrap()
    };
    let nodes = |link: &str, nic: &str| {
        format!(
            "{{name: dgx, count: 2, devices: {{kind: a100-sxm-80g, count: 8}}, link: {link}, nics: {{count: 8, bandwidth: {nic}}}}}"
        )
    };
    for (question, other) in [
        ("inter_node.bandwidth*2, memory_bandwidth*2", changed(&nodes("nvswitch-300GB/s", "400Gbit/s"))),
        ("intra_node.bandwidth/2, memory_bandwidth*2", changed(&nodes("nvswitch-150GB/s", "200Gbit/s"))),
    ] {
        let answer = asked(&program, &library(), &costs(&library()), question);
        let expected = run(&program, &other, &costs(&other)).step;
        assert!(about(answer, Seconds::from(expected)), "{question}: {answer} and not {expected}");
    }
    let step = |question: &str| asked(&program, &library(), &costs(&library()), question);
    let whole = step("latency*1");
    for question in ["speed*2", "latency/2", "exchange.overhead*0", "launch*0"] {
        assert!(step(question) < whole, "{question}");
    }
}
