//! TensorBoard's event files: scalars by step.
//!
//! A file is a sequence of records, as TensorFlow's `TFRecord` has them: the length, the masked
//! CRC-32C of the length, the bytes of a protobuf message `Event`, and their masked CRC-32C
//! (`tensorflow/core/lib/io/record_writer.cc`, `tensorflow/core/util/event.proto`). It knows no
//! runs.

use crate::failure::{Failure, code};
use prost::Message;
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// TensorFlow adds this to a checksum after turning it by fifteen bits.
const MASK: u32 = 0xa282_ead8;

/// The version that a file's first event states.
const FILE_VERSION: &str = "brain.Event:2";

/// The fields of `Event` that are in use.
#[derive(Clone, PartialEq, Message)]
struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Summary>,
}

#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<Value>,
}

#[derive(Clone, PartialEq, Message)]
struct Value {
    #[prost(string, tag = "1")]
    tag: String,
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
}

/// An event file that grows during a run.
pub struct EventFile {
    path: PathBuf,
    file: File,
}

impl EventFile {
    /// Starts a file in `folder`, which is made if it is missing.
    pub fn create(folder: &Path) -> Result<Self, Failure> {
        let now = seconds();
        // TensorBoard reads files with `tfevents` in their names, in the order of the names. A run
        // that is restarted within a second makes several.
        let name = |number| format!("events.out.tfevents.{:010}.foretell.{}.{number}", now as u64, std::process::id());
        let (mut number, mut path) = (0, folder.join(name(0)));
        let opened = std::fs::create_dir_all(folder).and_then(|()| {
            loop {
                match File::create_new(&path) {
                    Err(error) if error.kind() == ErrorKind::AlreadyExists => number += 1,
                    opened => break opened,
                }
                path = folder.join(name(number));
            }
        });
        let file = opened.map_err(|error| failed(&path, &error))?;
        let mut events = Self { path, file };
        events.append(&Event { wall_time: now, step: 0, file_version: Some(FILE_VERSION.into()), summary: None })?;
        Ok(events)
    }

    /// Writes the scalars of a step.
    pub fn write(&mut self, step: usize, values: &[(&str, f64)]) -> Result<(), Failure> {
        let value = |&(tag, value): &(&str, f64)| Value { tag: tag.into(), simple_value: Some(value as f32) };
        let summary = Summary { value: values.iter().map(value).collect() };
        let step = i64::try_from(step).unwrap_or(i64::MAX);
        self.append(&Event { wall_time: seconds(), step, file_version: None, summary: Some(summary) })
    }

    /// Appends a record, in one write, so that a reader never finds half of one.
    fn append(&mut self, event: &Event) -> Result<(), Failure> {
        self.file.write_all(&record(&event.encode_to_vec())).map_err(|error| failed(&self.path, &error))
    }
}

fn failed(path: &Path, error: &std::io::Error) -> Failure {
    Failure::undone(code::FILE_UNWRITABLE, format!("`{}` cannot be written: {error}", path.display()))
        .hint("leave `--tensorboard` out, or free the disk")
}

fn seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// A record with these contents.
fn record(contents: &[u8]) -> Vec<u8> {
    let length = (contents.len() as u64).to_le_bytes();
    [&length[..], &masked(&length), contents, &masked(contents)].concat()
}

fn masked(bytes: &[u8]) -> [u8; 4] {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(MASK).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The record of an event without a time, and of one with a scalar, as the `RecordWriter` of
    /// TensorBoard 2.21 writes them.
    const VERSION: &[u8] = b"\x0f\0\0\0\0\0\0\0\x6d\x53\x2b\x09\x1a\x0dbrain.Event:2\xfc\x98\x51\x29";
    const SCALAR: &[u8] = b"\x20\0\0\0\0\0\0\0\x29\xed\xa9\x50\x09\0\0\0\0\0\0\xf8\x3f\x10\x07\x2a\x13\x0a\x11\x0a\x0atrain/loss\
        \x15\0\0\x80\x3e\xf4\x98\x5d\x1a";

    #[test]
    fn records_are_those_that_tensorboard_writes() {
        let version = Event { wall_time: 0.0, step: 0, file_version: Some(FILE_VERSION.into()), summary: None };
        assert_eq!(record(&version.encode_to_vec()), VERSION);
        let value = vec![Value { tag: "train/loss".into(), simple_value: Some(0.25) }];
        let scalar = Event { wall_time: 1.5, step: 7, file_version: None, summary: Some(Summary { value }) };
        assert_eq!(record(&scalar.encode_to_vec()), SCALAR);
    }

    /// Needs `pip install tensorboard`, and its interpreter in `FORETELL_PYTHON`:
    /// `FORETELL_PYTHON=venv/bin/python cargo test -p foretell tensorboard -- --ignored`.
    #[test]
    #[ignore = "needs TensorBoard"]
    fn tensorboards_own_reader_reads_what_was_written() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut events = EventFile::create(folder.path()).expect("a file");
        for step in 0..3 {
            events.write(step, &[("train/loss", 1.0 / (step + 1) as f64), ("train/x", -2.5)]).expect("it is written");
        }
        let script = "import sys\n\
            from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n\
            events = EventAccumulator(sys.argv[1])\n\
            events.Reload()\n\
            print([(tag, [(one.step, round(one.value, 6)) for one in events.Scalars(tag)]) for tag in sorted(events.Tags()['scalars'])])";
        let python = std::env::var("FORETELL_PYTHON").unwrap_or_else(|_| "python3".into());
        let output = std::process::Command::new(python).args(["-c", script]).arg(folder.path()).output().expect("Python starts");
        let text = String::from_utf8_lossy(&output.stdout);
        let expected = "[('train/loss', [(0, 1.0), (1, 0.5), (2, 0.333333)]), ('train/x', [(0, -2.5), (1, -2.5), (2, -2.5)])]";
        assert_eq!(text.trim(), expected, "{}", String::from_utf8_lossy(&output.stderr));
    }
}
