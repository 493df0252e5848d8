//! Imports of NVIDIA tools' output from real machines. `imports/README.md` has the source of each
//! file.

#![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

use foretell_topologies::{
    DeviceId, Discovered, DiscoveredGpu, ImportError, ImportOptions, NodeLinkKind, SlurmGpus, SlurmNode, Topology,
    from_discovered, from_nccl_xml, from_rocm_topo, from_slurm_nodes, from_smi_topo,
};
use foretell_units::diagnostic::one_line;

fn options(device: Option<&str>, nic_bandwidth: Option<&str>) -> ImportOptions {
    ImportOptions { name: "here".into(), device: device.map(str::to_owned), nic_bandwidth: nic_bandwidth.map(str::to_owned) }
}

/// Devices per node, their kind, the link's kind and rate in GB/s, and NICs with their rate in
/// Gbit/s.
fn summary(text: &str) -> (usize, String, NodeLinkKind, f64, Option<(usize, f64)>) {
    let topology = Topology::from_yaml(text, "imported").unwrap();
    let group = &topology.node_groups()[0];
    let link = group.link.unwrap();
    let nics = group.nics.map(|nics| (nics.count, (nics.bandwidth.value() * 8e-9).round()));
    (group.devices, topology.device_kinds()[group.kind].name.clone(), link.kind, (link.bandwidth.value() * 1e-9).round(), nics)
}

#[test]
fn nvlinks_that_reach_every_gpu_mean_a_switch() {
    let text = include_str!("imports/h20-vm.smi-topo.txt");
    let imported = from_smi_topo(text, &options(Some("h100-sxm-80g"), Some("400Gbit/s"))).unwrap();
    let expected = (8, "h100-sxm-80g".into(), NodeLinkKind::NvSwitch, 450.0, Some((8, 400.0)));
    assert_eq!(summary(&imported), expected);
    let without = from_smi_topo(text, &options(Some("h100-sxm-80g"), None)).unwrap();
    assert_eq!(summary(&without).4, None);
    assert!(without.contains("8 NICs are left out"), "{without}");
}

#[test]
fn gpus_without_nvlink_are_joined_by_pcie() {
    let text = include_str!("imports/two-5090.smi-topo.txt");
    let imported = from_smi_topo(text, &options(Some("l40s"), None)).unwrap();
    let (devices, _, kind, _, nics) = summary(&imported);
    assert_eq!((devices, kind, nics), (2, NodeLinkKind::Pcie, None));
}

#[test]
fn a_matrix_without_a_known_gpu_is_refused() {
    let error = from_smi_topo(include_str!("imports/h20-vm.smi-topo.txt"), &options(None, None)).unwrap_err();
    assert!(one_line(&error).contains("a100-sxm-80g"), "{error}");
    let error = from_smi_topo("nothing of the kind", &options(Some("l40s"), None)).unwrap_err();
    assert!(matches!(error, ImportError::Form { .. }), "{error}");
    let error = from_smi_topo(include_str!("imports/h20-vm.smi-topo.txt"), &options(Some("h21"), None)).unwrap_err();
    assert!(matches!(error, ImportError::UnknownDevice { .. }), "{error}");
}

#[test]
fn an_nccl_dump_gives_gpus_switches_and_nics() {
    let imported = from_nccl_xml(include_str!("imports/h200-numa-0.nccl.xml"), &options(None, None)).unwrap();
    let expected = (3, "h200-sxm-141g".into(), NodeLinkKind::NvSwitch, 450.0, Some((3, 400.0)));
    assert_eq!(summary(&imported), expected);
    // The A100 of Azure's NC v4 is a PCIe card. Its NVLink bridges lead to itself in the file.
    let text = include_str!("imports/azure-ncv4.nccl.xml");
    let imported = from_nccl_xml(text, &options(None, None)).unwrap();
    assert_eq!(summary(&imported), (4, "a100-pcie-80g".into(), NodeLinkKind::Pcie, 25.0, Some((1, 100.0))));
    assert!(imported.contains("from a GPU to itself"), "{imported}");
    assert!(matches!(from_nccl_xml("<a/>", &options(None, None)), Err(ImportError::Form { .. })));
    // Counts whose sum overflows.
    let links = r#"<nvlink count="18446744073709551615"/>"#.repeat(2);
    let error = from_nccl_xml(&format!("<system><gpu>{links}</gpu></system>"), &options(None, None)).unwrap_err();
    assert!(one_line(&error).contains("a number of links up to 1024"), "{error}");
    // A commented-out GPU does not count, and either kind of quotes is read.
    let text = "<system><pci device='0x2330'><gpu/><!-- <gpu/> --></pci></system>";
    assert_eq!(summary(&from_nccl_xml(text, &options(None, None)).unwrap()).0, 1);
}

