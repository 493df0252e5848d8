//! Questions from outside: a page or an agent names a command with options, a child process of this
//! program answers, and the answer is the document that the command prints with `--json`.
//!
//! [`Request`] is the question; [`Desk`] lets children answer within [`Limits`]; the result is an
//! [`Answer`] or a [`Refusal`]. `allowed.rs` says which commands and options may be asked for;
//! their names and types are those of clap's description of the command line. This module knows no
//! page and no protocol.

mod allowed;
mod answer;
#[cfg(not(target_family = "wasm"))]
mod child;
#[cfg(not(target_family = "wasm"))]
mod desk;
#[cfg(target_family = "wasm")]
mod here;
mod known;
mod refusal;
mod typed;

pub use allowed::{Schema, commands, schema};
pub use answer::Answer;
#[cfg(not(target_family = "wasm"))]
pub use desk::{Desk, Place};
#[cfg(target_family = "wasm")]
pub use here::answer;
pub use known::known;
pub use refusal::Refusal;

use clap::Args;
use foretell_units::diagnostic::Mistake;
use foretell_units::{Bytes, Seconds};
use serde::Deserialize;
use serde_json::{Map, Value};

/// A question.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// The command, such as `plan` or `models show`.
    pub command: String,
    /// Its options by their long names, and its arguments by their names. A switch is `true`. A
    /// file is given by its contents: a text, `{"name": .., "text": ..}`, or the document itself.
    #[serde(default)]
    pub options: Map<String, Value>,
    /// Whether to also make the page of `--report`.
    #[serde(default)]
    pub report: bool,
    /// Whether to write the search's progress, for [`Desk::progress`].
    #[serde(default)]
    pub progress: bool,
}

/// Limits on what answers may take.
#[derive(Clone, Copy, Debug, Args)]
pub struct Limits {
    /// Longest time for an answer
    #[arg(long, value_name = "TIME", default_value = "2min")]
    pub answer_time: Seconds,
    /// Most memory for an answer
    #[arg(long, value_name = "SIZE", default_value = "4GiB")]
    pub answer_memory: Bytes,
    /// Most answers that are worked on at once; others wait
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = at_least_one)]
    pub at_once: usize,
}

/// The longest question with its files, in bytes. A `config.json` has some kilobytes, and a profile
/// of the largest model 2 MB.
pub const LONGEST_QUESTION: usize = 4 << 20;

fn at_least_one(text: &str) -> Result<usize, Mistake> {
    let count = foretell_units::count(text).map_err(|error| Mistake::of(&error))?;
    if count > 0 { Ok(count) } else { Err(Mistake::new("at least one answer is worked on", "write 1 or more")) }
}
