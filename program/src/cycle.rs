//! The order of a run's steps: which of a plan's Programs each step runs.
//!
//! In most plans all steps are equal. Where replicas exchange parameters only at the end of a
//! round, the last step of a round has a Program of its own, and rounds may differ too. If the
//! parameters are exchanged in fragments, each at a time of its own in the round, there is a
//! Program for each part of each exchange. The order repeats after a cycle of rounds. Interpreters
//! follow it without knowing why steps differ.

/// The order of a run's steps. Step Programs are numbered from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cycle {
    /// The number of steps in a round. The last exchange of a round ends with its last step.
    round: usize,
    /// The number of rounds in the cycle; 0 if no step exchanges.
    rounds: usize,
    /// The number of fragments, whose exchanges end at equal distances in a round.
    fragments: usize,
    /// The number of steps that an exchange overlaps with, after the step at whose end it begins.
    overlap: usize,
}

/// A part of an exchange between replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExchangePart {
    /// The number of the round within the cycle.
    pub(crate) round: usize,
    /// The fragment that is exchanged.
    pub(crate) fragment: usize,
    /// The part of the exchange that the step carries out.
    pub(crate) task: ExchangeTask,
}

/// The part of an exchange that a step carries out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExchangeTask {
    /// The whole exchange, at the end of the step.
    Whole,
    /// Takes the changes to be exchanged, at the end of the step.
    Take,
    /// Sends this part (from 0) of the changes while the step's kernels run. The step that sends
    /// the last part also applies the mean, at its end.
    Send(usize),
}

impl Cycle {
    /// All steps are equal.
    pub(crate) fn of_equal_steps() -> Self {
        Self { round: 1, rounds: 0, fragments: 1, overlap: 0 }
    }

    /// Rounds of `round` steps, `rounds` of them in a cycle. Zeros count as 1.
    pub(crate) fn new(round: usize, rounds: usize) -> Self {
        Self { round: round.max(1), rounds: rounds.max(1), ..Self::of_equal_steps() }
    }

    /// Cuts the exchange of a round into `fragments`. A fragment's exchange begins at the end of
    /// one step and overlaps with the next `overlap` steps. Exchanges must not overlap each other:
    /// a fragment must have more than `overlap` steps of a round.
    pub(crate) fn in_fragments(self, fragments: usize, overlap: usize) -> Self {
        Self { fragments: fragments.max(1), overlap, ..self }
    }

    /// The number of steps after which all replicas have exchanged everything and no exchange is
    /// under way, so that a run may stop.
    pub fn round_steps(&self) -> usize {
        self.round
    }

    /// The number of steps after which the order repeats.
    pub fn steps(&self) -> usize {
        self.round.saturating_mul(self.rounds.max(1))
    }

    /// The number of steps of a round that take part in an exchange. Each has its own Program.
    fn parts(&self) -> usize {
        self.fragments * (self.overlap + 1)
    }

    /// The last step of a fragment's exchange, counted within a round.
    fn last_step(&self, fragment: usize) -> usize {
        // A product of two step counts may exceed a `usize`.
        let end = self.round as u128 * (fragment as u128 + 1) / self.fragments as u128;
        (end as usize).saturating_sub(1)
    }

    /// The part of an exchange that each step Program has; `None` without one.
    pub(crate) fn exchanges(&self) -> Vec<Option<ExchangePart>> {
        let plain = (self.round > self.parts() || self.rounds == 0).then_some(None);
        let task = |part: usize| match (self.overlap, part) {
            (0, _) => ExchangeTask::Whole,
            (_, 0) => ExchangeTask::Take,
            (_, part) => ExchangeTask::Send(part - 1),
        };
        let part = |round: usize, number: usize| {
            let (fragment, part) = (number / (self.overlap + 1), number % (self.overlap + 1));
            ExchangePart { round, fragment, task: task(part) }
        };
        let of_round = |round: usize| (0..self.parts()).map(move |number| Some(part(round, number)));
        plain.into_iter().chain((0..self.rounds).flat_map(of_round)).collect()
    }

    /// The number of step Programs.
    pub fn program_count(&self) -> usize {
        self.exchanges().len()
    }

