//! Collectives among a set of ranks, over any mix of channels.
//!
//! Large reductions run on a ring (Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
//! workstations"; the algorithm of Horovod and NCCL), cut into blocks so that what one step wrote is still in the cache for
//! the next. Small all-reduces are exchanged directly, which takes one step instead of 2(n-1). In both, the order of summation
//! depends only on the number of members, the length and the element's place: every rank has the same bits, on every run.

use std::ops::Range;
use std::sync::Arc;

use super::channel::{Channel, Receiving, Sending, drive, exchange};
use super::message::{Incoming, Outgoing};
use super::neighbours::{Channels, Neighbours, pair, ring, starts, two_ranges};
use super::reduce::{self, Number, Reduction, bytes_of, bytes_of_mut};
use super::{StreamNumber, Transport, TransportError};

/// Up to so many bytes an all-reduce sends its whole input to every member. Measured with two ranks on two cores.
const DIRECT_BYTES: usize = 8 << 10;
/// A ring step moves at most so many bytes (of one member's chunk) before the next step begins: both directions of it, and the
/// chunk itself, stay in a second-level cache.
const STEP_BYTES: usize = 128 << 10;

/// Where part `index` of `parts` lies when `length` elements are divided as evenly as can be: the first parts get the excess.
pub fn chunk_range(length: usize, parts: usize, index: usize) -> Range<usize> {
    let size = length / parts;
    let excess = length % parts;
    let start = index * size + index.min(excess);
    start..start + size + usize::from(index < excess)
}

/// A process group: some ranks of a transport that do collectives together on one stream.
///
/// All members must call the same operations in the same order with the same sizes. A group of one is silent.
pub struct Group {
    transport: Arc<dyn Transport>,
    members: Vec<usize>,
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
    /// The group of these ranks, in this order, which all of them must give alike. `stream` must be the group's alone.
    pub fn new(transport: Arc<dyn Transport>, members: &[usize], stream: StreamNumber) -> Result<Self, TransportError> {
        let rank = transport.rank();
        if let Some(twice) = members.iter().enumerate().find(|(index, member)| members[..*index].contains(member)) {
            return Err(TransportError::NotAMember { rank: *twice.1, stream });
        }
        let position = members.iter().position(|member| *member == rank).ok_or(TransportError::NotAMember { rank, stream })?;
        let mut group =
            Group { transport, members: members.to_vec(), position, stream, channels: Channels::new(), scratch: Vec::new() };
        group.connect([group.at(1), group.at(group.size() - 1)])?;
        Ok(group)
    }

    /// How many members there are.
    pub fn size(&self) -> usize {
        self.members.len()
    }

    /// This rank's place among the members.
    pub fn position(&self) -> usize {
        self.position
    }

    /// The members' ranks, in the group's order.
    pub fn members(&self) -> &[usize] {
        &self.members
    }

    /// Sums `values` element by element over all members; each gets the result.
    pub fn all_reduce_f32(&mut self, values: &mut [f32]) -> Result<(), TransportError> {
        self.all_reduce_with(Reduction::Sum, values)
    }

    /// [`all_reduce_f32`](Self::all_reduce_f32) with any reduction.
    pub fn all_reduce_with(&mut self, reduction: Reduction, values: &mut [f32]) -> Result<(), TransportError> {
        self.all_reduce(Number::Fp32, reduction, bytes_of_mut(values))
    }

    /// [`all_reduce_with`](Self::all_reduce_with) over any numbers. Those of sixteen bits are rounded once a member that adds its own.
    pub fn all_reduce(&mut self, number: Number, reduction: Reduction, values: &mut [u8]) -> Result<(), TransportError> {
        self.need("all-reduce", values.len().next_multiple_of(number.width()), values.len())?;
        if self.size() == 1 || values.is_empty() {
            return Ok(());
        }
        if values.len() <= DIRECT_BYTES {
            return self.all_reduce_directly(number, reduction, values);
        }
        let block = self.size() * STEP_BYTES;
        values.chunks_mut(block).try_for_each(|block| self.all_reduce_block(number, reduction, block))
    }