/// An H200 in a machine of eight, as NVML describes it.
fn h200() -> DiscoveredGpu {
    DiscoveredGpu {
        name: "NVIDIA H200".into(),
        pci_device: 0x2335,
        pcie: Some((5, 16)),
        links: 18,
        links_into_switches: 18,
        link_generation: Some(4),
    }
}

#[test]
fn facts_from_nvml_become_a_topology() {
    let ports = vec!["400 Gb/sec (4X NDR)".to_owned(); 8];
    let found = Discovered { gpus: vec![h200(); 8], port_rates: ports };
    let imported = from_discovered(&found, &options(None, None)).unwrap();
    assert_eq!(summary(&imported), (8, "h200-sxm-141g".into(), NodeLinkKind::NvSwitch, 450.0, Some((8, 400.0))));
    // Cards without NVLink on PCIe 5 x16: 63 GB/s less protocol overhead.
    let card = DiscoveredGpu { links: 0, links_into_switches: 0, link_generation: None, ..h200() };
    let found = Discovered { gpus: vec![card; 2], port_rates: Vec::new() };
    let imported = from_discovered(&found, &options(None, None)).unwrap();
    assert_eq!(summary(&imported), (2, "h200-sxm-141g".into(), NodeLinkKind::Pcie, 50.0, None));
    assert!(!imported.contains("assumed"), "{imported}");
}

#[test]
fn unequal_links_and_unknown_gpus_are_reported() {
    let lame = DiscoveredGpu { links: 16, links_into_switches: 16, ..h200() };
    let found =
        Discovered { gpus: vec![h200(), lame], port_rates: vec!["200 Gb/sec (4X HDR)".into(), "400 Gb/sec (4X NDR)".into()] };
    let imported = from_discovered(&found, &options(None, None)).unwrap();
    assert!(imported.contains("not every GPU has 18 NVLinks up") && imported.contains("port 0 of 200 Gbit/s"), "{imported}");
    let unknown = DiscoveredGpu { name: "NVIDIA GB300".into(), pci_device: 0x31c2, ..h200() };
    let error = from_discovered(&Discovered { gpus: vec![unknown], port_rates: Vec::new() }, &options(None, None)).unwrap_err();
    assert!(one_line(&error).contains("NVIDIA GB300, PCI device 0x31c2"), "{error}");
}

#[test]
fn a_matrix_with_an_impossible_number_of_links_is_no_overflow() {
    let text = include_str!("imports/h20-vm.smi-topo.txt").replacen("NV18", "NV9223372036854775808", 3);
    let imported = from_smi_topo(&text, &options(Some("h100-sxm-80g"), None));
    assert!(imported.is_ok_and(|text| text.contains("contradict each other")));
}

