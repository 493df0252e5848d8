//! Weighted max-min fair sharing of resources by activities (Bertsekas and Gallager, "Data
//! Networks", 1992, section 6.5). Activities may use several resources at once, as in SimGrid's
//! linear max-min solver.
//!
//! An activity uses `weight x rate` of each of its resources. Its level is its rate divided by its
//! `growth`. All levels rise together until an activity reaches its bound or a resource is
//! saturated. The affected activities are then fixed, and the rest continue to rise. So no activity
//! can get faster without slowing one with an equal or lower level.
//!
//! The solver is incremental: a change costs only what it affects. Every resource stores the level
//! `x` at which `sum of weight x growth x min(x, level elsewhere)` equals its capacity. The level
//! is infinite if the users' levels elsewhere do not saturate the resource. An activity's level is
//! the lowest of its resources' levels and its bound. Rates that satisfy all these equations are
//! max-min fair, and such rates are unique. Every activity is then at its bound, or has a saturated
//! resource on which no user has a higher level.
//!
//! Only resources whose users' levels elsewhere changed are recomputed, until none changes. Charny,
//! Clark and Jain (1995) prove for one class of traffic that every round settles one more level.
//! The graph of resources that limit each other is the bottleneck structure of Ros-Giralt et al.
//! (2021). This module must not know of processors, links or bytes.

/// A resource's number.
pub type ResourceId = u32;

/// An activity's number. Numbers of removed activities are reused.
pub type ActivityId = u32;

/// Resources and the activities that share them.
#[derive(Debug, Default)]
pub struct FairShare {
    resources: Vec<Resource>,
    activities: Vec<Activity>,
    /// Limit of each activity. A separate array, since the solver mostly reads limits.
    limits: Vec<Limit>,
    free: Vec<ActivityId>,
    /// Resources whose levels must be recomputed.
    changed: Vec<ResourceId>,
    /// Activities whose rate may differ from the reported one.
    touched: Vec<ActivityId>,
    // Scratch, kept so that a solution allocates nothing once warm.
    round: Vec<ResourceId>,
    /// Resources with a changed level, the new level and the old one.
    moved: Vec<(ResourceId, f64, f64)>,
    affected: Vec<ActivityId>,
    growing: Vec<(f64, f64)>,
}

#[derive(Debug, Default)]
struct Resource {
    capacity: f64,
    /// The level at which it limits activities; infinite if it is not saturated.
    level: f64,
    /// Users, each with its consumption per unit of level.
    users: Vec<(ActivityId, f64)>,
    /// Consumption while it is not saturated, and the number of additions since the last full sum.
    used: f64,
    additions: u32,
    is_changed: bool,
}

#[derive(Debug, Default)]
struct Activity {
    demands: Vec<(ResourceId, f64)>,
    bound: f64,
    growth: f64,
    rate: f64,
    is_touched: bool,
    is_affected: bool,
}

/// The lowest levels that limit an activity.
#[derive(Debug, Clone, Copy)]
struct Limit {
    /// The lowest level and the resource that has it, or [`BOUND`].
    lowest: f64,
    at: ResourceId,
    /// The lowest level apart from that of `at`.
    elsewhere: f64,
}

impl Limit {
    /// Returns the lowest level apart from that of `resource`.
    fn without(&self, resource: ResourceId) -> f64 {
        if self.at == resource { self.elsewhere } else { self.lowest }
    }

    /// Returns whether a resource's change of level from `before` to `level` can change this limit.
    /// A collective of thousands of ranks uses thousands of processors on which kernels come and
    /// go. Most of them do not limit it.
    fn may_change(&self, level: f64, before: f64) -> bool {
        if self.at == BOUND {
            // No resource reads `elsewhere` of an activity at its bound, so it may be outdated.
            return level < self.lowest;
        }
        before <= self.elsewhere || level <= self.elsewhere
    }
}

/// Stands for an activity's bound in place of a resource.
const BOUND: ResourceId = ResourceId::MAX;

/// Relative difference below which two levels are equal. It is far above rounding errors.
const SAME: f64 = 1e-12;

/// A resource with less than this share of its capacity left is recomputed whenever its use
/// changes. The share is far above the rounding error of [`MOST_ADDITIONS`] additions.
const NEARLY_USED_UP: f64 = 1e-9;
const MOST_ADDITIONS: u32 = 1 << 20;

impl Resource {
    /// Records a change of a user's level elsewhere. Returns whether the resource must be
    /// recomputed.
    fn note(&mut self, slope: f64, before: f64, now: f64, same: f64) -> bool {
        if self.level.is_finite() {
            // A user that the resource limits both before and after does not affect its level.
            return differs_by(now, before, same) && before.min(now) < self.level * (1.0 - SAME);
        }
        self.used += slope * (now - before);
        self.additions += 1;
        // A user without any limit makes the sum infinite or NaN, so the resource is recomputed.
        let has_room = self.used <= self.capacity * (1.0 - NEARLY_USED_UP) && self.additions < MOST_ADDITIONS;
        !has_room
    }
}