    /// Every member sends its input to every other and adds them all up in the group's order.
    fn all_reduce_directly(&mut self, number: Number, reduction: Reduction, values: &mut [u8]) -> Result<(), TransportError> {
        let length = values.len();
        let position = self.position;
        if self.size() == 2 {
            let mut own = [0; DIRECT_BYTES];
            let own = &mut own[..length];
            own.copy_from_slice(values);
            let neighbour = self.channel(1 - position)?;
            let (outgoing, incoming) = (Outgoing::new(own), Incoming::reduce(number, reduction, values));
            return exchange(&mut *neighbour.sender, outgoing, &mut *neighbour.receiver, incoming);
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
            sends.push(Sending { half: &mut *channel.sender, message: Outgoing::new(values) });
            receives.push(Receiving { half: &mut *channel.receiver, message: Incoming::copy(into) });
        }
        drive(&mut sends, &mut receives)?;
        drop((sends, receives));
        values.copy_from_slice(&scratch[..length]);
        for other in scratch[length..].chunks_exact(length) {
            reduce::accumulate(number, reduction, values, other);
        }
        self.scratch = scratch;
        Ok(())
    }

    fn all_reduce_block(&mut self, number: Number, reduction: Reduction, values: &mut [u8]) -> Result<(), TransportError> {
        let (size, width) = (self.size(), number.width());
        let length = values.len() / width;
        let place = |steps_back: usize, ahead: usize, position: usize| {
            let numbers = chunk_range(length, size, (position + ahead + size - steps_back) % size);
            numbers.start * width..numbers.end * width
        };
        let position = self.position;
        let (sender, receiver) = ring(&mut self.channels, position, size)?;
        let mut neighbours = Neighbours::new(sender, receiver);
        // Reduce-scatter: in step s, member p passes on chunk p-s and adds to chunk p-s-1; it ends up owning chunk p+1.
        for step in 0..size - 1 {
            let (outgoing, incoming) = two_ranges(values, place(step, 0, position), place(step + 1, 0, position));
            neighbours.exchange(outgoing, Incoming::reduce(number, reduction, incoming))?;
        }
        // All-gather of what each owns.
        for step in 0..size - 1 {
            let (outgoing, incoming) = two_ranges(values, place(step, 1, position), place(step, 0, position));
            neighbours.exchange(outgoing, Incoming::copy(incoming))?;
        }
        Ok(())
    }

    /// Sums `input` over all members; member i gets the sums of its part ([`chunk_range`]) in `output`.
    pub fn reduce_scatter_f32(&mut self, input: &[f32], output: &mut [f32]) -> Result<(), TransportError> {
        let counts: Vec<usize> = (0..self.size()).map(|index| chunk_range(input.len(), self.size(), index).len()).collect();
        self.reduce_scatter_uneven(Reduction::Sum, input, &counts, output)
    }

    /// [`reduce_scatter_f32`](Self::reduce_scatter_f32) over any numbers. Those of sixteen bits are rounded once a member that adds its own.
    pub fn reduce_scatter(&mut self, number: Number, input: &[u8], output: &mut [u8]) -> Result<(), TransportError> {
        let (size, width) = (self.size(), number.width());
        let counts: Vec<usize> = (0..size).map(|index| chunk_range(input.len() / width, size, index).len() * width).collect();
        self.reduce_scatter_bytes(number, Reduction::Sum, input, &counts, output)
    }

    /// [`reduce_scatter_f32`](Self::reduce_scatter_f32) with any reduction, and member i's part of `counts[i]` elements.
    pub fn reduce_scatter_uneven(
        &mut self,
        reduction: Reduction,
        input: &[f32],
        counts: &[usize],
        output: &mut [f32],
    ) -> Result<(), TransportError> {
        let counts: Vec<usize> = counts.iter().map(|count| count * size_of::<f32>()).collect();
        self.reduce_scatter_bytes(Number::Fp32, reduction, bytes_of(input), &counts, bytes_of_mut(output))
    }

    fn reduce_scatter_bytes(
        &mut self,
        number: Number,
        reduction: Reduction,
        input: &[u8],
        counts: &[usize],
        output: &mut [u8],
    ) -> Result<(), TransportError> {
        const NAME: &str = "reduce-scatter";
        self.need(NAME, self.size(), counts.len())?;
        let width = number.width();
        self.need(NAME, counts.iter().sum::<usize>() / width, input.len() / width)?;
        self.need(NAME, counts[self.position] / width, output.len() / width)?;
        let (size, position) = (self.size(), self.position);
        let starts = starts(counts);
        if size == 1 {
            output.copy_from_slice(input);
            return Ok(());
        }
        // Blocks again: the b-th block takes the b-th slice of every member's part.
        let step = STEP_BYTES;
        let longest = counts.iter().copied().max().unwrap_or(0);
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.resize(scratch.len().max(2 * step), 0);
        let (sender, receiver) = ring(&mut self.channels, position, size)?;
        let mut neighbours = Neighbours::new(sender, receiver);
        for begin in (0..longest).step_by(step) {
            let slice = |part: usize| {
                let end = counts[part].min(begin + step);
                starts[part] + begin.min(end)..starts[part] + end
            };
            let (mut passing, mut arriving) = scratch.split_at_mut(step);
            // Member p begins with part p-1, so that after n-1 steps it holds its own.
            for step in 0..size - 1 {
                let outgoing_part = slice((position + 2 * size - 1 - step) % size);
                let incoming_part = slice((position + 2 * size - 2 - step) % size);
                let own = &input[incoming_part.clone()];
                let outgoing = if step == 0 { &input[outgoing_part] } else { &passing[..outgoing_part.len()] };
                let into = if step == size - 2 {
                    &mut output[begin.min(counts[position])..][..own.len()]
                } else {
                    &mut arriving[..own.len()]
                };
                neighbours.exchange(outgoing, Incoming::combine(number, reduction, into, own))?;
                std::mem::swap(&mut passing, &mut arriving);
            }
        }
        self.scratch = scratch;
        Ok(())
    }

