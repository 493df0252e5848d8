//! Images in memory, and how they are fitted to a model's input.
//!
//! Pixels are stored as bytes, channels last. They are normalised when a batch is filled. This
//! module knows neither files nor batches.

use super::error::DataError;
use super::options::OnBadSample;
use super::{SampleShape, Split};

/// Images with a label each: one split, as a reader returns it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LabelledImages {
    pub channels: usize,
    pub height: usize,
    pub width: usize,
    /// Bytes, `[image, height, width, channels]`.
    pub pixels: Vec<u8>,
    pub labels: Vec<u8>,
    /// Images that were left out because they are cut short or have no valid label.
    pub bad: usize,
}

impl LabelledImages {
    /// Leaves out images whose label the model does not have.
    fn without_labels_from(&mut self, classes: usize) {
        let (size, mut kept) = (self.image_size(), Vec::with_capacity(self.pixels.len()));
        let is_valid = |label: &u8| usize::from(*label) < classes;
        for (pixels, _) in self.pixels.chunks_exact(size).zip(&self.labels).filter(|(_, label)| is_valid(label)) {
            kept.extend_from_slice(pixels);
        }
        let before = self.labels.len();
        self.labels.retain(is_valid);
        (self.pixels, self.bad) = (kept, self.bad + before - self.labels.len());
    }

    fn image_size(&self) -> usize {
        self.channels * self.height * self.width
    }

    /// The pixels and the label of one image.
    pub(crate) fn get(&self, index: usize) -> Option<(&[u8], u8)> {
        Some((self.pixels.chunks_exact(self.image_size()).nth(index)?, *self.labels.get(index)?))
    }

    /// Splits into training and evaluation images: the first, sixth, eleventh ... image of each
    /// class is for evaluation.
    ///
    /// Images are counted by class, because the shipped digits are in counting order: every fifth
    /// of all images would mostly be a zero or a five.
    pub(crate) fn split_off_every_fifth(self) -> (LabelledImages, LabelledImages) {
        let empty = LabelledImages { pixels: Vec::new(), labels: Vec::new(), bad: 0, ..self };
        let (mut training, mut evaluation) = (empty.clone(), empty);
        let mut seen = [0_usize; 256];
        for (pixels, &label) in self.pixels.chunks_exact(self.image_size()).zip(&self.labels) {
            let mut into = &mut training;
            if let Some(seen) = seen.get_mut(usize::from(label)) {
                into = if seen.is_multiple_of(5) { &mut evaluation } else { into };
                *seen += 1;
            }
            into.pixels.extend(pixels);
            into.labels.push(label);
        }
        (training, evaluation)
    }
}

/// How an image becomes an input of the model: magnified by a whole number, then centred on black.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Fit {
    /// The shape of the model's input.
    channels: usize,
    height: usize,
    width: usize,
    /// The magnification.
    scale: usize,
    /// Black rows above the image and black columns left of it.
    top: usize,
    left: usize,
}

impl Fit {
    /// Fits the data into images of this size.
    fn image(name: &str, data: &LabelledImages, channels: usize, height: usize, width: usize) -> Result<Fit, DataError> {
        if channels != data.channels && data.channels != 1 {
            let problem = format!("its images have {} channels, the model wants {channels}", data.channels);
            return Err(DataError::unsuitable(name, problem, format!("give the model {} input channels", data.channels)));
        }
        let scale = (height / data.height).min(width / data.width);
        if scale == 0 {
            let problem = format!("its images of {}x{} are larger than the model's {height}x{width}", data.height, data.width);
            let hint = format!("give the model inputs of at least {}x{}, or use `synthetic` data", data.height, data.width);
            return Err(DataError::unsuitable(name, problem, hint));
        }
        let (top, left) = ((height - data.height * scale) / 2, (width - data.width * scale) / 2);
        Ok(Fit { channels, height, width, scale, top, left })
    }

    /// Fits the data into feature vectors of length `features`: as a magnified image with exactly
    /// that many values, or else as a square with that many.
    fn features(name: &str, data: &LabelledImages, features: usize) -> Result<Fit, DataError> {
        // A grey image can fill three channels.
        let channel_choices = if data.channels == 1 { &[1, 3][..] } else { &[data.channels][..] };
        let divisible = channel_choices.iter().copied().filter(|&channels| features.is_multiple_of(channels));
        for channels in divisible {
            let pixels = features / channels;
            let magnified = (pixels / (data.height * data.width)).isqrt();
            let side = pixels.isqrt();
            if magnified.pow(2) * data.height * data.width == pixels {
                return Fit::image(name, data, channels, data.height * magnified, data.width * magnified);
            }
            if side.pow(2) == pixels && side >= data.height.max(data.width) {
                return Fit::image(name, data, channels, side, side);
            }
        }
        let (channels, height, width) = (data.channels, data.height, data.width);
        let problem = format!("its images of {height}x{width} with {channels} channels cannot fill {features} features");
        // Saturating: a file may hold a single image that is as wide as the file is long.
        let (own, side) = (channels * height * width, height.max(width).saturating_mul(2));
        let square = side.saturating_mul(side).saturating_mul(channels);
        let hint = format!("give the model {own} features, or those of a larger square such as {square} ({side}x{side})");
        Err(DataError::unsuitable(name, problem, hint))
    }
}

