//! The progress of a run that another process makes, from its folder. Knows no launcher.

use serde::Deserialize;
use std::fmt;
use std::fs::File;
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

/// More bytes than a line of the metrics has.
const TAIL: u64 = 4096;

/// Reads the last step. `None` if there is none yet.
pub fn last_step(run: &Path) -> Option<LastStep> {
    let mut file = File::open(run.join("metrics.jsonl")).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL))).ok()?;
    let mut text = String::new();
    file.take(TAIL).read_to_string(&mut text).ok()?;
    // The last line may be half written.
    text.lines().rev().find_map(|line| serde_json::from_str(line).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_whole_line_is_the_last_step() {
        let folder = tempfile::tempdir().expect("a folder");
        assert_eq!(last_step(folder.path()), None);
        let line =
            |step| format!("{{\"step\":{step},\"loss\":0.5,\"seconds\":0.1,\"samples_per_second\":8,\"gradient_norm\":null}}\n");
        let text: String = (0..100).map(line).collect::<String>() + "{\"step\":100,\"lo";
        std::fs::write(folder.path().join("metrics.jsonl"), text).expect("it is written");
        assert_eq!(last_step(folder.path()).map(|one| one.step), Some(99));
    }
}
