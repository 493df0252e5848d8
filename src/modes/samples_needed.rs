//! The samples that training in each mode needs to reach a loss: a table, from a file or built in.

use crate::failure::{Failure, code};
use crate::inputs;
use foretell_program::Mode;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The table without `--samples-needed`.
const BUILT_IN: &str = include_str!("../modes.yaml");

/// The samples that a mode needs, as a function of its rounds and of its staleness: multiples of
/// what the synchronous mode needs. Samples whose late gradients servers drop do not count.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SamplesNeeded {
    /// The mode.
    pub mode: Mode,
    /// The number without staleness, and with an exchange after each step.
    pub samples: f64,
    /// Added for each step of a round after the first.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub per_step: f64,
    /// Added for each version that pushes are stale on average, as the simulator predicts.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub per_staleness: f64,
    /// The numbers of steps per round to try in place of the mode's own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub every: Vec<usize>,
    /// The source of the number.
    pub source: String,
}

fn is_zero(number: &f64) -> bool {
    *number == 0.0
}

impl SamplesNeeded {
    /// An entry with a constant number.
    pub fn constant(mode: Mode, samples: f64, source: String) -> Self {
        Self { mode, samples, per_step: 0.0, per_staleness: 0.0, every: Vec::new(), source }
    }

    /// The samples needed at a mean staleness.
    pub fn at(&self, staleness: f64) -> f64 {
        let further = self.mode.every().saturating_sub(1) as f64;
        self.samples + self.per_step * further + self.per_staleness * staleness
    }

    /// One entry for each number of steps per round to try.
    fn for_each_round(self) -> Vec<Self> {
        if self.every.is_empty() {
            return vec![self];
        }
        let of = |&every: &usize| Self { mode: self.mode.with_every(every), every: Vec::new(), ..self.clone() };
        self.every.iter().map(of).collect()
    }
}

/// Reads a table of samples needed, or the built-in one.
pub fn samples_needed(path: Option<&Path>) -> Result<Vec<SamplesNeeded>, Failure> {
    let built_in = || inputs::parse_yaml(BUILT_IN, Path::new("modes.yaml"));
    path.map_or_else(|| Ok(for_each_round(built_in()?)), table)
}

fn for_each_round(entries: Vec<SamplesNeeded>) -> Vec<SamplesNeeded> {
    entries.into_iter().flat_map(SamplesNeeded::for_each_round).collect()
}

/// Reads a table of samples needed, with an entry for each number of steps in a round.
///
/// # Errors
/// [`Failure::Input`] if the file is not such a table, a number cannot be used, or the synchronous
/// mode is missing.
pub fn table(path: &Path) -> Result<Vec<SamplesNeeded>, Failure> {
    let modes: Vec<SamplesNeeded> = inputs::parse_yaml(&inputs::read(path)?, path)?;
    let wrong = |message: String, hint: &str| Failure::input(code::FILE_FORM, message).hint(hint).in_file(path);
    if let Some(one) = modes.iter().find(|mode| !(mode.samples > 0.0 && mode.samples.is_finite())) {
        let hint = "write a multiple of what the synchronous mode needs, such as 1.1";
        let message = format!("the mode {} needs `{}` samples, which is no number above 0", name(&one.mode), one.samples);
        return Err(wrong(message, hint));
    }
    let is_rate = |rate: f64| rate >= 0.0 && rate.is_finite();
    if let Some(one) = modes.iter().find(|mode| !(is_rate(mode.per_step) && is_rate(mode.per_staleness))) {
        let hint = "write what each adds to `samples`, such as 0.01";
        let name = name(&one.mode);
        return Err(wrong(format!("`per_step` or `per_staleness` of the mode {name} is no number from 0 on"), hint));
    }
    if let Some(one) = modes.iter().find(|mode| mode.every.contains(&0) || (!mode.every.is_empty() && !mode.mode.has_rounds())) {
        let hint = "write numbers from 1 on, in entries of `local_sgd` or `decentralised`";
        return Err(wrong(format!("`every` of the mode {} has no steps of a round", name(&one.mode)), hint));
    }
    if !modes.iter().any(|mode| mode.mode == Mode::Synchronous) {
        let hint = "add `- {mode: synchronous, samples: 1.0, source: ...}`";
        return Err(wrong("no entry is of the synchronous mode".into(), hint));
    }
    Ok(for_each_round(modes))
}

/// A mode in the form of a plan file, on one line.
pub fn name(mode: &Mode) -> String {
    let text = serde_json::to_string(mode).expect("invariant: a mode has a text");
    text.replace('"', "").replace(':', ": ").replace(',', ", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use foretell_program::LocalSgd;

    #[test]
    fn the_built_in_table_is_sound_and_names_a_source_for_each_mode() {
        let modes = samples_needed(None).expect("a table");
        assert_eq!(modes.first().map(|mode| (mode.mode, mode.samples)), Some((Mode::Synchronous, 1.0)));
        for one in modes {
            assert!(one.samples >= 1.0 && !one.source.is_empty() && one.every.is_empty(), "{one:?}");
            assert!(!one.mode.has_synchronous_result() || one.samples == 1.0, "{one:?}");
        }
    }

    #[test]
    fn samples_grow_with_the_steps_of_a_round_and_with_staleness() {
        let read = |text: &str| serde_saphyr::from_str::<SamplesNeeded>(text).expect("an entry");
        let local = "{mode: {local_sgd: {every: 2}}, samples: 1, per_step: 0.01, every: [1, 5, 21], source: x}";
        let found: Vec<f64> = read(local).for_each_round().iter().map(|measured| measured.at(0.0)).collect();
        assert!(found.iter().zip([1.0, 1.04, 1.2]).all(|(left, wanted)| (left - wanted).abs() < 1e-12), "{found:?}");
        let servers = read("{mode: {parameter_server: {servers: 1, staleness: 4}}, samples: 1, per_staleness: 0.1, source: x}");
        assert!((servers.at(2.5) - 1.25).abs() < 1e-12 && servers.clone().for_each_round() == [servers]);
        // Of the built-in table: more for more steps alone, or for more staleness.
        let built_in = samples_needed(None).expect("a table");
        let of_local = |every: usize| {
            let is_plain = |needed: &&SamplesNeeded| needed.mode == Mode::LocalSgd(LocalSgd::new(every));
            built_in.iter().find(is_plain).map(|measured| measured.at(0.0))
        };
        assert!(of_local(32) > of_local(8) && of_local(8) > Some(1.0), "{built_in:?}");
        let stale = built_in.iter().filter(|measured| measured.per_staleness > 0.0);
        assert!(
            stale.clone().count() >= 2 && stale.clone().all(|measured| measured.at(0.0) == 1.0 && measured.at(2.0) > 1.0),
            "{built_in:?}"
        );
    }
}
