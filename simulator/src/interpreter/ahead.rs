//! The part of the interpreter that takes a rank ahead of the event queue: while all that a rank does follows from itself, block after block with one at a
//! time, when each begins and ends is a sum. So it is worked out at once, and one event stands for all of them.
//!
//! Such a block is a kernel on an idle processor, or a collective that only this rank has to reach (those that are folded onto it do as it does) and that
//! loads no link; or a pair of the two beside each other ([`super::pair`]). Which comes next is known from the list ([`crate::certain`]). Nothing of the
//! rank changes before its event. Whoever meets it sooner has it caught up first: what is over by then is noted, and what goes on goes on as
//! any other.
//! It must not know what others do.

use super::pair::Pair;
use super::{Alone, Event, Exchange, Interpreter, Lone, Progress, Task};
use crate::code::{Follows, NO_SLOT, Use};
use crate::lists::Step;
use foretell_units::Picoseconds;

/// Which ranks have been taken ahead, and through what.
#[derive(Debug)]
pub(super) struct Ahead {
    is_allowed: bool,
    /// By rank: its way, or [`NONE`].
    of_rank: Vec<u32>,
    /// The blocks that each will have passed; a pair is left out, since it follows from what is before it.
    ways: Vec<Vec<Passed>>,
    free: Vec<u32>,
    /// How many blocks have ended so that took no event.
    pub(super) passed: u64,
}

/// A block through which a rank was taken ahead.
#[derive(Clone, Copy, Debug)]
pub(super) struct Passed {
    pub(super) block: u32,
    pub(super) start: Picoseconds,
    pub(super) end: Picoseconds,
}

/// Where a rank is that was taken ahead.
enum Stopped {
    At(Passed),
    Within(Pair),
}

const NONE: u32 = u32::MAX;

/// Through how many blocks at once: enough that the event which they take is nothing, few enough that little is lost when someone comes.
const MOST: usize = 256;

impl Ahead {
    pub(super) fn new(ranks: usize, is_allowed: bool) -> Self {
        Self { is_allowed, of_rank: vec![NONE; ranks], ways: Vec::new(), free: Vec::new(), passed: 0 }
    }

    /// Has nobody go ahead, and says whether anybody might.
    pub(super) fn forbid(&mut self) -> bool {
        std::mem::replace(&mut self.is_allowed, false)
    }

    /// Has it be as it was.
    pub(super) fn allow(&mut self, is_allowed: bool) {
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
        let first = Passed { block, start, end: start + duration };
        let Some(mut last) = self.after(rank, &first) else { return false };
        let place = self.ahead.take_way();
        let mut way = std::mem::take(&mut self.ahead.ways[place as usize]);
        way.extend([first, last]);
        while way.len() < MOST
            && let Some(next) = self.after(rank, &last)
        {
            last = next;
            way.push(last);
        }
        self.ahead.ways[place as usize] = way;
        self.ahead.of_rank[rank as usize] = place;
        let processor = self.processor_of(rank);
        let state = &mut self.processors[processor];
        state.alone = Some(Alone { owner: Lone::Ahead(rank), end: last.end });
        self.queue.schedule(last.end, Event::Ahead { rank, generation: state.generation });
        true
    }

    /// What a rank that is by itself does after a block, if that follows from it: at once, or after a pair.
    fn after(&self, rank: u32, passed: &Passed) -> Option<Passed> {
        let state = &self.ranks[rank as usize];
        if state.work[passed.block as usize].host_waits {
            return None;
        }
        let (next, start) = match state.code.follows(passed.block) {
            Follows::Nothing => return None,
            Follows::Block(next) => (next, self.start_after(rank, next, &[*passed])),
            Follows::Fork(fork) => {
                let pair = self.pair(rank, passed, fork)?;
                (fork.join, self.start_after(rank, fork.join, &[pair.kernel, pair.exchange]))
            }
        };
        let duration = self.duration_alone(Task { rank, block: next })?;
        Some(Passed { block: next, start, end: start + duration })
    }

    /// The pair between a block and the one after it, if there is one.
    fn pair_after(&self, rank: u32, passed: &Passed) -> Option<Pair> {
        match self.ranks[rank as usize].code.follows(passed.block) {
            Follows::Fork(fork) => self.pair(rank, passed, fork),
            Follows::Nothing | Follows::Block(_) => None,
        }
    }

    /// When a block begins that waits for the last of some.
    pub(super) fn start_after(&self, rank: u32, next: u32, before: &[Passed]) -> Picoseconds {
        let state = &self.ranks[rank as usize];
        let stream = |block: u32| state.code.blocks[block as usize].stream;
        let launched = if state.has_launches { state.work[next as usize].launched + state.behind } else { Picoseconds::ZERO };
        let own = stream(next);
        let ends = before.iter().map(|one| if stream(one.block) == own { one.end } else { one.end + state.handoff });
        ends.fold(launched, Picoseconds::max)
    }

