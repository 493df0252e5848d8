//! The binary files of CIFAR-10 and CIFAR-100: records of one or two label bytes and 32x32 pixels,
//! one channel after the other.
//!
//! Format: <https://www.cs.toronto.edu/~kriz/cifar.html>, "Binary version". Reading puts the
//! channels last. This module knows neither splits nor models.

use super::error::DataError;
use super::images::LabelledImages;
use super::options::OnBadSample;

const SIDE: usize = 32;
const CHANNELS: usize = 3;
const PLANE: usize = SIDE * SIDE;

/// One of the two data sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Variant {
    /// Records with one label byte.
    Cifar10,
    /// Records with a coarse and a fine label byte. The fine one is used.
    Cifar100,
}

impl Variant {
    fn name(self) -> &'static str {
        match self {
            Variant::Cifar10 => "CIFAR-10",
            Variant::Cifar100 => "CIFAR-100",
        }
    }

    fn label_bytes(self) -> usize {
        match self {
            Variant::Cifar10 => 1,
            Variant::Cifar100 => 2,
        }
    }

    fn classes(self) -> u8 {
        match self {
            Variant::Cifar10 => 10,
            Variant::Cifar100 => 100,
        }
    }
}

/// An empty set of images of CIFAR's shape.
pub(crate) fn empty() -> LabelledImages {
    LabelledImages { channels: CHANNELS, height: SIDE, width: SIDE, pixels: Vec::new(), labels: Vec::new(), bad: 0 }
}

/// Appends the images of one file.
pub(crate) fn append(
    images: &mut LabelledImages,
    variant: Variant,
    name: &str,
    bytes: &[u8],
    policy: OnBadSample,
) -> Result<(), DataError> {
    let record_bytes = variant.label_bytes() + CHANNELS * PLANE;
    let malformed = |problem: String| DataError::malformed(name, problem, "fetch the \"binary version\" of the data set again");
    let is_whole = !bytes.is_empty() && bytes.len().is_multiple_of(record_bytes);
    images.bad += usize::from(!is_whole);
    if !is_whole && policy == OnBadSample::Error {
        return Err(malformed(format!(
            "is not a {} file, or is cut short: {} bytes are not a whole number of {record_bytes}-byte records",
            variant.name(),
            bytes.len()
        )));
    }
    for (number, record) in bytes.chunks_exact(record_bytes).enumerate() {
        let (labels, planes) = record.split_at(variant.label_bytes());
        let label = *labels.last().expect("invariant: a record begins with a label");
        if label >= variant.classes() && policy == OnBadSample::Skip {
            images.bad += 1;
            continue;
        }
        if label >= variant.classes() {
            let (name, classes) = (variant.name(), variant.classes());
            return Err(malformed(format!(
                "is not a {name} file: image {number} has the label {label}, but there are {classes} classes"
            )));
        }
        images.labels.push(label);
        let (red, others) = planes.split_at(PLANE);
        let (green, blue) = others.split_at(PLANE);
        for ((&red, &green), &blue) in red.iter().zip(green).zip(blue) {
            images.pixels.extend([red, green, blue]);
        }
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use foretell_units::diagnostic::one_line;

    /// A record whose red, green and blue pixels are 10, 20 and 30, except that the first red one
    /// is 11.
    pub(crate) fn record(labels: &[u8]) -> Vec<u8> {
        let mut bytes = labels.to_vec();
        [10, 20, 30].iter().for_each(|&value| bytes.extend([value; PLANE]));
        bytes[labels.len()] = 11;
        bytes
    }

    #[test]
    fn records_are_read_with_channels_last() {
        let mut images = empty();
        append(&mut images, Variant::Cifar10, "a", &[record(&[3]), record(&[9])].concat(), OnBadSample::Error).unwrap();
        append(&mut images, Variant::Cifar10, "b", &record(&[0]), OnBadSample::Error).unwrap();
        assert_eq!(images.labels, [3, 9, 0]);
        assert_eq!(images.pixels.len(), 3 * 3072);
        assert_eq!(images.pixels[..6], [11, 20, 30, 10, 20, 30]);
        let mut images = empty();
        append(&mut images, Variant::Cifar100, "c", &record(&[19, 99]), OnBadSample::Error).unwrap();
        assert_eq!((images.labels.as_slice(), &images.pixels[..3]), ([99].as_slice(), [11, 20, 30].as_slice()));
    }

    #[test]
    fn truncated_files_and_labels_out_of_range_are_refused() {
        let whole = record(&[3]);
        for length in [0, 1, 3072] {
            let message =
                one_line(&append(&mut empty(), Variant::Cifar10, "a", &whole[..length], OnBadSample::Error).unwrap_err());
            assert!(message.contains("`a` is not a CIFAR-10 file, or is cut short"), "{message}");
        }
        let message = one_line(&append(&mut empty(), Variant::Cifar10, "a", &record(&[10]), OnBadSample::Error).unwrap_err());
        assert!(message.contains("image 0 has the label 10, but there are 10 classes"), "{message}");
        assert!(append(&mut empty(), Variant::Cifar100, "a", &record(&[0, 100]), OnBadSample::Error).is_err());
    }
}
