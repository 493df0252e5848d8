//! The token file that `foretell data tokenize` writes: a header, then the tokens
//! (`docs/reference/data-formats.md`).
//!
//! The header says how many tokens there are, so a file that was cut is noticed, and the highest
//! one, so a vocabulary that is too small is noticed without reading the file.

use super::mapped::MappedFile;
use super::shard::{Shard, TokenWidth};
use crate::data::DataError;
use crate::data::options::OnBadSample;
use crate::regular;
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// The ending of a token file's name.
pub(crate) const ENDING: &str = "tokens";
const MAGIC: [u8; 8] = *b"FTTOKENS";
const VERSION: u32 = 1;
/// The length of the header, in bytes. Tokens begin after it.
const HEADER: usize = 64;

/// Whether a file is a token file, by its first bytes.
pub(super) fn is_at(path: &Path) -> bool {
    let mut start = [0; MAGIC.len()];
    // `regular::open` checks the file's type first: opening a named pipe would block.
    regular::open(path).is_ok_and(|(mut file, _)| file.read_exact(&mut start).is_ok()) && start == MAGIC
}

/// Opens a token file. Also returns how many parts were missing or in excess.
pub(super) fn open(path: &Path, policy: OnBadSample) -> Result<(Shard, usize), DataError> {
    let file = MappedFile::open(path)?;
    let name = path.display().to_string();
    let malformed = |problem: String, hint: &str| DataError::malformed(&name, problem, hint);
    let again = "write it again with `foretell data tokenize`";
    let header = file.bytes().first_chunk::<HEADER>().filter(|header| header.starts_with(&MAGIC)).copied();
    let Some(header) = header else {
        return Err(malformed("is not a token file: it does not begin with `FTTOKENS` and a header".into(), again));
    };
    let number = |at: usize| u32::from_le_bytes(std::array::from_fn(|byte| header[at + byte]));
    let version = number(8);
    if version != VERSION {
        let problem = format!("is a token file of version {version}, and this program reads version {VERSION}");
        return Err(malformed(problem, "use the version of foretell that wrote it, or write it again"));
    }
    let width = match number(12) {
        2 => TokenWidth::TwoBytes,
        4 => TokenWidth::FourBytes,
        bytes => return Err(malformed(format!("has tokens of {bytes} bytes, and only 2 and 4 are known"), again)),
    };
    let declared = u64::from_le_bytes(std::array::from_fn(|byte| header[16 + byte]));
    let held = file.bytes().len() - HEADER;
    let is_whole = declared.checked_mul(width.bytes() as u64) == Some(held as u64);
    if !is_whole && policy == OnBadSample::Error {
        let problem = format!("declares {declared} tokens of {} bytes but holds {held} bytes after its header", width.bytes());
        return Err(malformed(problem, "copy the file again, or use `--on-bad-sample skip`"));
    }
    let count = usize::try_from(declared).unwrap_or(usize::MAX).min(held / width.bytes());
    let mut shard = Shard::mapped(&name, file, width, HEADER, count);
    shard.highest = Some(number(24));
    Ok((shard, usize::from(!is_whole)))
}

/// Writes a token file, under a temporary name in the same folder until it is complete.
#[derive(Debug)]
pub struct TokenFileWriter {
    path: PathBuf,
    file: BufWriter<NamedTempFile>,
    width: TokenWidth,
    count: u64,
    highest: u32,
}

impl TokenFileWriter {
    /// Begins a file for tokens below `vocabulary`. They take two bytes if they fit, else four.
    ///
    /// # Errors
    /// If the folder cannot be written to.
    pub fn create(path: &Path, vocabulary: usize) -> Result<Self, DataError> {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let begin = || {
            std::fs::create_dir_all(folder)?;
            let readable = std::fs::Permissions::from_mode(0o644);
            let file = tempfile::Builder::new().prefix(".foretell-").permissions(readable).tempfile_in(folder)?;
            let mut file = BufWriter::with_capacity(1 << 20, file);
            file.write_all(&[0; HEADER])?;
            Ok(file)
        };
        let file = begin().map_err(|error| unwritable(path, &error))?;
        let width = if vocabulary <= 1 << 16 { TokenWidth::TwoBytes } else { TokenWidth::FourBytes };
        Ok(Self { path: path.to_path_buf(), file, width, count: 0, highest: 0 })
    }

    /// Appends tokens.
    ///
    /// # Errors
    /// If the disk is full, or a token is not below the vocabulary.
    pub fn push(&mut self, tokens: &[u32]) -> Result<(), DataError> {
        for &token in tokens {
            let bytes = token.to_le_bytes();
            let (bytes, rest) = bytes.split_at(self.width.bytes());
            if rest.iter().any(|&byte| byte != 0) {
                let problem = format!("was to hold the token {token} in {} bytes", self.width.bytes());
                let hint = "the tokenizer made a token beyond its own vocabulary: check its file";
                return Err(DataError::malformed(&self.path.display().to_string(), problem, hint));
            }
            self.file.write_all(bytes).map_err(|error| unwritable(&self.path, &error))?;
            self.highest = self.highest.max(token);
        }
        self.count += tokens.len() as u64;
        Ok(())
    }

    /// The number of tokens so far.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The bytes of a token.
    pub fn token_bytes(&self) -> usize {
        self.width.bytes()
    }

    /// Completes the file and gives it its final name.
    ///
    /// # Errors
    /// If the disk is full.
    pub fn finish(self) -> Result<(), DataError> {
        let Self { path, mut file, width, count, highest } = self;
        let mut header = [0; HEADER];
        let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &MAGIC);
        put(8, &VERSION.to_le_bytes());
        put(12, &(width.bytes() as u32).to_le_bytes());
        put(16, &count.to_le_bytes());
        put(24, &highest.to_le_bytes());
        let complete = || {
            file.seek(SeekFrom::Start(0))?;
            file.write_all(&header)?;
            let file = file.into_inner().map_err(std::io::IntoInnerError::into_error)?;
            file.as_file().sync_all()?;
            file.persist(&path).map_err(|error| error.error)
        };
        complete().map(|_| ()).map_err(|error| unwritable(&path, &error))
    }
}

fn unwritable(path: &Path, error: &std::io::Error) -> DataError {
    DataError::Unwritable { path: path.to_path_buf(), reason: error.to_string() }
}
