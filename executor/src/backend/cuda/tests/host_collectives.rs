//! Exchanges between devices of one test, each of which is used by a thread of its own: a rank puts down what it gives and waits until all have.

use crate::backend::cuda::driver::CudaError;
use crate::backend::cuda::driver::{CommunicationKind, CommunicatorHandle, CommunicatorId, DeviceCommunication, DeviceRange};
use crate::half::Half;
use foretell_units::DataType;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};

/// What the ranks of a communicator put down: by communication and rank.
#[derive(Default)]
struct Mailbox {
    given: Mutex<HashMap<(u64, usize), Vec<u8>>>,
    changed: Condvar,
    /// Whether a rank will put down nothing more.
    is_aborted: AtomicBool,
}

/// One rank's place in a communicator.
#[derive(Clone)]
pub(super) struct CollectiveMember {
    table: Arc<Mailbox>,
    size: usize,
    position: usize,
    done: Arc<AtomicU64>,
}

/// The communicators that a device has joined.
#[derive(Default)]
pub(crate) struct HostCollectives {
    joined: Mutex<Vec<CollectiveMember>>,
    is_aborted: AtomicBool,
}

pub(super) fn new_communicator_id() -> CommunicatorId {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let mut identity = [0; 128];
    identity[..8].copy_from_slice(&NEXT.fetch_add(1, Ordering::SeqCst).to_le_bytes());
    identity
}

impl HostCollectives {
    pub(super) fn join(&self, identity: &CommunicatorId, size: usize, position: usize) -> Result<CommunicatorHandle, CudaError> {
        static TABLES: OnceLock<Mutex<HashMap<CommunicatorId, Arc<Mailbox>>>> = OnceLock::new();
        let table = Arc::clone(TABLES.get_or_init(Mutex::default).lock().unwrap().entry(*identity).or_default());
        let mut joined = self.joined.lock().unwrap();
        // Who is lost before this was joined breaks it off as well.
        if self.is_aborted() {
            return Err(CudaError::Aborted);
        }
        joined.push(CollectiveMember { table, size, position, done: Arc::default() });
        Ok(CommunicatorHandle(joined.len() - 1))
    }

    /// Ends the exchanges of all communicators, on all their ranks.
    pub(super) fn abort(&self) {
        let joined = self.joined.lock().unwrap();
        self.is_aborted.store(true, Ordering::SeqCst);
        for member in joined.iter() {
            member.table.is_aborted.store(true, Ordering::SeqCst);
            // Who has looked at it and does not wait yet holds this.
            drop(member.table.given.lock());
            member.table.changed.notify_all();
        }
    }

    pub(super) fn is_aborted(&self) -> bool {
        self.is_aborted.load(Ordering::SeqCst)
    }

    pub(super) fn member(&self, communicator: CommunicatorHandle) -> CollectiveMember {
        self.joined.lock().unwrap()[communicator.0].clone()
    }
}

impl CollectiveMember {
    /// Does an communication.
    ///
    /// # Safety
    /// The pieces are valid.
    pub(super) unsafe fn communicate(&self, communication: &DeviceCommunication) {
        let number = self.done.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the caller's promise.
        let bytes = |piece: DeviceRange| unsafe { std::slice::from_raw_parts_mut(piece.address.pointer(), piece.bytes) };
        let given = if communication.kind == CommunicationKind::AllReduce { communication.write } else { communication.read };
        if let Some(given) = given.filter(|_| communication.kind != CommunicationKind::Receive) {
            self.table
                .given
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .insert((number, self.position), bytes(given).to_vec());
            self.table.changed.notify_all();
        }
        let Some(write) = communication.write.filter(|_| communication.kind != CommunicationKind::Send) else { return };
        let from = |position: usize| {
            let waiting = self.table.given.lock().unwrap_or_else(PoisonError::into_inner);
            let is_aborted = || self.table.is_aborted.load(Ordering::SeqCst);
            let is_missing = |given: &mut HashMap<_, _>| !given.contains_key(&(number, position)) && !is_aborted();
            let given = self.table.changed.wait_while(waiting, is_missing).unwrap_or_else(PoisonError::into_inner);
            given.get(&(number, position)).cloned().unwrap_or_else(|| panic!("rank {position} of an communication was lost"))
        };
        let write = bytes(write);
        match communication.kind {
            CommunicationKind::AllReduce => write.copy_from_slice(&self.sum(communication.data_type, from)),
            CommunicationKind::ReduceScatter => {
                let length = write.len();
                write.copy_from_slice(&self.sum(communication.data_type, from)[self.position * length..][..length]);
            }
            CommunicationKind::AllGather => write.copy_from_slice(&(0..self.size).flat_map(from).collect::<Vec<u8>>()),
            CommunicationKind::AllToAll => {
                let length = write.len() / self.size;
                let part = |other| from(other)[self.position * length..][..length].to_vec();
                write.copy_from_slice(&(0..self.size).flat_map(part).collect::<Vec<u8>>());
            }
            CommunicationKind::Shift => write.copy_from_slice(&from((self.position + self.size - 1) % self.size)),
            CommunicationKind::Receive => write.copy_from_slice(&from(0)),
            CommunicationKind::Send => {}
        }
    }

    fn sum(&self, data_type: DataType, from: impl Fn(usize) -> Vec<u8>) -> Vec<u8> {
        let numbers = |bytes: Vec<u8>| -> Vec<f32> {
            match Half::of(data_type) {
                Some(half) => bytes.chunks(2).map(|two| half.to_single(u16::from_le_bytes(two.try_into().unwrap()))).collect(),
                None => bytes.chunks(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect(),
            }
        };
        let mut sums = numbers(from(0));
        for other in 1..self.size {
            sums.iter_mut().zip(numbers(from(other))).for_each(|(sum, number)| *sum += number);
        }
        match Half::of(data_type) {
            Some(half) => sums.iter().flat_map(|&sum| half.nearest(sum).to_le_bytes()).collect(),
            None => sums.iter().flat_map(|sum| sum.to_le_bytes()).collect(),
        }
    }
}
