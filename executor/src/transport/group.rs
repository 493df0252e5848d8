//! Collectives among a set of ranks, over any mix of channels.
//!
//! Large reductions run on a ring (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce
//! algorithms for clusters of workstations"; also used by Horovod and NCCL). They are cut into
//! blocks, so that one step's output is still in the cache for the next step. Small all-reduces
//! send every input to every member, which takes one step instead of 2(n-1).
//!
//! The order of summation depends only on the number of members, the length and an element's index.
//! So every rank gets the same bits, in every run.

use std::ops::Range;
use std::sync::Arc;

use super::channel::{Channel, PendingReceive, PendingSend, send_receive, transfer};
use super::message::{Incoming, Outgoing};
use super::neighbours::{Channels, Neighbours, halves, ring_neighbours, split_ranges};
use super::reduce::{self, ElementType, bytes_of, bytes_of_mut};
use super::{StreamNumber, Transport, TransportError};

/// The longest all-reduce that sends its whole input to every member, in bytes. Measured with two
/// ranks on two cores.
const DIRECT_BYTES: usize = 8 << 10;
/// The most bytes of one member's chunk that a ring step moves. The chunk and both directions of
/// the step then stay in a second-level cache.
const STEP_BYTES: usize = 128 << 10;

/// The range of part `index` when `length` elements are divided into `parts` as evenly as possible.
/// The first parts are one element longer.
pub fn chunk_range(length: usize, parts: usize, index: usize) -> Range<usize> {
    let size = length / parts;
    let excess = length % parts;
    let start = index * size + index.min(excess);
    start..start + size + usize::from(index < excess)
}

/// [`chunk_range`] in bytes, for elements of `width` bytes.
fn chunk_bytes(length: usize, width: usize, parts: usize, index: usize) -> Range<usize> {
    let elements = chunk_range(length / width, parts, index);
    elements.start * width..elements.end * width
}

/// A process group: ranks of one transport that run collectives together, on one stream.
///
/// All members must call the same operations in the same order with the same sizes. A group of one
/// sends nothing.
pub struct Group {
    transport: Arc<dyn Transport>,
    members: Vec<usize>,
    /// This rank's index in `members`.
    position: usize,
    stream: StreamNumber,
    channels: Channels,
    scratch: Vec<u8>,
}

impl std::fmt::Debug for Group {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Group({:?} on {}, this is rank {})", self.members, self.stream, self.transport.rank())
    }
}

impl Group {
    /// Creates the group of these ranks. All of them must give the same order. No other group may
    /// use `stream`.
    pub fn new(transport: Arc<dyn Transport>, members: &[usize], stream: StreamNumber) -> Result<Self, TransportError> {
        let rank = transport.rank();
        if let Some((_, &twice)) = members.iter().enumerate().find(|(index, member)| members[..*index].contains(member)) {
            return Err(TransportError::NotAMember { rank: twice, stream });
        }
        let position = members.iter().position(|member| *member == rank).ok_or(TransportError::NotAMember { rank, stream })?;
        let size = members.len();
        let mut group =
            Group { transport, members: members.to_vec(), position, stream, channels: Channels::new(), scratch: Vec::new() };
        group.connect([(position + 1) % size, (position + size - 1) % size])?;
        Ok(group)
    }

    /// The number of members.
    pub fn size(&self) -> usize {
        self.members.len()
    }

    /// This rank's index among the members.
    pub fn position(&self) -> usize {
        self.position
    }

    /// The members' ranks, in the group's order.
    pub fn members(&self) -> &[usize] {
        &self.members
    }

    /// [`all_reduce`](Self::all_reduce) in single precision.
    pub fn all_reduce_f32(&mut self, values: &mut [f32]) -> Result<(), TransportError> {
        self.all_reduce(ElementType::Fp32, bytes_of_mut(values))
    }

    /// Sums `values` element by element over all members, in place. Elements of sixteen bits are
    /// rounded once for each member that is added.
    pub fn all_reduce(&mut self, element: ElementType, values: &mut [u8]) -> Result<(), TransportError> {
        self.check_length("all-reduce", values.len().next_multiple_of(element.width()), values.len())?;
        if self.size() == 1 || values.is_empty() {
            return Ok(());
        }
        if values.len() <= DIRECT_BYTES {
            return self.all_reduce_directly(element, values);
        }
        let block = self.size() * STEP_BYTES;
        values.chunks_mut(block).try_for_each(|block| self.all_reduce_block(element, block))
    }

