//! The one module that calls MPI: a lock, and a thread that starts, drives and ends MPI.
//!
//! MPI moves long messages only while it is called, and its own waits have no time limit. So every
//! call here returns at once, under one lock (`MPI_THREAD_SERIALIZED`), and a thread calls MPI
//! regularly for messages that no thread waits for. The same thread starts and ends MPI, since
//! those calls block; the caller waits for it only up to a time limit.

use super::super::abort_flag::AbortFlag;
use super::super::endpoint::WaitPolicy;
use super::super::{StreamNumber, TransportError};
use super::library::{Handle, Library, Status, THREAD_SERIALIZED};
use std::ffi::c_int;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How often the thread calls MPI. With one segment of 128 KiB a tick this would give 131 MB/s;
/// threads that wait call MPI far more often.
const TICK: Duration = Duration::from_millis(1);
/// A pause while messages end.
const PAUSE: Duration = Duration::from_micros(200);
/// MPI guarantees tags up to 32767. The last one is used for a message that no rank sends.
pub(super) const MOST_STREAMS: u16 = 32_767;
const NO_MESSAGE_TAG: c_int = 32_767;

/// An MPI request that may be in progress.
#[derive(Debug)]
struct Request(Handle);

// SAFETY: a request belongs to the process, not to a thread; it is used under the engine's lock.
unsafe impl Send for Request {}

/// Whether MPI reads a buffer or fills it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Send,
    Receive,
}

/// MPI in this process.
pub(super) struct Engine {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) wait_policy: WaitPolicy,
    pub(super) abort: AbortFlag,
    library: &'static Library,
    state: Mutex<State>,
}

struct State {
    /// The communicator of this run's ranks, separate from any other use of MPI.
    communicator: Request,
    /// A receive that never completes: testing it makes MPI move all messages.
    never: Request,
    /// Unfinished messages of dropped channels, with their buffers.
    orphans: Vec<(Request, Box<[u8]>)>,
    /// Whether MPI may be called.
    is_open: bool,
}

/// An order to end MPI: the channel for its result.
pub(super) type Finish = SyncSender<Result<(), TransportError>>;

impl Engine {
    /// Starts MPI as `rank` of `world_size`, on a thread of its own that then drives it.
    pub(super) fn start(
        rank: usize,
        world_size: usize,
        wait_policy: WaitPolicy,
        timeout: Duration,
    ) -> Result<(Arc<Self>, SyncSender<Finish>), TransportError> {
        let library = Library::get()?;
        let (orders, received) = sync_channel(1);
        let (started, engine) = sync_channel(1);
        let run = move || match Self::initialise(library, rank, world_size, wait_policy).map(Arc::new) {
            Ok(engine) => {
                if started.send(Ok(Arc::clone(&engine))).is_ok() {
                    engine.drive(&received);
                }
            }
            Err(error) => drop(started.send(Err(error))),
        };
        let thread = std::thread::Builder::new().name("mpi".into()).spawn(run);
        thread.map_err(|error| TransportError::system("start the thread that drives MPI", error))?;
        let engine = engine.recv_timeout(timeout).unwrap_or_else(|_| {
            let reason = format!("MPI did not start on rank {rank} within {timeout:?}");
            Err(TransportError::Mpi { reason, hint: "see whether `mpirun` reaches all hosts, and whether all ranks started" })
        })?;
        Ok((engine, orders))
    }

