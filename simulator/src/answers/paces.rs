//! Unsynchronised workers: their throughput and the staleness of their gradients, over many steps.
//!
//! One simulated step, which all workers begin together, gives the computations and transfers of a
//! worker ([`super::paced_steps`]). From these, many steps are simulated by the rules of
//! [`Versions`](foretell_program::Versions) ([`super::paced_course`]).
//!
//! Step times vary by the spread of the prediction of one step. The variation is drawn from a fixed
//! sequence, so the same Program gives the same answer.

use super::paced::PacedPrediction;
use super::paced_course::{Course, Length};
use super::paced_steps::PacedSteps;
use super::prediction::Prediction;
use super::simulation::Options;
use crate::cost::CostModel;
use crate::error::SimulationError;
use foretell_program::{Pacing, Program, StalenessDistribution, Timeline};
use foretell_topologies::Topology;
use foretell_units::{Seconds, median};

/// Steps of each worker in a course that count, and (`WARM_UP`) steps before them that do not.
const STEPS: usize = 100;
const WARM_UP: usize = 20;
/// The number of courses: enough for stable deciles.
const COURSES: usize = 16;
/// The most activities of all workers in all courses together. With many workers the mean varies
/// little, so fewer steps are enough.
const MOST_ACTIVITIES: usize = 250_000;
/// If one step of all workers has more activities than this, fewer activities are simulated in all:
/// each event may change the rate of every flow.
const FEW: usize = 256;

impl Prediction {
    /// The prediction of unsynchronised workers, from that of one step and its timeline. Times and
    /// rates become those of the mean step of all workers.
    ///
    /// # Errors
    /// [`SimulationError`] if the Program does not fit the topology.
    pub fn at_own_paces(
        self,
        program: &Program,
        topology: &Topology,
        costs: &CostModel,
        options: &Options,
        timeline: &Timeline,
        pacing: Pacing,
    ) -> Result<Self, SimulationError> {
        let steps = PacedSteps::new(program, topology, costs, options, timeline, pacing)?;
        if steps.workers.is_empty() {
            return Ok(self);
        }
        let spread =
            [self.step_seconds_p10, self.step_seconds_p90].map(|bound| bound.value() / self.step_seconds.value().max(1e-12));
        let activities: usize = steps.workers.iter().flat_map(|worker| &worker.parts).map(Vec::len).sum();
        let at_once = activities.max(pacing.workers) * (WARM_UP + STEPS);
        let most = MOST_ACTIVITIES * FEW / activities.max(FEW);
        let count = (most / at_once).clamp(1, COURSES);
        let share = (most as f64 / (at_once * count) as f64).min(1.0);
        let shortened = |steps: usize| ((steps as f64 * share) as usize).max(4);
        let length = Length { warm_up: shortened(WARM_UP), counted: shortened(STEPS) };
        let courses: Vec<Course> = (0..count as u64).map(|seed| Course::new(&steps, pacing, spread, length, seed)).collect();
        let mut staleness = Vec::new();
        for one in &courses {
            let known = one.staleness.len().max(staleness.len());
            staleness.resize(known, 0);
            staleness.iter_mut().zip(&one.staleness).for_each(|(sum, count)| *sum += count);
        }
        // A mean step is one step of each worker or, with a quorum, one update.
        let updates = pacing.updates_in(1) as f64;
        let median = median(courses.iter().map(|course| updates / course.rate.max(1e-12)), f64::total_cmp);
        let median = median.expect("invariant: there is a course");
        // Over many steps the variation of step times averages out; the error of the model itself
        // does not.
        let [fast, slow] = spread.map(|factor| Seconds::new(median * factor));
        let mean = |worker: usize| courses.iter().map(|course| course.worker_seconds[worker]).sum::<f64>() / courses.len() as f64;
        let own =
            |choose: fn(f64, f64) -> f64| (0..pacing.workers).map(mean).reduce(choose).expect("invariant: there is a worker");
        let rate = |worker: usize| courses.iter().map(|course| course.worker_rates[worker]).sum::<f64>() / courses.len() as f64;
        let paces = PacedPrediction {
            staleness: StalenessDistribution::of_counts(&staleness),
            server_load: courses.iter().map(|course| course.load).sum::<f64>() / courses.len() as f64,
            worker_seconds: [own(f64::min), own(f64::max)],
            worker_rates: (0..pacing.workers).map(rate).collect(),
        };
        Ok(Self { paces: Some(paces), ..self.with_step(Seconds::new(median), [fast, slow]) })
    }
}
