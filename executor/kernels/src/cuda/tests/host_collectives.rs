//! Communication between test devices through host memory. Each device has a thread of its own: a
//! rank leaves its input in the communicator's mailbox, and waits for the inputs that it needs.

use crate::cuda::driver::{CommunicationKind, CommunicatorHandle, CommunicatorId, CudaError, DeviceCommunication, DeviceRange};
use crate::half::SixteenBits;
use foretell_units::DataType;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};

/// The inputs that the ranks of a communicator have left.
#[derive(Default)]
struct Mailbox {
    /// By the communication's sequence number, and the rank.
    inputs: Mutex<HashMap<(u64, usize), Vec<u8>>>,
    arrived: Condvar,
    /// Whether a rank was lost, and will leave no more inputs.
    is_aborted: AtomicBool,
}

/// One rank of a communicator.
#[derive(Clone)]
pub(super) struct CommunicatorMember {
    mailbox: Arc<Mailbox>,
    size: usize,
    position: usize,
    /// Number of communications that this rank has taken part in.
    sequence: Arc<AtomicU64>,
}

/// The communicators that a device has joined.
#[derive(Default)]
pub struct HostCollectives {
    joined: Mutex<Vec<CommunicatorMember>>,
    is_aborted: AtomicBool,
}

/// Creates the id of a new communicator.
pub(super) fn new_id() -> CommunicatorId {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let mut id = [0; 128];
    id[..8].copy_from_slice(&NEXT.fetch_add(1, Ordering::SeqCst).to_le_bytes());
    id
}

impl HostCollectives {
    /// Joins a communicator as rank `position` of `size`.
    pub(super) fn join(&self, id: &CommunicatorId, size: usize, position: usize) -> Result<CommunicatorHandle, CudaError> {
        static MAILBOXES: OnceLock<Mutex<HashMap<CommunicatorId, Arc<Mailbox>>>> = OnceLock::new();
        let mailbox = Arc::clone(MAILBOXES.get_or_init(Mutex::default).lock().unwrap().entry(*id).or_default());
        let mut joined = self.joined.lock().unwrap();
        if self.is_aborted() {
            return Err(CudaError::Aborted);
        }
        joined.push(CommunicatorMember { mailbox, size, position, sequence: Arc::default() });
        Ok(CommunicatorHandle(joined.len() - 1))
    }

    /// Aborts all communicators, on all their ranks.
    pub(super) fn abort(&self) {
        let joined = self.joined.lock().unwrap();
        self.is_aborted.store(true, Ordering::SeqCst);
        for member in joined.iter() {
            member.mailbox.is_aborted.store(true, Ordering::SeqCst);
            // A rank between its check and its wait holds this lock.
            drop(member.mailbox.inputs.lock());
            member.mailbox.arrived.notify_all();
        }
    }

    /// Returns `true` after [`HostCollectives::abort`].
    pub(super) fn is_aborted(&self) -> bool {
        self.is_aborted.load(Ordering::SeqCst)
    }

    /// Returns this rank's part of a communicator.
    pub(super) fn member(&self, communicator: CommunicatorHandle) -> CommunicatorMember {
        self.joined.lock().unwrap()[communicator.0].clone()
    }
}

impl CommunicatorMember {
    /// Takes part in a communication, and waits for the ranks that it needs.
    ///
    /// # Safety
    /// The ranges are valid.
    pub(super) unsafe fn communicate(&self, communication: &DeviceCommunication) {
        let number = self.sequence.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the caller's promise.
        let bytes = |range: DeviceRange| unsafe { std::slice::from_raw_parts_mut(range.address.pointer(), range.bytes) };
        let is_in_place = communication.kind == CommunicationKind::AllReduce;
        let input = if is_in_place { communication.write } else { communication.read };
        if let Some(input) = input.filter(|_| communication.kind != CommunicationKind::Receive) {
            let mut inputs = self.mailbox.inputs.lock().unwrap_or_else(PoisonError::into_inner);
            inputs.insert((number, self.position), bytes(input).to_vec());
            self.mailbox.arrived.notify_all();
        }
        let Some(write) = communication.write.filter(|_| communication.kind != CommunicationKind::Send) else { return };
        let from = |position: usize| self.wait_for_input(number, position);
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

    /// Waits for a rank's input, and panics if the communicator is aborted first.
    fn wait_for_input(&self, number: u64, position: usize) -> Vec<u8> {
        let inputs = self.mailbox.inputs.lock().unwrap_or_else(PoisonError::into_inner);
        let is_aborted = || self.mailbox.is_aborted.load(Ordering::SeqCst);
        let is_missing = |inputs: &mut HashMap<_, _>| !inputs.contains_key(&(number, position)) && !is_aborted();
        let inputs = self.mailbox.arrived.wait_while(inputs, is_missing).unwrap_or_else(PoisonError::into_inner);
        inputs.get(&(number, position)).cloned().unwrap_or_else(|| panic!("rank {position} of a communicator was lost"))
    }

    /// Sums all ranks' inputs in rank order, in single precision.
    fn sum(&self, data_type: DataType, from: impl Fn(usize) -> Vec<u8>) -> Vec<u8> {
        let numbers = |bytes: Vec<u8>| -> Vec<f32> {
            match SixteenBits::of(data_type) {
                Some(half) => bytes.chunks(2).map(|two| half.to_single(u16::from_le_bytes(two.try_into().unwrap()))).collect(),
                None => bytes.chunks(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect(),
            }
        };
        let mut sums = numbers(from(0));
        for other in 1..self.size {
            sums.iter_mut().zip(numbers(from(other))).for_each(|(sum, number)| *sum += number);
        }
        match SixteenBits::of(data_type) {
            Some(half) => sums.iter().flat_map(|&sum| half.nearest(sum).to_le_bytes()).collect(),
            None => sums.iter().flat_map(|sum| sum.to_le_bytes()).collect(),
        }
    }
}
