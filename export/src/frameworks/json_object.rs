//! JSON objects of frameworks: their entries, which of them have been read, and numbers in decimal.
//! Knows no framework.

use super::FrameworkError;
use serde_json::{Map, Value};

/// A number as it is written in decimal, so that it reads back the same.
pub(super) fn decimal(number: f32) -> Value {
    number.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

/// An object being read.
pub(super) struct JsonObject {
    object: Map<String, Value>,
    read: Vec<String>,
}

impl JsonObject {
    /// Parses the text.
    pub(super) fn parse(text: &str, what: &str) -> Result<Self, FrameworkError> {
        let form = |reason: String| FrameworkError::Form { reason, hint: format!("give {what}") };
        match serde_json::from_str(text).map_err(|error| form(error.to_string()))? {
            Value::Object(object) => Ok(Self { object, read: Vec::new() }),
            _ => Err(form("it is no JSON object".into())),
        }
    }

    /// The value of an entry; `None` if it is missing, null, or `"auto"`.
    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        self.read.push(name.into());
        self.object.get(name).filter(|value| !value.is_null() && *value != "auto").cloned()
    }

    /// A size.
    pub(super) fn size(&mut self, name: &str) -> Result<Option<usize>, FrameworkError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let size = value.as_u64().and_then(|size| usize::try_from(size).ok()).filter(|&size| size > 0);
        size.map(Some).ok_or_else(|| FrameworkError::Form {
            reason: format!("`{name}: {value}` is no whole number above 0"),
            hint: "give a number, or \"auto\"".into(),
        })
    }

    /// A number.
    pub(super) fn number(&mut self, name: &str) -> Option<f32> {
        self.take(name)?.as_f64().map(|number| number as f32)
    }

    /// Whether a switch is on.
    pub(super) fn flag(&mut self, name: &str) -> bool {
        self.take(name).is_some_and(|value| value == true)
    }

    /// Marks entries as read.
    pub(super) fn neutral(&mut self, names: &[&str]) {
        self.read.extend(names.iter().map(ToString::to_string));
    }

    /// The entries that nobody read.
    pub(super) fn unread(&self) -> Vec<String> {
        let unread = self.object.iter().filter(|(name, value)| !self.read.contains(name) && !value.is_null());
        unread.map(|(name, value)| format!("{name}: {value}")).collect()
    }
}