    /// Blocks until all ranks have started MPI.
    fn initialise(
        library: &'static Library,
        rank: usize,
        world_size: usize,
        wait_policy: WaitPolicy,
    ) -> Result<Self, TransportError> {
        let (mut thread_level, mut own, mut size) = (0, 0, 0);
        let (mut communicator, mut never) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: MPI is started once, on this thread, without arguments.
        let code =
            unsafe { (library.init_thread)(std::ptr::null_mut(), std::ptr::null_mut(), THREAD_SERIALIZED, &mut thread_level) };
        library.check(code, || "start rank".into())?;
        if thread_level < THREAD_SERIALIZED {
            let reason = format!("{} may be called by one thread only", library.version);
            return Err(TransportError::Mpi { reason, hint: "use a build of Open MPI with threads" });
        }
        // SAFETY: MPI has started; the handles are its own, and the pointers are writable.
        let code = unsafe {
            let setting = (library.comm_set_errhandler)(library.world, library.errors_return);
            setting
                .max((library.comm_rank)(library.world, &mut own))
                .max((library.comm_size)(library.world, &mut size))
                .max((library.comm_dup)(library.world, &mut communicator))
        };
        library.check(code, || "learn the ranks".into())?;
        if (usize::try_from(own), usize::try_from(size)) != (Ok(rank), Ok(world_size)) {
            let reason = format!("rank {rank} of {world_size} is rank {own} of {size} for MPI");
            return Err(TransportError::Mpi { reason, hint: "start the run with Open MPI's mpirun, one process for each rank" });
        }
        // SAFETY: the receive has no memory to fill, and the pointer to `never` is valid.
        let code = unsafe {
            let setting = (library.comm_set_errhandler)(communicator, library.errors_return);
            let nothing = std::ptr::null_mut();
            setting.max((library.irecv)(nothing, 0, library.byte, own, NO_MESSAGE_TAG, communicator, &mut never))
        };
        library.check(code, || "begin to receive".into())?;
        let (communicator, never) = (Request(communicator), Request(never));
        let state = Mutex::new(State { communicator, never, orphans: Vec::new(), is_open: true });
        Ok(Self { rank, world_size, wait_policy, abort: AbortFlag::default(), library, state })
    }

    /// Calls MPI until the run is over or aborted.
    fn drive(&self, orders: &Receiver<Finish>) {
        loop {
            match orders.recv_timeout(TICK) {
                Ok(reply) => {
                    let _ = reply.send(self.finish());
                    break;
                }
                Err(RecvTimeoutError::Timeout) if self.abort.check().is_ok() => {
                    self.tick();
                }
                Err(_) => break,
            }
        }
        self.state().is_open = false;
    }

    /// Lets MPI move messages. Returns the number of unfinished messages of dropped channels.
    fn tick(&self) -> usize {
        let mut state = self.state();
        // The request never completes.
        let _ = self.test_request(&mut state.never);
        // A request that failed is finished too.
        state.orphans.retain_mut(|(request, _)| matches!(self.test_request(request), Ok(None)));
        state.orphans.len()
    }

    /// Ends MPI. All ranks must call it, after they have received everything that was sent to them.
    fn finish(&self) -> Result<(), TransportError> {
        let started = Instant::now();
        while self.tick() > 0 {
            if self.abort.check().is_err() || started.elapsed() > self.wait_policy.timeout {
                let reason = "messages that this rank sent were not received".into();
                return Err(TransportError::Mpi { reason, hint: "all ranks need the same version of foretell" });
            }
            std::thread::sleep(PAUSE);
        }
        let mut state = self.state();
        // SAFETY: the request is in progress.
        let code = unsafe { (self.library.cancel)(&mut state.never.0) };
        self.library.check(code, || "end".into())?;
        // A cancelled receive ends at once. If it does not, the caller gives up waiting by itself.
        while self.test_request(&mut state.never)?.is_none() {
            std::thread::sleep(PAUSE);
        }
        state.is_open = false;
        // SAFETY: this thread started MPI, and no other calls it any more.
        let code = unsafe { (self.library.finalize)() };
        if code == 0 { Ok(()) } else { Err(TransportError::system("end MPI", std::io::Error::other(format!("code {code}")))) }
    }

    /// Tests a request under the lock: the bytes of its message once it is complete.
    fn test_request(&self, request: &mut Request) -> Result<Option<usize>, TransportError> {
        let (mut is_done, mut count, mut status) = (0, 0, Status::default());
        // SAFETY: the request is in progress, and the pointers are writable.
        let code = unsafe { (self.library.test)(&mut request.0, &mut is_done, &mut status) };
        self.library.check(code, || "pass a message on".into())?;
        if is_done == 0 {
            return Ok(None);
        }
        // SAFETY: the status is that of a complete request.
        let code = unsafe { (self.library.get_count)(&status, self.library.byte, &mut count) };
        self.library.check(code, || "count the bytes of a message".into())?;
        // `MPI_UNDEFINED`, which is negative, is no number of bytes.
        let bytes = usize::try_from(count).map_err(|_| {
            TransportError::system("count the bytes of a message", std::io::Error::other(format!("MPI counts {count}")))
        })?;
        Ok(Some(bytes))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state, if MPI may be called.
    fn open_state(&self) -> Result<MutexGuard<'_, State>, TransportError> {
        self.abort.check()?;
        Some(self.state()).filter(|state| state.is_open).ok_or(TransportError::Aborted)
    }
}

