//! A rank's part of writing checkpoints: it runs the instructions of the Program that saves. A copy
//! of the pieces that the rank saves is made between two steps, and a thread writes it.

use super::commit::{partial_folder, require_space};
use super::layout::{CheckpointLayout, FileLayout};
use crate::arena::Arenas;
use crate::backend::cuda::{DeviceAddress, StreamHandle};
use crate::checkpoint_error::CheckpointError;
use crate::disk::Disk;
use crate::error::ExecutorError;
use crate::half::SixteenBits;
use crate::job::{PartTimes, Report, ReportSink, Scaler};
use crate::log::log;
use crate::member::Member;
use crate::state::{ElementOrder, Piece, RankState, Shard};
use foretell_models::Control;
use foretell_program::{Buffer, Operation, Rank, StageProgram, StateContents};
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
    list: &'a StageProgram,
    /// The pieces that each instruction saves.
    pieces: Vec<Vec<Piece<'a>>>,
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

/// The offsets of a rank's pieces in the files.
struct FilePlaces {
    layout: CheckpointLayout,
    /// In the order of [`CheckpointWriter::pieces`].
    pieces: Vec<PiecePlace>,
    /// Whether this rank also writes the headers and the batch counters, which belong to no piece.
    is_first: bool,
}

/// The offset of a piece in a file.
struct PiecePlace {
    shard: Shard,
    piece: std::ops::Range<usize>,
    /// The index of the file in the layout.
    file: usize,
    /// The offset of the whole tensor's first byte in that file.
    first: u64,
}

