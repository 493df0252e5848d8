//! Rates after every change, compared with an oracle that recomputes everything.

use super::*;
use proptest::prelude::*;

#[derive(Clone, Debug)]
struct Case {
    capacities: Vec<f64>,
    activities: Vec<Wanted>,
}

#[derive(Clone, Debug)]
struct Wanted {
    demands: Vec<(ResourceId, f64)>,
    bound: f64,
    growth: f64,
}

fn cases() -> impl Strategy<Value = Case> {
    (1usize..6).prop_flat_map(|resources| {
        let demand = (0..resources as ResourceId, 0.1f64..4.0);
        let activity = (proptest::collection::vec(demand, 1..4), 0.1f64..3.0, 0.2f64..5.0)
            .prop_map(|(demands, bound, growth)| Wanted { demands, bound, growth });
        let capacities = proptest::collection::vec(0.5f64..8.0, resources);
        (capacities, proptest::collection::vec(activity, 1..9))
            .prop_map(|(capacities, activities)| Case { capacities, activities })
    })
}

fn uses(activity: &Wanted, resource: usize) -> f64 {
    activity.demands.iter().filter(|(demand, _)| *demand as usize == resource).map(|(_, weight)| weight).sum()
}

/// Progressive filling without cached state: every round recomputes every sum.
fn oracle(case: &Case) -> Vec<f64> {
    let mut rates: Vec<Option<f64>> = vec![None; case.activities.len()];
    while rates.iter().any(Option::is_none) {
        let growing = |index: usize| rates[index].is_none();
        let limit_of = |resource: usize| {
            let used: f64 =
                case.activities.iter().zip(&rates).map(|(activity, rate)| uses(activity, resource) * rate.unwrap_or(0.0)).sum();
            let slope: f64 = (0..rates.len())
                .filter(|&index| growing(index))
                .map(|index| uses(&case.activities[index], resource) * case.activities[index].growth)
                .sum();
            if slope > 0.0 { (case.capacities[resource] - used).max(0.0) / slope } else { f64::INFINITY }
        };
        let limits: Vec<f64> = (0..case.capacities.len()).map(limit_of).collect();
        let own = |index: usize| {
            let activity = &case.activities[index];
            let shared = (0..limits.len()).filter(|&resource| uses(activity, resource) > 0.0).map(|resource| limits[resource]);
            shared.fold(activity.bound / activity.growth, f64::min)
        };
        let level = (0..rates.len()).filter(|&index| growing(index)).map(own).fold(f64::INFINITY, f64::min);
        let done: Vec<usize> = (0..rates.len()).filter(|&i| growing(i) && own(i) <= level * (1.0 + 1e-9)).collect();
        for index in done {
            rates[index] = Some((level * case.activities[index].growth).min(case.activities[index].bound));
        }
    }
    rates.into_iter().flatten().collect()
}

fn solved(case: &Case) -> Vec<f64> {
    let mut share = FairShare::new(case.capacities.iter().copied());
    let ids: Vec<ActivityId> = case
        .activities
        .iter()
        .map(|activity| share.add(activity.demands.iter().copied(), activity.bound, activity.growth))
        .collect();
    share.solve(|_, _, _| {});
    ids.into_iter().map(|id| share.rate(id)).collect()
}

