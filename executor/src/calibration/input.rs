//! The costs of reading a data set's samples: how fast its files are read, and how long a worker
//! takes to decode and augment one.

use crate::clock;
use crate::data::{DataError, Dataset, Split};
use foretell_program::InputCosts;
use foretell_units::{Bytes, BytesPerSecond, Seconds};

/// Samples that are timed, evenly spread over the training split.
const SAMPLES: usize = 64;
/// Samples that are timed at least, however long they take.
const LEAST_SAMPLES: usize = 8;
/// Time after which timing may stop, once the least number of samples is timed.
const LEAST_TIME: Seconds = Seconds::new(0.5);
/// Threads that read concurrently. A single one would mostly wait for the storage.
const READERS: usize = 4;
/// Files that each thread reads in one group.
const FILES_PER_READER: usize = 4;

/// Measures how long samples take to read and to decode; `None` if the data has no files of
/// samples. Decoding is timed in CPU time, so other work on the machine hardly counts.
///
/// # Errors
/// [`DataError`] if a sample cannot be used.
pub fn input_costs(dataset: &Dataset) -> Result<Option<InputCosts>, DataError> {
    let count = dataset.len(Split::Training);
    let samples: Vec<usize> = (0..count.min(SAMPLES)).map(|place| place * count / count.min(SAMPLES)).collect();
    let Some((bytes, read)) = read(dataset, &samples) else { return Ok(None) };
    let mut values = vec![0.0; dataset.sample_size()];
    let (start, mut done) = (clock::thread_cpu_time(), 0);
    let mut decode = Seconds::ZERO;
    // In an order that covers the split evenly wherever timing stops.
    for &index in (0..LEAST_SAMPLES).flat_map(|offset| samples.iter().skip(offset).step_by(LEAST_SAMPLES)) {
        dataset.fill_images(Split::Training, 0, &[index], &mut values)?;
        done += 1;
        decode = Seconds::new((clock::thread_cpu_time() - start) as f64 * 1e-9);
        if done >= LEAST_SAMPLES && decode > LEAST_TIME {
            break;
        }
    }
    Ok(Some(InputCosts {
        bytes_per_sample: Bytes::new(bytes / samples.len().max(1) as u64),
        decode: decode / f64::from(done.max(1) as u32),
        read,
    }))
}

/// Reads the files of samples, group by group. Returns their total size, and the rate of the
/// fastest group: slower ones may have competed with other work on the machine. `None` if the
/// samples have no files.
fn read(dataset: &Dataset, samples: &[usize]) -> Option<(u64, BytesPerSecond)> {
    let (mut total, mut fastest) = (0, 0.0_f64);
    for group in samples.chunks(READERS * FILES_PER_READER) {
        let start = clock::now();
        let bytes = std::thread::scope(|scope| {
            let read_part = |part: usize| {
                let part = group.iter().skip(part).step_by(READERS);
                part.map(|&index| dataset.stored_bytes(Split::Training, index)).sum::<Option<u64>>()
            };
            let readers: Vec<_> = (0..READERS).map(|part| scope.spawn(move || read_part(part))).collect();
            readers.into_iter().map(|reader| reader.join().expect("invariant: a reader does not panic")).sum::<Option<u64>>()
        })?;
        total += bytes;
        fastest = fastest.max(bytes as f64 / ((clock::now() - start) as f64 * 1e-9).max(1e-9));
    }
    Some((total, BytesPerSecond::new(fastest)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{DataSource, SampleShape};

    #[test]
    fn samples_in_memory_have_no_costs_of_input_and_those_in_files_do() {
        let shape = SampleShape::Image { channels: 3, height: 24, width: 24, classes: 10 };
        let digits = Dataset::open(&DataSource::Digits, &shape, 0).expect("the shipped digits");
        assert_eq!(input_costs(&digits), Ok(None));

        let folder = tempfile::tempdir().expect("a folder");
        let class = folder.path().join("train/class");
        std::fs::create_dir_all(&class).expect("a folder");
        let picture = include_bytes!("../../data/pictures/baseline.jpg");
        for name in ["0.jpg", "1.jpg", "2.jpg"] {
            std::fs::write(class.join(name), picture).expect("a picture");
        }
        let source = DataSource::Path(folder.path().to_path_buf());
        let dataset = Dataset::open(&source, &shape, 0).expect("a folder of pictures");
        let costs = input_costs(&dataset).expect("good pictures").expect("samples in files");
        assert_eq!(costs.bytes_per_sample.count(), picture.len() as u64);
        assert!(costs.decode > Seconds::ZERO && costs.read.value() > 0.0);
        std::fs::write(class.join("1.jpg"), "not a picture").expect("a bad picture");
        let message = input_costs(&dataset).expect_err("a bad picture").to_string();
        assert!(message.contains("1.jpg` is neither a JPEG nor a PNG file"), "{message}");
    }
}