/// A buffer, and its message, if one is in progress.
pub(super) struct Slot {
    engine: Arc<Engine>,
    direction: Direction,
    request: Option<Request>,
    buffer: Box<[u8]>,
}

impl Slot {
    /// A slot for messages of at most `bytes` bytes.
    pub(super) fn new(engine: &Arc<Engine>, direction: Direction, bytes: usize) -> Self {
        Slot { engine: Arc::clone(engine), direction, request: None, buffer: vec![0; bytes].into() }
    }

    /// The buffer; `None` while a message is in progress.
    pub(super) fn buffer(&mut self) -> Option<&mut [u8]> {
        self.request.is_none().then_some(&mut *self.buffer)
    }

    /// Starts to send the first `length` bytes of the buffer, or to receive at most that many.
    pub(super) fn begin(&mut self, length: usize, peer: usize, stream: StreamNumber) -> Result<(), TransportError> {
        let Slot { engine, direction, request, buffer } = self;
        let state = engine.open_state()?;
        let library = engine.library;
        let outside = |_| TransportError::NoSuchPeer { rank: peer, from: engine.rank };
        let other = c_int::try_from(peer).map_err(outside)?;
        let length = c_int::try_from(length.min(buffer.len())).map_err(outside)?;
        let (begin, doing) = match direction {
            Direction::Send => (library.isend, "send to"),
            Direction::Receive => (library.irecv, "receive from"),
        };
        let (pointer, communicator) = (buffer.as_mut_ptr().cast(), state.communicator.0);
        let mut begun = std::ptr::null_mut();
        debug_assert!(request.is_none(), "one message at a time is under way");
        // SAFETY: the buffer has `length` bytes. Nothing touches or frees it before the request is
        // complete: `buffer` refuses, and `drop` hands it to the engine.
        let code = unsafe { begin(pointer, length, library.byte, other, stream.0.into(), communicator, &mut begun) };
        library.check(code, || format!("{doing} rank {peer} on {stream}"))?;
        *request = Some(Request(begun));
        Ok(())
    }

    /// Whether [`Self::complete`] would return a result or an error: no message is in progress, or
    /// MPI may not be called.
    pub(super) fn is_ready(&self) -> bool {
        let Some(request) = &self.request else { return true };
        // [`Self::complete`] then returns the reason.
        let Ok(_state) = self.engine.open_state() else { return true };
        let (mut is_done, mut status) = (0, Status::default());
        // SAFETY: the request is in progress, and the pointers are writable.
        let code = unsafe { (self.engine.library.request_get_status)(request.0, &mut is_done, &mut status) };
        code != 0 || is_done != 0
    }

    /// The number of bytes of the message, once it is complete; 0 if there is none.
    pub(super) fn complete(&mut self) -> Result<Option<usize>, TransportError> {
        let Some(request) = &mut self.request else { return Ok(Some(0)) };
        let _state = self.engine.open_state()?;
        match self.engine.test_request(request) {
            Ok(None) => Ok(None),
            Ok(Some(bytes)) => {
                self.request = None;
                Ok(Some(bytes))
            }
            Err(error) => {
                // MPI may still use the memory.
                std::mem::forget(std::mem::take(&mut self.buffer));
                self.request = None;
                Err(error)
            }
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let Some(mut request) = self.request.take() else { return };
        let buffer = std::mem::take(&mut self.buffer);
        let Ok(mut state) = self.engine.open_state() else {
            // MPI may still use the memory, but may not be called any more.
            std::mem::forget(buffer);
            return;
        };
        if self.direction == Direction::Receive {
            // SAFETY: the request is in progress.
            unsafe { (self.engine.library.cancel)(&mut request.0) };
        }
        state.orphans.push((request, buffer));
    }
}