impl<'a> CheckpointWriter<'a> {
    /// The writer of a rank, into the run's folder of checkpoints. `state` describes the Program
    /// that saves. The rank `first` also writes headers and batch counters. A thread allocates the
    /// copy's memory now, so that the first checkpoint is as fast as later ones.
    pub(crate) fn new(
        folder: &Path,
        layout: CheckpointLayout,
        state: &RankState<'a>,
        (member, first): (&Member, Rank),
    ) -> Result<Self, ExecutorError> {
        if !folder.is_dir() {
            return Err(CheckpointError::NotShared { folder: folder.into() }.into());
        }
        let place_of = |piece: &Piece<'a>| {
            let no_place = || CheckpointError::NoPlace { value: format!("{:?} of tensor {}", piece.value, piece.tensor.0) };
            let (file, first) = layout.place(piece.tensor, piece.value, piece.replica).ok_or_else(no_place)?;
            let shard = state.shard(piece, ElementOrder::Public);
            Ok(PiecePlace { shard, piece: piece.elements.clone(), file, first })
        };
        let pieces: Vec<Vec<Piece<'a>>> =
            state.list.instructions.iter().map(|instruction| state.saved_pieces(instruction)).collect();
        let places = pieces.iter().flatten().map(place_of).collect::<Result<Vec<_>, CheckpointError>>()?;
        let is_control = |buffer: &&Buffer| matches!(buffer.state.as_deref(), Some(StateContents::Control(_)));
        let elements = pieces.iter().flatten().map(|piece| piece.elements.len()).sum();
        let allocate = move || {
            let mut copy = Vec::with_capacity(elements);
            // Touches every page now.
            copy.resize(elements, 0.0);
            copy
        };
        Ok(Self {
            folder: folder.into(),
            list: state.list,
            pieces,
            places: Arc::new(FilePlaces { layout, pieces: places, is_first: member.rank == first }),
            control: state.list.buffers.iter().find(is_control),
            launcher: Arc::clone(&member.control),
            disk: Arc::clone(&member.disk),
            stream: None,
            thread: Some(start_thread(allocate)?),
        })
    }

    /// Saves this rank's part of the state after `step` steps. First waits until the previous
    /// checkpoint is written. No stream may run meanwhile.
    pub(crate) fn save(&mut self, step: usize, arenas: &Arenas) -> Result<(), ExecutorError> {
        let started = Instant::now();
        let mut copy = self.wait()?;
        copy.resize(self.pieces.iter().flatten().map(|piece| piece.elements.len()).sum(), 0.0);
        if self.stream.is_none() {
            self.stream = arenas.driver().map(|driver| driver.create_stream()).transpose()?;
        }
        let mut end = 0;
        for (instruction, pieces) in self.list.instructions.iter().zip(&self.pieces) {
            match &*instruction.operation {
                Operation::Save { .. } => {
                    for piece in pieces {
                        let start = end;
                        end += piece.elements.len();
                        self.copy_out(arenas, piece.buffer, piece.place, &mut copy[start..end])?;
                    }
                }
                Operation::Write { .. } => {
                    let scaler = self.scaler(arenas)?;
                    self.thread = Some(self.write(step, std::mem::take(&mut copy), scaler, started)?);
                }
                other => {
                    return Err(ExecutorError::Unsupported {
                        what: format!("`{}` in a checkpoint", other.kind()),
                        hint: "this is a fault in the compiler: please report it".into(),
                    });
                }
            }
        }
        Ok(())
    }

    /// Starts the thread that writes the copy of a checkpoint that was begun at `started`.
    fn write(
        &self,
        step: usize,
        copy: Vec<f32>,
        scaler: Option<Scaler>,
        started: Instant,
    ) -> Result<JoinHandle<Vec<f32>>, ExecutorError> {
        let (places, launcher, disk) = (Arc::clone(&self.places), Arc::clone(&self.launcher), Arc::clone(&self.disk));
        let folder = partial_folder(&self.folder, step);
        let save = started.elapsed().as_secs_f64();
        start_thread(move || {
            // If the launcher is gone, the run has ended.
            let written = || drop(launcher.send(&Report::CheckpointWritten { step }));
            let report = match places.write(&*disk, &folder, step, &copy, written) {
                Ok(()) => {
                    let (bytes, total) = (4 * copy.len(), started.elapsed().as_secs_f64());
                    log(&format!("checkpoint {step}: {bytes} bytes copied in {save:.6} s, written after {total:.6} s"));
                    Report::CheckpointPart { step, scaler, times: PartTimes { save: save.into(), total: total.into() } }
                }
                Err(error) => Report::failed(&error, false),
            };
            let _ = launcher.send(&report);
            copy
        })
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

    /// Copies elements of a buffer, from element `place` on, widened to single precision.
    fn copy_out(&self, arenas: &Arenas, buffer: &Buffer, place: usize, values: &mut [f32]) -> Result<(), ExecutorError> {
        let Some(half) = SixteenBits::of(buffer.data_type) else {
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

    /// Copies bytes of a buffer, from byte `place` on.
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
            (None, _) => bytes.copy_from_slice(unsafe { std::slice::from_raw_parts(from, bytes.len()) }),
            (Some(_), None) => unreachable!("invariant: a stream is made before state is copied from a GPU"),
        }
        Ok(())
    }
}

/// Starts a thread that returns the copy.
fn start_thread(body: impl FnOnce() -> Vec<f32> + Send + 'static) -> Result<JoinHandle<Vec<f32>>, ExecutorError> {
    let thread = std::thread::Builder::new().name("checkpoint".into()).spawn(body);
    thread.map_err(|error| ExecutorError::system("start the thread that writes a checkpoint", error))
}