    /// Every member sends its input to every other, and adds all inputs in the group's order.
    fn all_reduce_directly(&mut self, element: ElementType, values: &mut [u8]) -> Result<(), TransportError> {
        let length = values.len();
        let position = self.position;
        if self.size() == 2 {
            let mut own = [0; DIRECT_BYTES];
            let own = &mut own[..length];
            own.copy_from_slice(values);
            let channel = self.channel(1 - position)?;
            let (outgoing, incoming) = (Outgoing::new(own), Incoming::reduce(element, values));
            return send_receive(&mut *channel.sender, outgoing, &mut *channel.receiver, incoming);
        }
        self.connect(0..self.size())?;
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.clear();
        scratch.resize(self.size() * length, 0);
        scratch[position * length..][..length].copy_from_slice(values);
        let mut sends = Vec::with_capacity(self.size());
        let mut receives = Vec::with_capacity(self.size());
        let mut rest = scratch.as_mut_slice();
        let mut next = 0;
        for (other, channel) in &mut self.channels {
            let (into, later) = std::mem::take(&mut rest)[(other - next) * length..].split_at_mut(length);
            (rest, next) = (later, other + 1);
            sends.push(PendingSend { half: &mut *channel.sender, message: Outgoing::new(values) });
            receives.push(PendingReceive { half: &mut *channel.receiver, message: Incoming::copy(into) });
        }
        transfer(&mut sends, &mut receives)?;
        drop((sends, receives));
        values.copy_from_slice(&scratch[..length]);
        for other in scratch[length..].chunks_exact(length) {
            reduce::accumulate(element, values, other);
        }
        self.scratch = scratch;
        Ok(())
    }

    /// A ring all-reduce of one block, whose chunks are those of [`chunk_range`].
    fn all_reduce_block(&mut self, element: ElementType, values: &mut [u8]) -> Result<(), TransportError> {
        let (size, position) = (self.size(), self.position);
        let length = values.len();
        let chunk = |number: usize| chunk_bytes(length, element.width(), size, number % size);
        let (sender, receiver) = ring_neighbours(&mut self.channels, position, size)?;
        let mut neighbours = Neighbours::new(sender, receiver);
        // Reduce-scatter: in step s, member p sends chunk p-s and adds what it receives to chunk
        // p-s-1. In the end its chunk p+1 is complete.
        for step in 0..size - 1 {
            let newest = position + size - step;
            let (outgoing, incoming) = split_ranges(values, chunk(newest), chunk(newest - 1));
            neighbours.send_receive(outgoing, Incoming::reduce(element, incoming))?;
        }
        // All-gather of the complete chunks.
        for step in 0..size - 1 {
            let newest = position + size + 1 - step;
            let (outgoing, incoming) = split_ranges(values, chunk(newest), chunk(newest - 1));
            neighbours.send_receive(outgoing, Incoming::copy(incoming))?;
        }
        Ok(())
    }

    /// [`reduce_scatter`](Self::reduce_scatter) in single precision.
    pub fn reduce_scatter_f32(&mut self, input: &[f32], output: &mut [f32]) -> Result<(), TransportError> {
        self.reduce_scatter(ElementType::Fp32, bytes_of(input), bytes_of_mut(output))
    }

