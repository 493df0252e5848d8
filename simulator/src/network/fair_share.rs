//! Weighted max-min fair sharing of resources by activities (Bertsekas and Gallager, "Data
//! Networks", 1992, section 6.5; for activities that use several resources at once as SimGrid's
//! linear max-min solver has them).
//!
//! An activity has a rate, and uses of each of its resources `weight x rate`. Its level is its rate
//! relative to its `growth`. All levels rise together until an activity reaches its bound or a
//! resource is used up; those are fixed, the rest rise on. So no activity can be faster without
//! making one slower that is, relative to its growth, no better off.
//!
//! A change costs what it affects. Every resource remembers the level at which it holds those who
//! are held nowhere lower: the level `x` at which `sum of weight x growth x min(x, level
//! elsewhere)` is its capacity, or none where even their levels elsewhere do not use it up. An
//! activity's level is the lowest of its resources' levels and its bound. Where all of these
//! equations hold, the rates are max-min fair: every activity is at its bound, or has a resource
//! that is used up and on which nobody is better off; and such rates are unique. So only resources
//! whose users' levels elsewhere changed are looked at again, until none changes (for one class of
//! traffic: Charny, Clark and Jain 1995, who prove that round by round one level more is settled
//! for good; the graph of who holds whom is the bottleneck structure of Ros-Giralt et al. 2021).
//! This file has no notion of processors, links or bytes.

/// A resource's number.
pub type ResourceId = u32;

/// An activity's number; numbers of those that were removed are used again.
pub type ActivityId = u32;

/// Resources and the activities that share them.
#[derive(Debug, Default)]
pub struct FairShare {
    resources: Vec<Resource>,
    activities: Vec<Activity>,
    /// What each activity's resources see of it; apart, since most of the work is to read it.
    limits: Vec<Limit>,
    free: Vec<ActivityId>,
    /// Resources that must be looked at again.
    changed: Vec<ResourceId>,
    /// Activities whose rate may be another than was reported.
    touched: Vec<ActivityId>,
    // Scratch, kept so that a solution allocates nothing once warm.
    round: Vec<ResourceId>,
    /// Resources whose level is new: which, the new one and the old one.
    moved: Vec<(ResourceId, f64, f64)>,
    affected: Vec<ActivityId>,
    growing: Vec<(f64, f64)>,
}

#[derive(Debug, Default)]
struct Resource {
    capacity: f64,
    /// The level at which it holds activities; infinite where it is not used up.
    level: f64,
    /// Who uses it, and how fast each eats it up as the level rises.
    users: Vec<(ActivityId, f64)>,
    /// Where it is not used up, how much is, and how often that was added to since it was last
    /// summed up.
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

/// The levels at which an activity is held.
#[derive(Debug, Clone, Copy)]
struct Limit {
    /// The lowest, and the resource that has it; none where it is the bound.
    lowest: f64,
    at: ResourceId,
    /// The lowest without that one resource.
    elsewhere: f64,
}

impl Limit {
    /// As a resource sees it.
    fn without(&self, resource: ResourceId) -> f64 {
        if self.at == resource { self.elsewhere } else { self.lowest }
    }

