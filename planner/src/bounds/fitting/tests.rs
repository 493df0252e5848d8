//! That dynamic programming finds what trying everything finds, and that no stages that fit are faster than a family's bound says.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that fails may panic")]

use super::stages::{Cost, least_of_all};
use crate::bounds::{Bounds, Verdict};
use crate::request::Request;
use crate::search::plan;
use foretell_models::{DropoutRate, Model};
use foretell_program::{Layout, Plan, Rank, Recompute, compile};
use foretell_simulator::{CostModel, Folding, Oversubscription, predict};
use foretell_topologies::{DeviceId, Topology};
use foretell_units::{Bytes, DataType};
use proptest::prelude::*;

/// Every way to share so many blocks out among stages that have at least one each.
fn all_cuts(blocks: usize, stages: usize) -> Vec<Vec<usize>> {
    if stages == 1 {
        return vec![vec![blocks]];
    }
    let with = |first: usize| all_cuts(blocks - first, stages - 1).into_iter().map(move |rest| [vec![first], rest].concat());
    (1..=blocks - (stages - 1)).flat_map(with).collect()
}

proptest! {
    #[test]
    fn the_least_of_all_cuts_is_found(
        all in prop::collection::vec(prop::collection::vec(prop::option::weighted(0.8, 1u32..40), 8), 1..5), cap in 1u32..60,
    ) {
        let cost = |all: u32| Cost { all: f64::from(all), through: f64::from(all % 7), passed: f64::from(all % 5), again: 0 };
        // None has no block.
        let costs: Vec<Vec<Option<Cost>>> =
            all.iter().map(|own| std::iter::once(None).chain(own.iter().map(|all| all.map(cost))).collect()).collect();
        let through = |stage: usize, cost: &Cost, rest: f64| {
            (cost.all <= f64::from(cap)).then_some(cost.through * (stage + 1) as f64 + rest)
        };
        let longest = |_, cost: &Cost, rest: f64| Some(cost.all.max(cost.passed + rest));
        type With<'a> = &'a dyn Fn(usize, &Cost, f64) -> Option<f64>;
        for (none, with) in [(0.0, &through as With<'_>), (f64::NEG_INFINITY, &longest)] {
            let value = |cuts: &Vec<usize>| {
                let stages = cuts.iter().zip(&costs).enumerate().rev();
                stages.map(|(stage, (&blocks, costs))| (stage, costs[blocks])).try_fold(none, |rest, (stage, cost)| with(stage, &cost?, rest))
            };
            let found = least_of_all(&costs, 8, none, with);
            let least = all_cuts(8, costs.len()).iter().filter_map(value).reduce(f64::min);
            prop_assert_eq!(found.as_ref().map(|(least, _)| *least), least);
            if let Some((least, cuts)) = found {
                prop_assert_eq!(value(&cuts), Some(least));
            }
        }
    }
}

/// Two devices of each of two kinds, the first with the least memory that is said.
fn two_kinds(slow: &str, fast: &str, nic: &str) -> Topology {
    let text = format!(
        "name: two\ndevices:\n  slow: {{base: v100-sxm-32g, memory: {slow}}}\n  fast: {{base: a100-sxm-80g, memory: {fast}}}\nnodes:\n  \
            - {{name: old, count: 1, devices: {{kind: slow, count: 2}}, link: nvswitch-150GB/s, nics: {{count: 1, bandwidth: {nic}}}}}\n  \
            - {{name: new, count: 1, devices: {{kind: fast, count: 2}}, link: nvswitch-150GB/s, nics: {{count: 1, bandwidth: {nic}}}}}\n\
            network: {{kind: switch, latency: 5us}}\n"
    );
    Topology::from_yaml(&text, "two.yaml").unwrap()
}

#[test]
fn stages_are_as_fast_as_the_best_that_fit_and_no_faster_than_their_bound() {
    let (attention_dropout, dropout) = (DropoutRate::NONE, DropoutRate::NONE);
    let model = Model::Gpt {
        layers: 6,
        hidden: 256,
        heads: 4,
        ffn: None,
        vocab: 512,
        sequence: 256,
        tied_embeddings: false,
        dropout,
        attention_dropout,
    };
    let base = Plan { precision: DataType::Fp16, ..Plan::new(Layout::default(), 64) };
    let mut computed_again = 0;
    for (slow, fast, nic) in [
        ("64MiB", "128MiB", "100Gbit/s"),
        ("48MiB", "48MiB", "100Gbit/s"),
        ("32MiB", "96MiB", "10Gbit/s"),
        ("64MiB", "128MiB", "5Gbit/s"),
    ] {
        let topology = two_kinds(slow, fast, nic);
        let costs = CostModel::new(None, &topology).with_stack(&topology, "foretell", DataType::Fp16).unwrap();
        let step = |layout: &Layout| {
            let compiled = compile(&model, "model", &Plan { layout: layout.clone(), ..base.clone() }).ok()?;
            let (mesh, arenas) = (&compiled.training.mesh, compiled.arenas());
            let fits = |rank| arenas[mesh.stage_of(Rank(rank))] <= topology.device_kind(DeviceId(rank)).memory;
            let (prediction, _) = predict(&compiled.training, &topology, &costs, Oversubscription::Refused, Folding::On).unwrap();
            (0..mesh.world_size()).all(fits).then(|| prediction.step_seconds.value())
        };
        for shape in [
            "data=2,pipeline=2,schedule=1f1b,micro_batch=4",
            "data=2,pipeline=2,schedule=zb-h1,micro_batch=2",
            "data=1,pipeline=4,schedule=1f1b,micro_batch=8",
        ] {
            let fixed = format!("{shape},tensor=1,zero=0,offload=none,bucket=25MiB,virtual_stages=1").parse().unwrap();
            let request = Request { fixed, tolerance: 0.0, ..Request::new(&model, "model", &topology, &costs, &base) };
            let bounds = Bounds::new(&request).unwrap();
            let families = bounds.space.families();
            let families = families.iter().filter(|family| family.layout.recompute == Recompute::None);
            let mut best: Option<f64> = None;
            for family in families {
                assert!(bounds.is_fitted(&family.layout), "{shape}");
                let mut orders: Vec<Option<Vec<usize>>> =
                    bounds.members(family).into_iter().map(|member| member.stage_places).collect();
                orders.dedup();
                let stages = family.layout.pipeline;
                // All numbers of two stages, and of four those that are all or nothing.
                let again = |cuts: &[usize]| -> Vec<Vec<usize>> {
                    let own = |blocks: usize| if stages == 2 { (0..=blocks).collect() } else { vec![0, blocks] };
                    cuts.iter().fold(vec![vec![]], |ways: Vec<Vec<usize>>, &blocks| {
                        ways.iter()
                            .flat_map(|way| own(blocks).into_iter().map(|again| [way.clone(), vec![again]].concat()))
                            .collect()
                    })
                };
                let mut all: Vec<f64> = Vec::new();
                for cuts in all_cuts(8, stages).into_iter().filter(|cuts| stages == 2 || cuts.iter().all(|blocks| *blocks < 4)) {
                    for (again, stage_places) in
                        again(&cuts).into_iter().flat_map(|again| orders.iter().map(move |order| (again.clone(), order.clone())))
                    {
                        let recompute = if again.iter().all(|again| *again == 0) {
                            Recompute::None
                        } else {
                            Recompute::FullLayersOfStages(again)
                        };
                        all.extend(step(&Layout { cuts: Some(cuts.clone()), recompute, stage_places, ..family.layout.clone() }));
                    }
                }
                let fastest = all.iter().copied().reduce(f64::min);
                best = best.into_iter().chain(fastest).reduce(f64::min);
                match bounds.fitted_family(family, Bytes::ZERO).unwrap().0 {
                    Verdict::Least(least) => {
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
            assert!(
                best.is_none_or(|best| found.search.best_seconds <= best * 1.005),
                "{shape} {slow} {fast}: {best:?} {layout:?}"
            );
            computed_again += usize::from(matches!(layout.recompute, Recompute::FullLayersOfStages(_)));
            let search = &found.search;
            let different = search.needless + search.indivisible + search.bounded_out + search.out_of_memory + search.simulated;
            assert_eq!(search.layouts, search.alike + different);
        }
    }
    assert!(computed_again > 0);
}