proptest! {
    #[test]
    fn rates_agree_with_the_oracle(case in cases()) {
        for (one, two) in solved(&case).iter().zip(oracle(&case)) {
            prop_assert!((one - two).abs() <= 1e-6 * two.max(1e-3), "{one} {two}");
        }
    }

    #[test]
    fn rates_meet_the_max_min_fairness_condition(case in cases()) {
        let rates = solved(&case);
        let used = |resource: usize| -> f64 {
            case.activities.iter().zip(&rates).map(|(activity, rate)| uses(activity, resource) * rate).sum()
        };
        for (resource, capacity) in case.capacities.iter().enumerate() {
            prop_assert!(used(resource) <= capacity * (1.0 + 1e-9));
        }
        let level = |index: usize| rates[index] / case.activities[index].growth;
        for (index, activity) in case.activities.iter().enumerate() {
            let is_at_bound = rates[index] >= activity.bound * (1.0 - 1e-9);
            // A saturated resource on which no user has a higher level.
            let is_held = (0..case.capacities.len()).any(|resource| {
                uses(activity, resource) > 0.0
                    && used(resource) >= case.capacities[resource] * (1.0 - 1e-9)
                    && (0..rates.len()).all(|other| {
                        uses(&case.activities[other], resource) == 0.0 || level(other) <= level(index) * (1.0 + 1e-6)
                    })
            });
            prop_assert!(is_at_bound || is_held, "activity {index} could be faster: {rates:?}");
        }
    }

    /// Larger networks with chains of dependent levels, changed one activity or several at a time.
    #[test]
    fn rates_agree_with_the_oracle_after_every_change(
        capacities in proptest::collection::vec(0.5f64..8.0, 20),
        activities in proptest::collection::vec(
            (proptest::collection::vec((0u32..20, prop_oneof![Just(1.0), 0.1f64..4.0]), 1..6), 0.1f64..30.0, 0.2f64..5.0), 60),
        turns in proptest::collection::vec((any::<bool>(), 0usize..60, any::<bool>()), 1..80),
    ) {
        let wanted = |(demands, bound, growth): (Vec<(ResourceId, f64)>, f64, f64)| Wanted { demands, bound, growth };
        let activities: Vec<Wanted> = activities.into_iter().map(wanted).collect();
        let mut share = FairShare::new(capacities.iter().copied());
        let mut live: Vec<(ActivityId, Wanted)> = Vec::new();
        let mut known: Vec<f64> = Vec::new();
        for (is_gone, which, is_solved) in turns {
            if is_gone && !live.is_empty() {
                share.remove(live.swap_remove(which % live.len()).0);
            } else {
                let one = activities[which].clone();
                live.push((share.add(one.demands.iter().copied(), one.bound, one.growth), one));
            }
            if !is_solved {
                continue;
            }
            share.solve(|id, before, rate| {
                known.resize(known.len().max(id as usize + 1), 0.0);
                assert!(before != rate);
                known[id as usize] = rate;
            });
            let case = Case { capacities: capacities.clone(), activities: live.iter().map(|(_, activity)| activity.clone()).collect() };
            for ((id, _), rate) in live.iter().zip(oracle(&case)) {
                let found = share.rate(*id);
                prop_assert!((found - rate).abs() <= 1e-6 * rate.max(1e-3), "{found} {rate}");
                prop_assert!(known[*id as usize] == found, "what was reported is what is so");
            }
        }
    }

    #[test]
    fn incremental_rates_equal_those_of_a_fresh_solution(case in cases(), gone in proptest::collection::vec(any::<bool>(), 9)) {
        let mut share = FairShare::new(case.capacities.iter().copied());
        let mut ids = Vec::new();
        for one in &case.activities {
            ids.push(share.add(one.demands.iter().copied(), one.bound, one.growth));
            share.solve(|_, _, _| {});
        }
        let mut left = case.clone();
        left.activities.clear();
        let mut left_ids = Vec::new();
        for ((one, &id), gone) in case.activities.iter().zip(&ids).zip(&gone) {
            if *gone {
                share.remove(id);
                share.solve(|_, _, _| {});
            } else {
                left.activities.push(one.clone());
                left_ids.push(id);
            }
        }
        for (id, rate) in left_ids.iter().zip(solved(&left)) {
            prop_assert!((share.rate(*id) - rate).abs() <= 1e-9 * rate, "{} {rate}", share.rate(*id));
        }
    }
}

/// The network is too large for the oracle, so the test checks the max-min condition itself.
#[test]
fn a_large_network_is_fair_after_each_of_many_changes() {
    let mut state = 7u64;
    let mut below = |limit: u64| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) % limit
    };
    let capacities: Vec<f64> = (0..300).map(|_| 1.0 + below(8) as f64 / 2.0).collect();
    let mut share = FairShare::new(capacities.iter().copied());
    let mut live: Vec<(ActivityId, Vec<ResourceId>)> = Vec::new();
    for turn in 0..3000 {
        if live.len() > 400 {
            let (id, _) = live.swap_remove(below(live.len() as u64) as usize);
            share.remove(id);
        }
        let mut resources: Vec<ResourceId> = (0..2 + below(4)).map(|_| below(300) as ResourceId).collect();
        resources.sort_unstable();
        resources.dedup();
        let id = share.add(resources.iter().map(|&resource| (resource, 1.0)), f64::INFINITY, 1.0);
        live.push((id, resources));
        share.solve(|_, _, _| {});
        if turn % 100 != 0 {
            continue;
        }
        let (mut used, mut highest) = (vec![0.0; 300], vec![0.0f64; 300]);
        for (id, resources) in &live {
            for &resource in resources {
                used[resource as usize] += share.rate(*id);
                highest[resource as usize] = highest[resource as usize].max(share.rate(*id));
            }
        }
        assert!(used.iter().zip(&capacities).all(|(used, capacity)| *used <= capacity * (1.0 + 1e-9)));
        for (id, resources) in &live {
            let is_held = |&resource: &ResourceId| {
                let resource = resource as usize;
                used[resource] >= capacities[resource] * (1.0 - 1e-9) && highest[resource] <= share.rate(*id) * (1.0 + 1e-9)
            };
            assert!(resources.iter().any(is_held), "turn {turn}: {resources:?} could have more than {}", share.rate(*id));
        }
    }
}

#[test]
fn a_kernel_and_a_flow_that_needs_little_share_a_processor() {
    // As under an operating system, the flow gets the 0.3 that it needs and the kernel the rest.
    let mut share = FairShare::new([1.0]);
    let kernel = share.add([(0, 1.0)], 1.0, 1.0);
    let flow = share.add([(0, 0.3)], 1.0, 1.0 / 0.3);
    share.solve(|_, _, _| {});
    assert!((share.rate(kernel) - 0.7).abs() < 1e-12 && (share.rate(flow) - 1.0).abs() < 1e-12);
    share.remove(flow);
    share.solve(|_, _, _| {});
    assert_eq!(share.rate(kernel), 1.0);
}

#[test]
fn an_activity_without_demands_runs_at_its_bound() {
    let mut share = FairShare::new([1.0]);
    let free = share.add([(0, 0.0)], 2.0, 1.0);
    assert_eq!(share.rate(free), 2.0);
    assert!(!share.is_stale());
}
