//! A folder of pictures in ImageNet's layout: `train/CLASS/*` and, for evaluation, `val/CLASS/*`.
//!
//! A sample is read and decoded when it is asked for. Its random changes depend on the seed, the
//! epoch and its index alone, so any number of workers and any layout gives the same bytes. This
//! module knows neither batches nor workers.

mod colour;
mod crop;
mod decode;
mod listing;
mod resize;
#[cfg(test)]
mod tests;

use super::error::DataError;
use super::options::{Augmentation, Filled, InputOptions, OnBadSample};
use super::order::{Purpose, stream_in_epoch, unit};
use super::{SampleShape, Split};
use crate::regular;
use decode::PIXEL;
use listing::Listing;
use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};

/// ImageNet's mean of each channel, of values from 0 to 1.
const MEAN: [f32; 3] = [0.485, 0.456, 0.406];
/// ImageNet's standard deviation of each channel.
const DEVIATION: [f32; 3] = [0.229, 0.224, 0.225];
/// The most bytes of a picture's file.
const MAX_FILE: u64 = 1 << 30;

/// The pictures of a folder, fitted to a model.
#[derive(Debug)]
pub(crate) struct PictureFolder {
    training: Listing,
    evaluation: Listing,
    /// The model's width and height.
    size: [usize; 2],
    seed: u64,
    augmentation: Augmentation,
    policy: OnBadSample,
    /// The normalised value of each byte, by channel.
    normalised: Vec<[f32; 256]>,
}

impl PictureFolder {
    /// Whether a folder has this layout.
    pub(crate) fn is_at(folder: &Path) -> bool {
        let train = folder.join("train");
        train.is_dir() && listing::class_names(&train).is_ok_and(|classes| !classes.is_empty())
    }

    /// Lists a folder and fits it to a model. The pictures are not read yet.
    pub(crate) fn open(folder: &Path, shape: &SampleShape, seed: u64, options: &InputOptions) -> Result<Self, DataError> {
        let name = folder.display().to_string();
        let SampleShape::Image { channels: 3, height, width, classes } = *shape else {
            let problem = "it holds pictures of three channels, the model wants something else";
            return Err(DataError::unsuitable(&name, problem, "use a model of images with three channels"));
        };
        let policy = options.on_bad_sample;
        let (train, val) = (folder.join("train"), folder.join("val"));
        let mut names = listing::class_names(&train)?;
        let mut bad = 0;
        if names.len() > classes {
            let problem = format!("it has {} classes, the model {classes}", names.len());
            let hint = format!("give the model at least {} classes, or use `--on-bad-sample skip`", names.len());
            if policy == OnBadSample::Error {
                return Err(DataError::unsuitable(&name, problem, hint));
            }
            bad += names.len() - classes;
            names.truncate(classes);
        }
        let mut training = Listing::read(&train, &names, policy)?;
        if training.len() == 0 {
            return Err(DataError::malformed(
                &train.display().to_string(),
                "holds no pictures",
                "put them into a folder per class",
            ));
        }
        let mut evaluation = Listing::default();
        if val.is_dir() {
            let unknown = listing::class_names(&val)?.into_iter().filter(|class| names.binary_search(class).is_err());
            for class in unknown.collect::<Vec<_>>() {
                if policy == OnBadSample::Error {
                    let class = val.join(String::from_utf8_lossy(&class).into_owned());
                    let problem = format!("is not a class of `{}`", train.display());
                    let hint = "name the classes of both alike, or use `--on-bad-sample skip`";
                    return Err(DataError::malformed(&class.display().to_string(), problem, hint));
                }
                bad += 1;
            }
            evaluation = Listing::read(&val, &names, policy)?;
        }
        training.bad += bad;
        let table = |(mean, deviation): (f32, f32)| std::array::from_fn(|byte| (byte as f32 / 255.0 - mean) / deviation);
        let normalised = MEAN.into_iter().zip(DEVIATION).map(table).collect();
        let augmentation = options.augmentation;
        Ok(PictureFolder { training, evaluation, size: [width, height], seed, augmentation, policy, normalised })
    }

    fn listing(&self, split: Split) -> &Listing {
        match split {
            Split::Training => &self.training,
            Split::Evaluation => &self.evaluation,
        }
    }

    /// The number of pictures of a split. The evaluation split may have none.
    pub(crate) fn len(&self, split: Split) -> usize {
        self.listing(split).len()
    }

    /// Number of pictures and classes that were left out when the folder was listed.
    pub(crate) fn bad_samples(&self) -> usize {
        self.training.bad + self.evaluation.bad
    }

