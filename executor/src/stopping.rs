//! Stopping a run early, after the same step on every rank.
//!
//! The launcher tells all ranks to hold: each finishes its step and reports the number of steps
//! that it has started. Ranks need each other within a step, so the launcher then lets all of them
//! continue to the largest of these numbers, where they stop.

use crate::transport::TransportError;
use std::sync::{Condvar, Mutex, PoisonError};

/// Decides whether a rank may start a step.
#[derive(Debug, Default)]
pub(crate) struct StepGate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct GateState {
    /// The number of steps that were started.
    started: usize,
    order: StepOrder,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum StepOrder {
    /// Start any step.
    #[default]
    GoOn,
    /// Start none until the next order.
    Hold,
    /// Start no more than this many steps.
    StopAfter(usize),
    /// Start none: another rank or the launcher is lost.
    Abort,
}

impl StepGate {
    /// Returns whether step `step`, counted from 0, may start. Waits while the rank is told to
    /// hold.
    ///
    /// # Errors
    /// [`TransportError::Aborted`] after [`abort`](Self::abort).
    pub(crate) fn may_start(&self, step: usize) -> Result<bool, TransportError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        // In a resumed run, the steps before it count too.
        state.started = state.started.max(step);
        while state.order == StepOrder::Hold {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        match state.order {
            StepOrder::Abort => Err(TransportError::Aborted),
            StepOrder::StopAfter(steps) if step >= steps => Ok(false),
            StepOrder::Hold => unreachable!("invariant: holding has ended"),
            StepOrder::GoOn | StepOrder::StopAfter(_) => {
                // Sessions of a server may be at different steps.
                state.started = state.started.max(step + 1);
                Ok(true)
            }
        }
    }

    /// Starts no more steps until [`stop_after`](Self::stop_after). Returns the number of steps
    /// that were started.
    pub(crate) fn hold(&self) -> usize {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.order == StepOrder::GoOn {
            state.order = StepOrder::Hold;
        }
        state.started
    }

    /// Lets the rank continue until it has made this many steps.
    pub(crate) fn stop_after(&self, steps: usize) {
        self.order(StepOrder::StopAfter(steps));
    }

    /// Lets the rank start no more steps, and wakes it if it holds.
    pub(crate) fn abort(&self) {
        self.order(StepOrder::Abort);
    }

    fn order(&self, order: StepOrder) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).order = order;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn ranks_that_hold_at_different_steps_stop_after_the_same_one() {
        let gates: Vec<Arc<StepGate>> = (0..2).map(|_| Arc::default()).collect();
        // The first rank is a step ahead.
        for (gate, steps) in gates.iter().zip([5, 4]) {
            assert!((3..steps).all(|step| gate.may_start(step).expect("nothing is lost")));
        }
        let most = gates.iter().map(|gate| gate.hold()).max().expect("two gates");
        assert_eq!(most, 5);
        let waiting: Vec<_> = gates
            .iter()
            .zip([5, 4])
            .map(|(gate, next)| {
                let gate = Arc::clone(gate);
                std::thread::spawn(move || (next..).take_while(|&step| gate.may_start(step).expect("nothing is lost")).last())
            })
            .collect();
        gates.iter().for_each(|gate| gate.stop_after(most));
        let last: Vec<_> = waiting.into_iter().map(|thread| thread.join().expect("the thread ends")).collect();
        assert_eq!(last, [None, Some(4)]);
    }

    #[test]
    fn a_rank_that_holds_wakes_when_another_is_lost() {
        let gate = Arc::new(StepGate::default());
        gate.hold();
        let waiting = std::thread::spawn({
            let gate = Arc::clone(&gate);
            move || gate.may_start(0)
        });
        gate.abort();
        assert!(waiting.join().expect("the thread ends").is_err());
    }
}