#[test]
fn a_mesh_of_uneven_pairs_is_stated_pair_by_pair() {
    // A DGX-1 of V100s, as in NVIDIA's white paper on it: six links a GPU, to four others.
    let imported = from_smi_topo(include_str!("imports/dgx-1.smi-topo.txt"), &options(Some("v100-sxm-32g"), None)).unwrap();
    let dgx = Topology::from_yaml(&imported, "dgx-1").unwrap();
    let rate = |from, to| dgx.route(DeviceId(from), DeviceId(to)).unwrap().single_flow_limit.unwrap().value() / 1e9;
    assert_eq!([rate(0, 1), rate(0, 3), rate(0, 4), rate(0, 5)], [25.0, 50.0, 50.0, 12.6]);
    assert_eq!(Topology::from_yaml(&serde_json::to_string(&dgx).unwrap(), "again").unwrap(), dgx);
    let lame = imported.replacen("[0, 1", "[0, 2", 1);
    let error = Topology::from_yaml(&lame, "lame").unwrap_err();
    assert!(one_line(&error).contains("both directions have the same number"), "{error}");
}

#[test]
fn gpus_with_xgmi_have_the_links_of_their_kind() {
    let imported = from_rocm_topo(include_str!("imports/eight-amd.rocm-topo.txt"), &options(Some("mi300x"), None)).unwrap();
    assert_eq!(summary(&imported), (8, "mi300x".into(), NodeLinkKind::NvLinkMesh, 448.0, None));
    let error = from_rocm_topo("GPU0", &options(Some("mi300x"), None)).unwrap_err();
    assert!(matches!(error, ImportError::Form { .. }), "{error}");
}

#[test]
fn nodes_of_slurm_with_equal_devices_are_one_group() {
    let text = &include_str!("imports/gpu-cluster.slurm-nodes.txt").replace("DOWN*", "IDLE");
    let imported = from_slurm_nodes(text, &options(None, Some("400Gbit/s"))).unwrap();
    let topology = Topology::from_yaml(&imported, "imported").unwrap();
    let groups: Vec<(usize, usize)> = topology.node_groups().iter().map(|group| (group.count, group.devices)).collect();
    assert_eq!(groups, [(2, 8), (1, 64)]);
    assert_eq!(summary(&imported), (8, "h200-sxm-141g".into(), NodeLinkKind::NvSwitch, 450.0, Some((1, 400.0))));
    assert!(from_slurm_nodes(text, &options(None, None)).unwrap().contains("the rate between nodes is assumed"));
    let unknown = text.replace("gpu:h200", "gpu:quantum");
    let error = from_slurm_nodes(&unknown, &options(None, None)).unwrap_err();
    assert!(one_line(&error).contains("Slurm says `quantum`"), "{error}");
    let error = from_slurm_nodes(&text.replace("gpu:h200", "gpu:a100"), &options(None, None)).unwrap_err();
    assert!(one_line(&error).contains("one of a100-pcie-40g, a100-pcie-80g, a100-sxm-40g"), "{error}");
}

#[test]
fn nodes_of_slurm_that_take_no_jobs_are_left_out() {
    let text = include_str!("imports/gpu-cluster.slurm-nodes.txt");
    let imported = from_slurm_nodes(text, &options(None, None)).unwrap();
    let topology = Topology::from_yaml(&imported, "imported").unwrap();
    assert_eq!(topology.node_groups().iter().map(|group| group.count).collect::<Vec<_>>(), [2]);
    assert!(imported.contains("nodes left out, as they are down, drained, failed or not there yet: 1"), "{imported}");
    for (state, takes_jobs) in [
        ("DOWN*", false),
        ("IDLE+DRAIN", false),
        ("FAIL", false),
        ("FUTURE", false),
        ("MIXED", true),
        ("IDLE+CLOUD+POWERED_DOWN", true),
    ] {
        let nodes = SlurmNode::parse_all(&text.replace("DOWN*", state)).unwrap();
        assert_eq!(nodes[2].takes_jobs(), takes_jobs, "{state}");
    }
    let none = text.replace("MIXED", "DOWN").replace("IDLE", "MIXED+DRAIN");
    assert_eq!(from_slurm_nodes(&none, &options(None, None)), Err(ImportError::NoNodes { count: 3 }));
}

