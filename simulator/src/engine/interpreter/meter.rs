//! What a rank spends a step on: every instant of it, counted once, as it goes by.

use crate::engine::Breakdown;
use crate::engine::blocks::TimeCategory;
use foretell_units::Picoseconds;

/// What goes on on one rank, and what its time so far went to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Meter {
    /// Until when time is accounted for.
    since: Picoseconds,
    /// How many things of each use go on, in the order of [`TimeCategory`].
    active: [u32; 4],
    spent: [Picoseconds; 4],
    idle: Picoseconds,
    /// When a kernel and an exchange will begin of which that is known already, or never.
    kernel: Picoseconds,
    kernel_category: TimeCategory,
    exchange: Picoseconds,
}

const NEVER: Picoseconds = Picoseconds::MAX;

impl Default for Meter {
    fn default() -> Self {
        Self {
            since: Picoseconds::ZERO,
            active: [0; 4],
            spent: [Picoseconds::ZERO; 4],
            idle: Picoseconds::ZERO,
            kernel: NEVER,
            kernel_category: TimeCategory::Compute,
            exchange: NEVER,
        }
    }
}

impl Meter {
    /// Something begins.
    pub(super) fn begin(&mut self, category: TimeCategory, now: Picoseconds) {
        self.settle(now);
        self.active[category as usize] += 1;
    }

    /// A kernel will begin. There is one at a time of which that is known.
    pub(super) fn kernel_begins(&mut self, category: TimeCategory, time: Picoseconds) {
        (self.kernel, self.kernel_category) = (time, category);
    }

    /// It will not.
    pub(super) fn cancel_kernel(&mut self) {
        self.kernel = NEVER;
    }

    /// Whether nothing is known yet of an exchange that will begin.
    pub(super) fn expects_no_exchange(&self, now: Picoseconds) -> bool {
        self.exchange == NEVER || self.exchange <= now
    }

    /// An exchange will begin.
    pub(super) fn exchange_begins(&mut self, time: Picoseconds, now: Picoseconds) {
        self.settle(now);
        self.exchange = time;
    }

    /// Something that began ends.
    pub(super) fn end(&mut self, category: TimeCategory, now: Picoseconds) {
        self.settle(now);
        self.active[category as usize] -= 1;
    }

    /// Something began and ended, and nothing else did meanwhile.
    pub(super) fn pass(&mut self, category: TimeCategory, start: Picoseconds, end: Picoseconds) {
        self.settle(start);
        if self.kernel.min(self.exchange) > end && self.active == [0; 4] {
            self.spent[category as usize] += end.saturating_sub(self.since);
            self.since = self.since.max(end);
        } else {
            self.active[category as usize] += 1;
            self.settle(end);
            self.active[category as usize] -= 1;
        }
    }

    /// Reads a word from its beginning and one from its end.
    pub(super) fn fetch(&self) -> u64 {
        self.since.0 ^ self.exchange.0
    }

    /// What the step went to, if it ends then.
    pub(super) fn breakdown(mut self, end: Picoseconds) -> Breakdown {
        self.settle(end);
        let of = |category: TimeCategory| self.spent[category as usize].into();
        Breakdown {
            compute: of(TimeCategory::Compute),
            exposed_communication: of(TimeCategory::Communication),
            bubble: self.idle.into(),
            data: of(TimeCategory::Data),
            optimizer: of(TimeCategory::Optimizer),
        }
    }

    /// Accounts for the time until now, and for what began in it.
    fn settle(&mut self, now: Picoseconds) {
        while self.kernel.min(self.exchange) <= now {
            if self.kernel <= self.exchange {
                self.account(self.kernel);
                self.kernel = NEVER;
                self.active[self.kernel_category as usize] += 1;
            } else {
                self.account(self.exchange);
                self.exchange = NEVER;
                self.active[TimeCategory::Communication as usize] += 1;
            }
        }
        self.account(now);
    }

    fn account(&mut self, time: Picoseconds) {
        let passed = time.saturating_sub(self.since);
        if passed == Picoseconds::ZERO {
            return;
        }
        self.since = time;
        match self.active.iter().position(|&count| count > 0) {
            Some(first) => self.spent[first] += passed,
            None => self.idle += passed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_instant_counts_once_as_the_first_of_what_goes_on() {
        let mut meter = Meter::default();
        meter.begin(TimeCategory::Communication, Picoseconds(10));
        meter.begin(TimeCategory::Compute, Picoseconds(20));
        meter.begin(TimeCategory::Data, Picoseconds(20));
        meter.end(TimeCategory::Compute, Picoseconds(50));
        meter.end(TimeCategory::Communication, Picoseconds(60));
        meter.end(TimeCategory::Data, Picoseconds(65));
        let Breakdown { compute, exposed_communication, bubble, data, optimizer } = meter.breakdown(Picoseconds(100));
        let found = [compute, exposed_communication, bubble, data, optimizer].map(|part| Picoseconds::from(part).0);
        assert_eq!(found, [30, 20, 45, 5, 0]);
    }

    #[test]
    fn what_passes_counts_as_what_begins_and_ends() {
        for (before, kernel) in
            [(None, None), (Some(TimeCategory::Communication), None), (Some(TimeCategory::Optimizer), None), (None, Some(25))]
        {
            let [mut one, mut other] = [Meter::default(); 2];
            for meter in [&mut one, &mut other] {
                before.into_iter().for_each(|before| meter.begin(before, Picoseconds(5)));
                kernel.into_iter().for_each(|time| meter.kernel_begins(TimeCategory::Optimizer, Picoseconds(time)));
            }
            one.pass(TimeCategory::Compute, Picoseconds(10), Picoseconds(30));
            other.begin(TimeCategory::Compute, Picoseconds(10));
            other.end(TimeCategory::Compute, Picoseconds(30));
            assert_eq!(one.breakdown(Picoseconds(50)), other.breakdown(Picoseconds(50)), "{before:?} {kernel:?}");
        }
    }

    #[test]
    fn what_is_known_to_begin_counts_from_when_it_does() {
        let mut meter = Meter::default();
        meter.kernel_begins(TimeCategory::Compute, Picoseconds(30));
        meter.exchange_begins(Picoseconds(20), Picoseconds(10));
        assert!(!meter.expects_no_exchange(Picoseconds(10)) && meter.expects_no_exchange(Picoseconds(20)));
        meter.end(TimeCategory::Compute, Picoseconds(50));
        meter.kernel_begins(TimeCategory::Compute, Picoseconds(55));
        meter.cancel_kernel();
        meter.end(TimeCategory::Communication, Picoseconds(60));
        let Breakdown { compute, exposed_communication, bubble, .. } = meter.breakdown(Picoseconds(70));
        let found = [compute, exposed_communication, bubble].map(|part| Picoseconds::from(part).0);
        assert_eq!(found, [20, 20, 30]);
    }
}
