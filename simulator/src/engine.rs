//! The event queue: what happens next, and when. It knows nothing of what it simulates.
//!
//! Events at the same instant come out in the order in which they were put in, so that a simulation is the same every time.
//!
//! Ranks that do alike do so at the same instants. So events are kept in lists of one instant each, and the heap orders the lists: what
//! joins a list that was joined a moment ago costs no more than a link. Nothing is allocated once the queue has been as long as it gets.

use foretell_units::Picoseconds;
use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// Events yet to come, and the time of the last that came.
#[derive(Debug)]
pub(crate) struct EventQueue<Event> {
    lists: BinaryHeap<Reverse<List>>,
    nodes: Vec<Node<Event>>,
    /// The first node that is free, if one is.
    free: u32,
    /// The next node of the list of this instant.
    current: u32,
    /// Lists that were joined last. One that is no longer among them is not joined again, so that of two lists of one instant the later one
    /// has the later events.
    recent: [Recent; RECENT],
    /// Which of them gives way next.
    oldest: usize,
    now: Picoseconds,
    lists_made: u64,
    handled: u64,
}

/// Events of one instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct List {
    time: Picoseconds,
    sequence: u64,
    first: u32,
}

#[derive(Clone, Copy, Debug)]
struct Recent {
    time: Picoseconds,
    last: u32,
}

#[derive(Clone, Copy, Debug)]
struct Node<Event> {
    event: Event,
    next: u32,
}

/// No node.
const NONE: u32 = u32::MAX;

/// How many lists can be joined. Few, as each new event is compared with all of them; enough for the kinds of things that a group of ranks
/// does at once.
const RECENT: usize = 4;

impl<Event: Copy> EventQueue<Event> {
    /// An empty queue at the start of time.
    pub(crate) fn new() -> Self {
        Self {
            lists: BinaryHeap::new(),
            nodes: Vec::new(),
            free: NONE,
            current: NONE,
            recent: [Recent { time: Picoseconds::ZERO, last: NONE }; RECENT],
            oldest: 0,
            now: Picoseconds::ZERO,
            lists_made: 0,
            handled: 0,
        }
    }

    /// The time of the last event that was taken out.
    pub(crate) fn now(&self) -> Picoseconds {
        self.now
    }

    /// How many events have been taken out.
    pub(crate) fn handled(&self) -> u64 {
        self.handled
    }

    /// Puts an event in. One that would lie in the past happens now.
    pub(crate) fn schedule(&mut self, time: Picoseconds, event: Event) {
        let time = time.max(self.now);
        let node = self.take_node(event);
        if let Some(recent) = self.recent.iter_mut().find(|recent| recent.time == time && recent.last != NONE) {
            self.nodes[recent.last as usize].next = node;
            recent.last = node;
            return;
        }
        self.lists.push(Reverse(List { time, sequence: self.lists_made, first: node }));
        self.lists_made += 1;
        self.recent[self.oldest] = Recent { time, last: node };
        self.oldest = (self.oldest + 1) % RECENT;
    }

    /// When the next event is due.
    pub(crate) fn next_time(&self) -> Option<Picoseconds> {
        if self.current != NONE { Some(self.now) } else { self.lists.peek().map(|Reverse(list)| list.time) }
    }

    /// Takes the next event out and moves the time to it.
    pub(crate) fn next(&mut self) -> Option<Event> {
        if self.current == NONE {
            let Reverse(list) = self.lists.pop()?;
            self.now = list.time;
            self.current = list.first;
        }
        let taken = self.current;
        let Node { event, next } = self.nodes[taken as usize];
        self.current = next;
        if next == NONE {
            // Whoever comes now has nothing to join.
            for recent in &mut self.recent {
                if recent.last == taken {
                    recent.last = NONE;
                }
            }
        }
        self.nodes[taken as usize].next = self.free;
        self.free = taken;
        self.handled += 1;
        Some(event)
    }

    fn take_node(&mut self, event: Event) -> u32 {
        let node = Node { event, next: NONE };
        if self.free == NONE {
            self.nodes.push(node);
            return self.nodes.len() as u32 - 1;
        }
        let taken = self.free;
        self.free = self.nodes[taken as usize].next;
        self.nodes[taken as usize] = node;
        taken
    }
}

impl PartialOrd for List {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for List {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.time, self.sequence).cmp(&(other.time, other.sequence))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn events_come_in_order_of_time_and_then_of_arrival() {
        let mut queue = EventQueue::new();
        for (time, event) in [(5, 'c'), (3, 'a'), (5, 'd'), (3, 'b')] {
            queue.schedule(Picoseconds(time), event);
        }
        let order: String = std::iter::from_fn(|| queue.next()).collect();
        assert_eq!(order, "abcd");
        assert_eq!((queue.now(), queue.handled()), (Picoseconds(5), 4));
    }

    #[test]
    fn the_past_is_now() {
        let mut queue = EventQueue::new();
        queue.schedule(Picoseconds(7), 'a');
        queue.next();
        queue.schedule(Picoseconds(2), 'b');
        assert_eq!(queue.next_time(), Some(Picoseconds(7)));
    }

    proptest! {
        /// Against a plain heap of single events: what is put in while others are taken out, at few instants and at many.
        #[test]
        fn it_agrees_with_a_heap_of_single_events(
            steps in proptest::collection::vec((any::<bool>(), 0u64..12), 1..300),
        ) {
            let mut queue = EventQueue::new();
            let mut heap = BinaryHeap::new();
            let mut now = 0;
            for (number, &(takes, delay)) in steps.iter().enumerate() {
                if takes {
                    let expected: Option<Reverse<(u64, usize)>> = heap.pop();
                    now = expected.map_or(now, |Reverse((time, _))| time);
                    prop_assert_eq!(queue.next(), expected.map(|Reverse((_, event))| event));
                    prop_assert_eq!(queue.now(), Picoseconds(now));
                } else {
                    queue.schedule(Picoseconds(now + delay), number);
                    heap.push(Reverse((now + delay, number)));
                }
                prop_assert_eq!(queue.next_time(), heap.peek().map(|Reverse((time, _))| Picoseconds(*time)));
            }
        }
    }
}
