//! The part of the interpreter that takes a rank ahead of the event queue: while all that a rank does follows from itself, block after block with one at a
//! time, when each begins and ends is a sum. So it is worked out at once, and one event stands for all of them.
//!
//! Such a block is a kernel on an idle processor, or a collective that only this rank has to reach (those that are folded onto it do as it does) and that
//! loads no link. Whoever meets the rank before it is through has it caught up first: what is over by then is noted, the block that goes on
//! goes on as any other, and the rest is forgotten.
//! It must not know what others do.

use super::{Alone, Event, Exchange, Following, Interpreter, Lone, Progress, Task};
use crate::code::{NO_SLOT, Use};
use crate::lists::Step;
use foretell_units::Picoseconds;

/// Which ranks have been taken ahead, and through what.
#[derive(Debug)]
pub(super) struct Ahead {
    is_allowed: bool,
    /// By rank: its log, or [`NONE`].
    of_rank: Vec<u32>,
    logs: Vec<Vec<Passed>>,
    free: Vec<u32>,
    /// How many blocks have ended so that took no event.
    pub(super) passed: u64,
}

/// A block through which a rank was taken ahead.
#[derive(Clone, Copy, Debug)]
struct Passed {
    block: u32,
    start: Picoseconds,
    end: Picoseconds,
    /// What its slot held before.
    slot_before: Picoseconds,
}

const NONE: u32 = u32::MAX;

/// Through how many blocks at once: enough that the event which they take is nothing, few enough that little is lost when someone comes.
const MOST: usize = 64;

impl Ahead {
    pub(super) fn new(ranks: usize, is_allowed: bool) -> Self {
        Self { is_allowed, of_rank: vec![NONE; ranks], logs: Vec::new(), free: Vec::new(), passed: 0 }
    }

    /// Has nobody go ahead, and says whether anybody might.
    pub(super) fn forbid(&mut self) -> bool {
        std::mem::replace(&mut self.is_allowed, false)
    }

    /// Has it be as it was.
    pub(super) fn allow(&mut self, is_allowed: bool) {
        self.is_allowed = is_allowed;
    }

    fn take_log(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.logs.push(Vec::with_capacity(MOST));
            self.logs.len() as u32 - 1
        })
    }
}

