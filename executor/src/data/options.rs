//! How samples are read: by how many workers, how far ahead, with which random changes, and what
//! happens to a sample that cannot be read. This module knows no formats.

use miette::Diagnostic;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// The policy for samples that cannot be used: a corrupt picture, a token beyond the vocabulary,
/// a label that the model does not have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnBadSample {
    /// End the run with an error that names the file.
    #[default]
    Error,
    /// Use another sample instead, and count it.
    Skip,
}

/// Whether a sample was filled as requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Filled {
    /// With the requested sample.
    Whole,
    /// With another sample, because the requested one could not be used.
    Replaced,
}

/// How samples are read.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct InputOptions {
    /// Threads per rank that prepare samples. 0: the rank's own thread prepares them. `None`: the
    /// default that [`Dataset::workers`](super::Dataset::workers) chooses.
    pub workers: Option<usize>,
    /// Batches that are prepared ahead of the step.
    pub prefetch: usize,
    /// Random changes of training pictures.
    pub augmentation: Augmentation,
    /// What to do with a sample that cannot be used.
    pub on_bad_sample: OnBadSample,
}

impl Default for InputOptions {
    fn default() -> Self {
        // Two batches ahead is PyTorch's default prefetch factor.
        Self { workers: None, prefetch: 2, augmentation: Augmentation::default(), on_bad_sample: OnBadSample::Error }
    }
}

/// Random changes of the pictures of a folder before they are trained on. Evaluation has none.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Augmentation {
    /// Whether to take a random part of the picture, resized; otherwise the centre, as in
    /// evaluation.
    pub crop: bool,
    /// Whether to mirror half of the pictures, at random.
    pub flip: bool,
    /// The largest relative changes of brightness, contrast and saturation, and the largest turn of
    /// the hue as a fraction of the colour circle.
    pub jitter: [f64; 4],
}

impl Default for Augmentation {
    /// A random crop and flip, as in PyTorch's ImageNet example.
    fn default() -> Self {
        Self { crop: true, flip: true, jitter: [0.0; 4] }
    }
}

/// A list of random changes that cannot be understood.
#[derive(Clone, Debug, PartialEq, Eq, Error, Diagnostic)]
#[error("`{text}` is not a list of random changes")]
#[diagnostic(code(data::augmentation), help("write `none`, or some of `crop`, `flip` and `jitter=0.4:0.4:0.4:0.1`"))]
pub struct AugmentationError {
    text: String,
}

impl FromStr for Augmentation {
    type Err = AugmentationError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || AugmentationError { text: text.into() };
        let mut augmentation = Self { crop: false, flip: false, jitter: [0.0; 4] };
        if text == "none" {
            return Ok(augmentation);
        }
        for word in text.split(',') {
            match word.trim().split_once('=').unwrap_or((word.trim(), "")) {
                ("crop", "") => augmentation.crop = true,
                ("flip", "") => augmentation.flip = true,
                ("jitter", strengths) => {
                    let numbers = strengths.split(':').map(str::parse).collect::<Result<Vec<f64>, _>>();
                    let numbers = numbers.map_err(|_| wrong())?;
                    // A single strength applies to brightness, contrast and saturation; the hue
                    // does not change.
                    augmentation.jitter = match *numbers {
                        [all] => [all, all, all, 0.0],
                        [brightness, contrast, saturation] => [brightness, contrast, saturation, 0.0],
                        [brightness, contrast, saturation, hue] => [brightness, contrast, saturation, hue],
                        _ => return Err(wrong()),
                    };
                    let [rest @ .., hue] = augmentation.jitter;
                    if rest.iter().any(|strength| !(0.0..=1.0).contains(strength)) || !(0.0..=0.5).contains(&hue) {
                        return Err(wrong());
                    }
                }
                _ => return Err(wrong()),
            }
        }
        Ok(augmentation)
    }
}

impl fmt::Display for Augmentation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [brightness, contrast, saturation, hue] = self.jitter;
        let jitter = format!("jitter={brightness}:{contrast}:{saturation}:{hue}");
        let all = [("crop", self.crop), ("flip", self.flip), (&jitter, self.jitter != [0.0; 4])];
        let words: Vec<&str> = all.into_iter().filter(|&(_, is_used)| is_used).map(|(word, _)| word).collect();
        formatter.write_str(if words.is_empty() { "none".into() } else { words.join(",") }.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_random_changes_reads_back() {
        for text in ["none", "crop", "flip", "crop,flip", "crop,flip,jitter=0.4:0.3:0.2:0.1"] {
            assert_eq!(text.parse::<Augmentation>().unwrap().to_string(), text);
        }
        assert_eq!("crop,flip".parse(), Ok(Augmentation::default()));
        assert_eq!("jitter=0.4".parse::<Augmentation>().unwrap().jitter, [0.4, 0.4, 0.4, 0.0]);
        for text in ["", "crops", "crop=1", "jitter", "jitter=2", "jitter=0.1:0.1:0.1:0.6", "jitter=NaN", "jitter=1:1"] {
            assert!(text.parse::<Augmentation>().is_err(), "{text}");
        }
    }
}