/// Both splits of a data set, fitted to a model.
#[derive(Debug)]
pub(crate) struct ImageData {
    training: LabelledImages,
    evaluation: LabelledImages,
    fit: Fit,
    /// Normalised values, by channel of the data and byte.
    normalised: Vec<[f32; 256]>,
}

impl ImageData {
    /// Fits two splits to a model.
    pub(crate) fn new(
        name: &str,
        mut training: LabelledImages,
        mut evaluation: LabelledImages,
        wanted: &SampleShape,
        policy: OnBadSample,
    ) -> Result<Self, DataError> {
        let shape = |images: &LabelledImages| (images.channels, images.height, images.width);
        if shape(&training) != shape(&evaluation) {
            let problem = "has training and evaluation images of different sizes";
            return Err(DataError::malformed(name, problem, "take all files from the same data set"));
        }
        let (fit, classes) = match *wanted {
            SampleShape::Image { channels, height, width, classes } => {
                (Fit::image(name, &training, channels, height, width)?, classes)
            }
            SampleShape::Features { width, classes } => (Fit::features(name, &training, width)?, classes),
            SampleShape::Tokens { .. } | SampleShape::MaskedTokens { .. } | SampleShape::Pair { .. } => {
                let problem = "it holds images, the model wants tokens";
                return Err(DataError::unsuitable(name, problem, "use `text`, `synthetic`, or the path of a text"));
            }
        };
        if policy == OnBadSample::Skip {
            training.without_labels_from(classes);
            evaluation.without_labels_from(classes);
        }
        if training.labels.is_empty() {
            let problem = format!("no training image is whole and has a label below {classes}");
            return Err(DataError::unsuitable(name, problem, "give the model more classes, or fetch the data again"));
        }
        let highest = training.labels.iter().chain(&evaluation.labels).max().copied();
        let highest = highest.expect("invariant: there is a training image");
        if usize::from(highest) >= classes {
            let needed = usize::from(highest) + 1;
            let problem = format!("it has {needed} classes, the model {classes}");
            return Err(DataError::unsuitable(name, problem, format!("give the model at least {needed} classes")));
        }
        let normalised = (0..training.channels).map(|channel| normalisation(&training, channel)).collect();
        Ok(ImageData { training, evaluation, fit, normalised })
    }

    /// Images that were left out.
    pub(crate) fn bad_samples(&self) -> usize {
        self.training.bad + self.evaluation.bad
    }

    /// The images of a split.
    pub(crate) fn split(&self, split: Split) -> &LabelledImages {
        match split {
            Split::Training => &self.training,
            Split::Evaluation => &self.evaluation,
        }
    }

    /// Fills `out`, `[height, width, channels]` of the model's input, from the pixels of one image.
    pub(crate) fn fill(&self, pixels: &[u8], out: &mut [f32]) {
        let Fit { channels, width, scale, top, left, .. } = self.fit;
        let (data_channels, data_width) = (self.training.channels, self.training.width);
        for (y, row) in out.chunks_exact_mut(width * channels).enumerate() {
            let source_row = y.checked_sub(top).map(|y| y / scale);
            let source_row = source_row.and_then(|y| pixels.chunks_exact(data_width * data_channels).nth(y)).unwrap_or_default();
            for (x, values) in row.chunks_exact_mut(channels).enumerate() {
                let source = x.checked_sub(left).map(|x| x / scale);
                let source = source.and_then(|x| source_row.chunks_exact(data_channels).nth(x)).unwrap_or(&[0]);
                // The cycles repeat a grey channel for every channel of the model.
                let normalised = source.iter().cycle().zip(self.normalised.iter().cycle());
                for (value, (&byte, table)) in values.iter_mut().zip(normalised) {
                    *value = table[usize::from(byte)];
                }
            }
        }
    }
}