#[test]
fn gpus_of_several_types_count_and_become_no_topology() {
    let text = include_str!("imports/gpu-cluster.slurm-nodes.txt")
        .replace("Gres=gpu:h200:8(S:0-1)", "Gres=gpu:h200:4(S:0,1),gpu:a100:2,nvme:1");
    let nodes = SlurmNode::parse_all(&text).unwrap();
    assert_eq!(nodes[0].gpus(), Some(SlurmGpus { kind: None, count: 6 }));
    let error = from_slurm_nodes(&text, &options(None, None)).unwrap_err();
    assert!(one_line(&error).contains("node `gpu001` has GPUs of several types (h200, a100)"), "{error}");
}

#[test]
fn a_number_of_gpus_that_is_none_is_refused() {
    let text = include_str!("imports/gpu-cluster.slurm-nodes.txt");
    for wrong in ["gpu:h200:x", "gpu:h200:0", "gpu:h200", "gpu:-8"] {
        let error = one_line(&SlurmNode::parse_all(&text.replace("gpu:h200:8", wrong)).unwrap_err());
        assert!(error.contains("in place of a number of GPUs; hint: write how many"), "{wrong}: {error}");
    }
}

#[test]
fn gpus_of_jobs_are_the_total_or_the_sum_of_types() {
    let text = include_str!("imports/gpu-cluster.slurm-nodes.txt");
    for (allocated, count) in [
        ("gres/gpu=4,gres/gpu:h200=3,gres/gpu:a100=1,gres/some_long_resource=9", 4),
        ("gres/gpu:h200=3,gres/gpu:a100=1,gres/nvme=7", 4),
        ("gres/gpu=2", 2),
        ("gres/nvme=7", 0),
    ] {
        let nodes = SlurmNode::parse_all(&text.replace("gres/gpu=4,gres/gpu:h200=4", allocated)).unwrap();
        assert_eq!(nodes[0].allocated_gpus(), count, "{allocated}");
    }
}

#[test]
fn a_node_of_slurm_says_what_jobs_have() {
    let nodes = SlurmNode::parse_all(include_str!("imports/gpu-cluster.slurm-nodes.txt")).unwrap();
    assert_eq!((nodes[0].cpus, nodes[0].load, nodes[0].allocated_gpus()), ((16, 96), Some(14.2), 4));
    assert_eq!(nodes[0].gpus(), Some(SlurmGpus { kind: Some("h200"), count: 8 }));
    assert_eq!((nodes[2].gpus(), nodes[2].load), (None, None));
    assert!(SlurmNode::parse_all("no nodes").is_err());
}

/// A matrix of `nvidia-smi topo -m` with these cells between GPUs.
fn matrix(cells: &[&[&str]]) -> String {
    let names: Vec<String> = (0..cells.len()).map(|gpu| format!("GPU{gpu}")).collect();
    let rows = cells.iter().zip(&names).map(|(row, name)| format!("{name}\t{}\t0-31\t0\n", row.join("\t")));
    format!("\t{}\tCPU Affinity\tNUMA Affinity\n{}", names.join("\t"), rows.collect::<String>())
}

#[test]
fn a_links_rate_is_that_of_the_devices_generation() {
    let pair = matrix(&[&["X", "NV4"], &["NV4", "X"]]);
    for (device, rate) in [("rtx-3090", 56.0), ("rtx-a6000", 56.0), ("a100-sxm-80g", 100.0), ("b200-sxm-180g", 200.0)] {
        let imported = from_smi_topo(&pair, &options(Some(device), None)).unwrap();
        assert_eq!((summary(&imported).2, summary(&imported).3), (NodeLinkKind::NvLinkMesh, rate), "{device}");
    }
    let switched = include_str!("imports/h20-vm.smi-topo.txt");
    assert_eq!(summary(&from_smi_topo(switched, &options(Some("b200-sxm-180g"), None)).unwrap()).3, 900.0);
    // Without a terminal's colours it is the same listing.
    let coloured = format!("\u{1b}[4m{}", switched.trim_start().replacen("ID\n", "ID\u{1b}[0m\n", 1));
    let [plain, other] = [switched, &coloured].map(|text| from_smi_topo(text, &options(Some("h20"), Some("400Gbit/s"))).unwrap());
    assert_eq!(plain, other);
}

