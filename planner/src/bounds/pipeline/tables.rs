//! Cuts, in-flight counts and timetables, each computed once and kept.

use super::cuts::PipelineCuts;
use super::in_flight::InFlight;
use super::timetable::Timetable;
use crate::bounds::memo::Memo;
use crate::space::BlockPattern;
use foretell_program::{Layout, Recompute, Schedule};
use std::sync::Arc;

/// Schedule, stages, micro-batches, and chunks of each stage.
type Shape = (Schedule, usize, usize, usize);

/// Cuts, in-flight counts and timetables of pipelines, keyed by what they depend on.
pub(in crate::bounds) struct PipelineTables {
    /// Keyed by stages and chunks of each stage.
    usual_cuts: Memo<(usize, usize), Arc<PipelineCuts>>,
    timetables: Memo<Shape, Arc<Timetable>>,
    in_flight: Memo<Shape, Arc<InFlight>>,
}

impl PipelineTables {
    pub(in crate::bounds) fn new() -> Self {
        Self { usual_cuts: Memo::new(), timetables: Memo::new(), in_flight: Memo::new() }
    }

    /// Returns a layout's cuts of a model's blocks, with the blocks that it recomputes.
    pub(in crate::bounds) fn cuts(&self, layout: &Layout, work: &[f64], pattern: &BlockPattern) -> Arc<PipelineCuts> {
        let (stages, chunks) = (layout.pipeline, layout.virtual_stages);
        let cuts = match &layout.cuts {
            Some(cuts) => Arc::new(PipelineCuts::new(cuts, pattern)),
            None => self.usual_cuts.get((stages, chunks), || Arc::new(PipelineCuts::usual(work, stages, chunks, pattern))),
        };
        match &layout.recompute {
            Recompute::FullLayers(layers) => Arc::new(cuts.recomputing(vec![*layers; stages], layout.schedule)),
            Recompute::FullLayersOfStages(layers) if layers.len() == stages => {
                Arc::new(cuts.recomputing(layers.clone(), layout.schedule))
            }
            Recompute::FullLayersOfStages(_) => unreachable!("invariant: each stage has its number of layers"),
            Recompute::None | Recompute::Selective | Recompute::Full | Recompute::AllBut(_) => cuts,
        }
    }

    /// Returns a lower bound on the micro-batches that a layout's stages hold at once.
    pub(in crate::bounds) fn in_flight(&self, layout: &Layout, micro_batches: usize) -> Arc<InFlight> {
        let (schedule, stages, chunks) = (layout.schedule, layout.pipeline, layout.virtual_stages);
        let micro_batches = schedule.equivalent_micro_batches(stages, micro_batches);
        let key = (schedule, stages, micro_batches, chunks);
        self.in_flight.get(key, || Arc::new(InFlight::lower_bound(schedule, stages, micro_batches, chunks)))
    }

    pub(in crate::bounds) fn timetable(&self, layout: &Layout, micro_batches: usize) -> Arc<Timetable> {
        let (schedule, stages, chunks) = (layout.schedule, layout.pipeline, layout.virtual_stages);
        let key = (schedule, stages, micro_batches, chunks);
        self.timetables.get(key, || Arc::new(Timetable::new(schedule, stages, micro_batches, chunks)))
    }
}
