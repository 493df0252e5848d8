//! Errors for settings that no plan expresses.

use super::super::FrameworkError;
use super::values::unexpanded_in;
use super::{Notation, Stated};
use serde_json::Value;

impl Stated {
    /// Refuses settings that no plan expresses, unless they are switched off.
    pub(in super::super) fn refuse(&mut self, names: &[&str], why: &str) -> Result<(), FrameworkError> {
        self.refuse_with(names, why, "leave it out of the file to plan the job without it")
    }

    /// As [`Self::refuse`], with another hint.
    pub(in super::super) fn refuse_with(&mut self, names: &[&str], why: &str, hint: &str) -> Result<(), FrameworkError> {
        match self.stated_of(names).iter().find(|name| !self.taken.contains(*name)) {
            None => Ok(()),
            Some(name) => Err(FrameworkError::Form { reason: format!("{}: {why}", self.written(name)), hint: hint.into() }),
        }
    }

    /// The error for a setting that freezes the text model, whose parameters have no common name.
    pub(in super::super) fn frozen_text(&self, name: &str) -> FrameworkError {
        FrameworkError::Form {
            reason: format!("{}: the language model is frozen, whose parameters have no one name", self.written(name)),
            hint: "leave it out, and give `training: {frozen: [..]}` with patterns of its parameters' names in the plan".into(),
        }
    }

    /// The error for a value of the wrong kind.
    pub(in super::super) fn wrong(&self, name: &str, expected: &str) -> FrameworkError {
        let value = self.settings.get(name).unwrap_or(&Value::Null);
        let hint = match self.notation {
            Notation::Flags => self.shell_hint(value),
            Notation::Toml => "give it as torchtitan's files do".into(),
            Notation::Json => "give it as the framework's documentation does".into(),
        };
        FrameworkError::Form { reason: format!("{} is not {expected}", self.written(name)), hint }
    }

    /// How to fix the value of a flag.
    pub(super) fn shell_hint(&self, value: &Value) -> String {
        let text = value.to_string();
        match unexpanded_in(&text, &self.unexpanded) {
            Some(why) => format!("{why}; give the command as the shell expands it"),
            None if text.contains('$') => "give the command as the shell expands it, without variables".into(),
            None => "give it as the framework's help says".into(),
        }
    }

    /// The error for a word that no plan has a value for.
    pub(in super::super) fn unknown(&self, name: &str, known: &str) -> FrameworkError {
        FrameworkError::Form { reason: format!("{} is not one of those that a plan has", self.written(name)), hint: known.into() }
    }
}
