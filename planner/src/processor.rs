//! What a rank's processor has to do in a pass: kernels want all of it, and exchanges that go on beside them some. So kernels that exchanges run beside
//! are over no sooner than the processor has done both.
//!
//! It knows lists of instructions and what each takes of the processor, and no layouts.

use foretell_program::{CollectiveRole, Operation, StageProgram, Stream};
use std::collections::VecDeque;

/// Beginnings that are remembered: those of long ago hardly ever say more than later ones.
const MOST: usize = 8;

/// A processor that goes through the instructions of a pass.
pub(crate) struct Processor {
    /// From when on its work is counted: at the beginning, and whenever a kernel has waited for an exchange, as what the processor could have done in
    /// between is not known. The later ones have come further so far, but the earlier ones count more exchanges.
    since: VecDeque<Since>,
    /// By stream, its exchanges that no kernel has awaited yet.
    exchanges: Vec<VecDeque<Pending>>,
    /// Of each instruction that is an exchange, the last kernel before it: by place in the range.
    roots: Vec<Option<usize>>,
}

#[derive(Clone, Copy)]
struct Since {
    /// The place of the kernel that begins it.
    first: usize,
    /// When all that was counted is done.
    over: f64,
}

#[derive(Clone, Copy)]
struct Pending {
    place: usize,
    root: usize,
    work: f64,
}

impl Processor {
    pub(crate) fn new(streams: usize) -> Self {
        let beginning = Since { first: 0, over: 0.0 };
        Self { since: VecDeque::from([beginning]), exchanges: vec![VecDeque::new(); streams], roots: Vec::new() }
    }

    /// Goes on with a kernel that begins no sooner than `start`, and `waits` until then; when the processor is done with it at the soonest. `first` is the
    /// range's first instruction.
    pub(crate) fn kernel(
        &mut self,
        list: &StageProgram,
        first: usize,
        index: usize,
        start: f64,
        duration: f64,
        waits: bool,
    ) -> f64 {
        let place = index - first;
        let Self { since, exchanges, .. } = self;
        for before in list.instructions[index].after.iter().filter_map(|one| (one.0 as usize).checked_sub(first)) {
            let stream = list.instructions[first + before].stream.0 as usize;
            // What an exchange comes after in its stream is over, too.
            while let Some(pending) = exchanges[stream].front().copied().filter(|pending| pending.place <= before) {
                exchanges[stream].pop_front();
                since.iter_mut().filter(|one| one.first <= pending.root).for_each(|one| one.over += pending.work);
            }
        }
        if waits {
            since.push_back(Since { first: place, over: start });
        }
        since.iter_mut().for_each(|one| one.over += duration);
        let mut most = f64::NEG_INFINITY;
        since.retain(|one| {
            let says_more = one.over > most;
            most = most.max(one.over);
            says_more
        });
        if since.len() > MOST {
            since.pop_front();
        }
        most
    }

    /// Goes on with an exchange that takes so much of the processor.
    pub(crate) fn exchange(&mut self, list: &StageProgram, first: usize, index: usize, work: f64) {
        // Gradients and parameters are exchanged in buckets, which a longer model may share out otherwise.
        let is_meant = matches!(
            *list.instructions[index].operation,
            Operation::Collective { role: CollectiveRole::Tensor | CollectiveRole::Context | CollectiveRole::Expert, .. }
        );
        if !is_meant {
            return;
        }
        let instruction = &list.instructions[index];
        let is_kernel = |place: usize| {
            let stream = list.instructions[first + place].stream;
            list.streams[stream.0 as usize] == Stream::Compute
        };
        let places = instruction.after.iter().filter_map(|one| (one.0 as usize).checked_sub(first));
        let root_of = |place: usize| if is_kernel(place) { Some(place) } else { self.roots.get(place).copied().flatten() };
        let root = places.filter_map(root_of).max().unwrap_or(0);
        let place = index - first;
        self.roots.resize(place + 1, None);
        self.roots[place] = Some(root);
        if work > 0.0 {
            self.exchanges[instruction.stream.0 as usize].push_back(Pending { place, root, work });
        }
    }
}
