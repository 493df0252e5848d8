//! Megatron-LM's pair of files: `.bin` with the tokens, and `.idx` with the positions of documents
//! in it.
//!
//! Format: `megatron/core/datasets/indexed_dataset.py`. The tokens are read as one stream, in the
//! order of the file, as they are for pre-training.

use super::mapped::MappedFile;
use super::shard::{Shard, TokenWidth};
use crate::data::DataError;
use crate::data::options::OnBadSample;
use std::path::Path;

const MAGIC: [u8; 9] = *b"MMIDIDX\0\0";
/// Magic number, version, type, number of sequences, number of documents.
const HEADER: usize = 9 + 8 + 1 + 8 + 8;

/// Opens the pair of `index` and the `.bin` file beside it. Also returns how many parts were
/// missing.
pub(super) fn open(index: &Path, policy: OnBadSample) -> Result<(Shard, usize), DataError> {
    let name = index.display().to_string();
    let malformed =
        |problem: String| DataError::malformed(&name, problem, "make the pair again with Megatron's `preprocess_data.py`");
    let file = MappedFile::open(index)?;
    let Some((header, lists)) = file.bytes().split_first_chunk::<HEADER>().filter(|(header, _)| header.starts_with(&MAGIC))
    else {
        return Err(malformed("is not an index of Megatron's: it does not begin with `MMIDIDX` and a header".into()));
    };
    let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| header[at + byte]));
    let version = number(9);
    if version != 1 {
        return Err(malformed(format!("has version {version}, and only version 1 is known")));
    }
    // The types of NumPy that hold tokens. A negative number becomes a large one, beyond every
    // vocabulary.
    let width = match header[17] {
        1 => TokenWidth::Byte,
        3 | 8 => TokenWidth::TwoBytes,
        4 => TokenWidth::FourBytes,
        code => return Err(malformed(format!("has elements of the type {code}, and only 8, 16 and 32-bit integers are read"))),
    };
    let sequences = usize::try_from(number(18)).unwrap_or(usize::MAX);
    let lengths = sequences.checked_mul(4).and_then(|bytes| lists.split_at_checked(bytes));
    let pointers = lengths.and_then(|(lengths, rest)| Some((lengths, rest.get(..sequences * 8)?)));
    let Some((lengths, pointers)) = pointers else {
        return Err(malformed(format!("is cut short: it declares {sequences} sequences")));
    };
    let mut end = 0_u64;
    for (length, pointer) in lengths.as_chunks::<4>().0.iter().zip(pointers.as_chunks::<8>().0) {
        if u64::from_le_bytes(*pointer) != end {
            return Err(malformed("has sequences that do not follow each other in the `.bin` file".into()));
        }
        end = end.saturating_add(u64::from(u32::from_le_bytes(*length)) * width.bytes() as u64);
    }
    let tokens = index.with_extension("bin");
    let file = MappedFile::open(&tokens)?;
    let held = file.bytes().len();
    let name = tokens.display().to_string();
    let is_whole = held as u64 == end;
    if !is_whole && policy == OnBadSample::Error {
        let problem = format!("holds {held} bytes, but its index declares {end}");
        return Err(DataError::malformed(&name, problem, "copy both files again, or use `--on-bad-sample skip`"));
    }
    let count = usize::try_from(end).unwrap_or(usize::MAX).min(held) / width.bytes();
    Ok((Shard::mapped(&name, file, width, 0, count), usize::from(!is_whole)))
}
