//! Periods of a run: a number of steps or of epochs.

use foretell_units::diagnostic::Mistake;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

/// A number of steps, or of passes over the training samples. In plan files `500`, `500 steps` or
/// `30 epochs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Period {
    /// Steps.
    Steps(usize),
    /// Epochs.
    Epochs(usize),
}

/// The length of a run, known once the size of its data set is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunLength {
    /// The number of steps, from the run's start to its end.
    pub steps: usize,
    /// The number of steps in an epoch.
    pub steps_per_epoch: usize,
}

impl Period {
    /// The number of steps of this period in a run of length `run`.
    pub fn steps(self, run: RunLength) -> usize {
        match self {
            Period::Steps(steps) => steps,
            Period::Epochs(epochs) => epochs.saturating_mul(run.steps_per_epoch),
        }
    }

    /// Whether a period ends with this step, counted from 0.
    pub fn ends_with(self, step: usize, run: RunLength) -> bool {
        (step + 1).is_multiple_of(self.steps(run))
    }

    /// The number of steps or epochs.
    pub(super) fn count(self) -> usize {
        match self {
            Period::Steps(count) | Period::Epochs(count) => count,
        }
    }
}

impl fmt::Display for Period {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Period::Steps(steps) => write!(formatter, "{steps} steps"),
            Period::Epochs(epochs) => write!(formatter, "{epochs} epochs"),
        }
    }
}

impl FromStr for Period {
    type Err = Mistake;

    fn from_str(text: &str) -> Result<Self, Mistake> {
        let wrong = || Mistake::new(format!("`{text}` is not a period"), "write `500`, `500 steps` or `30 epochs`");
        let text = text.trim();
        let digits = text.len() - text.trim_start_matches(|character: char| character.is_ascii_digit()).len();
        let count = text[..digits].parse().map_err(|_| wrong())?;
        match text[digits..].trim() {
            "" | "step" | "steps" => Ok(Period::Steps(count)),
            "epoch" | "epochs" => Ok(Period::Epochs(count)),
            _ => Err(wrong()),
        }
    }
}

impl Serialize for Period {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Period::Steps(steps) => serializer.serialize_u64(*steps as u64),
            Period::Epochs(_) => serializer.collect_str(self),
        }
    }
}

impl<'de> Deserialize<'de> for Period {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl de::Visitor<'_> for Visitor {
            type Value = Period;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a number of steps, or text such as `30 epochs`")
            }

            fn visit_u64<E: de::Error>(self, steps: u64) -> Result<Period, E> {
                usize::try_from(steps).map(Period::Steps).map_err(E::custom)
            }

            fn visit_i64<E: de::Error>(self, steps: i64) -> Result<Period, E> {
                usize::try_from(steps).map(Period::Steps).map_err(|_| {
                    Mistake::new("a period cannot be negative", "write `500`, `500 steps` or `30 epochs`").into_serde()
                })
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Period, E> {
                text.parse().map_err(Mistake::into_serde)
            }
        }

        deserializer.deserialize_any(Visitor)
    }
}

impl JsonSchema for Period {
    fn schema_name() -> Cow<'static, str> {
        "Period".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": "A number of steps, or text such as `30 epochs`.",
            "anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_period_reads_back_as_it_is_written() {
        let run = RunLength { steps: 100, steps_per_epoch: 7 };
        for (text, period, steps) in [
            ("500", Period::Steps(500), 500),
            ("500 steps", Period::Steps(500), 500),
            ("1 step", Period::Steps(1), 1),
            ("30 epochs", Period::Epochs(30), 210),
            ("1epoch", Period::Epochs(1), 7),
        ] {
            assert_eq!(text.parse(), Ok(period));
            assert_eq!(period.to_string().parse(), Ok(period));
            assert_eq!(period.steps(run), steps);
        }
        for wrong in ["", "x", "3 weeks", "-1", "1.5 epochs", "99999999999999999999999"] {
            let error = wrong.parse::<Period>().expect_err("not a period");
            assert!(error.hint.contains("`30 epochs`"), "{error}");
        }
        assert!(Period::Steps(5).ends_with(4, run) && !Period::Steps(5).ends_with(5, run));
        assert!(!Period::Steps(0).ends_with(4, run));
    }
}
