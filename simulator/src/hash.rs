//! A hash for keys of our own making that are looked up once an instruction: a multiplication and a rotation a word (as in rustc's `FxHasher`),
//! where the standard library's withstands keys that somebody chose in order to collide. Maps with it are only looked up, never walked through.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map from such keys.
pub(crate) type FastMap<Key, Value> = HashMap<Key, Value, BuildHasherDefault<FastHasher>>;

/// The state of one hash.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FastHasher(u64);

impl FastHasher {
    fn add(&mut self, word: u64) {
        // The multiplier is 2^64 over the golden ratio, made odd.
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

impl Hasher for FastHasher {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.add(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, number: u8) {
        self.add(number.into());
    }

    fn write_u32(&mut self, number: u32) {
        self.add(number.into());
    }

    fn write_u64(&mut self, number: u64) {
        self.add(number);
    }

    fn write_usize(&mut self, number: usize) {
        self.add(number as u64);
    }

    fn finish(&self) -> u64 {
        // The low bits choose the place, and a product's are its worst.
        self.0 ^ (self.0 >> 32)
    }
}
