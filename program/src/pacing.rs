//! Workers that are not synchronised: when a worker may pull parameters, and which version of the
//! parameters its gradients belong to.
//!
//! A server's parameters have a version: the number of pushes that it has applied. A pull reads the
//! latest version, a push reads the latest and writes the next. Between its pull and its push, a
//! worker computes with the version that it pulled: the number of versions since then is the
//! staleness of its gradients. A bound of n steps delays the pull of a worker that is more than n
//! steps ahead of the slowest (Ho et al. 2013, stale-synchronous). No worker waits for one that has
//! left.
//!
//! With a quorum of m pushes, an update uses the first m pushes that were computed from the latest
//! version; later ones are dropped (Chen et al. 2016, synchronous SGD with backup workers). A
//! worker may start step j, counted from 0, at version j: so a late worker does not wait, and its
//! gradients count again once it has caught up.
//!
//! Both interpreters follow these rules, and know nothing of the modes behind them.
//!
//! **No deadlock.** A worker with the fewest pushes may always pull, whatever the bound: it is not
//! ahead of any other. Each server decides by the pushes that it has applied. The worker that has
//! started the fewest steps waits for no other: the pushes of all others before that step have been
//! sent, and nothing delays a push. So with any number of servers, and whatever the order of
//! arrivals, some worker advances. With a quorum, each server has version j + 1 at the latest when
//! all have made step j: all pushes of step j that came while the server was at version j were
//! computed from it, and a quorum of them makes version j + 1. So the worker that has started the
//! fewest steps advances.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The workers of a server, and how far they may be apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pacing {
    /// The number of workers.
    pub workers: usize,
    /// The most steps that a worker may be ahead of the slowest; any number if `None`.
    pub bound: Option<usize>,
    /// The number of pushes of the latest version that an update waits for. `None`: each push is an
    /// update by itself, whatever version it was computed from.
    pub quorum: Option<usize>,
}

impl Pacing {
    /// The number of updates while each worker makes `steps` steps.
    pub fn updates_in(self, steps: usize) -> usize {
        if self.quorum.is_some() { steps } else { steps * self.workers }
    }

    /// The step that an update belongs to. With a quorum it is `version`, the version that the
    /// update replaces; otherwise it is `step`, the step whose push the update applies. All are
    /// counted from the start of the run.
    pub fn step_of_update(self, step: usize, version: usize) -> usize {
        if self.quorum.is_some() { version } else { step }
    }
}

/// A turn at a server: one worker's pull or push.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Turn {
    /// The worker's pull.
    Pull(u32),
    /// The worker's push.
    Push(u32),
}

/// The effect of a turn on the state that all workers share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Copies the parameters for a worker.
    Snapshot,
    /// Adds a worker's push to those of others that wait for a quorum.
    Add,
    /// Updates the parameters, which makes the next version.
    Update,
}

/// The versions and workers of one server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Versions {
    pacing: Pacing,
    /// The number of updates.
    version: usize,
    /// The last version of the run, which no update follows; `None` without a quorum, or if the run
    /// is unlimited.
    last: Option<usize>,
    /// The number of pushes that were added towards the next version; with a quorum only.
    added: usize,
    workers: Vec<WorkerVersions>,
    /// The fewest pushes of a worker that has not left, and how many workers have exactly that
    /// many.
    slowest: (usize, usize),
}

/// A worker's progress, as a server sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct WorkerVersions {
    pulls: usize,
    pushes: usize,
    /// The version that the last pull read.
    pulled: usize,
    has_left: bool,
}

impl Versions {
    /// The versions before the first turn.
    pub fn new(pacing: Pacing) -> Self {
        let workers = vec![WorkerVersions::default(); pacing.workers];
        Self { pacing, version: 0, last: None, added: 0, workers, slowest: (0, pacing.workers) }
    }

    /// With a quorum: ends the versions after `steps` steps. Later pushes make no new version.
    pub fn end_after(&mut self, steps: usize) {
        self.last = self.pacing.quorum.map(|_| self.pacing.updates_in(steps));
    }

    /// The latest version.
    pub fn version(&self) -> usize {
        self.version
    }

    /// The fewest pushes of any worker that has not left, and the version. A waiting pull can
    /// become allowed only when one of the two changes.
    pub fn awaited(&self) -> (usize, usize) {
        (self.slowest.0, self.version)
    }

    /// Whether a turn may come next. A worker pulls and pushes in turn. A bound or a quorum delays
    /// its pull, and nothing delays its push. A worker that has left has no more turns.
    pub fn allows(&self, turn: Turn) -> bool {
        let present = |worker: u32| self.workers.get(worker as usize).filter(|worker| !worker.has_left);
        match turn {
            Turn::Push(worker) => present(worker).is_some_and(|worker| worker.pulls == worker.pushes + 1),
            Turn::Pull(worker) => {
                let is_near = |steps: usize| self.pacing.bound.is_none_or(|bound| steps <= self.slowest.0.saturating_add(bound));
                let is_made = |steps: usize| self.pacing.quorum.is_none() || steps <= self.version;
                present(worker)
                    .is_some_and(|worker| worker.pulls == worker.pushes && is_near(worker.pushes) && is_made(worker.pushes))
            }
        }
    }