#[test]
fn bridges_between_pairs_leave_pcie_between_the_pairs() {
    let pairs = matrix(&[
        &["X", "NV12", "SYS", "SYS"],
        &["NV12", "X", "SYS", "SYS"],
        &["SYS", "SYS", "X", "NV12"],
        &["SYS", "SYS", "NV12", "X"],
    ]);
    let imported = from_smi_topo(&pairs, &options(Some("a100-pcie-80g"), None)).unwrap();
    assert!(imported.contains("bandwidth: 300GB/s, devices_per_switch: 2, uplink: 49.6GB/s"), "{imported}");
    // A bridge beside a card without one: not alike, so PCIe for all.
    let uneven = matrix(&[&["X", "NV12", "SYS"], &["NV12", "X", "SYS"], &["SYS", "SYS", "X"]]);
    let imported = from_smi_topo(&uneven, &options(Some("a100-pcie-80g"), None)).unwrap();
    assert!(summary(&imported).2 == NodeLinkKind::Pcie && imported.contains("not alike"), "{imported}");
    let other_tool = from_smi_topo(&matrix(&[&["X", "OK"], &["OK", "X"]]), &options(Some("l4"), None)).unwrap_err();
    assert!(other_tool.to_string().contains("topo -p2p"), "{other_tool}");
}

#[test]
fn interfaces_that_software_makes_do_not_count() {
    let without_pci = |name: &str, speed: u32| format!("<nic><net name='{name}' speed='{speed}' port='0'/></nic>");
    let real = "<pci device='0x16d8'><nic><net name='eno1np0' speed='1000' port='0'/></nic></pci>";
    let dump = |nics: &str| format!("<system><cpu><pci device='0x2230'><gpu/></pci>{nics}</cpu></system>");
    for name in ["veth268d912", "br-3c276cd5dbc3", "cali1", "tunl0", "docker0", "virbr0", "vxlan.calico"] {
        let imported = from_nccl_xml(&dump(&[real, &without_pci(name, 10_000)].concat()), &options(None, None)).unwrap();
        assert_eq!(summary(&imported).4, Some((1, 1.0)), "{imported}");
    }
    // A cloud's real NIC has no PCI device either.
    let imported = from_nccl_xml(&dump(&without_pci("eth0", 40_000)), &options(None, None)).unwrap();
    assert_eq!(summary(&imported).4, Some((1, 40.0)));
}

#[test]
fn gpus_of_amd_are_known_by_their_architecture() {
    let dump = |gcn: &str| format!("<system><cpu><pci><gpu dev='0' gcn='{gcn}'/></pci></cpu></system>");
    assert_eq!(summary(&from_nccl_xml(&dump("908"), &options(None, None)).unwrap()).1, "mi100");
    let error = one_line(&from_nccl_xml(&dump("906"), &options(None, None)).unwrap_err());
    assert!(error.contains("MI50 or MI60") && error.contains("not in the catalogue"), "{error}");
}

#[test]
fn the_slowest_link_on_the_way_to_the_processor_counts() {
    let dump = |above: &str, inner: &str| {
        format!(
            "<system><cpu><pci device='0x14c7' link_speed='{above} GT/s PCIe' link_width='16'><pci device='0x740f' link_speed='{inner} GT/s \
             PCIe' link_width='16'><gpu/></pci></pci></cpu></system>"
        )
    };
    let rate = |above: &str, inner: &str| summary(&from_nccl_xml(&dump(above, inner), &options(None, None)).unwrap()).3;
    assert_eq!(rate("16.0", "32.0"), rate("16.0", "16.0"));
    assert_eq!(rate("32.0", "16.0"), rate("16.0", "16.0"));
    assert!(rate("32.0", "32.0") > 1.9 * rate("16.0", "16.0"));
}