    /// How long a block takes that meets nobody, where it is one that can.
    pub(super) fn duration_alone(&self, task: Task) -> Option<Picoseconds> {
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
    pub(super) fn exchange_of(&self, task: Task) -> Option<Exchange> {
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
        let Some(Stopped::At(last)) = self.stop_ahead(rank, Picoseconds::MAX) else { return };
        let task = Task { rank, block: last.block };
        let counts_as = self.note_start(task, last.start);
        self.mark_alone_if_kernel(task, last.end);
        if counts_as == Use::Communication {
            self.ranks[rank as usize].meter.end(counts_as, last.end);
        }
        self.finish(task);
    }

    /// Has a rank be where it is now, if it was taken ahead, for someone who meets it.
    pub(super) fn catch_up(&mut self, rank: u32) {
        if self.ahead.of_rank[rank as usize] == NONE {
            return;
        }
        match self.stop_ahead(rank, self.queue.now()) {
            Some(Stopped::At(passed)) => self.go_on(rank, &passed),
            Some(Stopped::Within(pair)) => self.go_on_within(rank, &pair),
            None => {}
        }
    }

    /// Has a block that is next go on as any other.
    fn go_on(&mut self, rank: u32, passed: &Passed) {
        let Passed { block, start, end } = *passed;
        let task = Task { rank, block };
        if start > self.queue.now() {
            return self.begin_again(task);
        }
        let place = self.place_of(task);
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

    /// Has a block begin, in its time, that has not yet.
    pub(super) fn begin_again(&mut self, task: Task) {
        let (place, stream) = (self.place_of(task), self.block(task).stream);
        self.progress[place] = Progress::at(task.block);
        // It would go ahead again.
        let may_go_ahead = self.ahead.forbid();
        self.look_at(task.rank, stream);
        self.ahead.allow(may_go_ahead);
    }

    /// Where the progress of a block's stream is.
    pub(super) fn place_of(&self, task: Task) -> usize {
        self.ranks[task.rank as usize].first_stream as usize + self.block(task).stream as usize
    }

    /// Has a rank go ahead no more: notes what is over by a time, but for the last block, whose end is an event, and returns what goes on then.
    fn stop_ahead(&mut self, rank: u32, time: Picoseconds) -> Option<Stopped> {
        let place = std::mem::replace(&mut self.ahead.of_rank[rank as usize], NONE) as usize;
        let mut way = std::mem::take(self.ahead.ways.get_mut(place)?);
        let processor = self.processor_of(rank);
        let state = &mut self.processors[processor];
        state.alone = None;
        state.generation += 1;
        let mut stopped = None;
        for passed in way.split_last().map_or(&[][..], |(_, before)| before) {
            if passed.end > time {
                stopped = Some(Stopped::At(*passed));
                break;
            }
            self.note(rank, passed);
            if let Some(pair) = self.pair_after(rank, passed) {
                if pair.end() > time {
                    stopped = Some(Stopped::Within(pair));
                    break;
                }
                self.note_pair(rank, &pair);
            }
        }
        let stopped = stopped.or_else(|| way.last().map(|&last| Stopped::At(last)));
        way.clear();
        self.ahead.ways[place] = way;
        self.ahead.free.push(place as u32);
        stopped
    }

    /// Notes all of a block that is over.
    fn note(&mut self, rank: u32, passed: &Passed) {
        let task = Task { rank, block: passed.block };
        let block = self.block(task);
        let state = &mut self.ranks[rank as usize];
        state.meter.pass(block.counts_as, passed.start, passed.end);
        if let Some(recorder) = &mut self.recorder {
            recorder.begin(rank, state.code, block, passed.start);
            self.mark_alone_if_kernel(task, passed.end);
        }
        self.note_end(task, passed.end);
    }

    /// Notes a block's end.
    pub(super) fn note_end(&mut self, task: Task, end: Picoseconds) {
        let block = self.block(task);
        let state = &mut self.ranks[task.rank as usize];
        state.end = end;
        self.progress[state.first_stream as usize + block.stream as usize] = Progress::at(task.block + 1);
        if block.slot != NO_SLOT {
            self.ends[(state.first_slot + block.slot) as usize] = end;
        }
        if let Some(recorder) = &mut self.recorder {
            recorder.end(task.rank, state.code, block, end);
        }
        self.unfinished -= block.places().len();
        self.ahead.passed += 1;
        self.note_rest(task, end);
    }

    /// Notes a block's start, and returns what it counts as.
    pub(super) fn note_start(&mut self, task: Task, start: Picoseconds) -> Use {
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
            self.mark_alone(task, end, self.queue.now());
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
            let stacked = plain.clone().with_stack(&topology, plan.stack.name(), plan.unstated_format()).expect("a known stack");
            for (costs, folding) in [(&plain, Folding::On), (&stacked, Folding::On), (&plain, Folding::Off)] {
                let options = Options { folding, ..Options::default() };
                let lowered = lower(&program, &topology, costs, &options, &[]).expect("it fits");
                let paces: Vec<f64> = (0..program.mesh.world_size()).map(|rank| 1.0 + 0.01 * (rank % 3) as f64).collect();
                let paces = if folding == Folding::On { Vec::new() } else { paces };
                let run = |pacing| {
                    let recording = Recording::Spans;
                    let scenario =
                        Scenario { quantile: Quantile::P90, recording, paces: paces.clone(), pacing, ..Scenario::default() };
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
