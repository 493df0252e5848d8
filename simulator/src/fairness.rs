//! Weighted max-min fair sharing of resources by activities, solved by progressive filling (Bertsekas and Gallager, "Data
//! Networks", 1992, section 6.5; for activities that use several resources at once as SimGrid's linear max-min solver has them).
//!
//! An activity has a rate, and uses of each of its resources `weight x rate`. All rates grow together, each in proportion to its
//! activity's `growth`, until an activity reaches its bound or a resource is used up; those are fixed, the rest grow on. So no
//! activity can be faster without making one slower that is, relative to its growth, no better off.
//! This file has no notion of processors, links or bytes.

/// A resource's number.
pub(crate) type ResourceId = u32;

/// An activity's number; numbers of those that were removed are used again.
pub(crate) type ActivityId = u32;

/// Resources and the activities that share them.
#[derive(Debug, Default)]
pub(crate) struct FairShare {
    resources: Vec<Resource>,
    activities: Vec<Activity>,
    free: Vec<ActivityId>,
    /// Resources whose activities changed since the last solution.
    changed: Vec<ResourceId>,
    // Scratch, kept so that a solution allocates nothing once warm.
    component: Vec<ResourceId>,
    members: Vec<ActivityId>,
    round: u64,
}

#[derive(Debug, Default)]
struct Resource {
    capacity: f64,
    users: Vec<ActivityId>,
    is_changed: bool,
    /// The round in which it was last part of a component.
    seen: u64,
    /// While solving: what those already fixed leave, and how fast the others eat it up.
    left: f64,
    slope: f64,
    growing: u32,
    is_saturated: bool,
}

#[derive(Debug, Default)]
struct Activity {
    demands: Vec<(ResourceId, f64)>,
    bound: f64,
    growth: f64,
    rate: f64,
    seen: u64,
    is_fixed: bool,
}

/// Two limits that differ by less than this share are reached together; far above rounding, far below what matters.
const SAME: f64 = 1e-12;

impl FairShare {
    /// Nobody yet on resources of these capacities.
    pub(crate) fn new(capacities: impl IntoIterator<Item = f64>) -> Self {
        let resources = capacities.into_iter().map(|capacity| Resource { capacity, ..Resource::default() }).collect();
        Self { resources, ..Self::default() }
    }

    /// Adds an activity of rate 0; [`FairShare::solve`] gives it its rate. Demands that name a resource twice add up.
    pub(crate) fn add(&mut self, demands: impl IntoIterator<Item = (ResourceId, f64)>, bound: f64, growth: f64) -> ActivityId {
        let id = self.free.pop().unwrap_or_else(|| {
            self.activities.push(Activity::default());
            (self.activities.len() - 1) as ActivityId
        });
        let mut list = std::mem::take(&mut self.activities[id as usize].demands);
        list.clear();
        for (resource, weight) in demands {
            if weight <= 0.0 {
                continue;
            }
            match list.iter_mut().find(|(known, _)| *known == resource) {
                Some((_, sum)) => *sum += weight,
                None => {
                    list.push((resource, weight));
                    self.resources[resource as usize].users.push(id);
                    self.mark(resource);
                }
            }
        }
        // One that uses nothing has nobody to share with, and no component will ever contain it.
        let rate = if list.is_empty() { bound } else { 0.0 };
        self.activities[id as usize] = Activity { demands: list, bound, growth, rate, seen: 0, is_fixed: false };
        id
    }

    /// Removes an activity.
    pub(crate) fn remove(&mut self, id: ActivityId) {
        let demands = std::mem::take(&mut self.activities[id as usize].demands);
        for &(resource, _) in &demands {
            let users = &mut self.resources[resource as usize].users;
            if let Some(position) = users.iter().position(|&user| user == id) {
                users.remove(position);
            }
            self.mark(resource);
        }
        self.activities[id as usize].demands = demands;
        self.free.push(id);
    }