    /// The Program of a step, counted from the start of the run.
    pub fn program_of_step(&self, step: usize) -> usize {
        let (round, place) = (step / self.round, step % self.round);
        // The fragment whose exchange ends next.
        let fragment = place as u128 * self.fragments as u128 / self.round as u128;
        let next = (fragment as usize..self.fragments).find(|&fragment| place <= self.last_step(fragment));
        let left = next.map(|fragment| (fragment, self.last_step(fragment) - place));
        match left {
            Some((fragment, left)) if self.rounds > 0 && left <= self.overlap => {
                let plain = usize::from(self.round > self.parts());
                plain + round % self.rounds * self.parts() + fragment * (self.overlap + 1) + self.overlap - left
            }
            _ => 0,
        }
    }

    /// For each step Program, how many steps of a cycle run it.
    pub fn counts(&self) -> Vec<usize> {
        let exchanging = self.rounds * self.parts();
        let plain = self.steps() - exchanging;
        (plain > 0).then_some(plain).into_iter().chain((0..exchanging).map(|_| 1)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn programs(cycle: Cycle) -> Vec<usize> {
        (0..9).map(|step| cycle.program_of_step(step)).collect()
    }

    #[test]
    fn the_last_step_of_each_round_exchanges_as_its_kind_says() {
        let whole = |round| Some(ExchangePart { round, fragment: 0, task: ExchangeTask::Whole });
        assert_eq!(programs(Cycle::of_equal_steps()), [0; 9]);
        assert_eq!(Cycle::of_equal_steps().exchanges(), [None]);
        assert_eq!(programs(Cycle::new(1, 1)), [0; 9]);
        assert_eq!(Cycle::new(1, 1).exchanges(), [whole(0)]);
        assert_eq!(programs(Cycle::new(3, 1)), [0, 0, 1, 0, 0, 1, 0, 0, 1]);
        assert_eq!(Cycle::new(3, 1).exchanges(), [None, whole(0)]);
        assert_eq!(programs(Cycle::new(2, 3)), [0, 1, 0, 2, 0, 3, 0, 1, 0]);
        assert_eq!(programs(Cycle::new(1, 2)), [0, 1, 0, 1, 0, 1, 0, 1, 0]);
        assert_eq!(Cycle::new(2, 3).counts(), [3, 1, 1, 1]);
        assert_eq!((Cycle::new(2, 3).steps(), Cycle::new(2, 3).round_steps()), (6, 2));
    }

    #[test]
    fn exchanges_of_fragments_are_spread_over_a_round_and_end_with_it() {
        let of = |fragment, task| Some(ExchangePart { round: 0, fragment, task });
        let apart = Cycle::new(4, 1).in_fragments(2, 0);
        assert_eq!(programs(apart), [0, 1, 0, 2, 0, 1, 0, 2, 0]);
        assert_eq!(apart.exchanges(), [None, of(0, ExchangeTask::Whole), of(1, ExchangeTask::Whole)]);
        let slow = Cycle::new(7, 1).in_fragments(2, 1);
        // Fragment 0 is taken after step 1 and applied after step 2, fragment 1 after 5 and 6.
        assert_eq!(programs(slow), [0, 1, 2, 0, 0, 3, 4, 0, 1]);
        assert_eq!(slow.exchanges()[1..3], [of(0, ExchangeTask::Take), of(0, ExchangeTask::Send(0))]);
        assert_eq!(slow.counts(), [3, 1, 1, 1, 1]);
        // No step without an exchange.
        let full = Cycle::new(6, 1).in_fragments(2, 2);
        assert_eq!(programs(full), [0, 1, 2, 3, 4, 5, 0, 1, 2]);
        assert_eq!((full.counts(), full.program_count()), (vec![1; 6], 6));
    }

    #[test]
    fn each_exchanging_program_runs_once_in_each_round() {
        for (every, fragments, overlap) in
            (1..14).flat_map(|every| (1..=every).flat_map(move |f| (0..every / f).map(move |o| (every, f, o))))
        {
            let cycle = Cycle::new(every, 1).in_fragments(fragments, overlap);
            let mut counts = vec![0; cycle.program_count()];
            (0..every).for_each(|step| counts[cycle.program_of_step(step)] += 1);
            assert_eq!(counts, cycle.counts(), "{cycle:?}");
        }
    }
}