    /// Every member gets the inputs of all, in the group's order; all inputs have one length.
    pub fn all_gather(&mut self, input: &[u8], output: &mut [u8]) -> Result<(), TransportError> {
        self.all_gather_uneven(input, &vec![input.len(); self.size()], output)
    }

    /// Numbers whose division is that of [`chunk_range`]: the way back from [`reduce_scatter_f32`](Self::reduce_scatter_f32).
    pub fn all_gather_f32(&mut self, input: &[f32], output: &mut [f32]) -> Result<(), TransportError> {
        let counts: Vec<usize> =
            (0..self.size()).map(|index| chunk_range(output.len(), self.size(), index).len() * size_of::<f32>()).collect();
        self.all_gather_uneven(bytes_of(input), &counts, bytes_of_mut(output))
    }

    /// [`all_gather`](Self::all_gather) where member i's input has `byte_counts[i]` bytes.
    pub fn all_gather_uneven(&mut self, input: &[u8], byte_counts: &[usize], output: &mut [u8]) -> Result<(), TransportError> {
        const NAME: &str = "all-gather";
        self.need(NAME, self.size(), byte_counts.len())?;
        self.need(NAME, byte_counts.iter().sum(), output.len())?;
        self.need(NAME, byte_counts[self.position], input.len())?;
        let (size, position) = (self.size(), self.position);
        let starts = starts(byte_counts);
        let range = |part: usize| starts[part]..starts[part] + byte_counts[part];
        output[range(position)].copy_from_slice(input);
        if size == 1 {
            return Ok(());
        }
        let (sender, receiver) = ring(&mut self.channels, position, size)?;
        let mut neighbours = Neighbours::new(sender, receiver);
        for step in 0..size - 1 {
            let outgoing = range((position + size - step) % size);
            let incoming = range((position + 2 * size - 1 - step) % size);
            let (outgoing, incoming) = two_ranges(output, outgoing, incoming);
            neighbours.exchange(outgoing, Incoming::copy(incoming))?;
        }
        Ok(())
    }

    /// Every member gets the bytes of the one at position `root`, handed on along the ring in pieces.
    pub fn broadcast(&mut self, root: usize, bytes: &mut [u8]) -> Result<(), TransportError> {
        let size = self.size();
        if root >= size {
            return Err(TransportError::NotAMember { rank: root, stream: self.stream });
        }
        if size == 1 {
            return Ok(());
        }
        let distance = (self.position + size - root) % size;
        let (receives, sends) = (distance != 0, distance != size - 1);
        let (sender, receiver) = ring(&mut self.channels, self.position, size)?;
        let mut neighbours = Neighbours::new(sender, receiver);
        let (mut received, mut sent) = (if receives { 0 } else { bytes.len() }, if sends { 0 } else { bytes.len() });
        while received < bytes.len() || sent < bytes.len() {
            // Pass on what came in the previous turn while the next piece comes in.
            let (here, coming) = bytes.split_at_mut(received);
            let outgoing = &here[sent.min(received)..];
            let outgoing = &outgoing[..outgoing.len().min(STEP_BYTES)];
            let piece = coming.len().min(STEP_BYTES);
            let outgoing_message = (!outgoing.is_empty()).then(|| Outgoing::new(outgoing));
            let incoming_message = (piece != 0).then(|| Incoming::copy(&mut coming[..piece]));
            neighbours.drive(outgoing_message, incoming_message)?;
            sent += outgoing.len();
            received += piece;
        }
        Ok(())
    }

