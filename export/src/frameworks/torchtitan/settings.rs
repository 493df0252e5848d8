//! The sections of a TOML file, as settings named `section.key`.

use super::super::FrameworkError;
use std::collections::{BTreeMap, BTreeSet};
use toml::Value;

/// The settings of a file, and which of them have been read.
pub(super) struct Settings {
    values: BTreeMap<String, Value>,
    read: BTreeSet<String>,
}

fn wrong(name: &str, value: &Value, expected: &str) -> FrameworkError {
    FrameworkError::Form {
        reason: format!("`{name} = {value}` is not {expected}"),
        hint: "give it as torchtitan's files do".into(),
    }
}

impl Settings {
    pub(super) fn parse(text: &str) -> Result<Self, FrameworkError> {
        let form = |reason: String| FrameworkError::Form { reason, hint: "give a TOML file of torchtitan".into() };
        let table: toml::Table = text.parse().map_err(|error: toml::de::Error| form(error.message().to_string()))?;
        let mut values = BTreeMap::new();
        for (section, content) in table {
            let Value::Table(content) = content else { return Err(form(format!("`{section}` is no section"))) };
            values.extend(content.into_iter().map(|(key, value)| (format!("{section}.{key}"), value)));
        }
        if !values.keys().any(|name| name.starts_with("parallelism.") || name.starts_with("training.")) {
            return Err(form("it has neither `[training]` nor `[parallelism]`".into()));
        }
        Ok(Self { values, read: BTreeSet::new() })
    }

    /// Marks settings as read that change neither time nor memory.
    pub(super) fn neutral(&mut self, names: &[&str]) {
        self.read.extend(names.iter().map(ToString::to_string));
    }

    /// As [`Settings::neutral`], for whole sections.
    pub(super) fn neutral_sections(&mut self, sections: &[&str]) {
        let of_them = |name: &&String| name.split_once('.').is_some_and(|(section, _)| sections.contains(&section));
        self.read.extend(self.values.keys().filter(of_them).cloned());
    }

    fn take(&mut self, name: &str) -> Option<Value> {
        self.read.insert(name.into());
        self.values.get(name).cloned()
    }

    /// A size; `None` if it is missing or negative, which means that torchtitan chooses.
    pub(super) fn size(&mut self, name: &str) -> Result<Option<usize>, FrameworkError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Integer(number)) if number < 0 => Ok(None),
            Some(Value::Integer(number)) if number > 0 => Ok(usize::try_from(number).ok()),
            Some(other) => Err(wrong(name, &other, "a whole number other than 0")),
        }
    }

    pub(super) fn size_or(&mut self, name: &str, default: usize) -> Result<usize, FrameworkError> {
        Ok(self.size(name)?.unwrap_or(default))
    }

    pub(super) fn text_or(&mut self, name: &str, default: &str) -> Result<String, FrameworkError> {
        match self.take(name) {
            None => Ok(default.into()),
            Some(Value::String(text)) => Ok(text),
            Some(other) => Err(wrong(name, &other, "a text")),
        }
    }

    pub(super) fn flag_or(&mut self, name: &str, default: bool) -> Result<bool, FrameworkError> {
        match self.take(name) {
            None => Ok(default),
            Some(Value::Boolean(flag)) => Ok(flag),
            Some(other) => Err(wrong(name, &other, "true or false")),
        }
    }

    pub(super) fn number_or(&mut self, name: &str, default: f32) -> Result<f32, FrameworkError> {
        match self.take(name) {
            None => Ok(default),
            Some(Value::Float(number)) => Ok(number as f32),
            Some(Value::Integer(number)) => Ok(number as f32),
            Some(other) => Err(wrong(name, &other, "a number")),
        }
    }

    /// The blocks of each chunk, from lists of modules. The last norm and the head are one block.
    pub(super) fn chunks(&mut self, name: &str) -> Result<Option<Vec<usize>>, FrameworkError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let lists: Option<Vec<&Vec<Value>>> = value.as_array().map(|lists| lists.iter().filter_map(Value::as_array).collect());
        let Some(lists) = lists else { return Err(wrong(name, &value, "a list of lists")) };
        let is_block = |module: &&Value| module.as_str() != Some("norm");
        Ok(Some(lists.into_iter().map(|modules| modules.iter().filter(is_block).count()).collect()))
    }

    /// The settings that nobody read.
    pub(super) fn unread(&self) -> Vec<String> {
        let unread = self.values.iter().filter(|(name, _)| !self.read.contains(*name));
        unread.map(|(name, value)| format!("{name} = {value}")).collect()
    }
}
