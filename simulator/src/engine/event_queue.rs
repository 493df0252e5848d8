//! The event queue: which event comes next, and when. It knows nothing about what is simulated.
//!
//! Events of one instant come out in the order in which they were scheduled, so every run of a
//! simulation is the same.
//!
//! No event is scheduled before the time of the last one that came out. So the events need no total
//! order: a radix heap (Ahuja, Mehlhorn, Orlin and Tarjan 1990) keeps them in one list for each
//! highest bit in which their time differs from the current base. Events of the current instant are
//! a list that is read from the front, which is the common case when equivalent ranks act at the
//! same instants. Other events are moved to lower lists, a whole list at once and sequentially in
//! memory. Nothing is allocated once the lists have reached their largest size.

use foretell_units::Picoseconds;

/// Pending events, and the time of the last event that came out.
#[derive(Debug)]
pub struct EventQueue<Event> {
    /// Events at time `base`. Events from index `next` on are pending.
    current: Vec<Event>,
    next: usize,
    /// Indexed by the highest bit in which an event's time differs from `base`.
    lists: [Vec<Entry<Event>>; BITS],
    /// The earliest time of each list; the maximum if the list is empty.
    earliest: [Picoseconds; BITS],
    /// A bit for each list that has events.
    filled: u64,
    now: Picoseconds,
    /// The time from which the lists are computed: `now`, or a later time before which no event is
    /// pending.
    base: Picoseconds,
    /// The list that is being redistributed; kept to reuse its allocation.
    moving: Vec<Entry<Event>>,
    handled: u64,
}

#[derive(Clone, Copy, Debug)]
struct Entry<Event> {
    time: Picoseconds,
    event: Event,
}

impl<Event: Copy> Default for EventQueue<Event> {
    fn default() -> Self {
        Self::new()
    }
}

/// Bits of a time.
const BITS: usize = u64::BITS as usize;

impl<Event: Copy> EventQueue<Event> {
    /// An empty queue at time zero.
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

    /// The time of the last event that came out.
    pub fn now(&self) -> Picoseconds {
        self.now
    }

    /// Number of events that have come out.
    pub fn handled(&self) -> u64 {
        self.handled
    }

    /// Schedules an event. A time in the past counts as now.
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

    /// The time of the next event.
    pub fn next_time(&self) -> Option<Picoseconds> {
        if self.next < self.current.len() {
            return Some(self.base);
        }
        // Events in lower lists are earlier.
        self.earliest.get(self.filled.trailing_zeros() as usize).copied()
    }

    /// Takes the next event out and advances the time to it.
    pub fn pop(&mut self) -> Option<Event> {
        self.pop_with_preview(|_| ())
    }

    /// Like [`Self::pop`], but first calls `preview` with some of the next events, in no particular
    /// order, so that the caller can prefetch their data.
    pub fn pop_with_preview(&mut self, preview: impl FnMut(Event)) -> Option<Event> {
        if self.next == self.current.len() {
            self.preview_next_list(preview);
            self.redistribute_next_list()?;
        }
        let event = *self.current.get(self.next)?;
        self.next += 1;
        self.now = self.base;
        self.handled += 1;
        Some(event)
    }

    /// Previews the earliest list, if it is short enough for all of its events to come soon.
    fn preview_next_list(&self, preview: impl FnMut(Event)) {
        // Enough events to overlap many memory accesses, few enough that their data stay in the
        // nearest cache.
        const PREVIEWED: std::ops::RangeInclusive<usize> = 2..=24;
        let list = self.lists.get(self.filled.trailing_zeros() as usize);
        let list = list.filter(|list| PREVIEWED.contains(&list.len()));
        list.into_iter().flatten().map(|entry| entry.event).for_each(preview);
    }

    /// Makes the earliest pending time the base, and redistributes the list that it was in relative
    /// to the new base.
    fn redistribute_next_list(&mut self) -> Option<()> {
        self.current.clear();
        self.next = 0;
        let bit = self.filled.trailing_zeros() as usize;
        self.base = std::mem::replace(self.earliest.get_mut(bit)?, Picoseconds::MAX);
        self.filled &= !(1 << bit);
        std::mem::swap(&mut self.moving, &mut self.lists[bit]);
        for index in 0..self.moving.len() {
            let Entry { time, event } = self.moving[index];
            // In the order of the list, so that events of one instant keep their order.
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
        let order: String = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(order, "abcd");
        assert_eq!((queue.now(), queue.handled()), (Picoseconds(5), 4));
    }

    #[test]
    fn an_event_in_the_past_happens_now() {
        let mut queue = EventQueue::new();
        queue.schedule(Picoseconds(7), 'a');
        queue.pop();
        queue.schedule(Picoseconds(2), 'b');
        assert_eq!(queue.next_time(), Some(Picoseconds(7)));
    }

    proptest! {
        /// Compares with a plain heap of single events while events are scheduled and taken out,
        /// at few instants and at many.
        #[test]
        fn the_queue_agrees_with_a_heap_of_single_events(
            steps in proptest::collection::vec((any::<bool>(), prop_oneof![0u64..12, 0u64..1 << 40]), 1..300),
        ) {
            let mut queue = EventQueue::new();
            let mut heap = BinaryHeap::new();
            let mut now = 0;
            for (number, &(takes, delay)) in steps.iter().enumerate() {
                if takes {
                    let expected: Option<Reverse<(u64, usize)>> = heap.pop();
                    now = expected.map_or(now, |Reverse((time, _))| time);
                    prop_assert_eq!(queue.pop(), expected.map(|Reverse((_, event))| event));
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
