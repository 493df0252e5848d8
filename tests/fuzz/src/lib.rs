//! Mutated inputs. [`Corpus`] has valid files of one format, and [`Corpus::mutated`] makes an input
//! from them that a number determines: it repeats on every machine, so a failure replays by its
//! number. The readers are in `tests/readers.rs`; this package knows none of them.

use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use std::path::Path;

/// Values at the edges of number types and units, and texts that parsers treat specially.
const EDGES: [&str; 24] = [
    "0",
    "-1",
    "1",
    "4294967296",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1e308",
    "-1e308",
    "1e-308",
    ".nan",
    ".inf",
    "null",
    "~",
    "true",
    "[]",
    "{}",
    "\"\"",
    "1000000000",
    "1e30GB/s",
    "0GiB",
    "&a [*a, *a]",
    "\u{202e}\u{0}",
];

/// Valid files of one format.
pub struct Corpus {
    files: Vec<Vec<u8>>,
}

impl Corpus {
    /// Reads all files of a folder whose names end in `ending`, in the order of their names.
    ///
    /// # Errors
    /// The system's, or that there is no such file.
    pub fn read(folder: &Path, ending: &str) -> std::io::Result<Self> {
        let mut paths: Vec<_> = std::fs::read_dir(folder)?.flatten().map(|entry| entry.path()).collect();
        paths.retain(|path| path.to_string_lossy().ends_with(ending));
        paths.sort();
        let files = paths.iter().map(std::fs::read).collect::<Result<Vec<_>, _>>()?;
        if files.is_empty() {
            return Err(std::io::Error::other(format!("no file in {} ends in {ending}", folder.display())));
        }
        Ok(Self { files })
    }

    /// Files that are not on the disk.
    pub fn of(files: Vec<Vec<u8>>) -> Self {
        Self { files }
    }

    /// The valid files.
    pub fn files(&self) -> &[Vec<u8>] {
        &self.files
    }

    /// A file of the corpus with one to four changes. `number` determines all of them.
    pub fn mutated(&self, number: u64) -> Vec<u8> {
        let mut random = ChaCha8Rng::seed_from_u64(number);
        let mut bytes = self.files[random.random_range(0..self.files.len())].clone();
        for _ in 0..random.random_range(1..5) {
            self.mutate(&mut bytes, &mut random);
        }
        bytes
    }

    fn mutate(&self, bytes: &mut Vec<u8>, random: &mut ChaCha8Rng) {
        let at = random.random_range(0..bytes.len() + 1);
        let end = (at + random.random_range(0..40)).min(bytes.len());
        match random.random_range(0..8) {
            0 if at < bytes.len() => bytes[at] ^= 1 << random.random_range(0..8),
            1 => drop(bytes.drain(at..end)),
            2 => {
                let again = bytes[at..end].repeat(random.random_range(1..20));
                bytes.splice(at..at, again);
            }
            3 | 4 => replace_number(bytes, random),
            5 => {
                let other = &self.files[random.random_range(0..self.files.len())];
                let from = random.random_range(0..other.len() + 1);
                let piece = other[from..(from + 80).min(other.len())].to_vec();
                bytes.splice(at..end, piece);
            }
            6 => {
                let edge = EDGES[random.random_range(0..EDGES.len())];
                bytes.splice(at..end, edge.bytes());
            }
            _ => swap_lines(bytes, random),
        }
    }
}

/// Replaces one of the numbers in a text by a value from [`EDGES`].
fn replace_number(bytes: &mut Vec<u8>, random: &mut ChaCha8Rng) {
    let is_start = |&at: &usize| bytes[at].is_ascii_digit() && (at == 0 || !bytes[at - 1].is_ascii_alphanumeric());
    let starts: Vec<usize> = (0..bytes.len()).filter(is_start).collect();
    if starts.is_empty() {
        return;
    }
    let start = starts[random.random_range(0..starts.len())];
    let length = bytes[start..].iter().take_while(|byte| byte.is_ascii_digit() || **byte == b'.').count();
    let edge = EDGES[random.random_range(0..EDGES.len())];
    bytes.splice(start..start + length, edge.bytes());
}

fn swap_lines(bytes: &mut Vec<u8>, random: &mut ChaCha8Rng) {
    let mut lines: Vec<Vec<u8>> = bytes.split(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect();
    let [one, other] = [(); 2].map(|()| random.random_range(0..lines.len()));
    lines.swap(one, other);
    *bytes = lines.join(&b'\n');
}
