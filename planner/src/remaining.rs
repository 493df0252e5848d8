//! How long a step goes on at least after each pass of a layout's stages: what lets a simulation stop as soon as it is certain that the layout
//! is too slow.
//!
//! It is the longest way from the end of a pass to the end of the step, by the windows and messages of [`crate::pipeline`], found backwards.

use crate::answer::PlannerError;
use crate::bounds::{Bounds, ROUNDING};
use crate::pipeline::{Pieces, Timetable};
use crate::request::Request;
use crate::windows::{Chain, Window};
use foretell_program::{Layout, PassTimes, Plan, Program, StagePass, StageProgram, Stream, Task, pass_starts};
use foretell_simulator::Deadline;
use foretell_units::{Picoseconds, Seconds};
use std::cell::RefCell;

/// Until when a simulation of a layout, whose Program this is, is worth going on if no step matters that is longer; `None` where nothing is known of
/// the rest of its step.
///
/// # Errors
/// As [`crate::least`].
pub fn deadline(
    request: &Request<'_>,
    layout: &Layout,
    program: &Program,
    step: Seconds,
) -> Result<Option<Deadline>, PlannerError> {
    Ok(Bounds::new(request)?.deadline(layout, program, step))
}

impl Bounds<'_> {
    /// As [`deadline`].
    pub(crate) fn deadline(&self, layout: &Layout, program: &Program, step: Seconds) -> Option<Deadline> {
        let is_known = layout.stages.is_none() && layout.shares.is_none() && !self.devices.are_mixed() && self.has_probe(layout);
        if !is_known || !self.lies_as_probe(layout) {
            return None;
        }
        let micro_batches = (Plan { layout: layout.clone(), ..self.request.base.clone() }).micro_batches().ok()?;
        let probes = self.probes(layout, micro_batches.min(2)).ok()?;
        let (cutting, timetable) = (self.cutting(layout), self.timetable(layout, micro_batches));
        let of_stage = vec![0; layout.pipeline];
        let pieces = Pieces::new(&probes, &of_stage, self.devices.weights(), &cutting, layout.schedule, layout.virtual_stages);
        let pieces = pieces.offloading(self.offloading.of(layout, &self.offloading.paces, 1));
        let rests = pieces.rests(&timetable, &self.longer_messages(layout, &probes))?;
        let (of_step, of_micro_batch) = self.overheads;
        let beside = Picoseconds::from(of_step + of_micro_batch * micro_batches as f64).0 as f64;
        let of_list =
            |list: &StageProgram| after_kernels(list, &timetable.orders[list.stage], &rests[list.stage], beside, ROUNDING);
        Some(Deadline { step: step.into(), remaining: program.lists.iter().map(of_list).collect() })
    }
}

/// What follows the pass of which the rest is asked, at least until the end of the step.
struct After {
    /// From when the stage is free.
    free: f64,
    /// From when the exchanges are over that kernels wait for.
    exchanged: f64,
    /// From when what it sends has arrived, if another stage receives it.
    passed: Option<f64>,
    /// What comes after the last pass of a stage.
    tail: Option<Window>,
}

impl After {
    /// The rest from where a pass begins whose chain from there this is.
    fn since(&self, chain: &Chain, tail: fn(&Window) -> &Chain) -> f64 {
        let passed = self.passed.map_or(0.0, |passed| chain.passed + passed);
        let exchanged = if chain.exchanged > 0.0 { chain.exchanged + self.exchanged } else { 0.0 };
        let tail = self.tail.as_ref().map_or(0.0, |window| tail(window).over);
        (chain.busy + self.free).max(passed).max(exchanged).max(tail)
    }

    /// The same where what follows from there is not known of all of the chain, but zero of what is not.
    fn since_exchange(&self, chain: &Chain) -> f64 {
        let known = |value: f64, after: f64| if value > 0.0 { value + after } else { 0.0 };
        let passed = self.passed.map_or(0.0, |passed| known(chain.passed, passed));
        let tail = self.tail.as_ref().map_or(0.0, |window| window.exchange.over);
        known(chain.busy, self.free).max(known(chain.exchanged, self.exchanged)).max(passed).max(tail)
    }
}