    /// The class of a picture, which must be below [`len`](Self::len).
    pub(crate) fn label(&self, split: Split, index: usize) -> i32 {
        self.listing(split).get(index).expect("invariant: the request was checked").1 as i32
    }

    /// The file of a picture.
    pub(crate) fn path(&self, split: Split, index: usize) -> Option<PathBuf> {
        Some(self.listing(split).get(index)?.0)
    }

    /// Fills `out`, `[height, width, 3]`, with a picture as an epoch sees it. A picture that cannot
    /// be read is replaced by the next of its class, if the options say so. Its label is the same,
    /// so the rank that loads labels need not know of the replacement.
    pub(crate) fn fill(&self, split: Split, epoch: u64, index: usize, out: &mut [f32]) -> Result<Filled, DataError> {
        let listing = self.listing(split);
        let mut candidate = index;
        for attempt in 0..listing.class_size(index).max(1) {
            let Some((path, _)) = listing.get(candidate) else { break };
            match read_file(&path).and_then(|bytes| self.fill_from(&bytes, split, epoch, index, out)) {
                Ok(()) => return Ok(if attempt == 0 { Filled::Whole } else { Filled::Replaced }),
                Err(problem) if self.policy == OnBadSample::Error => {
                    let hint = "replace or remove the file, or use `--on-bad-sample skip`";
                    return Err(DataError::malformed(&path.display().to_string(), problem, hint));
                }
                Err(_) => candidate = listing.next_of_class(candidate),
            }
        }
        let class = listing.get(index).and_then(|(path, _)| path.parent().map(|folder| folder.display().to_string()));
        let problem = "has no picture that can be read";
        Err(DataError::malformed(&class.unwrap_or_default(), problem, "replace its files or remove the folder"))
    }

    /// Fills `out` from the bytes of a file. The random changes are those of sample `index`.
    pub(crate) fn fill_from(&self, file: &[u8], split: Split, epoch: u64, index: usize, out: &mut [f32]) -> Result<(), String> {
        let picture = decode::decode(file)?;
        let mut random = stream_in_epoch(self.seed, Purpose::Augmentation, index as u64, epoch);
        let is_training = split == Split::Training;
        let Augmentation { crop, flip, jitter } = self.augmentation;
        let mut seen = match is_training && crop {
            true => crop::random_crop(&mut random, &picture, self.size),
            false => crop::center_crop(&picture, self.size),
        };
        let is_mirrored = is_training && flip && unit(&mut random) < 0.5;
        if is_training && jitter != [0.0; 4] {
            colour::jitter(&mut random, &mut seen, jitter);
        }
        self.normalise(&seen, is_mirrored, out);
        Ok(())
    }

    fn normalise(&self, picture: &decode::Pixels, is_mirrored: bool, out: &mut [f32]) {
        let [red, green, blue] = self.normalised.as_slice() else { return };
        let lines = picture.bytes.chunks_exact(picture.width * PIXEL).zip(out.chunks_exact_mut(picture.width * 3));
        for (source, out) in lines {
            let pixel = |out: &mut [f32; 3], &[r, g, b, _]: &[u8; PIXEL]| {
                *out = [red[usize::from(r)], green[usize::from(g)], blue[usize::from(b)]];
            };
            let (source, out) = (source.as_chunks::<PIXEL>().0, out.as_chunks_mut::<3>().0);
            match is_mirrored {
                true => out.iter_mut().zip(source.iter().rev()).for_each(|(out, source)| pixel(out, source)),
                false => out.iter_mut().zip(source).for_each(|(out, source)| pixel(out, source)),
            }
        }
    }
}

/// Reads a picture's file, of at most [`MAX_FILE`] bytes.
///
/// # Errors
/// The reason, as the rest of a sentence that begins with the file's name.
pub(crate) fn read_file(path: &Path) -> Result<Vec<u8>, String> {
    let cannot = |reason: &dyn fmt::Display| format!("cannot be read: {reason}");
    let too_large = |size: u64| format!("has {size} bytes, and at most {MAX_FILE} are read");
    let (file, size) = regular::open(path).map_err(|error| cannot(&error))?;
    if size > MAX_FILE {
        return Err(too_large(size));
    }
    let mut bytes = Vec::with_capacity(size as usize);
    // The file may have grown since its size was checked.
    let read = file.take(MAX_FILE + 1).read_to_end(&mut bytes).map_err(|error| cannot(&error))?;
    if read as u64 > MAX_FILE { Err(too_large(read as u64)) } else { Ok(bytes) }
}