    /// Whether it can be another where a resource's level is. An exchange of thousands of ranks
    /// uses thousands of processors, on which kernels come and go, and mostly none of them holds
    /// it.
    fn may_change(&self, level: f64, before: f64) -> bool {
        if self.at == BOUND {
            // What comes next after its bound nobody asks for, so that `elsewhere` need not be
            // right.
            return level < self.lowest;
        }
        before <= self.elsewhere || level <= self.elsewhere
    }
}

/// No resource: an activity is held by its bound.
const BOUND: ResourceId = ResourceId::MAX;

/// Two levels that differ by less than this share are one; far above rounding, far below what
/// matters.
const SAME: f64 = 1e-12;

/// A resource of which less than this share is left is looked at whenever its use changes; of one
/// with more it is enough to know that. Far above what rounding makes of as many additions as are
/// made before it is summed up again.
const NEARLY_USED_UP: f64 = 1e-9;
const MOST_ADDITIONS: u32 = 1 << 20;

impl Resource {
    /// Notes that the level at which a user is held elsewhere is another; returns whether the
    /// resource must be looked at again.
    fn note(&mut self, slope: f64, before: f64, now: f64, same: f64) -> bool {
        if self.level.is_finite() {
            // One whom the resource itself holds, before and now, makes no difference to it
            // wherever else it would be held.
            return differs_by(now, before, same) && before.min(now) < self.level * (1.0 - SAME);
        }
        self.used += slope * (now - before);
        self.additions += 1;
        // Who was not held at all yet makes it infinite or no number.
        let has_room = self.used <= self.capacity * (1.0 - NEARLY_USED_UP) && self.additions < MOST_ADDITIONS;
        !has_room
    }
}

/// Whether two levels or rates differ by more than this share.
fn differs_by(one: f64, other: f64, same: f64) -> bool {
    // Two infinite ones do not: their difference is no number.
    (one - other).abs() > same * other.abs() || one.is_finite() != other.is_finite()
}

/// The level at which users eat up a capacity, given the level at which each is held elsewhere, and
/// its slope; infinite where the capacity suffices for them so. And how much those use who are held
/// elsewhere. Who is held lower elsewhere is taken out with what it uses, and the rest share what
/// is left, until nobody is. Leaves those who share.
fn level(capacity: f64, users: &mut Vec<(f64, f64)>) -> (f64, f64) {
    let (mut left, mut level) = (capacity, 0.0f64);
    loop {
        if users.is_empty() {
            return (f64::INFINITY, capacity - left);
        }
        let slope: f64 = users.iter().map(|&(_, slope)| slope).sum();
        // It only rises: who is taken out uses less than the same for all. So rounding cannot leave
        // anyone with nothing.
        level = level.max(left / slope);
        let before = users.len();
        // Who is held at the same level by both is held by both: were it taken out at each, nobody
        // would hold it.
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

/// Notes that a resource must be looked at again.
fn mark(state: &mut Resource, resource: ResourceId, changed: &mut Vec<ResourceId>) {
    if !std::mem::replace(&mut state.is_changed, true) {
        changed.push(resource);
    }
}

/// Adds up the demands for one resource.
fn add_up(demands: &mut Vec<(ResourceId, f64)>) {
    // Mostly they come sorted, which this finds out at once.
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
    /// Nobody yet on resources of these capacities.
    pub fn new(capacities: impl IntoIterator<Item = f64>) -> Self {
        let resource = |capacity| Resource { capacity, level: f64::INFINITY, ..Resource::default() };
        Self { resources: capacities.into_iter().map(resource).collect(), ..Self::default() }
    }

    /// Adds an activity of rate 0; [`FairShare::solve`] gives it its rate. Demands that name a
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
        // One that uses nothing has nobody to share with.
        let rate = if list.is_empty() { bound } else { 0.0 };
        self.activities[id as usize] = Activity { demands: list, bound, growth, rate, is_touched, is_affected: false };
        let limit = self.limit(id);
        self.limits[id as usize] = limit;
        for &(resource, weight) in &self.activities[id as usize].demands {
            let state = &mut self.resources[resource as usize];
            state.users.push((id, weight * growth));
            // It was held at nothing before.
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

    /// Gives a resource another capacity; of none nobody gets anything.
    pub fn set_capacity(&mut self, resource: ResourceId, capacity: f64) {
        let state = &mut self.resources[resource as usize];
        state.capacity = capacity;
        mark(state, resource, &mut self.changed);
    }

    /// What is used of a resource since the last solution.
    pub fn used(&self, resource: ResourceId) -> f64 {
        let of_user = |&(user, slope): &(ActivityId, f64)| {
            let activity = &self.activities[user as usize];
            slope / activity.growth * activity.rate
        };
        self.resources[resource as usize].users.iter().map(of_user).sum()
    }

    /// How many activities use a resource.
    pub fn users(&self, resource: ResourceId) -> usize {
        self.resources[resource as usize].users.len()
    }

    /// An activity's rate at the last solution.
    pub fn rate(&self, id: ActivityId) -> f64 {
        self.activities[id as usize].rate
    }

    /// Whether something was added or removed since the last solution.
    pub fn is_stale(&self) -> bool {
        !self.changed.is_empty() || !self.touched.is_empty()
    }

    /// Finds the rates again, of those activities only that a change affects, and reports each
    /// whose rate is another with its old and its new one, in the order of their numbers.
    pub fn solve(&mut self, mut report: impl FnMut(ActivityId, f64, f64)) {
        let mut rounds = 0;
        while !self.changed.is_empty() {
            rounds += 1;
            // In exact arithmetic a round settles one level at least, so that there are no more
            // rounds than resources. Should rounding keep some from settling, what counts as the
            // same is widened until they do.
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

    /// The levels of the resources that must be looked at again, all from what was known before
    /// this round.
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
        // The order in which changes came to notice is not to matter.
        for &(id, level, _) in moved.iter() {
            resources[id as usize].level = level;
        }
    }

    /// Finds where the users of the resources whose level is new are held now, and marks the other
    /// resources that this makes a difference to.
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

    /// Where an activity is held.
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
