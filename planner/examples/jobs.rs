//! Times searches, and prints what they find:
//! `MIMALLOC_PURGE_DELAY=-1 cargo run --release -p foretell-planner --example jobs -- CASE`.
//! Fixed fields and a stack may follow the case, as in `-- llama3-70b-16 "" megatron-core`.
//!
//! The cases are `turing-530b` and `gpt3-175b` (Calculon's jobs), `gpt-175b` (on 1,024 H100s),
//! `llama3-70b` (on 256 H100s), `llama3-70b-16` (on 128), `mixed` (on 5,000 A100s and 5,000 H100s),
//! `resnet50` (on 8 A100s), `uneven` (on 16 A100s and 24 H100s), `deepseek-v2-lite` (on 8 A100s)
//! and `gpt-oss-120b` (on 64 H100s).
#![allow(clippy::unwrap_used)]

use foretell_models::Model;
use foretell_planner::{Request, plan};
use foretell_program::{Layout, Plan};
use foretell_simulator::CostModel;
use foretell_topologies::Topology;
use foretell_units::DataType;
use std::time::Instant;

/// 40 GPUs. No common mesh of all stages uses both kinds evenly.
const UNEVEN: &str = "
name: uneven
devices:
  a100: {base: a100-sxm-80g}
  h100: {base: h100-sxm-80g}
nodes:
  - {name: old, count: 2, devices: {kind: a100, count: 8}, link: nvswitch-300GB/s, nics: {count: 8, bandwidth: 200Gbit/s}}
  - {name: new, count: 3, devices: {kind: h100, count: 8}, link: nvswitch-450GB/s, nics: {count: 8, bandwidth: 400Gbit/s}}
network: {kind: switch, latency: 5us}
";

/// 10,000 GPUs, half of them A100s and half H100s.
const MIXED: &str = "
name: mixed
devices:
  a100: {base: a100-sxm-80g}
  h100: {base: h100-sxm-80g}
nodes:
  - {name: old, count: 625, devices: {kind: a100, count: 8}, link: nvswitch-300GB/s, nics: {count: 8, bandwidth: 200Gbit/s}}
  - {name: new, count: 625, devices: {kind: h100, count: 8}, link: nvswitch-450GB/s, nics: {count: 8, bandwidth: 400Gbit/s}}
network: {kind: switch, latency: 5us}
";

/// The allocator of the command line. There it keeps freed memory; here it does so with
/// `MIMALLOC_PURGE_DELAY=-1`.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() {
    let case = std::env::args().nth(1).unwrap_or_default();
    let gpt = |layers, hidden, heads| {
        format!(
            r#"{{"family": "gpt", "layers": {layers}, "hidden": {hidden}, "heads": {heads}, "vocab": 51200, "sequence": 2048}}"#
        )
    };
    let llama = r#"{"family": "llama", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256, "sequence": 4096}"#;
    let llama70 = r#"{"family": "llama", "layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "vocab": 128256, "sequence": 8192}"#;
    let zoo = |name: &str| serde_json::to_string(&Model::named(name).unwrap()).unwrap();
    let (model, topology, devices, batch, fixed) = match case.as_str() {
        "turing-530b" => (gpt(105, 20480, 128), "dgx-a100-80g", 5128, 2520, ""),
        "gpt3-175b" => (gpt(96, 12288, 96), "dgx-a100-80g", 512, 512, ""),
        "gpt-175b" => (gpt(96, 12288, 96), "dgx-h100", 1024, 1536, ""),
        "mixed" => (gpt(96, 12288, 96), "mixed", 0, 10_000, ""),
        "uneven" => (llama.to_owned(), "uneven", 0, 480, ""),
        "llama3-70b" => (llama70.to_owned(), "dgx-h100", 256, 512, ""),
        "llama3-70b-16" => (llama70.to_owned(), "dgx-h100", 128, 512, ""),
        "resnet50" => (zoo("resnet50"), "dgx-a100-80g", 8, 256, ""),
        "deepseek-v2-lite" => (zoo("deepseek-v2-lite"), "dgx-a100-80g", 8, 512, ""),
        "gpt-oss-120b" => (zoo("gpt-oss-120b"), "dgx-h100", 64, 256, ""),
        other => return eprintln!("there is no case `{other}`"),
    };
    let fixed = std::env::args().nth(2).unwrap_or(fixed.into());
    let model: Model = serde_json::from_str(&model).unwrap();
    let topology = match topology {
        "mixed" => Topology::from_yaml(MIXED, "mixed.yaml").unwrap(),
        "uneven" => Topology::from_yaml(UNEVEN, "uneven.yaml").unwrap(),
        name => Topology::library(name).unwrap().with_nodes(devices / 8).unwrap(),
    };
    let stack = std::env::args().nth(3).unwrap_or_else(|| "foretell".into());
    let started = Instant::now();
    let costs = CostModel::new(None, &topology).with_stack(&topology, &stack, DataType::Bf16).unwrap();
    let base = Plan { precision: DataType::Bf16, ..Plan::new(Layout::default(), batch) };
    let request = Request { fixed: fixed.parse().unwrap(), top: 1, ..Request::new(&model, "gpt", &topology, &costs, &base) };
    let planned = plan(&request);
    println!("{:.3} s", started.elapsed().as_secs_f64());
    match planned {
        Ok(planned) => {
            println!("{:?}", planned.search);
            for candidate in planned.candidates {
                println!("{:.4} s: {:?}", candidate.prediction.step_seconds.value(), candidate.plan.layout);
            }
        }
        Err(error) => println!("{error}"),
    }
}
