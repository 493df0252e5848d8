//! The part of the interpreter that deals with devices that have a share of their processor's time, as a control group gives it (Linux'
//! `cpu.max`): of every period so much as the share is; who has used that up stands still until the next period begins. What is left
//! over is lost. So a device that waits for others most of the time goes on at full speed, and one that never waits gets its share.
//!
//! Costs are those of the long run: at its share's pace a device uses up a period's budget in a period. While it runs it goes as many times
//! as fast as a whole device is faster. All periods begin together: nothing says how those of several devices lie to each other.
//! It must not know what runs there.

use super::Interpreter;
use super::event::Event;
use crate::engine::QuotaPeriods;
use crate::lowering::Lowered;
use crate::network::FairShare;
use foretell_topologies::QUOTA_PERIOD;
use foretell_units::Picoseconds;

/// A processor of which its device has a share.
#[derive(Clone, Copy, Debug)]
struct Quota {
    resource: u32,
    /// How many times as fast as in the long run it goes while it runs.
    pace: f64,
    /// What was left of the budget at `since`, and how fast it has been used up since then.
    left: f64,
    since: Picoseconds,
    used: f64,
    is_stopped: bool,
    /// How often that changed.
    generation: u32,
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Quotas {
    quotas: Vec<Quota>,
    /// How long before the step the first period began.
    into: Picoseconds,
}

/// Less than a picosecond is nothing.
const NOTHING: f64 = 0.5;

fn period() -> Picoseconds {
    QUOTA_PERIOD.into()
}

impl Quotas {
    pub(super) fn new(lowered: &Lowered<'_>, before: &QuotaPeriods, share: &mut FairShare) -> Self {
        let mut quotas: Vec<Quota> = Vec::new();
        for rank in &lowered.ranks {
            let Some(speed) = lowered.quota(rank) else { continue };
            let left = before.left.get(quotas.len()).copied().unwrap_or(period().0 as f64);
            share.set_capacity(rank.processor, 1.0 / speed);
            let resource = rank.processor;
            quotas.push(Quota {
                resource,
                pace: 1.0 / speed,
                left,
                since: Picoseconds::ZERO,
                used: 0.0,
                is_stopped: false,
                generation: 0,
            });
        }
        Self { quotas, into: before.into }
    }

    /// The processors.
    pub(super) fn resources(&self) -> impl Iterator<Item = u32> + '_ {
        self.quotas.iter().map(|quota| quota.resource)
    }

    /// How long ago the period of a time began.
    fn passed_of_period(&self, time: Picoseconds) -> Picoseconds {
        Picoseconds((time + self.into).0 % period().0)
    }

    /// Where devices stand when a step ends. Who stood still last has nothing left, and what was handled after the end does not count.
    pub(super) fn at(&self, end: Picoseconds) -> QuotaPeriods {
        let into = self.passed_of_period(end);
        let left = |quota: &Quota| if quota.since > end { 0.0 } else { quota.left_at(end, into) };
        QuotaPeriods { into, left: self.quotas.iter().map(left).collect() }
    }
}

impl Quota {
    /// What is left at a time that is so far into its period.
    fn left_at(&self, time: Picoseconds, into: Picoseconds) -> f64 {
        let since = time.saturating_sub(self.since);
        if into < since {
            // A period has begun meanwhile.
            period().0 as f64 - self.used * into.0 as f64
        } else {
            self.left - self.used * since.0 as f64
        }
    }

    /// In how long the budget is used up, from a time that is so far into its period; never where it suffices.
    fn lasts(&self, into: Picoseconds) -> Option<Picoseconds> {
        let (rest, budget) = ((period().0 - into.0) as f64, period().0 as f64);
        if self.used * rest > self.left + NOTHING {
            return Some(Picoseconds((self.left / self.used).ceil().max(0.0) as u64));
        }
        let is_too_fast = self.used * budget > budget + NOTHING;
        is_too_fast.then(|| Picoseconds((rest + budget / self.used).ceil() as u64))
    }
}

impl Interpreter<'_> {
    /// Notes how fast budgets are used up from now on, and foretells when they are.
    pub(super) fn update_quotas(&mut self) {
        for number in 0..self.quotas.quotas.len() {
            let used = self.share.used(self.quotas.quotas[number].resource);
            if used != self.quotas.quotas[number].used {
                self.use_quota(number, used);
            }
        }
    }

    fn use_quota(&mut self, number: usize, used: f64) {
        let now = self.queue.now();
        let into = self.quotas.passed_of_period(now);
        let quota = &mut self.quotas.quotas[number];
        quota.left = quota.left_at(now, into);
        (quota.since, quota.used) = (now, used);
        quota.generation += 1;
        let generation = quota.generation;
        if let Some(lasts) = quota.lasts(into).filter(|_| !quota.is_stopped) {
            self.queue.schedule(now + lasts, Event::QuotaIsUsedUp { number: number as u32, generation });
        }
    }

    /// A budget is used up, unless its use changed in between: the device stands still.
    pub(super) fn stop_device(&mut self, number: u32, generation: u32) {
        let now = self.queue.now();
        let into = self.quotas.passed_of_period(now);
        let quota = &mut self.quotas.quotas[number as usize];
        if quota.generation != generation {
            return;
        }
        if quota.left_at(now, into) > NOTHING {
            // It was rounded up to the next period.
            let used = quota.used;
            return self.use_quota(number as usize, used);
        }
        (quota.left, quota.since, quota.is_stopped) = (0.0, now, true);
        let resource = quota.resource;
        self.share.set_capacity(resource, 0.0);
        self.queue.schedule(now + Picoseconds(period().0 - into.0), Event::PeriodBegins(number));
    }

    /// A period begins for a device that stood still.
    pub(super) fn start_device(&mut self, number: u32) {
        let now = self.queue.now();
        let quota = &mut self.quotas.quotas[number as usize];
        (quota.left, quota.since, quota.is_stopped) = (period().0 as f64, now, false);
        let (resource, pace) = (quota.resource, quota.pace);
        self.share.set_capacity(resource, pace);
    }
}
