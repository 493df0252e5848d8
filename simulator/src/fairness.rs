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
    pub(crate) fn add(
        &mut self,
        demands: impl IntoIterator<Item = (ResourceId, f64)>,
        bound: f64,
        growth: f64,
    ) -> ActivityId {
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
    /// with its old one.
    pub(crate) fn solve(&mut self, mut report: impl FnMut(ActivityId, f64)) {
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
    fn fill(&mut self, report: &mut impl FnMut(ActivityId, f64)) {
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
                    report(member, before);
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