impl FilePlaces {
    /// Writes the copy of a rank's part into the files of `folder`, calls `written`, and syncs the
    /// files.
    fn write(
        &self,
        disk: &dyn Disk,
        folder: &Path,
        step: usize,
        copy: &[f32],
        written: impl FnOnce(),
    ) -> Result<(), CheckpointError> {
        if self.is_first {
            require_space(disk, folder.parent().unwrap_or(folder), self.layout.bytes())?;
        }
        disk.create_folder(folder).map_err(|error| CheckpointError::write(folder, error))?;
        let mut files = Vec::with_capacity(self.layout.files.len());
        for (number, (name, layout)) in self.layout.files.iter().enumerate() {
            let path = folder.join(name);
            let file =
                disk.open(&path).and_then(|file| self.write_file(disk, &file, (number, layout), step, copy).map(|()| file));
            files.push((file.map_err(|error| CheckpointError::write(&path, error))?, path));
        }
        written();
        files.iter().try_for_each(|(file, path)| disk.sync(file).map_err(|error| CheckpointError::write(path, error)))
    }

    fn write_file(
        &self,
        disk: &dyn Disk,
        file: &File,
        (number, layout): (usize, &FileLayout),
        step: usize,
        copy: &[f32],
    ) -> std::io::Result<()> {
        if self.is_first {
            disk.reserve(file, layout.bytes)?;
            disk.write_at(file, &layout.header, 0)?;
            for &place in &layout.batch_counts {
                disk.write_at(file, &(step as i64).to_le_bytes(), place)?;
            }
        }
        let mut staging = Staging::new(disk, file);
        let mut rest = copy;
        for place in &self.pieces {
            let (values, others) = rest.split_at(place.piece.len());
            rest = others;
            if place.file == number {
                let mut result = Ok(());
                place.shard.lines(place.piece.clone(), &mut |line| {
                    if result.is_ok() {
                        let from = line.local - place.piece.start;
                        let reach = line.count.saturating_sub(1) * line.stride + line.count.min(1);
                        let values = &values[from..from + reach];
                        result = staging.add(place.first + 4 * line.whole as u64, values, line.stride);
                    }
                });
                result?;
            }
        }
        staging.flush()
    }
}

/// Bytes that follow each other in a file and are not yet written.
pub(crate) struct Staging<'a> {
    disk: &'a dyn Disk,
    file: &'a File,
    /// The offset of the first staged byte in the file.
    first: u64,
    bytes: Vec<u8>,
}

impl<'a> Staging<'a> {
    /// An empty stage for a file.
    pub(crate) fn new(disk: &'a dyn Disk, file: &'a File) -> Self {
        Self { disk, file, first: 0, bytes: Vec::with_capacity(STAGING_BYTES) }
    }

    /// Stages every `stride`-th of `values` to be written at offset `place`. If `place` does not
    /// follow the staged bytes, writes those first.
    pub(crate) fn add(&mut self, place: u64, mut values: &[f32], stride: usize) -> std::io::Result<()> {
        if place != self.first + self.bytes.len() as u64 {
            self.flush()?;
            self.first = place;
        }
        while !values.is_empty() {
            if self.bytes.len() >= STAGING_BYTES {
                let next = self.first + self.bytes.len() as u64;
                self.flush()?;
                self.first = next;
            }
            let (before, space) = (self.bytes.len(), (STAGING_BYTES - self.bytes.len()) / 4);
            let (now, later) = values.split_at(values.len().min(space * stride));
            self.bytes.resize(before + 4 * now.len().div_ceil(stride), 0);
            let places = self.bytes[before..].chunks_exact_mut(4);
            let set = |(place, value): (&mut [u8], &f32)| place.copy_from_slice(&value.to_le_bytes());
            // Most values are contiguous: with stride 1 the compiler turns this into one copy.
            if stride == 1 {
                places.zip(now).for_each(set)
            } else {
                places.zip(now.iter().step_by(stride)).for_each(set)
            }
            values = later;
        }
        Ok(())
    }

    /// Writes the staged bytes.
    pub(crate) fn flush(&mut self) -> std::io::Result<()> {
        if !self.bytes.is_empty() {
            self.disk.write_at(self.file, &self.bytes, self.first)?;
            self.disk.begin_sync(self.file, self.first, self.bytes.len());
        }
        self.bytes.clear();
        Ok(())
    }
}
