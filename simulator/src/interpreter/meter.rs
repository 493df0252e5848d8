//! What a rank spends a step on: every instant of it, counted once, as it goes by.

use crate::code::Use;
use crate::simulation::Breakdown;
use foretell_units::Picoseconds;

/// What goes on on one rank, and what its time so far went to.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Meter {
    /// Until when time is accounted for.
    since: Picoseconds,
    /// How many things of each use go on, in the order of [`Use`].
    active: [u32; 4],
    spent: [Picoseconds; 4],
    idle: Picoseconds,
}

impl Meter {
    /// Something begins.
    pub(super) fn begin(&mut self, counts_as: Use, now: Picoseconds) {
        self.settle(now);
        self.active[counts_as as usize] += 1;
    }

    /// Something that began ends.
    pub(super) fn end(&mut self, counts_as: Use, now: Picoseconds) {
        self.settle(now);
        self.active[counts_as as usize] -= 1;
    }

    /// What the step went to, if it ends then.
    pub(super) fn breakdown(mut self, end: Picoseconds) -> Breakdown {
        self.settle(end);
        let of = |counts_as: Use| self.spent[counts_as as usize].into();
        Breakdown {
            compute: of(Use::Compute),
            exposed_communication: of(Use::Communication),
            bubble: self.idle.into(),
            data: of(Use::Data),
            optimizer: of(Use::Optimizer),
        }
    }

    fn settle(&mut self, now: Picoseconds) {
        let passed = now.saturating_sub(self.since);
        if passed == Picoseconds::ZERO {
            return;
        }
        self.since = now;
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
        meter.begin(Use::Communication, Picoseconds(10));
        meter.begin(Use::Compute, Picoseconds(20));
        meter.begin(Use::Data, Picoseconds(20));
        meter.end(Use::Compute, Picoseconds(50));
        meter.end(Use::Communication, Picoseconds(60));
        meter.end(Use::Data, Picoseconds(65));
        let Breakdown { compute, exposed_communication, bubble, data, optimizer } = meter.breakdown(Picoseconds(100));
        let found = [compute, exposed_communication, bubble, data, optimizer].map(|part| Picoseconds::from(part).0);
        assert_eq!(found, [30, 20, 45, 5, 0]);
    }
}
