//! The order of a run's steps: which of a plan's Programs each step runs.
//!
//! In most plans all steps are equal. Where replicas exchange parameters only at the end of a
//! round, the last step of a round has a Program of its own, and rounds may differ too. The order
//! repeats after a cycle of rounds. Interpreters follow it without knowing why steps differ.

/// The order of a run's steps. Step Programs are numbered from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cycle {
    /// The number of steps in a round, of which the last one exchanges.
    round: usize,
    /// The number of rounds in the cycle; 0 if no step exchanges.
    rounds: usize,
}

impl Cycle {
    /// All steps are equal.
    pub(crate) fn of_equal_steps() -> Self {
        Self { round: 1, rounds: 0 }
    }

    /// Rounds of `round` steps, in turn of `rounds` kinds. Both count at least 1.
    pub(crate) fn new(round: usize, rounds: usize) -> Self {
        Self { round: round.max(1), rounds: rounds.max(1) }
    }

    /// The number of steps after which all replicas have exchanged, and a run may stop.
    pub fn round_steps(&self) -> usize {
        self.round
    }

    /// The number of steps after which the order repeats.
    pub fn steps(&self) -> usize {
        self.round.saturating_mul(self.rounds.max(1))
    }

    /// Whether a round ends with a step, counted from 0.
    pub fn ends_round(&self, step: usize) -> bool {
        (step + 1).is_multiple_of(self.round)
    }

    /// The exchange at the end of each step Program: the number of the round's kind; `None` without
    /// one.
    pub(crate) fn exchanges(&self) -> Vec<Option<usize>> {
        let plain = (self.round > 1 || self.rounds == 0).then_some(None);
        plain.into_iter().chain((0..self.rounds).map(Some)).collect()
    }

    /// The number of step Programs.
    pub fn program_count(&self) -> usize {
        self.exchanges().len()
    }

    /// The Program of a step, counted from the start of the run.
    pub fn program_of_step(&self, step: usize) -> usize {
        if self.rounds == 0 || !self.ends_round(step) {
            return 0;
        }
        let plain = usize::from(self.round > 1);
        plain + step / self.round % self.rounds
    }

    /// How many steps of a cycle run each Program.
    pub fn counts(&self) -> Vec<usize> {
        let plain = self.steps() - self.rounds;
        (plain > 0).then_some(plain).into_iter().chain((0..self.rounds).map(|_| 1)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_step_of_each_round_exchanges_as_its_kind_says() {
        let programs = |cycle: Cycle| (0..9).map(|step| cycle.program_of_step(step)).collect::<Vec<_>>();
        assert_eq!(programs(Cycle::of_equal_steps()), [0; 9]);
        assert_eq!(Cycle::of_equal_steps().exchanges(), [None]);
        assert_eq!(programs(Cycle::new(1, 1)), [0; 9]);
        assert_eq!(Cycle::new(1, 1).exchanges(), [Some(0)]);
        assert_eq!(programs(Cycle::new(3, 1)), [0, 0, 1, 0, 0, 1, 0, 0, 1]);
        assert_eq!(Cycle::new(3, 1).exchanges(), [None, Some(0)]);
        assert_eq!(programs(Cycle::new(2, 3)), [0, 1, 0, 2, 0, 3, 0, 1, 0]);
        assert_eq!(programs(Cycle::new(1, 2)), [0, 1, 0, 1, 0, 1, 0, 1, 0]);
        assert_eq!(Cycle::new(2, 3).counts(), [3, 1, 1, 1]);
        assert_eq!((Cycle::new(2, 3).steps(), Cycle::new(2, 3).round_steps()), (6, 2));
    }
}