    /// The effects of `turn` if it comes next, in order. A late push has none.
    pub fn effects(&self, turn: Turn) -> &'static [Effect] {
        let Turn::Push(worker) = turn else { return &[Effect::Snapshot] };
        let Some(quorum) = self.pacing.quorum else { return &[Effect::Update] };
        let pulled = self.workers.get(worker as usize).map(|worker| worker.pulled);
        let is_late = pulled != Some(self.version) || self.last.is_some_and(|last| self.version >= last);
        match () {
            () if is_late => &[],
            () if self.added + 1 < quorum => &[Effect::Add],
            () => &[Effect::Add, Effect::Update],
        }
    }

    /// Records that a worker has left: it has no more turns, and no other waits for it.
    pub fn leave(&mut self, worker: u32) {
        self.workers.get_mut(worker as usize).into_iter().for_each(|worker| worker.has_left = true);
        self.find_slowest();
    }

    fn find_slowest(&mut self) {
        let pushes = || self.workers.iter().filter(|worker| !worker.has_left).map(|worker| worker.pushes);
        let fewest = pushes().min().unwrap_or(0);
        self.slowest = (fewest, pushes().filter(|&pushes| pushes == fewest).count());
    }

    /// Takes a turn. Returns the staleness of a push. A turn that is not allowed changes nothing.
    pub fn take(&mut self, turn: Turn) -> Option<usize> {
        if !self.allows(turn) {
            return None;
        }
        let (version, effects) = (self.version, self.effects(turn));
        match turn {
            Turn::Pull(worker) => {
                let one = self.workers.get_mut(worker as usize)?;
                (one.pulls, one.pulled) = (one.pulls + 1, version);
                None
            }
            Turn::Push(worker) => {
                let one = self.workers.get_mut(worker as usize)?;
                one.pushes += 1;
                let (staleness, was_slowest) = (version - one.pulled, one.pushes == self.slowest.0 + 1);
                if was_slowest {
                    self.slowest.1 -= 1;
                }
                if self.slowest.1 == 0 {
                    self.find_slowest();
                }
                self.added += usize::from(effects.contains(&Effect::Add));
                if effects.contains(&Effect::Update) {
                    (self.version, self.added) = (version + 1, 0);
                }
                Some(staleness)
            }
        }
    }
}

/// The distribution of the staleness of pushes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StalenessDistribution {
    /// The mean.
    pub mean: f64,
    /// The 95th percentile.
    pub p95: usize,
    /// The largest.
    pub max: usize,
}

impl StalenessDistribution {
    /// The distribution in which `counts[n]` pushes have a staleness of n.
    pub fn of_counts(counts: &[u64]) -> Self {
        let total: u64 = counts.iter().sum();
        if total == 0 {
            return Self::default();
        }
        let sum: f64 = counts.iter().enumerate().map(|(staleness, &count)| staleness as f64 * count as f64).sum();
        let mut rest = (total * 95).div_ceil(100);
        let p95 = counts.iter().position(|&count| {
            rest = rest.saturating_sub(count);
            rest == 0
        });
        let max = counts.iter().rposition(|&count| count > 0).unwrap_or(0);
        Self { mean: sum / total as f64, p95: p95.unwrap_or(max), max }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Each server sees the pushes of a worker in their order, and otherwise in any order.
        #[test]
        fn whatever_the_order_workers_finish_and_none_is_too_far_ahead(
            workers in 1usize..6, servers in 1usize..4, bound in proptest::option::of(0usize..4), steps in 1usize..8,
            backup in proptest::option::of(0usize..5), choices in proptest::collection::vec(any::<u32>(), 1..64),
        ) {
            let quorum = backup.map(|backup| workers.saturating_sub(backup).max(1));
            let bound = bound.filter(|_| quorum.is_none());
            let mut states = vec![Versions::new(Pacing { workers, bound, quorum }); servers];
            states.iter_mut().for_each(|state| state.end_after(steps));
            // What each worker has had from each server: so many pulls, and so many pushes sent.
            let mut pulls = vec![vec![0; servers]; workers];
            let mut pushes = vec![vec![0; servers]; workers];
            let mut choice = (0usize..).map(|turn| choices[turn % choices.len()].wrapping_add(turn as u32 * 7) as usize);
            loop {
                let mut possible = Vec::new();
                for worker in 0..workers {
                    // A worker pushes once it has pulled from all, and pulls once it has pushed to
                    // all.
                    let pulled = *pulls[worker].iter().min().expect("a server");
                    let pushed = *pushes[worker].iter().min().expect("a server");
                    for server in 0..servers {
                        let number = worker as u32;
                        let wants_pull = pulls[worker][server] == pushed && pushed < steps;
                        if wants_pull && pushes[worker][server] == pushed && states[server].allows(Turn::Pull(number)) {
                            possible.push((server, Turn::Pull(number)));
                        }
                        if pulled > pushes[worker][server] {
                            prop_assert!(states[server].allows(Turn::Push(number)), "a push waits");
                            possible.push((server, Turn::Push(number)));
                        }
                    }
                }
                if possible.is_empty() {
                    break;
                }
                let (server, turn) = possible[choice.next().expect("it goes on for ever") % possible.len()];
                let before = states[server].version();
                let staleness = states[server].take(turn);
                match turn {
                    Turn::Pull(worker) => pulls[worker as usize][server] += 1,
                    Turn::Push(worker) => {
                        pushes[worker as usize][server] += 1;
                        let after = states[server].version();
                        prop_assert!(after == before + 1 || quorum.is_some() && after == before);
                        let staleness = staleness.expect("of a push");
                        // Each of the others has at most 2 n + 1 pushes while one computes.
                        prop_assert!(bound.is_none_or(|bound| staleness <= (workers - 1) * (2 * bound + 1)));
                    }
                }
                let of_server = |server: usize| (0..workers).map(move |worker| (worker, server));
                let slowest = of_server(server).map(|(worker, server)| pushes[worker][server]).min().expect("a worker");
                for (worker, server) in of_server(server) {
                    let ahead = pushes[worker][server] - slowest;
                    prop_assert!(bound.is_none_or(|bound| ahead <= bound + 1), "{} steps ahead", ahead);
                }
            }
            prop_assert!(pushes.iter().flatten().all(|&pushes| pushes == steps), "stuck after {:?}", pushes);
            let versions = if quorum.is_some() { steps } else { steps * workers };
            prop_assert!(states.iter().all(|state| state.version() == versions), "{:?}", states);
        }
    }