impl Pieces<'_> {
    /// Of each stage in the order of its passes, how long in picoseconds the step goes on at least after the last kernel of each, where messages
    /// between a stage and the next one round take so much longer than the pieces say. Nothing where the stages wait for each other in a circle.
    pub(crate) fn rests(&self, timetable: &Timetable, longer: &[f64]) -> Option<Vec<Vec<f64>>> {
        let Timetable { schedule, stages, chunks, micro_batches, orders, .. } = timetable;
        let sequence: RefCell<Vec<(usize, Task)>> = RefCell::default();
        let note = |stage: usize, task: &Task, free: u64, _| {
            sequence.borrow_mut().push((stage, *task));
            PassTimes { start: free, free, passed: free }
        };
        pass_starts(*schedule, *stages, *chunks, orders, note)?;
        let mut free: Vec<f64> = (0..*stages).map(|stage| self.after_passes(stage)).collect();
        let mut exchanged = vec![0.0; *stages];
        // From when a micro-batch's pass has what it needs of another stage: of forward passes, and of those back.
        let mut ready = [vec![0.0; stages * chunks * micro_batches], vec![0.0; stages * chunks * micro_batches]];
        let mut rests: Vec<Vec<f64>> = orders.iter().map(|order| vec![0.0; order.len()]).collect();
        let mut left: Vec<usize> = orders.iter().map(Vec::len).collect();
        for (stage, task) in sequence.into_inner().into_iter().rev() {
            let way = usize::from(task.pass != StagePass::Forward);
            let place = |position: usize| position * micro_batches + task.micro_batch;
            let receiver = self.receiver(timetable, stage, &task);
            let passed =
                receiver.map(|(position, other)| ready[way][place(position)] + longer_between(longer, *stages, stage, other));
            let is_last = left[stage] == orders[stage].len();
            let tail = is_last.then(|| self.of(stage, task.chunk).tail);
            let after = After { free: free[stage], exchanged: exchanged[stage], passed, tail };
            left[stage] -= 1;
            rests[stage][left[stage]] = after.free;
            let own = self.window(stage, &task);
            free[stage] = after.since(&own.free, |tail| &tail.free);
            exchanged[stage] = after.exchanged.max(after.since_exchange(&own.exchange));
            if task.pass != StagePass::WeightGradient {
                ready[way][place(schedule.position(*stages, stage, task.chunk))] =
                    after.since(&own.arrival, |tail| &tail.arrival);
            }
        }
        Some(rests)
    }
}

/// How much longer than pieces say a message takes between two stages that follow each other, the last and the first included.
pub(crate) fn longer_between(longer: &[f64], stages: usize, stage: usize, other: usize) -> f64 {
    let first = if (stage + 1) % stages == other { stage } else { other };
    longer.get(first).copied().unwrap_or(0.0)
}

/// Of a stage's list the last kernel of each pass, and what the step takes at least after it and beside its instructions, of which `rests` says how much it
/// is after each pass. Nothing if the list's passes are not these.
fn after_kernels(list: &StageProgram, order: &[Task], rests: &[f64], beside: f64, rounding: f64) -> Vec<(u32, Picoseconds)> {
    if !list.passes.iter().map(|pass| &pass.task).eq(order) {
        return Vec::new();
    }
    let is_kernel = |&index: &u32| list.streams[list.instructions[index as usize].stream.0 as usize] == Stream::Compute;
    let after = list.passes.iter().zip(rests).filter_map(|(pass, rest)| {
        let last = pass.instructions.clone().rev().find(is_kernel)?;
        Some((last, Picoseconds(((rest + beside) * rounding).max(0.0) as u64)))
    });
    let mut after: Vec<(u32, Picoseconds)> = after.collect();
    after.sort_unstable();
    after
}
