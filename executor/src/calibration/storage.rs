//! The costs of writing checkpoints into a folder. Each rank copies its part, writes it into one
//! shared file and syncs it, while the file is read back for its checksum; then the folder gets its
//! final name. A run's checkpoints take the same steps, by the same code.

use super::statistics::summarise;
use crate::checkpoint::{Staging, describe, require_space};
use crate::checkpoint_error::CheckpointError;
use crate::disk::{Disk, SystemDisk};
use foretell_program::StorageCosts;
use foretell_units::{Bytes, BytesPerSecond, Seconds};
use std::fs::File;
use std::path::Path;
use std::sync::Barrier;
use std::time::Instant;

/// Bytes of the two checkpoints that are written: one shows the latency, the other the rate.
const SMALL: usize = 64 << 10;
const LARGE: usize = 192 << 20;
/// How many times each size is written.
const REPETITIONS: usize = 3;

/// Measures what checkpoints in a folder cost if `ranks` ranks write each together.
///
/// # Errors
/// [`CheckpointError`] if the folder cannot be written to, or has no space for a checkpoint of
/// `LARGE` bytes.
pub fn storage_costs(folder: &Path, ranks: usize) -> Result<StorageCosts, CheckpointError> {
    let refused = |error| CheckpointError::write(folder, error);
    let scratch = tempfile::Builder::new().prefix(".foretell-").tempdir_in(folder).map_err(refused)?;
    require_space(&SystemDisk, folder, LARGE as u64)?;
    let ranks = ranks.max(1);
    let state: Vec<f32> = (0..LARGE / 4).map(|number| number as f32).collect();
    let mut copies: Vec<Vec<f32>> = state.chunks((LARGE / 4).div_ceil(ranks)).map(<[f32]>::to_vec).collect();
    let (mut small, mut large, mut saves) = (Vec::new(), Vec::new(), Vec::new());
    for number in 0..REPETITIONS {
        saves.push(save(&state, &mut copies));
        for (size, times) in [(SMALL, &mut small), (LARGE, &mut large)] {
            let started = Instant::now();
            write(scratch.path(), &format!("{number}-{size}"), &copies, size).map_err(refused)?;
            times.push(started.elapsed().as_secs_f64());
        }
    }
    let median = |times: Vec<f64>| summarise(times).median;
    let (small, large, save) = (median(small), median(large), median(saves));
    let per_byte = (large - small).max(Seconds::new(1e-9)) / (LARGE - SMALL) as f64;
    Ok(StorageCosts {
        save: Bytes::new((LARGE / ranks) as u64) / save,
        write: BytesPerSecond::new(1.0 / per_byte.value()),
        latency: (small - per_byte * SMALL as f64).max(Seconds::ZERO),
    })
}

/// Copies the parts of all ranks concurrently. Returns the seconds until the last copy is done.
fn save(state: &[f32], copies: &mut [Vec<f32>]) -> f64 {
    let first = copies.first().map_or(1, Vec::len).max(1);
    let started = Instant::now();
    std::thread::scope(|scope| {
        for (copy, part) in copies.iter_mut().zip(state.chunks(first)) {
            scope.spawn(move || copy.copy_from_slice(part));
        }
    });
    started.elapsed().as_secs_f64()
}

/// Writes a checkpoint of `size` bytes, syncs it and gives it its final name.
fn write(scratch: &Path, name: &str, copies: &[Vec<f32>], size: usize) -> std::io::Result<()> {
    let disk = SystemDisk;
    let (partial, whole) = (scratch.join(format!(".{name}")), scratch.join(name));
    let path = partial.join("state");
    disk.create_folder(&partial)?;
    let share = size / 4 / copies.len();
    let all_written = Barrier::new(copies.len() + 1);
    let write_part = |number: usize, copy: &[f32]| -> std::io::Result<()> {
        let write = |file: File| -> std::io::Result<File> {
            if number == 0 {
                disk.reserve(&file, (4 * share * copies.len()) as u64)?;
            }
            let mut staging = Staging::new(&disk, &file);
            staging.add((4 * share * number) as u64, &copy[..share.min(copy.len())], 1)?;
            staging.flush()?;
            Ok(file)
        };
        let file = disk.open(&path).and_then(write);
        all_written.wait();
        disk.sync(&file?)
    };
    std::thread::scope(|scope| {
        let write_part = &write_part;
        let ranks: Vec<_> =
            copies.iter().enumerate().map(|(number, copy)| scope.spawn(move || write_part(number, copy))).collect();
        // Checksums are computed while ranks sync.
        all_written.wait();
        let described = describe(&path);
        let panicked = || Err(std::io::Error::other("a thread panicked"));
        ranks.into_iter().try_for_each(|rank| rank.join().unwrap_or_else(|_| panicked()))?;
        described
    })?;
    disk.sync_folder(&partial)?;
    disk.rename(&partial, &whole)?;
    disk.sync_folder(scratch)?;
    disk.remove_folder(&whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_has_a_rate_and_keeps_nothing_of_its_measurement() {
        let folder = tempfile::tempdir().expect("a folder");
        let costs = storage_costs(folder.path(), 2).expect("it can be written to");
        // From a slow disk to a fast memory.
        assert!((1e6..1e12).contains(&costs.write.value()) && (1e7..1e12).contains(&costs.save.value()), "{costs:?}");
        assert!(costs.latency < Seconds::new(10.0), "{costs:?}");
        assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 0);
        let missing = storage_costs(&folder.path().join("missing"), 1).expect_err("there is no such folder");
        assert!(missing.to_string().contains("missing"), "{missing}");
    }
}
