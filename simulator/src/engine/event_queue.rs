//! The event queue: what happens next, and when. It knows nothing of what it simulates.
//!
//! Events at the same instant come out in the order in which they were put in, so that a simulation is the same every time.
//!
//! Nothing is ever put in before what came out last. So events need not be in order, only sorted by the highest bit in which their time differs
//! from that: a radix heap (Ahuja, Mehlhorn, Orlin and Tarjan 1990). Those of this instant are a list that is read from the front, which is all
//! there is to do where ranks that do alike do so at the same instants; the others move to a lower list now and then, all of a list at once and
//! one after the other in memory. Nothing is allocated once the lists have been as long as they get.

use foretell_units::Picoseconds;

/// Events yet to come, and the time of the last that came.
#[derive(Debug)]
pub struct EventQueue<Event> {
    /// Of this instant, those from `next` on.
    current: Vec<Event>,
    next: usize,
    /// Those whose time differs from `base` first in this bit.
    lists: [Vec<Entry<Event>>; BITS],
    /// The earliest time of each list.
    earliest: [Picoseconds; BITS],
    /// Which lists have any, bit by bit.
    filled: u64,
    now: Picoseconds,
    /// The instant by which events are sorted: that of the last that came, or a later one before which there are none.
    base: Picoseconds,
    /// Room for a list while it is sorted.
    moving: Vec<Entry<Event>>,
    handled: u64,
}

#[derive(Clone, Copy, Debug)]
struct Entry<Event> {
    time: Picoseconds,
    event: Event,
}

/// Of a time.
const BITS: usize = u64::BITS as usize;

impl<Event: Copy> EventQueue<Event> {
    /// An empty queue at the start of time.
    pub fn new() -> Self {
        Self {
            current: Vec::new(),
            next: 0,
            lists: std::array::from_fn(|_| Vec::new()),
            earliest: [Picoseconds::MAX; BITS],
            filled: 0,
            now: Picoseconds::ZERO,
            base: Picoseconds::ZERO,
            moving: Vec::new(),
            handled: 0,
        }
    }

    /// The time of the last event that was taken out.
    pub fn now(&self) -> Picoseconds {
        self.now
    }

    /// How many events have been taken out.
    pub fn handled(&self) -> u64 {
        self.handled
    }

    /// Puts an event in. One that would lie in the past happens now.
    pub fn schedule(&mut self, time: Picoseconds, event: Event) {
        let time = time.max(self.now);
        match time.0 ^ self.base.0 {
            0 => self.current.push(event),
            difference => {
                let bit = difference.ilog2() as usize;
                self.lists[bit].push(Entry { time, event });
                self.earliest[bit] = self.earliest[bit].min(time);
                self.filled |= 1 << bit;
            }
        }
    }

    /// When the next event is due.
    pub fn next_time(&self) -> Option<Picoseconds> {
        if self.next < self.current.len() {
            return Some(self.base);
        }
        // Those in lower lists are earlier.
        self.earliest.get(self.filled.trailing_zeros() as usize).copied()
    }

    /// Takes the next event out and moves the time to it.
    pub fn next(&mut self) -> Option<Event> {
        self.next_showing(|_| ())
    }

    /// The same. Now and then `soon` is shown some that come soon after, in no order.
    pub fn next_showing(&mut self, soon: impl FnMut(Event)) -> Option<Event> {
        if self.next == self.current.len() {
            self.show_next_list(soon);
            self.sort_next_list()?;
        }
        let event = *self.current.get(self.next)?;
        self.next += 1;
        self.now = self.base;
        self.handled += 1;
        Some(event)
    }

    /// Shows the earliest list, if it is one of which all come soon.
    fn show_next_list(&self, soon: impl FnMut(Event)) {
        // Enough for memory to answer many at once, few enough to stay in the nearest cache until they come.
        const SHOWN: std::ops::RangeInclusive<usize> = 2..=24;
        let list = self.lists.get(self.filled.trailing_zeros() as usize);
        let list = list.filter(|list| SHOWN.contains(&list.len()));
        list.into_iter().flatten().map(|entry| entry.event).for_each(soon);
    }

    /// Sorts the earliest list by its earliest time, whose events come next.
    fn sort_next_list(&mut self) -> Option<()> {
        self.current.clear();
        self.next = 0;
        let bit = self.filled.trailing_zeros() as usize;
        self.base = std::mem::replace(self.earliest.get_mut(bit)?, Picoseconds::MAX);
        self.filled &= !(1 << bit);
        std::mem::swap(&mut self.moving, &mut self.lists[bit]);
        for index in 0..self.moving.len() {
            let Entry { time, event } = self.moving[index];
            // In the order of the list, so that those of one instant stay as they came.
            self.schedule(time, event);
        }
        self.moving.clear();
        std::mem::swap(&mut self.moving, &mut self.lists[bit]);
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::cmp::Reverse;
    use std::collections::BinaryHeap;

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
            steps in proptest::collection::vec((any::<bool>(), prop_oneof![0u64..12, 0u64..1 << 40]), 1..300),
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