/// Returns whether two levels or rates differ by more than the share `same`.
fn differs_by(one: f64, other: f64, same: f64) -> bool {
    // Two infinite values are equal, but their difference is NaN.
    (one - other).abs() > same * other.abs() || one.is_finite() != other.is_finite()
}

/// Returns the level at which users saturate a capacity, and the consumption of users limited
/// elsewhere.
///
/// `users` has each user's level elsewhere and its slope. The level is infinite if all users are
/// limited elsewhere. Each round removes the users limited elsewhere at a lower level, with their
/// consumption. The remaining users share what is left. On return, `users` has those that the
/// resource limits.
fn level(capacity: f64, users: &mut Vec<(f64, f64)>) -> (f64, f64) {
    let (mut left, mut level) = (capacity, 0.0f64);
    loop {
        if users.is_empty() {
            return (f64::INFINITY, capacity - left);
        }
        let slope: f64 = users.iter().map(|&(_, slope)| slope).sum();
        // Removed users consume less than an equal share, so the level only rises. The maximum
        // guards against rounding.
        level = level.max(left / slope);
        let before = users.len();
        // A user with the same level elsewhere stays. If both resources removed it, neither would
        // limit it.
        let held_here = level * (1.0 - SAME);
        users.retain(|&(elsewhere, slope)| {
            let stays = elsewhere >= held_here;
            if !stays {
                left -= slope * elsewhere;
            }
            stays
        });
        if users.len() == before {
            return (level, capacity - left);
        }
    }
}

/// Marks a resource for recomputation.
fn mark(state: &mut Resource, resource: ResourceId, changed: &mut Vec<ResourceId>) {
    if !std::mem::replace(&mut state.is_changed, true) {
        changed.push(resource);
    }
}

/// Sorts demands and adds up those for the same resource.
fn add_up(demands: &mut Vec<(ResourceId, f64)>) {
    // Demands usually arrive sorted, and this check is cheap.
    if !demands.is_sorted_by_key(|&(resource, _)| resource) {
        // A stable sort would allocate.
        demands.sort_unstable_by_key(|&(resource, _)| resource);
    }
    demands.dedup_by(|later, first| {
        let is_same = later.0 == first.0;
        if is_same {
            first.1 += later.1;
        }
        is_same
    });
}

impl FairShare {
    /// Creates resources of these capacities, without activities.
    pub fn new(capacities: impl IntoIterator<Item = f64>) -> Self {
        let resource = |capacity| Resource { capacity, level: f64::INFINITY, ..Resource::default() };
        Self { resources: capacities.into_iter().map(resource).collect(), ..Self::default() }
    }

    /// Adds an activity with rate 0. [`FairShare::solve`] computes its rate. Demands that name a
    /// resource twice add up.
    pub fn add(&mut self, demands: impl IntoIterator<Item = (ResourceId, f64)>, bound: f64, growth: f64) -> ActivityId {
        let id = self.free.pop().unwrap_or_else(|| {
            self.activities.push(Activity::default());
            self.limits.push(Limit { lowest: 0.0, at: BOUND, elsewhere: 0.0 });
            (self.activities.len() - 1) as ActivityId
        });
        let mut list = std::mem::take(&mut self.activities[id as usize].demands);
        list.clear();
        list.extend(demands.into_iter().filter(|&(_, weight)| weight > 0.0));
        add_up(&mut list);
        let is_touched = self.activities[id as usize].is_touched;
        // An activity without demands runs at its bound.
        let rate = if list.is_empty() { bound } else { 0.0 };
        self.activities[id as usize] = Activity { demands: list, bound, growth, rate, is_touched, is_affected: false };
        let limit = self.limit(id);
        self.limits[id as usize] = limit;
        for &(resource, weight) in &self.activities[id as usize].demands {
            let state = &mut self.resources[resource as usize];
            state.users.push((id, weight * growth));
            // A new activity's level was 0 before.
            if state.level.is_finite() || state.note(weight * growth, 0.0, limit.without(resource), SAME) {
                mark(state, resource, &mut self.changed);
            }
        }
        if rate == 0.0 {
            self.touch(id);
        }
        id
    }

    /// Removes an activity.
    pub fn remove(&mut self, id: ActivityId) {
        let limit = self.limits[id as usize];
        let activity = &mut self.activities[id as usize];
        for &(resource, weight) in &activity.demands {
            let state = &mut self.resources[resource as usize];
            if let Some(position) = state.users.iter().position(|&(user, _)| user == id) {
                state.users.remove(position);
            }
            if state.level.is_finite() || state.note(weight * activity.growth, limit.without(resource), 0.0, SAME) {
                mark(state, resource, &mut self.changed);
            }
        }
        activity.demands.clear();
        self.free.push(id);
    }

    /// Changes a resource's capacity. At capacity 0, its users get rate 0.
    pub fn set_capacity(&mut self, resource: ResourceId, capacity: f64) {
        let state = &mut self.resources[resource as usize];
        state.capacity = capacity;
        mark(state, resource, &mut self.changed);
    }