    #[test]
    fn a_quorum_makes_a_version_and_a_late_push_counts_for_nothing() {
        let mut versions = Versions::new(Pacing { workers: 3, bound: None, quorum: Some(2) });
        let [pull, push] = [Turn::Pull, Turn::Push];
        for turn in [pull(0), pull(1), pull(2)] {
            assert_eq!((versions.effects(turn), versions.take(turn)), (&[Effect::Snapshot][..], None));
        }
        assert_eq!((versions.effects(push(1)), versions.take(push(1))), (&[Effect::Add][..], Some(0)));
        assert!(!versions.allows(pull(1)), "it counts in the version that is being made");
        assert_eq!((versions.effects(push(0)), versions.take(push(0))), (&[Effect::Add, Effect::Update][..], Some(0)));
        assert_eq!((versions.version(), versions.effects(push(2))), (1, &[][..]));
        // One that was late does not wait, and counts again.
        assert_eq!([push(2), pull(2)].map(|turn| versions.take(turn)), [Some(1), None]);
        assert_eq!((versions.version(), versions.effects(push(2))), (1, &[Effect::Add][..]));
        versions.end_after(1);
        assert_eq!(versions.effects(push(2)), [], "no step is left");
    }

    #[test]
    fn staleness_counts_the_pushes_since_the_pull() {
        let mut versions = Versions::new(Pacing { workers: 2, bound: Some(1), quorum: None });
        let [pull, push] = [Turn::Pull, Turn::Push];
        assert!(!versions.allows(push(0)) && !versions.allows(pull(2)));
        for turn in [pull(0), pull(1)] {
            assert_eq!(versions.take(turn), None);
        }
        assert_eq!([push(0), pull(0), push(0), push(1)].map(|turn| versions.take(turn)), [Some(0), None, Some(0), Some(2)]);
        // Worker 0 is one step ahead, then two.
        assert!(versions.allows(pull(0)));
        assert_eq!([pull(0), push(0)].map(|turn| versions.take(turn)), [None, Some(0)]);
        assert!(!versions.allows(pull(0)) && versions.allows(pull(1)));
    }

    #[test]
    fn nobody_waits_for_a_worker_that_has_left() {
        let mut versions = Versions::new(Pacing { workers: 3, bound: Some(0), quorum: None });
        let [pull, push] = [Turn::Pull, Turn::Push];
        for turn in [pull(0), pull(1), pull(2), push(0), push(1)] {
            versions.take(turn);
        }
        assert!(!versions.allows(pull(0)) && versions.allows(push(2)));
        versions.leave(2);
        assert!(versions.allows(pull(0)) && !versions.allows(push(2)) && !versions.allows(pull(2)));
        assert_eq!((versions.take(push(2)), versions.version()), (None, 2));
    }

    #[test]
    fn a_distribution_has_its_mean_percentile_and_maximum() {
        let of = StalenessDistribution::of_counts;
        assert_eq!(of(&[]), StalenessDistribution::default());
        assert_eq!(of(&[95, 5]), StalenessDistribution { mean: 0.05, p95: 0, max: 1 });
        assert_eq!(of(&[94, 0, 6, 0]), StalenessDistribution { mean: 0.12, p95: 2, max: 2 });
    }
}