    /// Sums `input` element by element over all members. Member i gets part i of the sums
    /// ([`chunk_range`]) in `output`. Elements of sixteen bits are rounded once for each member
    /// that is added.
    pub fn reduce_scatter(&mut self, element: ElementType, input: &[u8], output: &mut [u8]) -> Result<(), TransportError> {
        const NAME: &str = "reduce-scatter";
        let (size, position, width) = (self.size(), self.position, element.width());
        self.check_length(NAME, input.len().next_multiple_of(width), input.len())?;
        let part = |index: usize| chunk_bytes(input.len(), width, size, index);
        self.check_length(NAME, part(position).len(), output.len())?;
        if size == 1 {
            output.copy_from_slice(input);
            return Ok(());
        }
        let longest = part(0).len();
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.resize(scratch.len().max(2 * STEP_BYTES), 0);
        let (sender, receiver) = ring_neighbours(&mut self.channels, position, size)?;
        let mut neighbours = Neighbours::new(sender, receiver);
        // A block has the same slice of every member's part.
        for begin in (0..longest).step_by(STEP_BYTES) {
            let slice = |index: usize| {
                let part = part(index % size);
                let end = part.end.min(part.start + begin + STEP_BYTES);
                end.min(part.start + begin)..end
            };
            let (mut passing, mut arriving) = scratch.split_at_mut(STEP_BYTES);
            // Member p begins by sending part p-1, so that after n-1 steps it holds its own part.
            for step in 0..size - 1 {
                let outgoing_slice = slice(position + 2 * size - 1 - step);
                let own = &input[slice(position + 2 * size - 2 - step)];
                let outgoing = if step == 0 { &input[outgoing_slice] } else { &passing[..outgoing_slice.len()] };
                let into = if step == size - 2 {
                    &mut output[begin.min(part(position).len())..][..own.len()]
                } else {
                    &mut arriving[..own.len()]
                };
                neighbours.send_receive(outgoing, Incoming::combine(element, into, own))?;
                std::mem::swap(&mut passing, &mut arriving);
            }
        }
        self.scratch = scratch;
        Ok(())
    }

    /// Collects the inputs of all members, in the group's order. All inputs have the same length.
    pub fn all_gather(&mut self, input: &[u8], output: &mut [u8]) -> Result<(), TransportError> {
        self.check_length("all-gather", input.len() * self.size(), output.len())?;
        self.all_gather_parts(input, |index| index * input.len()..(index + 1) * input.len(), output)
    }

    /// Collects the parts of [`chunk_range`]: the inverse of
    /// [`reduce_scatter_f32`](Self::reduce_scatter_f32)'s division.
    pub fn all_gather_f32(&mut self, input: &[f32], output: &mut [f32]) -> Result<(), TransportError> {
        let (size, length) = (self.size(), size_of_val(output));
        let part = |index: usize| chunk_bytes(length, size_of::<f32>(), size, index);
        self.check_length("all-gather", part(self.position).len(), size_of_val(input))?;
        self.all_gather_parts(bytes_of(input), part, bytes_of_mut(output))
    }

    /// A ring all-gather: member i's input fills `part(i)` of `output`. The parts must cover
    /// `output`.
    fn all_gather_parts(
        &mut self,
        input: &[u8],
        part: impl Fn(usize) -> Range<usize>,
        output: &mut [u8],
    ) -> Result<(), TransportError> {
        let (size, position) = (self.size(), self.position);
        output[part(position)].copy_from_slice(input);
        if size == 1 {
            return Ok(());
        }
        let (sender, receiver) = ring_neighbours(&mut self.channels, position, size)?;
        let mut neighbours = Neighbours::new(sender, receiver);
        for step in 0..size - 1 {
            let newest = position + size - step;
            let (outgoing, incoming) = split_ranges(output, part(newest % size), part((newest - 1) % size));
            neighbours.send_receive(outgoing, Incoming::copy(incoming))?;
        }
        Ok(())
    }

    /// Copies the bytes of the member at position `root` to all members. They travel along the ring
    /// in pieces.
    pub fn broadcast(&mut self, root: usize, bytes: &mut [u8]) -> Result<(), TransportError> {
        let size = self.size();
        if root >= size {
            return Err(TransportError::NotAMember { rank: root, stream: self.stream });
        }
        if size == 1 {
            return Ok(());
        }
        let distance = (self.position + size - root) % size;
        let (is_root, is_last) = (distance == 0, distance == size - 1);
        let (sender, receiver) = ring_neighbours(&mut self.channels, self.position, size)?;
        let mut neighbours = Neighbours::new(sender, receiver);
        let mut received = if is_root { bytes.len() } else { 0 };
        let mut sent = if is_last { bytes.len() } else { 0 };
        while received < bytes.len() || sent < bytes.len() {
            // Send what the previous round received while the next piece comes in.
            let (available, missing) = bytes.split_at_mut(received);
            let outgoing = &available[sent.min(received)..];
            let outgoing = &outgoing[..outgoing.len().min(STEP_BYTES)];
            let piece = missing.len().min(STEP_BYTES);
            let outgoing_message = (!outgoing.is_empty()).then(|| Outgoing::new(outgoing));
            let incoming_message = (piece != 0).then(|| Incoming::copy(&mut missing[..piece]));
            neighbours.transfer(outgoing_message, incoming_message)?;
            sent += outgoing.len();
            received += piece;
        }
        Ok(())
    }

