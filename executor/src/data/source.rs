//! The names of data on the command line: shipped data, or a path. This module knows no file
//! formats.

use super::{Dataset, SampleShape};
use miette::Diagnostic;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use thiserror::Error;

/// The source of a run's data.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DataSource {
    /// The shipped 8x8 handwritten digits.
    Digits,
    /// The shipped licence texts, one token per byte.
    Text,
    /// Seeded random data of any shape, from which a model can learn something.
    Synthetic,
    /// A folder of pictures, of IDX (MNIST) or CIFAR files, a text, or files of tokens.
    Path(PathBuf),
}

/// The name is empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error, Diagnostic)]
#[error("the name of the data is empty")]
#[diagnostic(code(data::no_name), help("write `digits`, `text`, `synthetic`, or the path of a file or folder"))]
pub struct EmptyDataName;

impl DataSource {
    /// The default data for a model: digits for images and features, text for tokens, and synthetic
    /// data where those do not fit.
    pub fn default_for(shape: &SampleShape) -> Self {
        let shipped = match shape {
            SampleShape::Image { .. } | SampleShape::Features { .. } => DataSource::Digits,
            SampleShape::Tokens { .. } | SampleShape::MaskedTokens { .. } => DataSource::Text,
            SampleShape::Pair { .. } => DataSource::Synthetic,
        };
        // Opening it is the only reliable test, and cheap, because the shipped data is small.
        if Dataset::open(&shipped, shape, 0).is_ok() { shipped } else { DataSource::Synthetic }
    }
}

impl FromStr for DataSource {
    type Err = EmptyDataName;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "digits" => Ok(DataSource::Digits),
            "text" => Ok(DataSource::Text),
            "synthetic" => Ok(DataSource::Synthetic),
            _ if text.trim().is_empty() => Err(EmptyDataName),
            _ => Ok(DataSource::Path(PathBuf::from(text))),
        }
    }
}

impl fmt::Display for DataSource {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DataSource::Digits => formatter.write_str("digits"),
            DataSource::Text => formatter.write_str("text"),
            DataSource::Synthetic => formatter.write_str("synthetic"),
            DataSource::Path(path) => path.display().fmt(formatter),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_paths_are_distinguished() {
        assert_eq!("digits".parse(), Ok(DataSource::Digits));
        assert_eq!("text".parse(), Ok(DataSource::Text));
        assert_eq!("synthetic".parse(), Ok(DataSource::Synthetic));
        assert_eq!("./digits".parse(), Ok(DataSource::Path("./digits".into())));
        assert_eq!(" ".parse::<DataSource>(), Err(EmptyDataName));
        for name in ["digits", "text", "synthetic", "/data/mnist"] {
            assert_eq!(name.parse::<DataSource>().unwrap().to_string(), name);
        }
    }

    #[test]
    fn the_default_is_shipped_data_if_it_fits_and_else_synthetic() {
        let image = |side, classes| SampleShape::Image { channels: 3, height: side, width: side, classes };
        let default = DataSource::default_for;
        assert_eq!(default(&image(32, 10)), DataSource::Digits);
        assert_eq!(default(&image(4, 10)), DataSource::Synthetic);
        assert_eq!(default(&image(32, 2)), DataSource::Synthetic);
        assert_eq!(default(&SampleShape::Features { width: 784, classes: 10 }), DataSource::Digits);
        assert_eq!(default(&SampleShape::Features { width: 65, classes: 10 }), DataSource::Synthetic);
        assert_eq!(default(&SampleShape::Tokens { sequence: 128, vocabulary: 256 }), DataSource::Text);
        assert_eq!(default(&SampleShape::Tokens { sequence: 1 << 20, vocabulary: 256 }), DataSource::Synthetic);
        assert_eq!(default(&SampleShape::Tokens { sequence: 128, vocabulary: 16 }), DataSource::Synthetic);
    }
}