    /// Returns once every member has called it.
    pub fn barrier(&mut self) -> Result<(), TransportError> {
        // Dissemination (Hensgen, Finkel & Manber 1988): after round k each member has heard, through others, from 2^k.
        let (size, position) = (self.size(), self.position);
        let mut distance = 1;
        while distance < size {
            let (to, from) = ((position + distance) % size, (position + size - distance) % size);
            self.connect([to, from])?;
            let (sender, receiver) = pair(&mut self.channels, to, from)?;
            Neighbours::new(sender, receiver).exchange(&[], Incoming::copy(&mut []))?;
            distance *= 2;
        }
        Ok(())
    }

    /// Member i's j-th piece goes to member j's i-th place; all pieces have one length.
    pub fn all_to_all(&mut self, input: &[u8], output: &mut [u8]) -> Result<(), TransportError> {
        let size = self.size();
        self.need("all-to-all", input.len().next_multiple_of(size), input.len())?;
        let counts = vec![input.len() / size; size];
        self.all_to_all_uneven(input, &counts, output, &counts)
    }

    /// [`all_to_all`](Self::all_to_all) where `send_counts[j]` bytes go to member j and `receive_counts[i]` come from member i.
    pub fn all_to_all_uneven(
        &mut self,
        input: &[u8],
        send_counts: &[usize],
        output: &mut [u8],
        receive_counts: &[usize],
    ) -> Result<(), TransportError> {
        const NAME: &str = "all-to-all";
        let (size, position) = (self.size(), self.position);
        for (counts, length) in [(send_counts, input.len()), (receive_counts, output.len())] {
            self.need(NAME, size, counts.len())?;
            self.need(NAME, counts.iter().sum(), length)?;
        }
        self.need(NAME, send_counts[position], receive_counts[position])?;
        let (send_starts, receive_starts) = (starts(send_counts), starts(receive_counts));
        let outgoing = |part: usize| &input[send_starts[part]..][..send_counts[part]];
        output[receive_starts[position]..][..receive_counts[position]].copy_from_slice(outgoing(position));
        for distance in 1..size {
            let (to, from) = ((position + distance) % size, (position + size - distance) % size);
            self.connect([to, from])?;
            let (sender, receiver) = pair(&mut self.channels, to, from)?;
            let incoming = &mut output[receive_starts[from]..][..receive_counts[from]];
            Neighbours::new(sender, receiver).exchange(outgoing(to), Incoming::copy(incoming))?;
        }
        Ok(())
    }

    /// Every member sends its input to the next, the last to the first, and receives that of the one before it.
    pub fn shift(&mut self, input: &[u8], output: &mut [u8]) -> Result<(), TransportError> {
        self.need("shift", input.len(), output.len())?;
        if self.size() == 1 {
            output.copy_from_slice(input);
            return Ok(());
        }
        let (position, size) = (self.position, self.size());
        let (sender, receiver) = ring(&mut self.channels, position, size)?;
        Neighbours::new(sender, receiver).exchange(input, Incoming::copy(output))
    }

    /// Sends `bytes` to the member at `position`, which must [`receive`](Self::receive) as many.
    pub fn send(&mut self, position: usize, bytes: &[u8]) -> Result<(), TransportError> {
        self.channel(position)?.send(bytes)
    }

    /// Receives `into.len()` bytes from the member at `position`.
    pub fn receive(&mut self, position: usize, into: &mut [u8]) -> Result<(), TransportError> {
        self.channel(position)?.receive(into)
    }

    /// The position `ahead` places further along the ring.
    fn at(&self, ahead: usize) -> usize {
        (self.position + ahead) % self.size()
    }

    fn channel(&mut self, position: usize) -> Result<&mut Channel, TransportError> {
        self.connect([position])?;
        self.channels.get_mut(&position).ok_or(TransportError::NotAMember { rank: self.transport.rank(), stream: self.stream })
    }

    /// Opens the channels to these members that are not open yet.
    fn connect(&mut self, positions: impl IntoIterator<Item = usize>) -> Result<(), TransportError> {
        for position in positions {
            let peer = *self.members.get(position).ok_or(TransportError::NotAMember { rank: position, stream: self.stream })?;
            if position != self.position && !self.channels.contains_key(&position) {
                self.channels.insert(position, self.transport.open(peer, self.stream)?);
            }
        }
        Ok(())
    }

    fn need(&self, operation: &'static str, expected: usize, given: usize) -> Result<(), TransportError> {
        if expected == given {
            return Ok(());
        }
        Err(TransportError::WrongSize { rank: self.transport.rank(), operation, expected, given })
    }
}
