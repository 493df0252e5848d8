//! A queue of deadlines that change often. Each entry is in the heap once and moves when its
//! deadline changes, so the heap has no outdated entries.

use foretell_units::Picoseconds;

/// Entries by deadline. Equal deadlines are ordered by number.
#[derive(Debug, Default)]
pub struct Deadlines {
    /// A heap in which the children of position `p` are at `4p + 1` to `4p + 4`.
    heap: Vec<(Picoseconds, u32)>,
    /// Position of each entry in the heap.
    place: Vec<u32>,
}

/// Children per entry. With four, the heap is half as deep as with two, and siblings lie in one or
/// two cache lines.
const WIDTH: usize = 4;

/// Position of an entry that is not in the heap.
const NOWHERE: u32 = u32::MAX;

impl Deadlines {
    /// Returns the earliest deadline and its entry.
    pub fn first(&self) -> Option<(Picoseconds, u32)> {
        self.heap.first().copied()
    }

    /// Sets an entry's deadline, whether it is new or already in the heap.
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

    /// Removes an entry, if present.
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

    /// Moves an entry from a free position to where it belongs.
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
