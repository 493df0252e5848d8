//! When each of some things is due, where that changes often: a heap in which every thing stands
//! once and is moved when its time changes, so that nothing outdated has to be taken out later. It
//! knows nothing of what is due.

use foretell_units::Picoseconds;

/// Things by the time at which they are due, of equal ones the lower number first.
#[derive(Debug, Default)]
pub struct Deadlines {
    /// Each entry is due no later than those at four times its place and one to four more.
    heap: Vec<(Picoseconds, u32)>,
    /// Where each thing stands in the heap.
    place: Vec<u32>,
}

/// Children of an entry: with four a heap is half as deep as with two, and they lie in one or two
/// cache lines.
const WIDTH: usize = 4;

/// The place of what is not in the heap.
const NOWHERE: u32 = u32::MAX;

impl Deadlines {
    /// What is due first, and when.
    pub fn first(&self) -> Option<(Picoseconds, u32)> {
        self.heap.first().copied()
    }

    /// Says when a thing is due, whether or not that was known before.
    pub fn set(&mut self, thing: u32, time: Picoseconds) {
        if self.place.len() <= thing as usize {
            self.place.resize(thing as usize + 1, NOWHERE);
        }
        let mut place = self.place[thing as usize] as usize;
        if place == NOWHERE as usize {
            place = self.heap.len();
            self.heap.push((time, thing));
        }
        self.put(place, (time, thing));
    }

    /// Takes a thing out, if it is there.
    pub fn remove(&mut self, thing: u32) {
        let Some(place) = self.place.get_mut(thing as usize).map(|place| std::mem::replace(place, NOWHERE)) else { return };
        if place == NOWHERE {
            return;
        }
        if let Some(last) = self.heap.pop()
            && last.1 != thing
        {
            self.put(place as usize, last);
        }
    }

    /// Puts an entry where it belongs, beginning at a place that is free.
    fn put(&mut self, mut place: usize, entry: (Picoseconds, u32)) {
        while place > 0 {
            let parent = (place - 1) / WIDTH;
            if self.heap[parent] <= entry {
                break;
            }
            self.move_entry(parent, place);
            place = parent;
        }
        loop {
            let children = WIDTH * place + 1..(WIDTH * place + 1 + WIDTH).min(self.heap.len());
            let Some(least) = children.min_by_key(|&child| self.heap[child]) else { break };
            if entry <= self.heap[least] {
                break;
            }
            self.move_entry(least, place);
            place = least;
        }
        self.heap[place] = entry;
        self.place[entry.1 as usize] = place as u32;
    }

    fn move_entry(&mut self, from: usize, to: usize) {
        let entry = self.heap[from];
        self.heap[to] = entry;
        self.place[entry.1 as usize] = to as u32;
    }
}
