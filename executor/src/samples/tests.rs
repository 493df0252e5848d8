//! Samples that workers prepare are those that the rank would read itself.

use super::{Samples, WorkerPool};
use crate::backend::Operand;
use crate::data::{DataSource, Dataset, InputOptions, OnBadSample, SampleShape, Split};
use foretell_models::InputKind;
use std::path::Path;
use std::sync::Arc;

const SIDE: usize = 24;
const SHAPE: SampleShape = SampleShape::Image { channels: 3, height: SIDE, width: SIDE, classes: 2 };

/// A folder of one class with nine pictures, of which some may be bad.
fn folder(bad: &[usize]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let class = folder.path().join("train/class");
    std::fs::create_dir_all(&class).expect("a folder");
    let pictures: [&[u8]; 2] =
        [include_bytes!("../../data/pictures/baseline.jpg"), include_bytes!("../../data/pictures/colour.png")];
    for number in 0..9 {
        let bytes = if bad.contains(&number) { b"not a picture" } else { pictures[number % 2] };
        std::fs::write(class.join(format!("{number}.jpg")), bytes).expect("a picture");
    }
    folder
}

fn open(folder: &Path, on_bad_sample: OnBadSample) -> Arc<Dataset> {
    let options = InputOptions { on_bad_sample, ..InputOptions::default() };
    let source = DataSource::Path(folder.to_path_buf());
    Arc::new(Dataset::open_with(&source, &SHAPE, 1, &options).expect("a folder of pictures"))
}

/// The batch's images from position `first` on.
fn load(samples: &Samples, first: usize, count: usize) -> Result<Vec<f32>, String> {
    let mut values = vec![f32::NAN; count * SIDE * SIDE * 3];
    let operand = Operand { pointer: values.as_mut_ptr().cast(), bytes: 4 * values.len() };
    // SAFETY: the operand is the vector, which nothing else uses.
    unsafe { samples.load(InputKind::Images, None, first, count, None, &operand) }.map_err(|error| error.to_string())?;
    Ok(values)
}

fn pool(workers: usize) -> WorkerPool {
    WorkerPool::start(workers, &crate::machine::allowed_cores()).expect("threads start")
}

#[test]
fn any_number_of_workers_and_any_order_give_the_same_samples() {
    let folder = folder(&[]);
    let dataset = open(folder.path(), OnBadSample::Error);
    let samples = || Samples::new(Arc::clone(&dataset), Split::Training, 4, vec![8, 0, 3, 3, 5, 1]);
    let expected = load(&samples(), 1, 4).expect("good pictures");
    for workers in [1, 2, 5] {
        let pool = pool(workers);
        // All positions, those that are loaded, in another order, or only some.
        for positions in [&[0, 1, 2, 3, 4, 5][..], &[4, 3, 2, 1], &[1, 2, 1, 2], &[3]] {
            // Several batches at once, of which the last is asked for first.
            let batches: Vec<Samples> = (0..3).map(|_| samples().prepared_by(&pool, positions)).collect();
            for batch in batches.iter().rev() {
                assert_eq!(load(batch, 1, 4).expect("good pictures"), expected, "{workers} workers, {positions:?}");
            }
        }
    }
}

#[test]
fn a_bad_sample_fails_the_load_or_is_noted_as_replaced() {
    let folder = folder(&[3]);
    let pool = pool(2);
    let positions = [0, 1, 2];
    let samples = |policy| Samples::new(open(folder.path(), policy), Split::Training, 0, vec![2, 3, 4]);
    for samples in [samples(OnBadSample::Error), samples(OnBadSample::Error).prepared_by(&pool, &positions)] {
        let message = load(&samples, 0, 3).expect_err("a bad picture");
        assert!(message.contains("3.jpg` is neither a JPEG nor a PNG file"), "{message}");
    }
    for samples in [samples(OnBadSample::Skip), samples(OnBadSample::Skip).prepared_by(&pool, &positions)] {
        let first = load(&samples, 0, 1).expect("a good picture");
        assert!(samples.replaced().is_empty() && first.iter().all(|value| value.is_finite()));
        load(&samples, 1, 2).expect("another picture");
        assert_eq!(samples.replaced().into_iter().collect::<Vec<_>>(), [3]);
    }
}

#[test]
fn workers_end_with_work_left() {
    let folder = folder(&[]);
    let dataset = open(folder.path(), OnBadSample::Error);
    for workers in [0, 1, 3] {
        let pool = pool(workers);
        let batch = || Samples::new(Arc::clone(&dataset), Split::Training, 0, (0..9).collect());
        let _left: Vec<Samples> = (0..20).map(|_| batch().prepared_by(&pool, &[0, 1, 2, 3, 4, 5, 6, 7, 8])).collect();
        drop(pool);
    }
}
