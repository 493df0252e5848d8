//! Layouts offload only what they must.

use crate::common::{fixed, own_costs, short_gpt};
use foretell_models::{Mlp, Model};
use foretell_planner::{PlannerError, Request, SearchResult, layouts, plan};
use foretell_program::{Layout, Offload, Optimizer, Plan, compile};
use foretell_topologies::Topology;
use foretell_units::diagnostic::one_line;
use foretell_units::{Bytes, DataType};

#[test]
fn layouts_offload_no_more_than_they_must() {
    let model = short_gpt(48, 1024, 512, false);
    let text = "name: one\nnodes:\n  - {name: node, count: 1, devices: {kind: a100-sxm-80g, count: 1}, link: nvswitch-300GB/s, host_memory: 1TiB}\n";
    let topology = Topology::from_yaml(text, "one.yaml").expect("it is sound");
    let costs = own_costs(&topology, DataType::Bf16);
    let base = Plan { precision: DataType::Bf16, optimizer: Optimizer::AdamW, ..Plan::new(Layout::default(), 128) };
    let shape = "data=1,tensor=1,pipeline=1,zero=0,recompute=none,micro_batch=128,bucket=25MiB";
    let request = Request { fixed: fixed(shape), ..Request::new(&model, "model", &topology, &costs, &base) };
    let all = layouts(&request).expect("the model is sound");
    let forms: Vec<Offload> = all.iter().map(|layout| layout.offload).collect();
    assert_eq!(forms, [Offload::None, Offload::Optimizer, Offload::Activations, Offload::Both]);
    let arena_of = |layout: &Layout| {
        let compiled = compile(&model, "model", &Plan { layout: layout.clone(), ..base.clone() }).expect("it divides the model");
        compiled.arenas()[0]
    };
    let arenas: Vec<Bytes> = all.iter().map(arena_of).collect();
    let [none, optimizer, activations, both] = <[Bytes; 4]>::try_from(arenas).expect("there are four");
    assert!(both < optimizer && optimizer < activations && activations < none, "{both} {optimizer} {activations} {none}");
    // Forms that do not fit are counted so. Those that offload more than the one that fits are
    // needless.
    for (limit, fitting, too_large) in [(none, Offload::None, 0), (optimizer, Offload::Optimizer, 2), (both, Offload::Both, 3)] {
        let planned = plan(&Request { memory_limit: Some(limit), ..request.clone() }).expect("one fits");
        let search = &planned.search;
        assert_eq!(planned.candidates[0].plan.layout.offload, fitting, "with {limit}");
        let counted = (search.layouts, search.simulated, search.out_of_memory, search.needless, search.bounded_out);
        assert_eq!(counted, (4, 1, too_large, 3 - too_large, 0), "with {limit}");
    }
    // If both single forms fit, the faster one is returned.
    let planned = plan(&Request { memory_limit: Some(activations), ..request.clone() }).expect("one fits");
    let step_of = |offload: &str| {
        let request = Request { fixed: fixed(&format!("{shape},offload={offload}")), ..request.clone() };
        plan(&request).expect("it fits").candidates[0].prediction.step_seconds
    };
    let faster = step_of("optimizer").min(step_of("activations"));
    assert_eq!(planned.candidates[0].prediction.step_seconds, faster);
    assert!(step_of("none") <= faster);
}

/// Searches layouts of a model with 256 MiB of weights, 512 MiB of gradients and 1.5 GiB of
/// optimizer state on two devices. An empty `host` leaves the hosts' memory unknown.
fn search(limit: &str, host: &str, choices: &str) -> Result<SearchResult, PlannerError> {
    let model = Model::Mlp(Mlp { widths: vec![4096; 9] });
    let host = if host.is_empty() { String::new() } else { format!(", host_memory: {host}") };
    let text = format!(
        "name: one\nnodes:\n  - {{name: node, count: 1, devices: {{kind: a100-sxm-80g, count: 2}}, link: nvswitch-300GB/s{host}}}\n"
    );
    let topology = Topology::from_yaml(&text, "one.yaml").expect("it is sound");
    let costs = own_costs(&topology, DataType::Bf16);
    let base = Plan { precision: DataType::Bf16, optimizer: Optimizer::AdamW, ..Plan::new(Layout::default(), 64) };
    let memory_limit = Some(limit.parse().expect("a size"));
    let shape = "data=2,tensor=1,pipeline=1,zero=0,recompute=none,micro_batch=32,bucket=25MiB";
    let fixed = fixed(&format!("{shape}{choices}"));
    plan(&Request { memory_limit, fixed, ..Request::new(&model, "model", &topology, &costs, &base) })
}

#[test]
fn only_layouts_that_do_not_fit_otherwise_offload_optimizer_state() {
    let found = |limit: &str, host: &str, choices: &str| search(limit, host, choices).expect("some layout fits");
    let resident = found("8GiB", "1TiB", "");
    assert_eq!((resident.search.layouts, resident.search.needless, resident.search.simulated), (4, 3, 1));
    assert_eq!(resident.candidates[0].plan.layout.offload, Offload::None);
    let offloaded = found("2GiB", "1TiB", "");
    assert_eq!((offloaded.search.layouts, offloaded.search.needless, offloaded.search.out_of_memory), (4, 1, 2));
    let best = &offloaded.candidates[0];
    assert_eq!(best.plan.layout.offload, Offload::Optimizer);
    assert!(best.prediction.fits && best.prediction.host_memory_bytes[0] >= Bytes::new(3 << 29));
    assert!(best.prediction.peak_memory_bytes[0] <= Bytes::new(2 << 30));
    assert!(best.prediction.step_seconds > resident.candidates[0].prediction.step_seconds);
    assert_eq!(found("8GiB", "1TiB", ",offload=optimizer").candidates[0].plan.layout.offload, Offload::Optimizer);
}

#[test]
fn nothing_is_offloaded_to_hosts_that_are_too_small_or_unknown() {
    let refused = |limit: &str, host: &str, choices: &str| one_line(&search(limit, host, choices).expect_err("nothing fits"));
    assert!(refused("2GiB", "1TiB", ",offload=none").starts_with("no layout fits: the smallest needs "));
    assert!(refused("2GiB", "2GiB", "").starts_with("no layout fits: the smallest needs "));
    assert!(refused("2GiB", "", "").contains("or write `host_memory: 1TB` of the nodes"));
}
