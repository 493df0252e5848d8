//! A rank's part of writing checkpoints: a copy of the pieces that it saves, and the thread that
//! writes the copy.

use super::commit::partial_folder;
use super::layout::{CheckpointLayout, FileLayout};
use crate::arena::Arenas;
use crate::backend::cuda::{DeviceAddress, StreamHandle};
use crate::checkpoint_error::CheckpointError;
use crate::disk::Disk;
use crate::error::ExecutorError;
use crate::half::Half;
use crate::job::{Report, ReportSink, Scaler};
use crate::log::log;
use crate::member::Member;
use crate::state::{Order, Piece, RankState, Shard};
use foretell_models::Control;
use foretell_program::{Buffer, Program, Rank, StateContents};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

/// The bytes that are gathered before they are written.
const STAGING_BYTES: usize = 4 << 20;

/// Writes one rank's part of each checkpoint.
pub(crate) struct CheckpointWriter<'a> {
    /// The run's `checkpoints` folder.
    folder: PathBuf,
    pieces: Vec<Piece<'a>>,
    places: Arc<FilePlaces>,
    /// The control of the update, which the first rank reports.
    control: Option<&'a Buffer>,
    launcher: Arc<dyn ReportSink>,
    disk: Arc<dyn Disk>,
    /// The stream of the GPU that copies; `None` before the first copy and on a CPU.
    stream: Option<StreamHandle>,
    /// The thread that writes the last checkpoint. It returns the copy, to be used again.
    thread: Option<JoinHandle<Vec<f32>>>,
}

/// Where a rank's part lies in the files.
struct FilePlaces {
    layout: CheckpointLayout,
    /// In the order of [`CheckpointWriter::pieces`].
    pieces: Vec<PiecePlace>,
    /// Whether this rank also writes what belongs to no piece.
    is_first: bool,
}

/// Where a piece lies in a file.
struct PiecePlace {
    shard: Shard,
    piece: std::ops::Range<usize>,
    /// The number of the file in the layout.
    file: usize,
    /// The first byte of the whole tensor there.
    first: u64,
}

impl<'a> CheckpointWriter<'a> {
    /// The writer of a rank, into the run's folder of checkpoints. The state is that of `program`.
    /// The rank `first` also writes what belongs to no rank.
    pub(crate) fn new(
        folder: &Path,
        layout: CheckpointLayout,
        state: &RankState<'a>,
        program: &'a Program,
        (member, first): (&Member, Rank),
    ) -> Result<Self, CheckpointError> {
        if !folder.is_dir() {
            return Err(CheckpointError::NotShared { folder: folder.into() });
        }
        let place_of = |piece: Piece<'a>| {
            let no_place = || CheckpointError::NoPlace { value: format!("{:?} of tensor {}", piece.value, piece.tensor.0) };
            let (file, first) = layout.place(piece.tensor, piece.value, piece.replica).ok_or_else(no_place)?;
            let shard = state.shard(&piece, Order::Public);
            let place = PiecePlace { shard, piece: piece.elements.clone(), file, first };
            Ok((piece, place))
        };
        let saved = state.saved_pieces(program).into_iter().map(place_of).collect::<Result<Vec<_>, CheckpointError>>()?;
        let (pieces, places) = saved.into_iter().unzip();
        let is_control = |buffer: &&Buffer| matches!(buffer.state.as_deref(), Some(StateContents::Control(_)));
        Ok(Self {
            folder: folder.into(),
            pieces,
            places: Arc::new(FilePlaces { layout, pieces: places, is_first: member.rank == first }),
            control: state.list.buffers.iter().find(is_control),
            launcher: Arc::clone(&member.control),
            disk: Arc::clone(&member.disk),
            stream: None,
            thread: None,
        })
    }

    /// Copies this rank's part of the state after `step` steps, and has it written. Waits for the
    /// checkpoint before it to be written. No stream may run.
    pub(crate) fn save(&mut self, step: usize, arenas: &Arenas) -> Result<(), ExecutorError> {
        let mut copy = self.wait()?;
        let started = Instant::now();
        copy.resize(self.pieces.iter().map(|piece| piece.elements.len()).sum(), 0.0);
        if self.stream.is_none() {
            self.stream = arenas.driver().map(|driver| driver.create_stream()).transpose()?;
        }
        let mut rest = copy.as_mut_slice();
        for piece in &self.pieces {
            let (values, others) = rest.split_at_mut(piece.elements.len());
            self.copy_out(arenas, piece.buffer, piece.place, values)?;
            rest = others;
        }
        let scaler = self.scaler(arenas)?;
        let (places, launcher, disk) = (Arc::clone(&self.places), Arc::clone(&self.launcher), Arc::clone(&self.disk));
        let folder = partial_folder(&self.folder, step);
        let copying = started.elapsed().as_secs_f64();
        let write = move || {
            let started = Instant::now();
            let report = match places.write(&*disk, &folder, step, &copy) {
                Ok(()) => {
                    let (bytes, writing) = (4 * copy.len(), started.elapsed().as_secs_f64());
                    log(&format!("checkpoint {step}: {bytes} bytes copied in {copying:.6} s, written in {writing:.6} s"));
                    Report::CheckpointPart { step, scaler }
                }
                Err(error) => Report::Failed { message: error.to_string(), consequence: false },
            };
            // A launcher that is gone has ended the run.
            let _ = launcher.send(&report);
            copy
        };
        let thread = std::thread::Builder::new().name("checkpoint".into()).spawn(write);
        self.thread = Some(thread.map_err(|error| ExecutorError::system("start the thread that writes a checkpoint", error))?);
        Ok(())
    }

    /// Waits until the last checkpoint is written and reported. Returns the memory of its copy.
    pub(crate) fn wait(&mut self) -> Result<Vec<f32>, ExecutorError> {
        match self.thread.take().map(JoinHandle::join) {
            None => Ok(Vec::new()),
            Some(Ok(copy)) => Ok(copy),
            Some(Err(panic)) => Err(ExecutorError::panicked("checkpoint", panic.as_ref())),
        }
    }

    /// The state of loss scaling and clipping, on the first rank.
    fn scaler(&self, arenas: &Arenas) -> Result<Option<Scaler>, ExecutorError> {
        let Some(buffer) = self.control.filter(|_| self.places.is_first) else { return Ok(None) };
        let mut control = vec![0.0; Control::LENGTH];
        self.copy_out(arenas, buffer, 0, &mut control)?;
        Ok(Some(Scaler::of_control(&control)))
    }

    /// Copies elements of a buffer from `place` on, in single precision.
    fn copy_out(&self, arenas: &Arenas, buffer: &Buffer, place: usize, values: &mut [f32]) -> Result<(), ExecutorError> {
        let Some(half) = Half::of(buffer.data_type) else {
            // SAFETY: any bytes are numbers, and the slice has four for each.
            let bytes = unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), 4 * values.len()) };
            return self.copy_bytes(arenas, buffer, 4 * place, bytes);
        };
        let mut halves = vec![0_u16; values.len()];
        // SAFETY: any bytes are numbers, and the slice has two for each.
        let bytes = unsafe { std::slice::from_raw_parts_mut(halves.as_mut_ptr().cast(), 2 * halves.len()) };
        self.copy_bytes(arenas, buffer, 2 * place, bytes)?;
        half.widen(values, &halves);
        Ok(())
    }

    /// Copies bytes of a buffer from `place` on.
    fn copy_bytes(&self, arenas: &Arenas, buffer: &Buffer, place: usize, bytes: &mut [u8]) -> Result<(), ExecutorError> {
        let missing = || ExecutorError::system("copy the state of training", std::io::ErrorKind::InvalidData.into());
        let from = arenas.at(buffer).ok_or_else(missing)?.wrapping_add(place);
        match (arenas.of(buffer).driver(), self.stream) {
            (Some(driver), Some(stream)) => {
                // SAFETY: the bytes lie in the buffer. No stream writes to it between steps. The
                // copy ends before this function returns.
                unsafe { driver.copy_out(bytes.as_mut_ptr(), DeviceAddress::from_pointer(from), bytes.len(), stream) }?;
                driver.synchronize(stream)?;
            }
            // SAFETY: the bytes lie in the buffer. No stream writes to it between steps.
            _ => bytes.copy_from_slice(unsafe { std::slice::from_raw_parts(from, bytes.len()) }),
        }
        Ok(())
    }
}