    /// Returns the consumption of a resource at the last solution.
    pub fn used(&self, resource: ResourceId) -> f64 {
        let of_user = |&(user, slope): &(ActivityId, f64)| {
            let activity = &self.activities[user as usize];
            slope / activity.growth * activity.rate
        };
        self.resources[resource as usize].users.iter().map(of_user).sum()
    }

    /// Returns the number of activities that use a resource.
    pub fn users(&self, resource: ResourceId) -> usize {
        self.resources[resource as usize].users.len()
    }

    /// Returns an activity's rate at the last solution.
    pub fn rate(&self, id: ActivityId) -> f64 {
        self.activities[id as usize].rate
    }

    /// Returns whether anything changed since the last solution.
    pub fn is_stale(&self) -> bool {
        !self.changed.is_empty() || !self.touched.is_empty()
    }

    /// Recomputes the rates that the changes affect. Calls `report` with the number, old rate and
    /// new rate of each activity whose rate changed, in ascending order of number.
    pub fn solve(&mut self, mut report: impl FnMut(ActivityId, f64, f64)) {
        let mut rounds = 0;
        while !self.changed.is_empty() {
            rounds += 1;
            // In exact arithmetic each round settles at least one level, so there are at most as
            // many rounds as resources. If rounding prevents that, the tolerance widens until all
            // levels settle.
            let same = SAME * f64::powi(2.0, (rounds / (self.resources.len() + 8)) as i32);
            self.find_levels(same);
            self.tell_users(same);
        }
        self.touched.sort_unstable();
        for index in 0..self.touched.len() {
            let id = self.touched[index];
            let activity = &mut self.activities[id as usize];
            activity.is_touched = false;
            if activity.demands.is_empty() {
                continue;
            }
            let level = self.limits[id as usize].lowest;
            let is_bound = activity.bound <= level * activity.growth * (1.0 + SAME);
            let rate = if is_bound { activity.bound } else { level * activity.growth };
            if differs_by(rate, activity.rate, SAME) {
                let before = std::mem::replace(&mut activity.rate, rate);
                report(id, before, rate);
            }
        }
        self.touched.clear();
    }

    /// Recomputes the levels of the changed resources, all from the limits before this round.
    fn find_levels(&mut self, same: f64) {
        let Self { resources, limits, changed, round, moved, growing, .. } = self;
        std::mem::swap(changed, round);
        moved.clear();
        for &id in round.iter() {
            let resource = &mut resources[id as usize];
            resource.is_changed = false;
            growing.clear();
            growing.extend(resource.users.iter().map(|&(user, slope)| (limits[user as usize].without(id), slope)));
            let (level, used) = level(resource.capacity, growing);
            (resource.used, resource.additions) = (used, 0);
            if differs_by(level, resource.level, same) {
                moved.push((id, level, resource.level));
            }
        }
        round.clear();
        // Levels are stored after the loop, so the order of changes does not matter.
        for &(id, level, _) in moved.iter() {
            resources[id as usize].level = level;
        }
    }

    /// Recomputes the limits of the users of `moved` resources and marks the other resources that
    /// these affect.
    fn tell_users(&mut self, same: f64) {
        let Self { resources, activities, limits, moved, affected, .. } = self;
        affected.clear();
        for &(id, level, before) in moved.iter() {
            for &(user, _) in &resources[id as usize].users {
                if !limits[user as usize].may_change(level, before) {
                    continue;
                }
                if !std::mem::replace(&mut activities[user as usize].is_affected, true) {
                    affected.push(user);
                }
            }
        }
        for index in 0..self.affected.len() {
            let id = self.affected[index];
            self.activities[id as usize].is_affected = false;
            let new = self.limit(id);
            let old = std::mem::replace(&mut self.limits[id as usize], new);
            self.touch(id);
            let Self { resources, activities, changed, .. } = self;
            let activity = &activities[id as usize];
            for &(resource, weight) in &activity.demands {
                let state = &mut resources[resource as usize];
                let (before, now) = (old.without(resource), new.without(resource));
                if before != now && state.note(weight * activity.growth, before, now, same) {
                    mark(state, resource, changed);
                }
            }
        }
    }

    /// Returns an activity's limit.
    fn limit(&self, id: ActivityId) -> Limit {
        let activity = &self.activities[id as usize];
        let mut limit = Limit { lowest: activity.bound / activity.growth, at: BOUND, elsewhere: f64::INFINITY };
        for &(resource, _) in &activity.demands {
            let level = self.resources[resource as usize].level;
            if level < limit.lowest {
                limit = Limit { lowest: level, at: resource, elsewhere: limit.lowest };
            } else {
                limit.elsewhere = limit.elsewhere.min(level);
            }
        }
        limit
    }

    fn touch(&mut self, id: ActivityId) {
        if !std::mem::replace(&mut self.activities[id as usize].is_touched, true) {
            self.touched.push(id);
        }
    }
}

#[cfg(test)]
mod tests;