/// The normalised values of all bytes of one channel: less the channel's mean over the training
/// split, and divided by its standard deviation.
///
/// The sums are integers, so the result does not depend on the order of summation.
fn normalisation(images: &LabelledImages, channel: usize) -> [f32; 256] {
    let (mut count, mut sum, mut squares) = (0_u64, 0_u64, 0_u64);
    for &byte in images.pixels.iter().skip(channel).step_by(images.channels) {
        count += 1;
        sum += u64::from(byte);
        squares += u64::from(byte).pow(2);
    }
    let count = count.max(1) as f64;
    let mean = sum as f64 / count;
    let variance = squares as f64 / count - mean * mean;
    // If all bytes are equal there is no deviation to divide by.
    let deviation = if variance > 1e-9 { variance.sqrt() } else { 1.0 };
    std::array::from_fn(|byte| ((byte as f64 - mean) / deviation) as f32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use foretell_units::diagnostic::one_line;

    fn images(channels: usize, height: usize, width: usize, pixels: &[u8], labels: &[u8]) -> LabelledImages {
        LabelledImages { channels, height, width, pixels: pixels.to_vec(), labels: labels.to_vec(), bad: 0 }
    }

    fn open(training: LabelledImages, evaluation: LabelledImages, wanted: &SampleShape) -> Result<ImageData, DataError> {
        ImageData::new("d", training, evaluation, wanted, OnBadSample::Error)
    }

    fn blank(channels: usize, side: usize) -> LabelledImages {
        images(channels, side, side, &vec![0; channels * side * side], &[0])
    }

    fn image(channels: usize, height: usize, width: usize) -> SampleShape {
        SampleShape::Image { channels, height, width, classes: 2 }
    }

    #[test]
    fn images_are_magnified_centred_on_black_and_repeated_over_channels() {
        // Mean 1, deviation 1: the bytes 0 and 2 become -1 and 1.
        let grey = images(1, 1, 2, &[0, 2], &[1]);
        let data = open(grey.clone(), grey, &image(3, 3, 4)).unwrap();
        let mut out = vec![9.0; 36];
        data.fill(&[2, 2], &mut out);
        let rows: Vec<&[f32]> = out.chunks(12).collect();
        assert_eq!(rows, [[1.0; 12], [1.0; 12], [-1.0; 12]]);
        data.fill(&[2, 0], &mut out);
        assert_eq!(out[..12], [[1.0; 6], [-1.0; 6]].concat());
    }

    #[test]
    fn each_channel_is_normalised_on_its_own() {
        let colour = images(2, 1, 2, &[0, 10, 2, 30], &[0]);
        let data = open(colour.clone(), colour, &image(2, 1, 2)).unwrap();
        let mut out = [9.0; 4];
        data.fill(&[0, 10, 2, 30], &mut out);
        assert_eq!(out, [-1.0, -1.0, 1.0, 1.0]);
    }

    #[test]
    fn the_largest_magnification_that_fits_is_taken() {
        let fit = |data: LabelledImages, wanted: usize| {
            let fit = Fit::image("d", &data, 1, wanted, wanted).unwrap();
            (fit.scale, fit.top, fit.left)
        };
        assert_eq!(fit(blank(1, 8), 32), (4, 0, 0));
        assert_eq!(fit(blank(1, 28), 28), (1, 0, 0));
        assert_eq!(fit(blank(1, 28), 32), (1, 2, 2));
        assert_eq!(fit(blank(1, 8), 28), (3, 2, 2));
    }

    #[test]
    fn features_are_the_image_its_magnification_or_a_square_around_it() {
        let fit = |data: LabelledImages, features: usize| {
            Fit::features("d", &data, features).map(|fit| (fit.channels, fit.height, fit.scale)).map_err(|error| one_line(&error))
        };
        assert_eq!(fit(blank(1, 8), 64), Ok((1, 8, 1)));
        assert_eq!(fit(blank(1, 8), 256), Ok((1, 16, 2)));
        assert_eq!(fit(blank(1, 8), 784), Ok((1, 28, 3)));
        assert_eq!(fit(blank(1, 8), 3072), Ok((3, 32, 4)));
        assert_eq!(fit(blank(1, 28), 784), Ok((1, 28, 1)));
        assert_eq!(fit(blank(3, 32), 3072), Ok((3, 32, 1)));
        let message = fit(blank(1, 8), 100_001).unwrap_err();
        assert!(message.contains("hint: give the model 64 features") && message.contains("256 (16x16)"), "{message}");
        assert!(fit(blank(1, 8), 49).is_err());
    }

    #[test]
    fn images_that_do_not_fit_are_refused_with_a_hint() {
        let refused = |data: LabelledImages, wanted| {
            let evaluation = data.clone();
            one_line(&open(data, evaluation, &wanted).unwrap_err())
        };
        assert!(refused(blank(1, 8), image(1, 7, 8)).contains("hint: give the model inputs of at least 8x8"));
        assert!(refused(blank(3, 8), image(1, 8, 8)).contains("hint: give the model 3 input channels"));
        assert!(refused(images(1, 1, 1, &[0], &[2]), image(1, 1, 1)).contains("hint: give the model at least 3 classes"));
        assert!(refused(blank(1, 8), SampleShape::Tokens { sequence: 8, vocabulary: 8 }).contains("the model wants tokens"));
        let message = one_line(&open(blank(1, 8), blank(1, 9), &image(1, 9, 9)).unwrap_err());
        assert!(message.contains("different sizes"), "{message}");
    }

    #[test]
    fn every_fifth_image_of_each_class_is_for_evaluation() {
        let labels = [0, 1, 0, 1, 0, 0, 0, 0, 1];
        let pixels = [0, 1, 2, 3, 4, 5, 6, 7, 8];
        let (training, evaluation) = images(1, 1, 1, &pixels, &labels).split_off_every_fifth();
        assert_eq!((evaluation.pixels, evaluation.labels), (vec![0, 1, 7], vec![0, 1, 0]));
        assert_eq!(training.pixels, [2, 3, 4, 5, 6, 8]);
        assert_eq!(training.get(5), Some(([8].as_slice(), 1)));
        assert_eq!(training.get(6), None);
    }
}
