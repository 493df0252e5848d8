//! The files of tokens at a path: one, Megatron's pair, or a folder of them.

use super::mapped::MappedFile;
use super::shard::{Shard, TokenWidth};
use super::{Tokens, file, megatron};
use crate::data::DataError;
use crate::data::options::OnBadSample;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// Endings of files of bare tokens, and the width of a token.
const BARE: [(&str, TokenWidth); 4] =
    [("txt", TokenWidth::Byte), ("bin", TokenWidth::TwoBytes), ("u16", TokenWidth::TwoBytes), ("u32", TokenWidth::FourBytes)];

fn ending(path: &Path) -> &str {
    path.extension().and_then(OsStr::to_str).unwrap_or_default()
}

/// Opens the file of tokens at `path`; `None` if its name is not one of a token file.
pub(crate) fn open_file(path: &Path, policy: OnBadSample) -> Result<Option<Tokens>, DataError> {
    let mut tokens = Tokens::default();
    Ok(tokens.add(path, policy)?.then_some(tokens))
}

/// Opens a folder of files of tokens; `None` if it has none. Files named `val...` are for
/// evaluation, the others for training, in the order of their names.
pub(crate) fn open_folder(folder: &Path, policy: OnBadSample) -> Result<Option<Tokens>, DataError> {
    let unreadable = |error: std::io::Error| DataError::io(folder, &error);
    let entries = std::fs::read_dir(folder).map_err(unreadable)?.collect::<Result<Vec<_>, _>>().map_err(unreadable)?;
    let is_shard = |path: &PathBuf| path.is_file() && matches!(ending(path), file::ENDING | "bin" | "u16" | "u32");
    let mut paths: Vec<PathBuf> = entries.into_iter().map(|entry| entry.path()).filter(is_shard).collect();
    paths.sort();
    let is_evaluation = |path: &PathBuf| path.file_name().and_then(OsStr::to_str).is_some_and(|name| name.starts_with("val"));
    let (evaluation, training): (Vec<PathBuf>, Vec<PathBuf>) = paths.into_iter().partition(is_evaluation);
    if training.is_empty() {
        return Ok(None);
    }
    let mut tokens = Tokens::default();
    for path in &training {
        tokens.add(path, policy)?;
    }
    if !evaluation.is_empty() {
        tokens.training_shards = Some(tokens.shards.len());
        for path in &evaluation {
            tokens.add(path, policy)?;
        }
    }
    Ok(Some(tokens))
}

impl Tokens {
    /// Adds the tokens of a file. Returns whether it is a file of tokens.
    fn add(&mut self, path: &Path, policy: OnBadSample) -> Result<bool, DataError> {
        let index = path.with_extension("idx");
        let (shard, bad) = if ending(path) == file::ENDING || file::is_at(path) {
            file::open(path, policy)?
        } else if matches!(ending(path), "bin" | "idx") && index.is_file() {
            megatron::open(&index, policy)?
        } else if let Some(&(_, width)) = BARE.iter().find(|(known, _)| *known == ending(path)) {
            open_bare(path, width, policy)?
        } else {
            return Ok(false);
        };
        self.shards.push(shard);
        self.bad += bad;
        Ok(true)
    }
}

fn open_bare(path: &Path, width: TokenWidth, policy: OnBadSample) -> Result<(Shard, usize), DataError> {
    let file = MappedFile::open(path)?;
    let (name, held) = (path.display().to_string(), file.bytes().len());
    let is_whole = held.is_multiple_of(width.bytes());
    if !is_whole && policy == OnBadSample::Error {
        let problem = format!("has {held} bytes, which are not whole {}-bit tokens", 8 * width.bytes());
        let hint = "write it as little-endian numbers, name it `.txt` if it is text, or use `--on-bad-sample skip`";
        return Err(DataError::malformed(&name, problem, hint));
    }
    Ok((Shard::mapped(&name, file, width, 0, held / width.bytes()), usize::from(!is_whole)))
}
