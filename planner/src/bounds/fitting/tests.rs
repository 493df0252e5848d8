//! Tests of fitted layouts against brute force.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that fails may panic")]

use super::stages::{StageCost, least_cuts};
use crate::bounds::{Bound, Bounds};
use crate::search::plan;
use crate::space::{Family, Request};
use foretell_models::{DropoutRate, Gpt, Model};
use foretell_program::{Layout, Plan, Rank, Recompute, Schedule, compile};
use foretell_simulator::{CostModel, Folding, Oversubscription, predict};
use foretell_topologies::{DeviceId, Topology};
use foretell_units::{Bytes, DataType};
use proptest::prelude::*;

/// Returns all cuts of so many blocks into stages of at least one block.
fn all_cuts(blocks: usize, stages: usize) -> Vec<Vec<usize>> {
    if stages == 1 {
        return vec![vec![blocks]];
    }
    let with = |first: usize| all_cuts(blocks - first, stages - 1).into_iter().map(move |rest| [vec![first], rest].concat());
    (1..=blocks - (stages - 1)).flat_map(with).collect()
}

proptest! {
    #[test]
    fn dynamic_programming_finds_the_least_of_all_cuts(
        all in prop::collection::vec(prop::collection::vec(prop::option::weighted(0.8, 1u32..40), 8), 1..5), cap in 1u32..60,
    ) {
        let cost = |all: u32| StageCost {
            all_passes: f64::from(all),
            round_trip: f64::from(all % 7),
            serial: f64::from(all % 5),
            recomputed: 0,
        };
        // No stage may have no block.
        let costs: Vec<Vec<Option<StageCost>>> =
            all.iter().map(|own| std::iter::once(None).chain(own.iter().map(|all| all.map(cost))).collect()).collect();
        let round_trip = |stage: usize, cost: &StageCost, rest: f64| {
            (cost.all_passes <= f64::from(cap)).then_some(cost.round_trip * (stage + 1) as f64 + rest)
        };
        let longest = |_, cost: &StageCost, rest: f64| Some(cost.all_passes.max(cost.serial + rest));
        type Add<'a> = &'a dyn Fn(usize, &StageCost, f64) -> Option<f64>;
        for (none, add) in [(0.0, &round_trip as Add<'_>), (f64::NEG_INFINITY, &longest)] {
            let value = |cuts: &Vec<usize>| {
                let stages = cuts.iter().zip(&costs).enumerate().rev();
                stages.map(|(stage, (&blocks, costs))| (stage, costs[blocks])).try_fold(none, |rest, (stage, cost)| add(stage, &cost?, rest))
            };
            let found = least_cuts(&costs, 8, none, add);
            let least = all_cuts(8, costs.len()).iter().filter_map(value).reduce(f64::min);
            prop_assert_eq!(found.as_ref().map(|(least, _)| *least), least);
            if let Some((least, cuts)) = found {
                prop_assert_eq!(value(&cuts), Some(least));
            }
        }
    }
}

/// Returns two devices of each of two kinds, with the given memories.
fn two_kinds(slow: &str, fast: &str, nic: &str) -> Topology {
    let text = format!(
        "name: two\ndevices:\n  slow: {{base: v100-sxm-32g, memory: {slow}}}\n  fast: {{base: a100-sxm-80g, memory: {fast}}}\nnodes:\n  \
            - {{name: old, count: 1, devices: {{kind: slow, count: 2}}, link: nvswitch-150GB/s, nics: {{count: 1, bandwidth: {nic}}}}}\n  \
            - {{name: new, count: 1, devices: {{kind: fast, count: 2}}, link: nvswitch-150GB/s, nics: {{count: 1, bandwidth: {nic}}}}}\n\
            network: {{kind: switch, latency: 5us}}\n"
    );
    Topology::from_yaml(&text, "two.yaml").unwrap()
}

/// Returns the layouts of a family of eight blocks with any cuts, numbers of recomputed blocks, and
/// these orders of the stages. For four stages only some: up to three blocks each, of which none or
/// all are recomputed.
fn fitted_layouts(family: &Family, orders: &[Option<Vec<usize>>]) -> Vec<Layout> {
    let stages = family.layout.pipeline;
    let recomputations = |cuts: &[usize]| -> Vec<Vec<usize>> {
        let own = |blocks: usize| if stages == 2 { (0..=blocks).collect() } else { vec![0, blocks] };
        cuts.iter().fold(vec![vec![]], |found: Vec<Vec<usize>>, &blocks| {
            let with_next = |before: &Vec<usize>| {
                let before = before.clone();
                own(blocks).into_iter().map(move |own| [before.clone(), vec![own]].concat())
            };
            found.iter().flat_map(with_next).collect()
        })
    };
    let mut all = Vec::new();
    for cuts in all_cuts(8, stages).into_iter().filter(|cuts| stages == 2 || cuts.iter().all(|blocks| *blocks < 4)) {
        for layers in recomputations(&cuts) {
            let is_none = layers.iter().all(|layers| *layers == 0);
            let recompute = if is_none { Recompute::None } else { Recompute::FullLayersOfStages(layers) };
            for stage_places in orders.iter().cloned() {
                let (cuts, recompute) = (Some(cuts.clone()), recompute.clone());
                all.push(Layout { cuts, recompute, stage_places, ..family.layout.clone() });
            }
        }
    }
    all
}

#[test]
fn fitted_stages_are_as_fast_as_the_best_and_not_below_their_bound() {
    let (attention_dropout, dropout) = (DropoutRate::NONE, DropoutRate::NONE);
    let model = Model::Gpt(Gpt {
        layers: 6,
        hidden: 256,
        heads: 4,
        ffn: None,
        vocab: 512,
        sequence: 256,
        tied_embeddings: false,
        dropout,
        attention_dropout,
    });
    let base = Plan { precision: DataType::Fp16, ..Plan::new(Layout::default(), 64) };
    let mut partly_recomputed = 0;
    // Two of them, since each takes a quarter of a minute; all with the variable of many cases.
    let tried = if std::env::var("FORETELL_BOUND_CASES").is_ok() { 4 } else { 2 };
    for (slow, fast, nic) in [
        ("32MiB", "96MiB", "10Gbit/s"),
        ("48MiB", "48MiB", "100Gbit/s"),
        ("64MiB", "128MiB", "100Gbit/s"),
        ("64MiB", "128MiB", "5Gbit/s"),
    ]
    .into_iter()
    .take(tried)
    {
        let topology = two_kinds(slow, fast, nic);
        let costs = CostModel::new(None, &topology).with_stack(&topology, "foretell", DataType::Fp16).unwrap();
        let step = |layout: &Layout| {
            let compiled = compile(&model, "model", &Plan { layout: layout.clone(), ..base.clone() }).ok()?;
            let (mesh, arenas) = (&compiled.training.mesh, compiled.arenas());
            let fits = |rank| arenas[mesh.stage_of(Rank(rank))] <= topology.device_kind(DeviceId(rank)).memory;
            let (prediction, _) = predict(&compiled.training, &topology, &costs, Oversubscription::Refused, Folding::On).unwrap();
            (0..mesh.world_size()).all(fits).then(|| prediction.step_seconds.value())
        };
        let usual = Schedule::default();
        let splitting = Schedule::ALL.into_iter().find(|schedule| schedule.splits_backward() && schedule.allows(1)).unwrap();
        for (shape, schedule) in [
            ("data=2,pipeline=2,micro_batch=4", usual),
            ("data=2,pipeline=2,micro_batch=2", splitting),
            ("data=1,pipeline=4,micro_batch=8", usual),
        ] {
            let shape = format!("{shape},schedule={schedule}");
            let fixed = format!("{shape},tensor=1,zero=0,offload=none,bucket=25MiB,virtual_stages=1").parse().unwrap();
            let request = Request { fixed, tolerance: 0.0, ..Request::new(&model, "model", &topology, &costs, &base) };
            let bounds = Bounds::new(&request).unwrap();
            let families = bounds.space.families();
            let families = families.iter().filter(|family| family.layout.recompute == Recompute::None);
            let mut best: Option<f64> = None;
            for family in families {
                assert!(bounds.has_fitted_cuts(&family.layout), "{shape}");
                let mut orders: Vec<Option<Vec<usize>>> =
                    bounds.variants(family).into_iter().map(|variant| variant.stage_places).collect();
                orders.dedup();
                let all: Vec<f64> = fitted_layouts(family, &orders).iter().filter_map(&step).collect();
                let fastest = all.iter().copied().reduce(f64::min);
                best = best.into_iter().chain(fastest).reduce(f64::min);
                match bounds.fitted_family(family, Bytes::ZERO).unwrap().0 {
                    Ok(Bound { time: Some(least), .. }) => {
                        let least = least.value();
                        assert!(fastest.is_none_or(|fastest| least <= fastest), "{shape} {slow} {fast}: {least} {fastest:?}")
                    }
                    _ => assert_eq!(fastest, None, "{shape} {slow} {fast}"),
                }
            }
            let found = plan(&request).ok();
            let Some(found) = found else {
                assert_eq!(best, None, "{shape} {slow} {fast}");
                continue;
            };
            let layout = &found.candidates[0].plan.layout;
            assert_eq!(step(layout), Some(found.search.best_seconds));
            // The bound that chooses the cuts knows how long slow messages take, but not which
            // stage waits for them.
            let slack = if nic == "100Gbit/s" { 1.005 } else { 1.02 };
            assert!(
                best.is_none_or(|best| found.search.best_seconds <= best * slack),
                "{shape} {slow} {fast}: {} {best:?} {layout:?}",
                found.search.best_seconds
            );
            partly_recomputed += usize::from(matches!(layout.recompute, Recompute::FullLayersOfStages(_)));
            let search = &found.search;
            let different = search.needless + search.indivisible + search.bounded_out + search.out_of_memory + search.simulated;
            assert_eq!(search.layouts, search.alike + different);
        }
    }
    assert!(partly_recomputed > 0);
}