impl FilePlaces {
    /// Writes the copy of a rank's part into the files of `folder`, and syncs them.
    fn write(&self, disk: &dyn Disk, folder: &Path, step: usize, copy: &[f32]) -> Result<(), CheckpointError> {
        disk.create_folder(folder).map_err(|error| CheckpointError::write(folder, error))?;
        for (number, (name, file)) in self.layout.files.iter().enumerate() {
            let path = folder.join(name);
            self.write_file(disk, &path, (number, file), step, copy).map_err(|error| CheckpointError::write(&path, error))?;
        }
        Ok(())
    }

    fn write_file(
        &self,
        disk: &dyn Disk,
        path: &Path,
        (number, layout): (usize, &FileLayout),
        step: usize,
        copy: &[f32],
    ) -> std::io::Result<()> {
        let file = disk.open(path)?;
        if self.is_first {
            disk.reserve(&file, layout.bytes)?;
            disk.write_at(&file, &layout.header, 0)?;
            for &place in &layout.batch_counts {
                disk.write_at(&file, &(step as i64).to_le_bytes(), place)?;
            }
        }
        let mut staging = Staging { disk, file: &file, first: 0, bytes: Vec::with_capacity(STAGING_BYTES) };
        let mut rest = copy;
        for place in &self.pieces {
            let (values, others) = rest.split_at(place.piece.len());
            rest = others;
            if place.file == number {
                let mut result = Ok(());
                place.shard.lines(place.piece.clone(), &mut |line| {
                    if result.is_ok() {
                        let from = line.local - place.piece.start;
                        let values = values[from..].iter().step_by(line.stride).take(line.count);
                        result = staging.add(place.first + 4 * line.whole as u64, values);
                    }
                });
                result?;
            }
        }
        staging.flush()?;
        disk.sync(&file)
    }
}

/// Bytes that follow each other in a file and are not yet written.
struct Staging<'a> {
    disk: &'a dyn Disk,
    file: &'a File,
    /// The place of the first byte in the file.
    first: u64,
    bytes: Vec<u8>,
}

impl Staging<'_> {
    fn add<'b>(&mut self, place: u64, values: impl Iterator<Item = &'b f32>) -> std::io::Result<()> {
        if place != self.first + self.bytes.len() as u64 {
            self.flush()?;
            self.first = place;
        }
        for value in values {
            if self.bytes.len() >= STAGING_BYTES {
                let next = self.first + self.bytes.len() as u64;
                self.flush()?;
                self.first = next;
            }
            self.bytes.extend_from_slice(&value.to_le_bytes());
        }
        Ok(())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        if !self.bytes.is_empty() {
            self.disk.write_at(self.file, &self.bytes, self.first)?;
        }
        self.bytes.clear();
        Ok(())
    }
}
