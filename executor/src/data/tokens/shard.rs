//! One run of tokens of one width: a text, or a file of numbers. This module knows no windows and
//! no models.

use super::mapped::MappedFile;

/// The encoding of a token. All numbers are little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenWidth {
    /// One byte.
    Byte,
    /// Two bytes, without a sign.
    TwoBytes,
    /// Four bytes, without a sign.
    FourBytes,
}

impl TokenWidth {
    pub(crate) fn bytes(self) -> usize {
        match self {
            TokenWidth::Byte => 1,
            TokenWidth::TwoBytes => 2,
            TokenWidth::FourBytes => 4,
        }
    }
}

#[derive(Debug)]
enum Memory {
    /// Shipped with the program.
    Own(Vec<u8>),
    Mapped(MappedFile),
}

/// Tokens of one width, one after the other.
#[derive(Debug)]
pub(crate) struct Shard {
    /// The file, for messages.
    pub(crate) name: String,
    pub(crate) width: TokenWidth,
    memory: Memory,
    /// Where the tokens begin, in bytes.
    offset: usize,
    /// The number of tokens.
    pub(crate) len: usize,
    /// The highest token, if the file says so.
    pub(crate) highest: Option<u32>,
}

impl Shard {
    /// All bytes as tokens. Bytes that are not a whole token are left out.
    pub(crate) fn in_memory(name: &str, bytes: Vec<u8>, width: TokenWidth) -> Self {
        let len = bytes.len() / width.bytes();
        Self { name: name.to_owned(), width, memory: Memory::Own(bytes), offset: 0, len, highest: None }
    }

    /// `len` tokens of a mapped file, from byte `offset` on. They lie within the file.
    pub(super) fn mapped(name: &str, file: MappedFile, width: TokenWidth, offset: usize, len: usize) -> Self {
        debug_assert!(offset + len * width.bytes() <= file.bytes().len());
        Self { name: name.to_owned(), width, memory: Memory::Mapped(file), offset, len, highest: None }
    }

    /// Up to `count` tokens from position `start` on.
    pub(crate) fn tokens(&self, start: usize, count: usize) -> impl Iterator<Item = u32> {
        let bytes = match &self.memory {
            Memory::Own(bytes) => bytes.as_slice(),
            Memory::Mapped(file) => file.bytes(),
        };
        let end = start.saturating_add(count).min(self.len);
        let place = |token: usize| self.offset + token * self.width.bytes();
        let bytes = &bytes[place(start.min(end))..place(end)];
        bytes.chunks_exact(self.width.bytes()).map(|token| match *token {
            [a, b, c, d] => u32::from_le_bytes([a, b, c, d]),
            [low, high] => u32::from(u16::from_le_bytes([low, high])),
            [byte] => u32::from(byte),
            _ => unreachable!("invariant: a token has one, two or four bytes"),
        })
    }
}
