//! Reads a folder of pictures as the workers of a rank do, and prints the time per picture:
//! `cargo run --release -p foretell-executor --example read_pictures -- FOLDER WORKERS [PICTURES]`.
//! `benches/input_speed.py` compares it with PyTorch's `DataLoader`.

use foretell_executor::data::{DataSource, Dataset, SampleShape, Split};
use std::error::Error;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let folder = PathBuf::from(arguments.next().ok_or("the folder of pictures is missing")?);
    let workers: usize = arguments.next().ok_or("the number of workers is missing")?.parse()?;
    let shape = SampleShape::Image { channels: 3, height: 224, width: 224, classes: 1000 };
    let dataset = Dataset::open(&DataSource::Path(folder), &shape, 0)?;
    let count = arguments.next().map_or(Ok(usize::MAX), |count| count.parse())?.min(dataset.len(Split::Training));
    let indices = dataset.epoch_order(0).batch(0, count)?;
    let next = AtomicUsize::new(0);
    let read = || -> Result<f64, String> {
        let mut values = vec![0.0; dataset.sample_size()];
        let mut sum = 0.0;
        while let Some(&index) = indices.get(next.fetch_add(1, Ordering::Relaxed)) {
            dataset.fill_images(Split::Training, 0, &[index], &mut values).map_err(|error| error.to_string())?;
            sum += f64::from(values.iter().sum::<f32>());
        }
        Ok(sum)
    };
    let start = Instant::now();
    let sums = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..workers.max(1)).map(|_| scope.spawn(read)).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().map_err(|_| "a worker panicked".to_owned())?)
            .collect::<Result<Vec<_>, _>>()
    })?;
    let wall = start.elapsed().as_secs_f64();
    let user = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    let user = user.tv_sec as f64 + user.tv_nsec as f64 * 1e-9;
    let mean = sums.iter().sum::<f64>() / (count * dataset.sample_size()) as f64;
    println!("{{\"pictures\": {count}, \"wall_seconds\": {wall}, \"cpu_seconds\": {user}, \"mean\": {mean}}}");
    Ok(())
}