impl Interpreter<'_> {
    /// Takes a rank ahead that begins a block now or at a time that is certain, if another follows of itself. Else nothing is done.
    pub(super) fn go_ahead(&mut self, task: Task, start: Picoseconds) -> bool {
        let Task { rank, block } = task;
        // Who else begins now would have it caught up at once.
        if !self.ahead.is_allowed || !self.ready.is_empty() {
            return false;
        }
        let state = &self.ranks[rank as usize];
        if state.interruption > Picoseconds::ZERO || !self.is_idle(state.processor) {
            return false;
        }
        let Some(duration) = self.duration_alone(task) else { return false };
        let mut passed = Passed { block, start, end: start + duration, slot_before: Picoseconds::ZERO };
        let mut log = NONE;
        while let Some(next) = self.pass(rank, &mut passed) {
            if log == NONE {
                log = self.ahead.take_log();
            }
            let entries = &mut self.ahead.logs[log as usize];
            entries.push(passed);
            passed = next;
            if entries.len() + 1 == MOST {
                break;
            }
        }
        if log == NONE {
            return false;
        }
        self.ahead.logs[log as usize].push(passed);
        self.ahead.of_rank[rank as usize] = log;
        let processor = self.processor_of(rank);
        let state = &mut self.processors[processor];
        state.alone = Some(Alone { owner: Lone::Ahead(rank), end: passed.end });
        self.queue.schedule(passed.end, Event::Ahead { rank, generation: state.generation });
        true
    }

    /// Takes a rank past a block and to the one that follows of itself, if one does. Else nothing is done.
    fn pass(&mut self, rank: u32, passed: &mut Passed) -> Option<Passed> {
        let state = &self.ranks[rank as usize];
        let (code, first_stream, first_slot) = (state.code, state.first_stream as usize, state.first_slot as usize);
        if state.work[passed.block as usize].host_waits {
            return None;
        }
        let block = &code.blocks[passed.block as usize];
        let own = first_stream + block.stream as usize;
        self.progress[own] = Progress::at(passed.block + 1);
        if block.slot != NO_SLOT {
            let slot = &mut self.ends[first_slot + block.slot as usize];
            passed.slot_before = std::mem::replace(slot, passed.end);
        }
        let next = match self.following(rank, block, passed.end) {
            Following::One(next, start) => self.duration_alone(Task { rank, block: next }).map(|duration| {
                let end = start + duration;
                Passed { block: next, start, end, slot_before: Picoseconds::ZERO }
            }),
            Following::Nobody | Following::Several => None,
        };
        match &next {
            Some(next) => {
                let stream = code.blocks[next.block as usize].stream as usize;
                self.progress[first_stream + stream] = Progress::at(next.block).busy();
            }
            None => {
                self.take_back(rank, passed);
                self.progress[own] = Progress::at(passed.block).busy();
            }
        }
        next
    }

    /// Undoes that a rank was taken past a block, as if it had not begun.
    fn take_back(&mut self, rank: u32, passed: &Passed) {
        let state = &self.ranks[rank as usize];
        let block = &state.code.blocks[passed.block as usize];
        self.progress[state.first_stream as usize + block.stream as usize] = Progress::at(passed.block);
        if block.slot != NO_SLOT {
            self.ends[(state.first_slot + block.slot) as usize] = passed.slot_before;
        }
    }

    /// How long a block takes that meets nobody, where it is one that can.
    fn duration_alone(&self, task: Task) -> Option<Picoseconds> {
        match self.block(task).step {
            Step::Compute => Some(self.work(task)),
            Step::Collective { .. } => {
                let exchange = self.exchange_of(task)?;
                let group = &self.lowered.groups[exchange.party as usize];
                let price = self.price(exchange);
                (group.members.len() == 1 && price.loads().is_empty()).then(|| price.latency + price.flow)
            }
            Step::Load | Step::Copy | Step::Send { .. } | Step::Receive { .. } => None,
        }
    }

    /// Which collective a block is.
    fn exchange_of(&self, task: Task) -> Option<Exchange> {
        match self.block(task).step {
            Step::Collective { group, nth } => Some(Exchange { party: self.party(task.rank, group), nth }),
            _ => None,
        }
    }

    /// A rank is through all blocks through which it was taken ahead, unless someone came in between.
    pub(super) fn finish_ahead(&mut self, rank: u32, generation: u32) {
        if self.processors[self.processor_of(rank)].generation != generation {
            return;
        }
        let Some((place, log)) = self.stop_ahead(rank) else { return };
        if let Some((&last, before)) = log.split_last() {
            before.iter().for_each(|passed| self.note(rank, passed));
            self.put_back(place, log);
            let task = Task { rank, block: last.block };
            let counts_as = self.note_start(task, last.start);
            self.mark_alone_if_kernel(task, last.end);
            if counts_as == Use::Communication {
                self.ranks[rank as usize].meter.end(counts_as, last.end);
            }
            self.finish(task);
        }
    }

    /// Has a rank be where it is now, if it was taken ahead, for someone who meets it.
    pub(super) fn catch_up(&mut self, rank: u32) {
        if self.ahead.of_rank[rank as usize] == NONE {
            return;
        }
        let Some((place, log)) = self.stop_ahead(rank) else { return };
        let now = self.queue.now();
        // The last is not noted as passed before its event.
        let over = log.partition_point(|passed| passed.end <= now).min(log.len() - 1);
        if let Some((last, before)) = log.split_last() {
            let first_stream = self.ranks[rank as usize].first_stream as usize;
            let stream = self.block(Task { rank, block: last.block }).stream as usize;
            self.progress[first_stream + stream] = Progress::at(last.block);
            before.iter().skip(over).rev().for_each(|passed| self.take_back(rank, passed));
            before.iter().take(over).for_each(|passed| self.note(rank, passed));
        }
        self.go_on(Task { rank, block: log[over].block }, log[over].start, log[over].end);
        self.put_back(place, log);
    }

    /// Has a block that is next go on as any other.
    fn go_on(&mut self, task: Task, start: Picoseconds, end: Picoseconds) {
        let rank = &self.ranks[task.rank as usize];
        let (stream, place) = (self.block(task).stream, rank.first_stream as usize + self.block(task).stream as usize);
        if start > self.queue.now() {
            // It would go ahead again.
            let may_go_ahead = self.ahead.forbid();
            self.look_at(task.rank, stream);
            self.ahead.allow(may_go_ahead);
            return;
        }
        self.progress[place] = Progress::at(task.block).busy();
        self.note_start(task, start);
        match self.exchange_of(task) {
            Some(exchange) if self.price(exchange).shares_nothing => self.queue.schedule(end, Event::Exchanged(exchange)),
            Some(exchange) => self.hold_processors(exchange, end),
            None => {
                let processor = self.processor_of(task.rank);
                let state = &mut self.processors[processor];
                state.alone = Some(Alone { owner: Lone::Task(task), end });
                self.queue.schedule(end, Event::Alone { task, generation: state.generation });
            }
        }
    }

    /// Takes a rank's log away, and the processor from what stood for it.
    fn stop_ahead(&mut self, rank: u32) -> Option<(u32, Vec<Passed>)> {
        let place = std::mem::replace(&mut self.ahead.of_rank[rank as usize], NONE);
        let processor = self.processor_of(rank);
        let state = &mut self.processors[processor];
        state.alone = None;
        state.generation += 1;
        self.ahead.logs.get_mut(place as usize).map(|log| (place, std::mem::take(log)))
    }

    fn put_back(&mut self, place: u32, mut log: Vec<Passed>) {
        log.clear();
        self.ahead.logs[place as usize] = log;
        self.ahead.free.push(place);
    }

    /// Notes all of a block that is over, but for what others could see of it already.
    fn note(&mut self, rank: u32, passed: &Passed) {
        let task = Task { rank, block: passed.block };
        let block = self.block(task);
        let state = &mut self.ranks[rank as usize];
        state.end = passed.end;
        state.meter.pass(block.counts_as, passed.start, passed.end);
        if let Some(recorder) = &mut self.recorder {
            recorder.begin(rank, state.code, block, passed.start);
            recorder.end(rank, state.code, block, passed.end);
            self.mark_alone_if_kernel(task, passed.end);
        }
        self.unfinished -= block.places().len();
        self.ahead.passed += 1;
    }

    /// Notes a block's start, and returns what it counts as.
    fn note_start(&mut self, task: Task, start: Picoseconds) -> Use {
        let block = self.block(task);
        let state = &mut self.ranks[task.rank as usize];
        if let Some(recorder) = &mut self.recorder {
            recorder.begin(task.rank, state.code, block, start);
        }
        state.meter.begin(block.counts_as, start);
        block.counts_as
    }

    fn mark_alone_if_kernel(&mut self, task: Task, end: Picoseconds) {
        if self.recorder.is_some() && matches!(self.block(task).step, Step::Compute) {
            self.mark_alone(task, end);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::cost::CostModel;
    use crate::interpreter::interpret;
    use crate::simulation::{Folding, Options, Pacing, Quantile, Recording, Scenario, lower};
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
            let stacked = plain.clone().with_stack(&topology, plan.stack.name(), plan.precision).expect("a known stack");
            for (costs, folding) in [(&plain, Folding::On), (&stacked, Folding::On), (&plain, Folding::Off)] {
                let options = Options { folding, ..Options::default() };
                let lowered = lower(&program, &topology, costs, &options, &[]).expect("it fits");
                let paces: Vec<f64> = (0..program.mesh.world_size()).map(|rank| 1.0 + 0.01 * (rank % 3) as f64).collect();
                let paces = if folding == Folding::On { Vec::new() } else { paces };
                let run = |pacing| {
                    let recording = Recording::Spans;
                    let scenario = Scenario { quantile: Quantile::P90, recording, paces: paces.clone(), pacing };
                    interpret(&lowered, &scenario).expect("it ends")
                };
                let (fast, each) = (run(Pacing::Ahead), run(Pacing::Each));
                // Not with assert_eq, which would print them.
                assert!(fast.timeline == each.timeline, "{layout} of {stack}, folding {folding:?}");
                assert_eq!(fast.breakdowns, each.breakdowns);
                ahead += u32::from(fast.queue_events < each.queue_events);
            }
        }
        assert!(ahead > 10, "only {ahead} were taken ahead");
    }
}