#[test]
fn nics_for_storage_and_management_do_not_count() {
    let nic = |name: &str, speed: u32, device: &str| {
        format!("<pci device='{device}'><nic><net name='{name}' speed='{speed}' port='1'/></nic></pci>")
    };
    let dump = |nics: &str| format!("<system><pci device='0x2330'><gpu/></pci>{nics}</system>");
    let two = [nic("mlx5_0", 400_000, "0x1021"), nic("mlx5_1", 400_000, "0x1021")].concat();
    // A slower port, one listed twice, and a virtual function.
    let more =
        [two.clone(), nic("bond", 25_000, "0x101d"), nic("mlx5_1", 400_000, "0x1021"), nic("vf", 400_000, "0x101e")].concat();
    for nics in [&two, &more] {
        let imported = from_nccl_xml(&dump(nics), &options(None, None)).unwrap();
        assert_eq!(summary(&imported).4, Some((2, 400.0)), "{imported}");
    }
    // A cloud's machine has virtual functions alone.
    let imported = from_nccl_xml(&dump(&nic("vf", 400_000, "0x101e")), &options(None, None)).unwrap();
    assert_eq!(summary(&imported).4, Some((1, 400.0)));
}

#[test]
fn links_of_amd_are_read_and_scaled_by_peers() {
    let gpu = |bus: &str, peers: &[&str]| {
        let links: String = peers.iter().map(|peer| format!("<xgmi target='{peer}' count='1'/>")).collect();
        format!("<pci busid='{bus}' device='0x74a1' link_speed='8.0 GT/s PCIe' link_width='16'><gpu>{links}</gpu></pci>")
    };
    let all = ["a", "b", "c", "d"];
    let gpus: String =
        all.iter().map(|bus| gpu(bus, &all.iter().filter(|peer| *peer != bus).copied().collect::<Vec<_>>())).collect();
    let imported = from_nccl_xml(&format!("<system>{gpus}</system>"), &options(None, None)).unwrap();
    assert_eq!(summary(&imported), (4, "mi300x".into(), NodeLinkKind::NvLinkMesh, 192.0, None));
    // Without links the slot counts: generation 3 x16 less overhead.
    let lone = [gpu("a", &[]), gpu("b", &[])].concat();
    let imported = from_nccl_xml(&format!("<system>{lone}</system>"), &options(None, None)).unwrap();
    assert_eq!((summary(&imported).2, summary(&imported).3), (NodeLinkKind::Pcie, 13.0));
}

#[test]
fn each_kind_of_a_mixed_cluster_keeps_its_devices() {
    let node = |name: &str, gres: &str, tres: &str| {
        format!("NodeName={name} CPUAlloc=0 CPUTot=32 Gres={gres} RealMemory=256000 State=IDLE CfgTRES={tres}\n")
    };
    let kinds = |text: &str, device: Option<&str>| {
        let imported = from_slurm_nodes(text, &options(device, Some("200Gbit/s")))?;
        let topology = Topology::from_yaml(&imported, "imported")?;
        Ok::<Vec<String>, ImportError>(topology.device_kinds().iter().map(|kind| kind.name.clone()).collect())
    };
    let mixed = [node("na", "gpu:a100:4", ""), node("nb", "gpu:h20:4", "")].concat();
    assert_eq!(kinds(&mixed, Some("a100-sxm-80g")).unwrap(), ["a100-sxm-80g", "h20"]);
    let unclear = mixed.replace("h20", "v100");
    let error = one_line(&kinds(&unclear, Some("a100-sxm-80g")).unwrap_err());
    assert!(error.contains("Slurm says `v100` of others") && error.contains("a100=a100-sxm-80g,v100="), "{error}");
    let mapped = kinds(&unclear, Some("a100=a100-sxm-80g,v100=v100-sxm-32g")).unwrap();
    assert_eq!(mapped, ["a100-sxm-80g", "v100-sxm-32g"]);
    // GPUs that only the trackable resources have.
    let tracked = node("na", "(null)", "cpu=192,gres/gpu=4,gres/gpu:nvidia_b200=4");
    assert_eq!(kinds(&tracked, None).unwrap(), ["b200-sxm-180g"]);
}
