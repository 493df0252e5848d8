//! Files and folders: bounded reading, and finding out which format a path holds. The readers of
//! each format know what the bytes mean.

use super::error::DataError;
use super::images::LabelledImages;
use super::options::OnBadSample;
use super::pictures::PictureFolder;
use super::tokens::{self, Tokens};
use super::{cifar, idx};
use crate::regular;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The largest file that is read. Files are kept in memory, and samples are numbered with 32 bits.
pub(crate) const MAX_FILE: u64 = u32::MAX as u64;

/// The data at a path.
#[derive(Debug)]
pub(crate) enum FileContents {
    /// A training and an evaluation split of images.
    Images { training: LabelledImages, evaluation: LabelledImages },
    /// A folder of pictures, a folder per class.
    Pictures,
    /// Files of tokens.
    Tokens(Tokens),
}

/// Opens the data at `path`.
pub(crate) fn open_path(path: &Path, policy: OnBadSample) -> Result<FileContents, DataError> {
    // Megatron names a pair of files by what they have in common.
    let pair = PathBuf::from(format!("{}.idx", path.display()));
    if !path.exists() && pair.is_file() {
        return open_path(&pair, policy);
    }
    let metadata = std::fs::metadata(path).map_err(|error| DataError::io(path, &error))?;
    if metadata.is_dir() {
        return open_folder(path, policy);
    }
    tokens::open_file(path, policy)?.map(FileContents::Tokens).ok_or_else(|| {
        DataError::malformed(
            &path.display().to_string(),
            "is neither a folder nor a file of tokens",
            "for images give the folder; for tokens, a `.tokens` file that `foretell data tokenize` wrote, a `.txt` file of text, a `.bin` or `.u32` file of little-endian 16- or 32-bit tokens, or Megatron's `.idx`",
        )
    })
}

/// The files of MNIST. Each has one of two names.
const MNIST: [[&str; 2]; 4] = [
    ["train-images-idx3-ubyte", "train-images.idx3-ubyte"],
    ["train-labels-idx1-ubyte", "train-labels.idx1-ubyte"],
    ["t10k-images-idx3-ubyte", "t10k-images.idx3-ubyte"],
    ["t10k-labels-idx1-ubyte", "t10k-labels.idx1-ubyte"],
];

/// The training files of CIFAR-10.
const CIFAR_10: [&str; 5] = ["data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin", "data_batch_5.bin"];

fn open_folder(folder: &Path, policy: OnBadSample) -> Result<FileContents, DataError> {
    let has = |name: &str| folder.join(name).is_file();
    let [training_images, training_labels, evaluation_images, evaluation_labels] = MNIST;
    if training_images.iter().chain(&evaluation_images).any(|name| has(name)) {
        let training = read_idx(folder, &training_images, &training_labels, policy)?;
        let evaluation = read_idx(folder, &evaluation_images, &evaluation_labels, policy)?;
        return Ok(FileContents::Images { training, evaluation });
    }
    let batches: Vec<&str> = CIFAR_10.into_iter().filter(|name| has(name)).collect();
    if !batches.is_empty() || has("test_batch.bin") {
        let batches = if batches.is_empty() { &CIFAR_10 } else { &*batches };
        let training = read_cifar(folder, cifar::Variant::Cifar10, batches, policy)?;
        let evaluation = read_cifar(folder, cifar::Variant::Cifar10, &["test_batch.bin"], policy)?;
        return Ok(FileContents::Images { training, evaluation });
    }
    if has("train.bin") && has("test.bin") {
        let training = read_cifar(folder, cifar::Variant::Cifar100, &["train.bin"], policy)?;
        let evaluation = read_cifar(folder, cifar::Variant::Cifar100, &["test.bin"], policy)?;
        return Ok(FileContents::Images { training, evaluation });
    }
    if PictureFolder::is_at(folder) {
        return Ok(FileContents::Pictures);
    }
    if let Some(tokens) = tokens::open_folder(folder, policy)? {
        return Ok(FileContents::Tokens(tokens));
    }
    let hint = match has("train-images-idx3-ubyte.gz") {
        true => "unpack its files with `gunzip`",
        false => {
            "give the folder that directly contains `train-images-idx3-ubyte` (MNIST), `data_batch_1.bin` (CIFAR-10), or `train.bin` and `test.bin` (CIFAR-100), or the one with `train/CLASS/*.jpg`; for tokens give the file, or a folder of `.tokens` files"
        }
    };
    Err(DataError::malformed(&folder.display().to_string(), "contains no data of a known format", hint))
}

fn read_idx(folder: &Path, images: &[&str], labels: &[&str], policy: OnBadSample) -> Result<LabelledImages, DataError> {
    let (images, labels) = (find(folder, images)?, find(folder, labels)?);
    let images_name = images.display().to_string();
    let labels_name = labels.display().to_string();
    idx::labelled_images(&images_name, &read_file(&images)?, &labels_name, &read_file(&labels)?, policy)
}

fn read_cifar(folder: &Path, variant: cifar::Variant, names: &[&str], policy: OnBadSample) -> Result<LabelledImages, DataError> {
    let mut all = cifar::empty();
    for name in names {
        let path = find(folder, &[name])?;
        cifar::append(&mut all, variant, &path.display().to_string(), &read_file(&path)?, policy)?;
    }
    Ok(all)
}

/// The first of these files that exists.
fn find(folder: &Path, names: &[&str]) -> Result<PathBuf, DataError> {
    let found = names.iter().map(|name| folder.join(name)).find(|path| path.is_file());
    found.ok_or_else(|| {
        let missing = names.first().copied().unwrap_or_default();
        let problem = format!("lacks the file `{missing}`");
        DataError::malformed(&folder.display().to_string(), problem, "put all files of the data set into the folder, unpacked")
    })
}

/// Reads a regular file of at most [`MAX_FILE`] bytes.
fn read_file(path: &Path) -> Result<Vec<u8>, DataError> {
    let unreadable = |error: std::io::Error| DataError::io(path, &error);
    let (file, size) = regular::open(path).map_err(unreadable)?;
    let too_large = |size: u64| {
        let problem = format!("has {size} bytes, more than the {MAX_FILE} that can be read into memory");
        DataError::malformed(&path.display().to_string(), problem, "split it and train on a part")
    };
    if size > MAX_FILE {
        return Err(too_large(size));
    }
    let mut bytes = Vec::new();
    let out_of_memory = || DataError::Unreadable { path: path.to_path_buf(), reason: "not enough memory".to_owned() };
    bytes.try_reserve_exact(size as usize).map_err(|_| out_of_memory())?;
    // The file may have grown since its size was checked.
    let read = file.take(MAX_FILE + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if read as u64 > MAX_FILE { Err(too_large(read as u64)) } else { Ok(bytes) }
}
