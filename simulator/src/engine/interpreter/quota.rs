//! Devices with a quota: a share of a processor's time, as a control group gives it (Linux
//! `cpu.max`). A device may use its budget of processor time in each period. Once it has used up
//! the budget, the device is stopped until the next period. What it does not use in a period is
//! lost. So a device that mostly waits for others runs at full speed, and one that never waits gets
//! its share.
//!
//! Costs are long-run averages: at the long-run pace a device uses up a period's budget in one
//! period. While it runs, its rate is the long-run rate divided by its share. All periods begin
//! together, since nothing says how those of several devices are aligned.

use super::Interpreter;
use super::event::Event;
use crate::engine::QuotaPeriods;
use crate::lowering::Lowered;
use crate::network::FairShare;
use foretell_topologies::QUOTA_PERIOD;
use foretell_units::Picoseconds;

/// The quota of one device.
#[derive(Clone, Copy, Debug)]
struct Quota {
    /// The resource index of its processor.
    resource: u32,
    /// The device's rate while it runs without contention, over its long-run rate.
    max_rate: f64,
    /// The budget that was unused at `since`, in picoseconds of work at the long-run pace.
    left: f64,
    since: Picoseconds,
    /// How fast the device has used its budget since `since`, per picosecond.
    rate: f64,
    is_stopped: bool,
    /// Counts the changes of `rate`. An event for the end of the budget is ignored if its
    /// generation is older.
    generation: u32,
}

/// The quotas of all devices that have one.
#[derive(Debug, Default)]
pub(super) struct Quotas {
    quotas: Vec<Quota>,
    /// Time from the start of the first period until the start of the step.
    elapsed: Picoseconds,
}

/// A budget below this many picoseconds counts as used up.
const NOTHING: f64 = 0.5;

fn period() -> Picoseconds {
    QUOTA_PERIOD.into()
}

impl Quotas {
    pub(super) fn new(lowered: &Lowered<'_>, before: &QuotaPeriods, fair_share: &mut FairShare) -> Self {
        let mut quotas: Vec<Quota> = Vec::new();
        for rank in &lowered.ranks {
            let Some(speed) = lowered.quota(rank) else { continue };
            let left = before.budgets.get(quotas.len()).copied().unwrap_or(period().0 as f64);
            fair_share.set_capacity(rank.processor, 1.0 / speed);
            let resource = rank.processor;
            quotas.push(Quota {
                resource,
                max_rate: 1.0 / speed,
                left,
                since: Picoseconds::ZERO,
                rate: 0.0,
                is_stopped: false,
                generation: 0,
            });
        }
        Self { quotas, elapsed: before.elapsed }
    }

    /// The processors of devices with a quota.
    pub(super) fn resources(&self) -> impl Iterator<Item = u32> + '_ {
        self.quotas.iter().map(|quota| quota.resource)
    }

    /// Time from the start of the period that contains `time` until `time`.
    fn elapsed_of_period(&self, time: Picoseconds) -> Picoseconds {
        Picoseconds((time + self.elapsed).0 % period().0)
    }

    /// How far devices are in their periods when a step ends. A device that was stopped last has no
    /// budget left. Ignores changes after `end`.
    pub(super) fn periods_at(&self, end: Picoseconds) -> QuotaPeriods {
        let elapsed = self.elapsed_of_period(end);
        let left = |quota: &Quota| if quota.since > end { 0.0 } else { quota.left_at(end, elapsed) };
        QuotaPeriods { elapsed, budgets: self.quotas.iter().map(left).collect() }
    }
}

impl Quota {
    /// The unused budget at `time`, whose period began `elapsed` before.
    fn left_at(&self, time: Picoseconds, elapsed: Picoseconds) -> f64 {
        let since = time.saturating_sub(self.since);
        if elapsed < since {
            // A new period has begun since `since`.
            period().0 as f64 - self.rate * elapsed.0 as f64
        } else {
            self.left - self.rate * since.0 as f64
        }
    }

    /// Time until the budget is used up, from a time whose period began `elapsed` before. `None` if
    /// each period's budget suffices at the present rate.
    fn lasts(&self, elapsed: Picoseconds) -> Option<Picoseconds> {
        let (rest, budget) = ((period().0 - elapsed.0) as f64, period().0 as f64);
        if self.rate * rest > self.left + NOTHING {
            return Some(Picoseconds((self.left / self.rate).ceil().max(0.0) as u64));
        }
        let is_too_fast = self.rate * budget > budget + NOTHING;
        is_too_fast.then(|| Picoseconds((rest + budget / self.rate).ceil() as u64))
    }
}

impl Interpreter<'_> {
    /// Reschedules the end of the budget for each device whose rate of use has changed.
    pub(super) fn update_quotas(&mut self) {
        for number in 0..self.fluids.quotas.quotas.len() {
            let rate = self.fluids.fair_share.used(self.fluids.quotas.quotas[number].resource);
            if rate != self.fluids.quotas.quotas[number].rate {
                self.use_quota(number, rate);
            }
        }
    }

    fn use_quota(&mut self, number: usize, rate: f64) {
        let now = self.queue.now();
        let elapsed = self.fluids.quotas.elapsed_of_period(now);
        let quota = &mut self.fluids.quotas.quotas[number];
        quota.left = quota.left_at(now, elapsed);
        (quota.since, quota.rate) = (now, rate);
        quota.generation += 1;
        let generation = quota.generation;
        if let Some(lasts) = quota.lasts(elapsed).filter(|_| !quota.is_stopped) {
            self.queue.schedule(now + lasts, Event::QuotaIsUsedUp { number: number as u32, generation });
        }
    }

    /// Handles the end of a budget: stops the device.
    pub(super) fn stop_device(&mut self, number: u32, generation: u32) {
        let now = self.queue.now();
        let elapsed = self.fluids.quotas.elapsed_of_period(now);
        let quota = &mut self.fluids.quotas.quotas[number as usize];
        if quota.generation != generation {
            return;
        }
        if quota.left_at(now, elapsed) > NOTHING {
            // The time was rounded up into the next period.
            let rate = quota.rate;
            return self.use_quota(number as usize, rate);
        }
        (quota.left, quota.since, quota.is_stopped) = (0.0, now, true);
        let resource = quota.resource;
        self.fluids.fair_share.set_capacity(resource, 0.0);
        self.queue.schedule(now + Picoseconds(period().0 - elapsed.0), Event::PeriodBegins(number));
    }

    /// Handles the start of a period for a stopped device.
    pub(super) fn start_device(&mut self, number: u32) {
        let now = self.queue.now();
        let quota = &mut self.fluids.quotas.quotas[number as usize];
        (quota.left, quota.since, quota.is_stopped) = (period().0 as f64, now, false);
        let (resource, max_rate) = (quota.resource, quota.max_rate);
        self.fluids.fair_share.set_capacity(resource, max_rate);
    }
}
