//! Reads YAML files, and words their errors. It must not know the schema of any file.

use crate::error::Place;
use foretell_units::diagnostic::Mistake;
use foretell_units::suggest;
use serde::de::DeserializeOwned;
use serde_saphyr::{DefaultMessageFormatter, Error, MessageFormatter};

/// Why a text is not YAML, or does not match the schema.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct YamlError {
    /// The place in the text.
    pub place: Option<Place>,
    /// What is wrong at that place. The hint may be empty.
    pub mistake: Mistake,
}

/// Reads YAML. JSON is a subset of it.
///
/// # Errors
/// [`YamlError`] if the text is not YAML or does not match `T`.
pub fn read_yaml<T: DeserializeOwned>(text: &str) -> Result<T, YamlError> {
    let options = serde_saphyr::options! { with_snippet: false };
    serde_saphyr::from_str_with_options(text, options)
        .map_err(|error| YamlError { place: error.location().as_ref().and_then(place), mistake: in_words(&error) })
}

/// Converts a location of the YAML reader. `None` if the location is unknown.
pub(crate) fn place(location: &serde_saphyr::Location) -> Option<Place> {
    (location.line() > 0).then(|| Place { line: location.line(), column: location.column() })
}

/// Rewords the errors of the YAML reader that users are likely to see.
fn in_words(error: &Error) -> Mistake {
    match error {
        Error::SerdeUnknownField { field, expected, .. } => {
            Mistake::new(format!("unknown field `{field}`"), suggest(field, expected.iter().copied()))
        }
        Error::SerdeUnknownVariant { variant, expected, .. } => {
            Mistake::new(format!("unknown name `{variant}`"), suggest(variant, expected.iter().copied()))
        }
        Error::DuplicateMappingKey { key: Some(key), .. } => {
            Mistake::new(format!("`{key}` is written twice"), "keep one of the two")
        }
        Error::SerdeInvalidType { unexpected, expected, .. } => {
            Mistake::new(format!("{} stands where {} belongs", thing(unexpected), thing(expected)), "")
        }
        Error::Unexpected { expected, .. } => {
            Mistake::new(format!("something else stands where {} belongs", thing(expected)), "")
        }
        Error::InvalidScalar { ty: "boolean", .. } | Error::InvalidBooleanStrict { .. } => {
            Mistake::new("this is neither yes nor no", "write `true` or `false`")
        }
        Error::AliasError { error, .. } | Error::WithSnippet { error, .. } => in_words(error),
        other => {
            let message = DefaultMessageFormatter.format_message(other);
            Mistake::recorded(&message).unwrap_or_else(|| Mistake::new(message, ""))
        }
    }
}

/// Rewords the YAML reader's names for parts of a file.
fn thing(name: &str) -> &str {
    match name {
        "mapping start" | "map" => "a mapping",
        "sequence start" | "sequence" => "a list",
        "string scalar" | "scalar" => "a single value",
        other => other,
    }
}
