//! Accounts for the time of a rank: every instant counts once, in the first of the categories that
//! apply.

use crate::engine::Breakdown;
use crate::engine::blocks::TimeCategory;
use foretell_units::Picoseconds;

/// The activities of one rank, and the time spent so far by category.
#[derive(Clone, Copy, Debug)]
pub(super) struct Meter {
    /// Time up to this instant is accounted for.
    since: Picoseconds,
    /// Number of activities under way, by [`TimeCategory`].
    active: [u32; 4],
    /// Time spent, by [`TimeCategory`].
    spent: [Picoseconds; 4],
    idle: Picoseconds,
    /// The start of the next kernel that was planned in advance, or [`NEVER`]; and its category.
    next_kernel: Picoseconds,
    next_kernel_category: TimeCategory,
    /// The start of the next collective that was planned in advance, or [`NEVER`].
    next_collective: Picoseconds,
}

const NEVER: Picoseconds = Picoseconds::MAX;

impl Default for Meter {
    fn default() -> Self {
        Self {
            since: Picoseconds::ZERO,
            active: [0; 4],
            spent: [Picoseconds::ZERO; 4],
            idle: Picoseconds::ZERO,
            next_kernel: NEVER,
            next_kernel_category: TimeCategory::Compute,
            next_collective: NEVER,
        }
    }
}

impl Meter {
    /// An activity begins.
    pub(super) fn begin(&mut self, category: TimeCategory, now: Picoseconds) {
        self.settle(now);
        self.active[category as usize] += 1;
    }

    /// Announces a kernel that begins at a later time. Only one kernel can be announced at a time.
    pub(super) fn kernel_begins(&mut self, category: TimeCategory, time: Picoseconds) {
        (self.next_kernel, self.next_kernel_category) = (time, category);
    }

    /// Withdraws the announced kernel.
    pub(super) fn cancel_kernel(&mut self) {
        self.next_kernel = NEVER;
    }

    /// Whether no collective is announced for a time after `now`.
    pub(super) fn expects_no_collective(&self, now: Picoseconds) -> bool {
        self.next_collective == NEVER || self.next_collective <= now
    }

    /// Announces a collective that begins at a later time. Only one can be announced at a time.
    pub(super) fn collective_begins(&mut self, time: Picoseconds, now: Picoseconds) {
        self.settle(now);
        self.next_collective = time;
    }

    /// An activity ends.
    pub(super) fn end(&mut self, category: TimeCategory, now: Picoseconds) {
        self.settle(now);
        self.active[category as usize] -= 1;
    }

    /// An activity began at `start` and ended at `end`, and no other began or ended in between.
    pub(super) fn pass(&mut self, category: TimeCategory, start: Picoseconds, end: Picoseconds) {
        self.settle(start);
        if self.next_kernel.min(self.next_collective) > end && self.active == [0; 4] {
            self.spent[category as usize] += end.saturating_sub(self.since);
            self.since = self.since.max(end);
        } else {
            self.active[category as usize] += 1;
            self.settle(end);
            self.active[category as usize] -= 1;
        }
    }

    /// Reads a word near each end of the struct: see [`Memory::prefetch`](super::state::Memory).
    pub(super) fn prefetch(&self) -> u64 {
        self.since.0 ^ self.next_collective.0
    }

    /// The breakdown of the step, which ends at `end`.
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

    /// Accounts for the time until now, and for announced activities that have begun.
    fn settle(&mut self, now: Picoseconds) {
        // `NEVER` stands for no activity, even if `now` is the largest time.
        let begun = |meter: &Self| meter.next_kernel.min(meter.next_collective) <= now.min(Picoseconds(NEVER.0 - 1));
        while begun(self) {
            if self.next_kernel <= self.next_collective {
                self.account(self.next_kernel);
                self.next_kernel = NEVER;
                self.active[self.next_kernel_category as usize] += 1;
            } else {
                self.account(self.next_collective);
                self.next_collective = NEVER;
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
    fn every_instant_counts_once_in_the_first_active_category() {
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
    fn passing_an_activity_equals_beginning_and_ending_it() {
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
    fn announced_activities_count_from_their_start() {
        let mut meter = Meter::default();
        meter.kernel_begins(TimeCategory::Compute, Picoseconds(30));
        meter.collective_begins(Picoseconds(20), Picoseconds(10));
        assert!(!meter.expects_no_collective(Picoseconds(10)) && meter.expects_no_collective(Picoseconds(20)));
        meter.end(TimeCategory::Compute, Picoseconds(50));
        meter.kernel_begins(TimeCategory::Compute, Picoseconds(55));
        meter.cancel_kernel();
        meter.end(TimeCategory::Communication, Picoseconds(60));
        let Breakdown { compute, exposed_communication, bubble, .. } = meter.breakdown(Picoseconds(70));
        let found = [compute, exposed_communication, bubble].map(|part| Picoseconds::from(part).0);
        assert_eq!(found, [20, 20, 30]);
    }
}
