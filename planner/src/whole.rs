//! Bounds of layouts of which no short model tells: of the whole Program, or of one micro-batch of it.

use crate::bounds::{Bounds, Verdict};
use crate::request::Request;
use crate::windows::{Held, Kept, kernels, window};
use foretell_program::{Layout, Phase, Plan, StageProgram};
use foretell_simulator::{LeastTimes, Oversubscription, least_times, least_times_on};

impl Bounds<'_> {
    /// Of models that are no stack of equal blocks: all kernels of the fullest stage but for the update, which may be shared out.
    pub(crate) fn of_kernels(&self, layout: &Layout, micro_batches: usize) -> Verdict {
        if !self.space.speeds.is_empty() && layout.pipeline > 1 {
            // Members differ in their cuts, and a stage's devices in their speed.
            return Verdict::Least(0.0);
        }
        match self.kernels_of(&Layout { data: 1, ..layout.clone() }, None) {
            Ok(longest) => self.verdict(layout, micro_batches, longest * micro_batches as f64, 0.0),
            Err(verdict) => verdict,
        }
    }

    /// The kernels of a micro-batch of the fullest stage, but for the update, on a kind of device or on the fastest.
    pub(crate) fn kernels_of(&self, layout: &Layout, kind: Option<usize>) -> Result<f64, Verdict> {
        let Request { topology, costs, base, .. } = *self.request;
        let plan = Plan { layout: layout.clone(), global_batch: layout.samples_at_once(), ..base.clone() };
        let program = self.compiler.unplaced(&plan).map_err(|error| Verdict::Indivisible(error.to_string()))?;
        let alone = match kind {
            Some(kind) => least_times_on(&program, costs, layout.bucket, |_| kind),
            None => least_times(&program, topology, costs, Oversubscription::Allowed, layout.bucket),
        };
        let alone = alone.map_err(|_| Verdict::Least(0.0))?;
        let of_list = |(list, alone): (&StageProgram, &LeastTimes)| {
            let end = list.instructions.iter().position(|one| one.phase == Phase::Update).unwrap_or(list.instructions.len());
            kernels(list, alone, 0..end)
        };
        Ok(program.lists.iter().zip(&alone).map(of_list).fold(0.0, f64::max))
    }

    /// Of such a layout: the longest chain of any rank, and what it keeps from step to step.
    pub(crate) fn of_whole(&self, layout: &Layout, micro_batches: usize) -> Verdict {
        let plan = Plan { layout: layout.clone(), ..self.request.base.clone() };
        let Request { topology, costs, oversubscription, .. } = *self.request;
        let program = match self.compiler.unplaced(&plan) {
            Ok(program) => program,
            Err(error) => return Verdict::Indivisible(error.to_string()),
        };
        let Ok(alone) = least_times(&program, topology, costs, oversubscription, plan.layout.bucket) else {
            return Verdict::Least(0.0);
        };
        // Where there are more ranks than devices they begin again at the first: a group that seems to lie over two nodes may lie in one, and then its
        // exchanges take less than is said.
        let are_where_they_seem = program.mesh.world_size() <= topology.device_count();
        let of_list = |(list, alone): (&StageProgram, &LeastTimes)| match are_where_they_seem {
            true => chain_of(list, alone, &plan),
            false => kernels(list, alone, 0..list.instructions.len()),
        };
        let longest = program.lists.iter().zip(&alone).map(of_list).fold(0.0, f64::max);
        let weights = self.devices.weights_of_lists(&program);
        let held = |(list, weight): (&StageProgram, f64)| (Kept::of(list).total() + Held::of(list).most()) * weight;
        let memory = program.lists.iter().zip(weights).map(held).fold(0.0, f64::max);
        self.verdict(layout, micro_batches, longest, memory)
    }
}

fn chain_of(list: &StageProgram, alone: &LeastTimes, plan: &Plan) -> f64 {
    let all = 0..list.instructions.len() as u32;
    let window = window(list, alone, &plan.overlap, &all);
    window.free.busy.max(window.free.over).max(window.launches)
}
