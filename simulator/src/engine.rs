//! The event queue: what happens next, and when. It knows nothing of what it simulates.
//!
//! Events at the same instant come out in the order in which they were put in, so that a simulation is the same every time.

use foretell_units::Picoseconds;
use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// Events yet to come, and the time of the last that came.
#[derive(Debug)]
pub(crate) struct EventQueue<Event> {
    heap: BinaryHeap<Reverse<Entry<Event>>>,
    now: Picoseconds,
    scheduled: u64,
    handled: u64,
}

#[derive(Debug)]
struct Entry<Event> {
    time: Picoseconds,
    sequence: u64,
    event: Event,
}

impl<Event> EventQueue<Event> {
    /// An empty queue at the start of time.
    pub(crate) fn new() -> Self {
        Self { heap: BinaryHeap::new(), now: Picoseconds::ZERO, scheduled: 0, handled: 0 }
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
        self.heap.push(Reverse(Entry { time, sequence: self.scheduled, event }));
        self.scheduled += 1;
    }

    /// When the next event is due.
    pub(crate) fn next_time(&self) -> Option<Picoseconds> {
        self.heap.peek().map(|Reverse(entry)| entry.time)
    }

    /// Takes the next event out and moves the time to it.
    pub(crate) fn next(&mut self) -> Option<Event> {
        let Reverse(entry) = self.heap.pop()?;
        self.now = entry.time;
        self.handled += 1;
        Some(entry.event)
    }
}

impl<Event> PartialEq for Entry<Event> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<Event> Eq for Entry<Event> {}

impl<Event> PartialOrd for Entry<Event> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<Event> Ord for Entry<Event> {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.time, self.sequence).cmp(&(other.time, other.sequence))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