    /// Returns once every member has called it.
    pub fn barrier(&mut self) -> Result<(), TransportError> {
        // Dissemination barrier (Hensgen, Finkel and Manber 1988): after round k each member has
        // heard, directly or through others, from 2^k members.
        let (size, position) = (self.size(), self.position);
        let mut distance = 1;
        while distance < size {
            let (to, from) = ((position + distance) % size, (position + size - distance) % size);
            self.connect([to, from])?;
            let (sender, receiver) = halves(&mut self.channels, to, from)?;
            Neighbours::new(sender, receiver).send_receive(&[], Incoming::copy(&mut []))?;
            distance *= 2;
        }
        Ok(())
    }

    /// Sends piece j of `input` to member j, and receives member i's into piece i of `output`. All
    /// pieces have the same length.
    pub fn all_to_all(&mut self, input: &[u8], output: &mut [u8]) -> Result<(), TransportError> {
        const NAME: &str = "all-to-all";
        let (size, position) = (self.size(), self.position);
        self.check_length(NAME, input.len().next_multiple_of(size), input.len())?;
        self.check_length(NAME, input.len(), output.len())?;
        let length = input.len() / size;
        let piece = |index: usize| index * length..(index + 1) * length;
        output[piece(position)].copy_from_slice(&input[piece(position)]);
        for distance in 1..size {
            let (to, from) = ((position + distance) % size, (position + size - distance) % size);
            self.connect([to, from])?;
            let (sender, receiver) = halves(&mut self.channels, to, from)?;
            Neighbours::new(sender, receiver).send_receive(&input[piece(to)], Incoming::copy(&mut output[piece(from)]))?;
        }
        Ok(())
    }

    /// Sends `input` to the next member of the ring and receives the previous member's into
    /// `output`.
    pub fn shift(&mut self, input: &[u8], output: &mut [u8]) -> Result<(), TransportError> {
        self.check_length("shift", input.len(), output.len())?;
        if self.size() == 1 {
            output.copy_from_slice(input);
            return Ok(());
        }
        let (position, size) = (self.position, self.size());
        let (sender, receiver) = ring_neighbours(&mut self.channels, position, size)?;
        Neighbours::new(sender, receiver).send_receive(input, Incoming::copy(output))
    }

    /// Sends `bytes` to the member at `position`, which must [`receive`](Self::receive) as many.
    pub fn send(&mut self, position: usize, bytes: &[u8]) -> Result<(), TransportError> {
        self.channel(position)?.send(bytes)
    }

    /// Receives `into.len()` bytes from the member at `position`.
    pub fn receive(&mut self, position: usize, into: &mut [u8]) -> Result<(), TransportError> {
        self.channel(position)?.receive(into)
    }

    fn channel(&mut self, position: usize) -> Result<&mut Channel, TransportError> {
        self.connect([position])?;
        self.channels.get_mut(&position).ok_or(TransportError::NotAMember { rank: self.transport.rank(), stream: self.stream })
    }

    /// Opens the channels to the members at these positions that are not open yet.
    fn connect(&mut self, positions: impl IntoIterator<Item = usize>) -> Result<(), TransportError> {
        for position in positions {
            let peer = *self.members.get(position).ok_or(TransportError::NotAMember { rank: position, stream: self.stream })?;
            if position != self.position && !self.channels.contains_key(&position) {
                self.channels.insert(position, self.transport.open(peer, self.stream)?);
            }
        }
        Ok(())
    }

    /// Refuses a buffer of `given` bytes where the operation needs `expected`.
    fn check_length(&self, operation: &'static str, expected: usize, given: usize) -> Result<(), TransportError> {
        if expected == given {
            return Ok(());
        }
        Err(TransportError::WrongSize { rank: self.transport.rank(), operation, expected, given })
    }
}