    /// How many activities use a resource.
    pub(crate) fn users(&self, resource: ResourceId) -> usize {
        self.resources[resource as usize].users.len()
    }

    /// An activity's rate at the last solution.
    pub(crate) fn rate(&self, id: ActivityId) -> f64 {
        self.activities[id as usize].rate
    }

    /// Whether something was added or removed since the last solution.
    pub(crate) fn is_stale(&self) -> bool {
        !self.changed.is_empty()
    }

    /// Finds the rates anew, of those activities only that are connected with a change, and reports each whose rate is another
    /// with its old and its new one.
    pub(crate) fn solve(&mut self, mut report: impl FnMut(ActivityId, f64, f64)) {
        while let Some(start) = self.changed.pop() {
            if !std::mem::take(&mut self.resources[start as usize].is_changed) {
                continue;
            }
            self.collect_component(start);
            self.fill(&mut report);
        }
    }

    fn mark(&mut self, resource: ResourceId) {
        let state = &mut self.resources[resource as usize];
        if !state.is_changed {
            state.is_changed = true;
            self.changed.push(resource);
        }
    }

    /// Everything that shares a resource with `start`, directly or through others.
    fn collect_component(&mut self, start: ResourceId) {
        let Self { resources, activities, component, members, round, .. } = self;
        *round += 1;
        component.clear();
        members.clear();
        component.push(start);
        resources[start as usize].seen = *round;
        let mut next = 0;
        while let Some(&resource) = component.get(next) {
            next += 1;
            resources[resource as usize].is_changed = false;
            for position in 0..resources[resource as usize].users.len() {
                let user = resources[resource as usize].users[position];
                let activity = &mut activities[user as usize];
                if activity.seen == *round {
                    continue;
                }
                activity.seen = *round;
                members.push(user);
                for &(other, _) in &activity.demands {
                    let other_state = &mut resources[other as usize];
                    if other_state.seen != *round {
                        other_state.seen = *round;
                        component.push(other);
                    }
                }
            }
        }
        // The order of discovery depends on what changed; that of numbers does not.
        members.sort_unstable();
        component.sort_unstable();
    }

    /// Progressive filling of one component.
    fn fill(&mut self, report: &mut impl FnMut(ActivityId, f64, f64)) {
        let Self { resources, activities, component, members, .. } = self;
        for &resource in component.iter() {
            let state = &mut resources[resource as usize];
            (state.left, state.slope, state.growing) = (state.capacity, 0.0, 0);
        }
        for &member in members.iter() {
            let activity = &mut activities[member as usize];
            activity.is_fixed = false;
            for &(resource, weight) in &activity.demands {
                let state = &mut resources[resource as usize];
                state.slope += weight * activity.growth;
                state.growing += 1;
            }
        }
        let mut unfixed = members.len();
        while unfixed > 0 {
            // The level at which the next limit is reached.
            let mut level = f64::INFINITY;
            for &resource in component.iter() {
                let state = &resources[resource as usize];
                if state.growing > 0 {
                    level = level.min(state.level());
                }
            }
            for &member in members.iter() {
                let activity = &activities[member as usize];
                if !activity.is_fixed {
                    level = level.min(activity.bound / activity.growth);
                }
            }
            let reached = level * (1.0 + SAME);
            // Saturation is decided before anything is fixed, so that the order of members does not matter.
            for &resource in component.iter() {
                let state = &mut resources[resource as usize];
                state.is_saturated = state.growing > 0 && state.level() <= reached;
            }
            for &member in members.iter() {
                let activity = &mut activities[member as usize];
                if activity.is_fixed {
                    continue;
                }
                let is_bound = activity.bound <= reached * activity.growth;
                let is_held = activity.demands.iter().any(|&(resource, _)| resources[resource as usize].is_saturated);
                if !is_bound && !is_held {
                    continue;
                }
                let rate = if is_bound { activity.bound } else { level * activity.growth };
                activity.is_fixed = true;
                unfixed -= 1;
                for &(resource, weight) in &activity.demands {
                    let state = &mut resources[resource as usize];
                    state.left = (state.left - weight * rate).max(0.0);
                    state.slope -= weight * activity.growth;
                    state.growing -= 1;
                }
                if rate != activity.rate {
                    let before = std::mem::replace(&mut activity.rate, rate);
                    report(member, before, rate);
                }
            }
        }
    }
}

