//! The fast path: ranks that are taken ahead of the event queue.
//!
//! The oracle is the test of this folder: it compares the fast path with the interpreter event by event.

mod forced_order;
mod overlapped_pair;
mod run_ahead;
mod vector_clocks;

pub(in crate::engine) use forced_order::ForcedOrder;

use foretell_units::Picoseconds;

/// Which ranks have been taken ahead, and through what.
#[derive(Debug)]
pub(in crate::engine) struct RunAheadState {
    is_allowed: bool,
    /// By rank: its way, or [`NONE`].
    of_rank: Vec<u32>,
    /// The blocks that each will have passed; a pair is left out, since it follows from what is before it.
    ways: Vec<Vec<TimedBlock>>,
    free: Vec<u32>,
    /// How many blocks have ended so that took no event.
    pub(in crate::engine) passed: u64,
}

/// A block through which a rank was taken ahead.
#[derive(Clone, Copy, Debug)]
pub(super) struct TimedBlock {
    pub(super) block: u32,
    pub(super) start: Picoseconds,
    pub(super) end: Picoseconds,
}

const NONE: u32 = u32::MAX;

impl RunAheadState {
    pub(in crate::engine) fn new(ranks: usize, is_allowed: bool) -> Self {
        Self { is_allowed, of_rank: vec![NONE; ranks], ways: Vec::new(), free: Vec::new(), passed: 0 }
    }

    /// Has nobody go ahead, and says whether anybody might.
    pub(in crate::engine) fn forbid(&mut self) -> bool {
        std::mem::replace(&mut self.is_allowed, false)
    }

    /// Has it be as it was.
    pub(in crate::engine) fn allow(&mut self, is_allowed: bool) {
        self.is_allowed = is_allowed;
    }

    /// A way on which nothing is yet.
    fn take_way(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.ways.push(Vec::with_capacity(8));
            self.ways.len() as u32 - 1
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::cost::{CostModel, Quantile};
    use crate::engine::{FastPath, Recording, Runnable, Scenario, interpret};
    use crate::equivalence::{Folding, lower};
    use crate::lowering::Oversubscription;
    use crate::network::Collectives;
    use foretell_models::Model;
    use foretell_program::{Plan, compile_training};
    use foretell_topologies::Topology;

    /// Programs with handoffs and without, whose hosts launch ahead and do not, with ranks folded and each by itself, with kernels that other
    /// streams run beside and that they do not.
    #[test]
    fn ranks_that_are_taken_ahead_do_as_they_would_event_by_event() {
        let model = r#"{"family": "gpt", "layers": 8, "hidden": 512, "heads": 8, "vocab": 8192, "sequence": 256}"#;
        let model: Model = serde_json::from_str(model).expect("a model");
        let layouts = [
            r#""data": 2, "tensor": 8, "pipeline": 2, "micro_batch": 1, "zero": 1, "sequence_parallel": true"#,
            r#""tensor": 8, "pipeline": 4, "micro_batch": 2, "schedule": "interleaved", "virtual_stages": 2, "recompute": "full""#,
            r#""data": 8, "tensor": 2, "pipeline": 2, "micro_batch": 1, "schedule": "zb-h1""#,
            r#""data": 32, "micro_batch": 1, "zero": 3"#,
            r#""tensor": 4, "micro_batch": 8"#,
        ];
        let mut ahead = 0;
        for (layout, stack) in layouts.iter().flat_map(|layout| ["foretell", "megatron-core"].map(|stack| (layout, stack))) {
            let text = format!(
                r#"{{"global_batch": 32, "precision": "bf16", "optimizer": "adam", "stack": "{stack}", "layout": {{{layout}}}}}"#
            );
            let plan: Plan = serde_json::from_str(&text).expect("a plan");
            let program = compile_training(&model, "m", &plan).expect("it can be laid out");
            let topology = Topology::library("dgx-h100").expect("in the library").with_nodes(4).expect("four nodes");
            let plain = CostModel::new(None, &topology);
            let stacked = plain.clone().with_stack(&topology, plan.stack.name(), plan.unstated_format()).expect("a known stack");
            for (costs, folding) in [(&plain, Folding::On), (&stacked, Folding::On), (&plain, Folding::Off)] {
                let modes = (Oversubscription::Refused, Collectives::Flow);
                let lowered = lower(&program, &topology, costs, modes, folding, &[]).expect("it fits");
                let runnable = Runnable::new(lowered);
                let paces: Vec<f64> = (0..program.mesh.world_size()).map(|rank| 1.0 + 0.01 * (rank % 3) as f64).collect();
                let paces = if folding == Folding::On { Vec::new() } else { paces };
                let run = |fast_path| {
                    let recording = Recording::Spans;
                    let scenario =
                        Scenario { quantile: Quantile::P90, recording, paces: paces.clone(), fast_path, ..Scenario::default() };
                    interpret(&runnable, &scenario).expect("it ends")
                };
                let (fast, each) = (run(FastPath::On), run(FastPath::Off));
                // Not with assert_eq, which would print them.
                assert!(fast.timeline == each.timeline, "{layout} of {stack}, folding {folding:?}");
                assert_eq!(fast.breakdowns, each.breakdowns);
                ahead += u32::from(fast.queue_events < each.queue_events);
            }
        }
        assert!(ahead > 10, "only {ahead} were taken ahead");
    }
}
