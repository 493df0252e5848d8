//! The progress of a run in another process, read from its folder, and the ends of growing files.
//! Knows no launcher.

use foretell_executor::regular;
use serde::Deserialize;
use std::fmt;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// The last step of a run.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct LastStep {
    /// Its number.
    pub step: usize,
    /// Its loss.
    pub loss: f64,
    /// Its duration.
    pub seconds: f64,
    /// Samples in a second.
    pub samples_per_second: f64,
}

impl fmt::Display for LastStep {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "step {}, loss {:.4}, {:.1} samples/s", self.step, self.loss, self.samples_per_second)
    }
}

/// More bytes than a line of the metrics, or a few lines of a log, have.
const TAIL: u64 = 4096;

/// The last bytes of a file as text, with replacement characters for invalid UTF-8. The first line
/// may be cut. `None` if the file cannot be read.
pub fn tail(path: &Path) -> Option<String> {
    let (mut file, length) = regular::open(path).ok()?;
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL))).ok()?;
    let mut bytes = Vec::new();
    file.take(TAIL).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// Reads the last step. `None` if there is none yet.
pub fn last_step(run: &Path) -> Option<LastStep> {
    let text = tail(&run.join("metrics.jsonl"))?;
    // The last line may be half written.
    text.lines().rev().find_map(|line| serde_json::from_str(line).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_long_file_is_read_whatever_its_bytes() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log");
        assert_eq!(tail(&path), None);
        std::fs::write(&path, [&vec![b'x'; 10_000][..], b"\n\xff\nlast"].concat()).expect("it is written");
        let text = tail(&path).expect("a text");
        assert!(text.len() < 5_000 && text.ends_with("\n\u{fffd}\nlast"), "{} bytes", text.len());
    }

    #[test]
    fn the_last_whole_line_is_the_last_step() {
        let folder = tempfile::tempdir().expect("a folder");
        assert_eq!(last_step(folder.path()), None);
        let line =
            |step| format!("{{\"step\":{step},\"loss\":0.5,\"seconds\":0.1,\"samples_per_second\":8,\"gradient_norm\":null}}\n");
        let text: String = (0..100).map(line).collect::<String>() + "{\"step\":100,\"lo";
        std::fs::write(folder.path().join("metrics.jsonl"), text).expect("it is written");
        assert_eq!(last_step(folder.path()).map(|line| line.step), Some(99));
    }
}
