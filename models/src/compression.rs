//! Formats of few bits for numbers that ranks send to each other: gradients and changes of
//! parameters.
//!
//! A message consists of complete chunks. With [`Compression::Int8`] a chunk is a factor in single
//! precision, then one signed byte for each number. So any number of chunks is a message by itself.
//! The last chunk is filled up with zeros.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The format of numbers that are sent in few bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Compression {
    /// bfloat16: the range of single precision, eight bits of mantissa.
    Bf16,
    /// IEEE half precision: up to 65,504, eleven bits of mantissa.
    Fp16,
    /// Integers from -127 to 127, with one factor for each 256 numbers.
    Int8,
}

impl Compression {
    /// Elements of a chunk.
    pub const fn chunk(self) -> usize {
        match self {
            // One cache line of 16-bit numbers.
            Compression::Bf16 | Compression::Fp16 => 32,
            Compression::Int8 => 256,
        }
    }

    /// The bytes of a chunk.
    pub const fn chunk_bytes(self) -> usize {
        match self {
            Compression::Bf16 | Compression::Fp16 => 2 * self.chunk(),
            Compression::Int8 => self.chunk() + size_of::<f32>(),
        }
    }

    /// The bytes of a message of `elements` numbers.
    pub const fn bytes(self, elements: usize) -> usize {
        elements.div_ceil(self.chunk()) * self.chunk_bytes()
    }

    /// The elements of each of `parts` equal parts of `elements`, rounded up to complete chunks.
    pub const fn part(self, elements: usize, parts: usize) -> usize {
        elements.div_ceil(parts).next_multiple_of(self.chunk())
    }

    /// The name in plan files.
    pub const fn name(self) -> &'static str {
        match self {
            Compression::Bf16 => "bf16",
            Compression::Fp16 => "fp16",
            Compression::Int8 => "int8",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_message_are_whole_chunks_and_hold_all_numbers() {
        for format in [Compression::Bf16, Compression::Fp16, Compression::Int8] {
            for (elements, parts) in [(1, 1), (1, 3), (255, 2), (256, 2), (1037, 4), (40_000, 7)] {
                let part = format.part(elements, parts);
                assert!(part.is_multiple_of(format.chunk()) && part * parts >= elements, "{format:?}");
                assert_eq!(format.bytes(part) * parts, format.bytes(part * parts), "{format:?}");
            }
        }
        assert_eq!((Compression::Int8.bytes(257), Compression::Fp16.bytes(33)), (520, 128));
    }
}
