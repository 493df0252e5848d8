//! Phases of a repeated step on groups of devices: when each phase begins, and how long a step
//! takes in the steady state.
//!
//! A phase occupies all of its groups of devices. Each group runs its phases in the order of the
//! list, step by step. A phase may wait for a phase of an earlier step, so that steps overlap. This
//! module must not know roles, models or devices.

use foretell_units::Seconds;
use schemars::JsonSchema;
use serde::Serialize;

/// Number of steps simulated to reach the steady state, and number of further steps over which the
/// step time is averaged.
const STEPS: usize = 8;

/// A phase of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Phase {
    /// What is done, such as `generation`.
    pub name: String,
    /// Who does it, such as `rollout engine`.
    pub role: String,
    /// Indices of the groups of devices that it occupies.
    pub groups: Vec<usize>,
    /// How long it takes.
    pub duration: Seconds,
    /// Phases that it waits for: the index of each in the list, and how many steps earlier (0 for
    /// the same step).
    pub after: Vec<(usize, usize)>,
}

/// Start and end of a phase in a step of the steady state, relative to the start of the step's
/// first phase.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct PhaseSpan {
    /// What is done.
    pub phase: String,
    /// Who does it.
    pub role: String,
    /// Indices of the groups of devices that it occupies.
    pub groups: Vec<usize>,
    /// Start of the phase.
    pub start_seconds: f64,
    /// End of the phase.
    pub end_seconds: f64,
}

/// The steady state of a repeated step.
#[derive(Clone, Debug, PartialEq)]
pub struct PhaseCourse {
    /// Mean time from the end of a step to that of the next.
    pub step: Seconds,
    /// A span for each phase.
    pub spans: Vec<PhaseSpan>,
}

/// Returns the steady state of a step that consists of these phases and repeats. A phase may wait
/// for phases that precede it in the list, and for any phase of an earlier step.
pub fn course(phases: &[Phase]) -> PhaseCourse {
    let groups = phases.iter().flat_map(|phase| &phase.groups).max().map_or(0, |most| most + 1);
    let mut free = vec![0.0f64; groups];
    let mut ends: Vec<Vec<f64>> = Vec::new();
    let mut begins: Vec<f64> = Vec::new();
    for step in 0..2 * STEPS {
        begins.clear();
        let mut done = vec![0.0f64; phases.len()];
        for (index, phase) in phases.iter().enumerate() {
            let of_groups = phase.groups.iter().map(|&group| free[group]);
            let of_others = phase.after.iter().filter(|(_, ago)| *ago <= step).map(|&(other, ago)| match ago {
                0 => done[other],
                _ => ends[step - ago][other],
            });
            let begin = of_groups.chain(of_others).fold(0.0, f64::max);
            done[index] = begin + phase.duration.value();
            begins.push(begin);
            phase.groups.iter().for_each(|&group| free[group] = done[index]);
        }
        ends.push(done);
    }
    let end = |step: usize| ends[step].iter().copied().fold(0.0, f64::max);
    let first = begins.iter().copied().fold(f64::INFINITY, f64::min);
    let last = ends.last().expect("invariant: there are steps");
    let span = |(phase, (begin, end)): (&Phase, (&f64, &f64))| PhaseSpan {
        phase: phase.name.clone(),
        role: phase.role.clone(),
        groups: phase.groups.clone(),
        start_seconds: begin - first,
        end_seconds: end - first,
    };
    PhaseCourse {
        step: Seconds::new((end(2 * STEPS - 1) - end(STEPS - 1)) / STEPS as f64),
        spans: phases.iter().zip(begins.iter().zip(last)).map(span).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn phase(groups: &[usize], seconds: f64, after: &[(usize, usize)]) -> Phase {
        let (name, role) = (String::new(), String::new());
        Phase { name, role, groups: groups.into(), duration: Seconds::new(seconds), after: after.into() }
    }

    #[test]
    fn phases_that_wait_for_each_other_add_up() {
        let one_group = [phase(&[0], 3.0, &[(1, 1)]), phase(&[0], 2.0, &[(0, 0)])];
        assert_eq!(course(&one_group).step, Seconds::new(5.0));
        let two_groups = [phase(&[0], 3.0, &[(1, 1)]), phase(&[1], 2.0, &[(0, 0)])];
        assert_eq!(course(&two_groups).step, Seconds::new(5.0));
    }

    #[test]
    fn a_step_that_overlaps_with_the_next_takes_the_longer_part() {
        // Generation; a transfer of the weights of the step before; training.
        let of = |generation, training| {
            let transfer = [(0, 0), (2, 1)];
            [phase(&[0], generation, &[(1, 1)]), phase(&[0, 1], 1.0, &transfer), phase(&[1], training, &[(0, 0)])]
        };
        assert_eq!(course(&of(7.0, 4.0)).step, Seconds::new(8.0));
        assert_eq!(course(&of(4.0, 7.0)).step, Seconds::new(8.0));
    }

    #[test]
    fn nothing_overlaps_on_a_group() {
        let steps = [phase(&[0], 7.0, &[(1, 1)]), phase(&[0, 1], 1.0, &[(0, 0), (2, 1)]), phase(&[1], 4.0, &[(0, 0)])];
        let course = course(&steps);
        for (index, one) in course.spans.iter().enumerate() {
            for other in &course.spans[index + 1..] {
                let is_shared = one.groups.iter().any(|group| other.groups.contains(group));
                assert!(!is_shared || one.end_seconds <= other.start_seconds, "{one:?} beside {other:?}");
            }
        }
    }
}
