//! The IDX format of MNIST: a magic number, the size of each dimension, then the elements.
//!
//! Format: <http://yann.lecun.com/exdb/mnist/>, "THE IDX FILE FORMAT". Sizes are checked against
//! the length of the file before they are used. This module knows neither splits nor models.

use super::error::DataError;
use super::images::LabelledImages;
use super::options::OnBadSample;

/// The third byte of the magic number, for elements that are unsigned bytes. No other type is read.
const UNSIGNED_BYTE: u8 = 0x08;

/// Reads grey images and their labels from the contents of two files.
pub(crate) fn labelled_images(
    images_name: &str,
    images: &[u8],
    labels_name: &str,
    labels: &[u8],
    policy: OnBadSample,
) -> Result<LabelledImages, DataError> {
    let ([declared, height, width], mut pixels) = parse(images_name, images, policy)?;
    let ([declared_labels], mut labels) = parse(labels_name, labels, policy)?;
    let (mut count, mut label_count, mut bad) = (declared, declared_labels, 0);
    if policy == OnBadSample::Skip {
        // Keep as many samples as both files hold completely.
        let whole = pixels.len() / (height * width).max(1);
        count = declared.min(declared_labels).min(whole).min(labels.len());
        (bad, label_count) = (declared.max(declared_labels) - count, count);
        pixels = &pixels[..count * height * width];
        labels = &labels[..count];
    }
    if count != label_count {
        let problem = format!("has {label_count} labels for the {count} images of `{images_name}`");
        return Err(DataError::malformed(labels_name, problem, "take both files from the same data set"));
    }
    if count == 0 || height == 0 || width == 0 {
        let problem = format!("holds {count} images of {height}x{width} pixels");
        return Err(DataError::malformed(images_name, problem, "use a file with at least one image"));
    }
    Ok(LabelledImages { channels: 1, height, width, pixels: pixels.to_vec(), labels: labels.to_vec(), bad })
}

/// Reads the sizes and the elements of a file with exactly `DIMENSIONS` dimensions. If bad samples
/// are skipped, there may be fewer or more elements than the sizes say.
fn parse<'bytes, const DIMENSIONS: usize>(
    name: &str,
    bytes: &'bytes [u8],
    policy: OnBadSample,
) -> Result<([usize; DIMENSIONS], &'bytes [u8]), DataError> {
    let malformed =
        |problem: String| DataError::malformed(name, problem, "fetch the file again, and unpack it if it is still packed");
    let cut_short = || malformed(format!("is cut short: {} bytes do not hold an IDX header", bytes.len()));
    let (magic, mut rest) = bytes.split_first_chunk::<4>().ok_or_else(cut_short)?;
    let expected = [0, 0, UNSIGNED_BYTE, DIMENSIONS as u8];
    if *magic != expected {
        let (found, expected) = (u32::from_be_bytes(*magic), u32::from_be_bytes(expected));
        return Err(malformed(format!(
            "is not an IDX file of bytes in {DIMENSIONS} dimensions: its magic number is {found:#010x}, not {expected:#010x}"
        )));
    }
    let mut dimensions = [0_usize; DIMENSIONS];
    for dimension in &mut dimensions {
        let (size, after) = rest.split_first_chunk::<4>().ok_or_else(cut_short)?;
        *dimension = u32::from_be_bytes(*size) as usize;
        rest = after;
    }
    let elements = dimensions.iter().try_fold(1_usize, |product, &size| product.checked_mul(size));
    let is_enough = policy == OnBadSample::Skip && elements.is_some();
    if elements != Some(rest.len()) && !is_enough {
        let sizes: Vec<String> = dimensions.iter().map(usize::to_string).collect();
        let (sizes, held) = (sizes.join(" x "), rest.len());
        return Err(malformed(format!("declares {sizes} bytes but holds {held} after its header")));
    }
    Ok((dimensions, rest))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use foretell_units::diagnostic::one_line;

    /// The bytes of an IDX file.
    pub(crate) fn file(dimensions: &[u32], elements: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0, 0, UNSIGNED_BYTE, dimensions.len() as u8];
        dimensions.iter().for_each(|size| bytes.extend(size.to_be_bytes()));
        bytes.extend(elements);
        bytes
    }

    fn problem(images: &[u8], labels: &[u8]) -> String {
        one_line(&labelled_images("images", images, "labels", labels, OnBadSample::Error).unwrap_err())
    }

    #[test]
    fn a_valid_pair_of_files_is_read() {
        let images =
            labelled_images("i", &file(&[2, 1, 3], &[1, 2, 3, 4, 5, 6]), "l", &file(&[2], &[7, 8]), OnBadSample::Error).unwrap();
        assert_eq!((images.channels, images.height, images.width), (1, 1, 3));
        assert_eq!((images.pixels, images.labels), (vec![1, 2, 3, 4, 5, 6], vec![7, 8]));
    }

    #[test]
    fn every_truncation_is_refused_with_the_files_name() {
        let images = file(&[2, 1, 3], &[1, 2, 3, 4, 5, 6]);
        let labels = file(&[2], &[7, 8]);
        for length in 0..images.len() {
            let message = problem(&images[..length], &labels);
            assert!(message.starts_with("`images` ") && message.contains("hint: fetch the file again"), "{message}");
        }
        for length in 0..labels.len() {
            assert!(problem(&images, &labels[..length]).starts_with("`labels` "));
        }
    }

    #[test]
    fn wrong_magic_numbers_and_impossible_sizes_are_refused() {
        let labels = file(&[2], &[7, 8]);
        assert!(problem(&[0x1f, 0x8b, 8, 0, 0, 0], &labels).contains("its magic number is 0x1f8b0800, not 0x00000803"));
        assert!(problem(&labels, &labels).contains("in 3 dimensions"));
        let absurd = problem(&file(&[u32::MAX, u32::MAX, u32::MAX], &[0]), &labels);
        assert!(absurd.contains("declares 4294967295 x 4294967295 x 4294967295 bytes but holds 1"), "{absurd}");
        assert!(problem(&file(&[1, 1, 1], &[1, 2]), &labels).contains("declares 1 x 1 x 1 bytes but holds 2"));
        assert!(problem(&file(&[1, 1, 1], &[1]), &labels).contains("has 2 labels for the 1 images of `images`"));
        assert!(problem(&file(&[0, 8, 8], &[]), &file(&[0], &[])).contains("holds 0 images"));
        assert!(problem(&file(&[2, 0, 8], &[]), &labels).contains("holds 2 images of 0x8"));
    }
}