impl Resource {
    /// The level at which those that still grow would use it up.
    fn level(&self) -> f64 {
        self.left / self.slope.max(f64::MIN_POSITIVE)
    }
}

#[cfg(test)]
mod tests {
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
        activity.demands.iter().filter(|(one, _)| *one as usize == resource).map(|(_, weight)| weight).sum()
    }

    /// The same rule with nothing remembered: every sum is made anew in every round.
    fn oracle(case: &Case) -> Vec<f64> {
        let mut rates: Vec<Option<f64>> = vec![None; case.activities.len()];
        while rates.iter().any(Option::is_none) {
            let growing = |index: usize| rates[index].is_none();
            let limit_of = |resource: usize| {
                let used: f64 =
                    case.activities.iter().zip(&rates).map(|(one, rate)| uses(one, resource) * rate.unwrap_or(0.0)).sum();
                let slope: f64 = (0..rates.len())
                    .filter(|&index| growing(index))
                    .map(|index| uses(&case.activities[index], resource) * case.activities[index].growth)
                    .sum();
                if slope > 0.0 { (case.capacities[resource] - used).max(0.0) / slope } else { f64::INFINITY }
            };
            let limits: Vec<f64> = (0..case.capacities.len()).map(limit_of).collect();
            let own = |index: usize| {
                let activity = &case.activities[index];
                let shared = (0..limits.len()).filter(|&one| uses(activity, one) > 0.0).map(|one| limits[one]);
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
        let ids: Vec<ActivityId> =
            case.activities.iter().map(|one| share.add(one.demands.iter().copied(), one.bound, one.growth)).collect();
        share.solve(|_, _, _| {});
        ids.into_iter().map(|id| share.rate(id)).collect()
    }

    proptest! {
        #[test]
        fn it_agrees_with_the_oracle(case in cases()) {
            for (one, two) in solved(&case).iter().zip(oracle(&case)) {
                prop_assert!((one - two).abs() <= 1e-6 * two.max(1e-3), "{one} {two}");
            }
        }

        #[test]
        fn nobody_can_be_faster_at_the_cost_of_the_better_off_only(case in cases()) {
            let rates = solved(&case);
            let used = |resource: usize| -> f64 {
                case.activities.iter().zip(&rates).map(|(one, rate)| uses(one, resource) * rate).sum()
            };
            for (resource, capacity) in case.capacities.iter().enumerate() {
                prop_assert!(used(resource) <= capacity * (1.0 + 1e-9));
            }
            let level = |index: usize| rates[index] / case.activities[index].growth;
            for (index, activity) in case.activities.iter().enumerate() {
                let is_at_bound = rates[index] >= activity.bound * (1.0 - 1e-9);
                // A resource that is used up, and that nobody better off uses.
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

        #[test]
        fn changes_lead_where_a_fresh_start_leads(case in cases(), gone in proptest::collection::vec(any::<bool>(), 9)) {
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

    #[test]
    fn a_kernel_and_a_flow_that_needs_little_share_a_processor() {
        // As an operating system does: the flow gets the 0.3 that it needs, the kernel the rest.
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
    fn who_uses_nothing_runs_at_its_bound() {
        let mut share = FairShare::new([1.0]);
        let free = share.add([(0, 0.0)], 2.0, 1.0);
        assert_eq!(share.rate(free), 2.0);
        assert!(!share.is_stale());
    }
}
