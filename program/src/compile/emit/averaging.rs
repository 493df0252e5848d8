//! Averaging changes over all replicas: how replicas exchange them, and the kernels before, between
//! and after.
//!
//! Changes are exchanged in slices of a bucket. Uncompressed slices are summed by all-reduces in
//! single precision. Compressed slices are added by kernels, in single precision. Two replicas
//! gather each other's compressed changes and add them: as many bytes as scattering would send,
//! with one rounding less. More replicas scatter their changes by all-to-all; each adds one part,
//! compresses the sum and gathers the other parts (as in ZeRO++, Wang et al. 2023).

use super::list::{Label, ListBuilder};
use crate::collective::{Collective, CollectiveRole};
use crate::compile::state::BUCKET_ALIGNMENT;
use crate::mesh::{Axis, Group};
use crate::plan::Plan;
use crate::program::{BufferId, BufferRole, Phase};
use foretell_models::{Compression, Kernel};
use foretell_units::DataType;

/// How replicas exchange changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// By all-reduces in single precision.
    Sum,
    /// By all-gathers of compressed changes.
    Gather(Compression),
    /// By all-to-alls of compressed changes, then all-gathers of compressed sums.
    Scatter(Compression),
}

/// The averaging of changes over the replicas of a plan.
#[derive(Clone, Copy, Debug)]
pub(super) struct Averaging {
    way: Way,
    replicas: usize,
}

/// A range of a bucket's changes that is exchanged together.
#[derive(Clone, Debug)]
pub(super) struct Slice {
    /// The first element within the bucket.
    start: usize,
    elements: usize,
    /// For compressed changes: this replica's message, and the buffer for received messages.
    messages: Option<[BufferId; 2]>,
}

impl Averaging {
    pub(super) fn of(plan: &Plan) -> Self {
        let replicas = plan.replicas();
        let way = match plan.mode.compression() {
            None => Way::Sum,
            Some(format) if replicas == 2 => Way::Gather(format),
            Some(format) => Way::Scatter(format),
        };
        Self { way, replicas }
    }

    /// Returns whether changes are compressed. Kernels then add them, and they need no buffers but
    /// the messages.
    pub(super) fn is_compressed(&self) -> bool {
        self.way != Way::Sum
    }

    /// The number of slices of a bucket whose exchange overlaps `overlap` steps. Scattered changes
    /// take one step more than there are slices: a slice's sum returns one step later.
    fn slices(&self, overlap: usize) -> usize {
        match self.way {
            Way::Scatter(_) => overlap.saturating_sub(1).max(1),
            Way::Sum | Way::Gather(_) => overlap.max(1),
        }
    }

    /// The start and the end of each slice of a bucket of `elements` whose exchange overlaps
    /// `overlap` steps.
    fn bounds(&self, elements: usize, overlap: usize) -> impl Iterator<Item = [usize; 2]> + use<> {
        let slices = self.slices(overlap);
        let unit = match self.way {
            Way::Sum => BUCKET_ALIGNMENT,
            Way::Gather(format) | Way::Scatter(format) => format.chunk(),
        };
        let bound = move |slice: usize| if slice == slices { elements } else { elements * slice / slices / unit * unit };
        (0..slices).map(move |slice| [bound(slice), bound(slice + 1)])
    }

    /// The sizes of the buffers that the exchange of a bucket of `elements` needs: bytes of each
    /// message if changes are compressed, else one buffer of `elements`.
    pub(super) fn sizes(&self, elements: usize, overlap: usize) -> Vec<usize> {
        if !self.is_compressed() {
            return vec![elements];
        }
        self.bounds(elements, overlap).filter_map(|[start, end]| self.message_bytes(end - start)).flatten().collect()
    }

    /// Cuts a bucket into slices. `buffers` yields the message buffers, in the order of
    /// [`Self::sizes`]; it is not read if changes are uncompressed.
    pub(super) fn cut(&self, elements: usize, overlap: usize, buffers: &mut dyn Iterator<Item = BufferId>) -> Vec<Slice> {
        let slice = |[start, end]: [usize; 2]| {
            let messages = if self.is_compressed() { buffers.next().zip(buffers.next()) } else { None };
            Slice { start, elements: end - start, messages: messages.map(|(own, received)| [own, received]) }
        };
        self.bounds(elements, overlap).map(slice).collect()
    }

    /// The bytes of a slice's own message, and of all received messages; `None` if changes are not
    /// compressed.
    fn message_bytes(&self, elements: usize) -> Option<[usize; 2]> {
        match self.way {
            Way::Sum => None,
            Way::Gather(format) => Some([format.bytes(elements), self.replicas * format.bytes(elements)]),
            Way::Scatter(format) => {
                let all = self.replicas * format.bytes(format.part(elements, self.replicas));
                Some([all, all])
            }
        }
    }

    /// Compresses a slice of `changes`.
    pub(super) fn compress(&self, list: &mut ListBuilder, name: &str, changes: BufferId, slice: &Slice) {
        let Some([message, _]) = slice.messages.filter(|_| slice.elements > 0) else { return };
        let (format, parts) = match self.way {
            Way::Sum => return,
            Way::Gather(format) => (format, 1),
            Way::Scatter(format) => (format, self.replicas),
        };
        let own = part(list, name, changes, [slice.start, slice.elements]);
        let kernel = Kernel::Compress { elements: slice.elements, parts, format, feedback: false };
        list.compute(label(name), kernel, &[own], &[message]);
    }

    /// Sends a slice to the other replicas. Returns the received messages if this replica must
    /// still add them ([`Self::add`]). `changes` are given if they are sent uncompressed.
    pub(super) fn send(&self, list: &mut ListBuilder, name: &str, changes: Option<BufferId>, slice: &Slice) -> Option<BufferId> {
        if slice.elements == 0 {
            return None;
        }
        match (self.way, slice.messages) {
            (Way::Gather(_), Some([message, received])) => {
                collective(list, name, Collective::AllGather, [message, received]);
                None
            }
            (Way::Scatter(_), Some([message, _])) => {
                let arrived = list.add_buffer_like(name, BufferRole::Workspace, message);
                collective(list, name, Collective::AllToAll, [message, arrived]);
                Some(arrived)
            }
            (Way::Sum, None) => {
                let changes = changes.expect("invariant: changes that are summed have a buffer");
                let own = part(list, name, changes, [slice.start, slice.elements]);
                collective(list, name, Collective::AllReduce, [own, own]);
                None
            }
            (Way::Sum, Some(_)) | (Way::Gather(_) | Way::Scatter(_), None) => {
                unreachable!("invariant: compressed changes, and they alone, have messages")
            }
        }
    }

    /// Adds the messages that [`Self::send`] returned, and compresses the sum.
    pub(super) fn add(&self, list: &mut ListBuilder, name: &str, arrived: BufferId, slice: &Slice) {
        let (Way::Scatter(format), Some([message, _])) = (self.way, slice.messages) else { return };
        let elements = format.part(slice.elements, self.replicas);
        let sum = list.add_buffer(name, BufferRole::Workspace, vec![elements], DataType::Fp32);
        list.compute(label(name), Kernel::Decompress { elements, sources: self.replicas, format }, &[arrived], &[sum]);
        let message = part(list, name, message, [0, format.bytes(elements)]);
        list.compute(label(name), Kernel::Compress { elements, parts: 1, format, feedback: false }, &[sum], &[message]);
    }

    /// Sends the sums that [`Self::add`] made to the other replicas.
    pub(super) fn send_back(&self, list: &mut ListBuilder, name: &str, slice: &Slice) {
        let (Way::Scatter(format), Some([message, received])) = (self.way, slice.messages) else { return };
        if slice.elements > 0 {
            let bytes = format.bytes(format.part(slice.elements, self.replicas));
            let own = part(list, name, message, [0, bytes]);
            collective(list, name, Collective::AllGather, [own, received]);
        }
    }

    /// Decompresses the sum of a slice's changes into `changes`.
    pub(super) fn decompress(&self, list: &mut ListBuilder, name: &str, changes: BufferId, slice: &Slice) {
        let Some([_, received]) = slice.messages.filter(|_| slice.elements > 0) else { return };
        let (format, sources) = match self.way {
            Way::Sum => return,
            Way::Gather(format) => (format, self.replicas),
            Way::Scatter(format) => (format, 1),
        };
        let messages = part(list, name, received, [0, sources * format.bytes(slice.elements)]);
        let sum = part(list, name, changes, [slice.start, slice.elements]);
        list.compute(label(name), Kernel::Decompress { elements: slice.elements, sources, format }, &[messages], &[sum]);
    }
}

/// `elements` elements of a buffer from `start` on: a view, or the buffer itself if that is all of
/// it.
fn part(list: &mut ListBuilder, name: &str, buffer: BufferId, [start, elements]: [usize; 2]) -> BufferId {
    let is_all = elements == list.elements(buffer);
    if is_all { buffer } else { list.add_view(name, buffer, start, vec![elements]) }
}

fn label(name: &str) -> Label<'_> {
    Label::of_step(name, Phase::Update)
}

/// A collective of all replicas, of whole buffers.
fn collective(list: &mut ListBuilder, name: &str, kind: Collective, buffers: [BufferId; 2]) {
    list.collective(label(name), kind, CollectiveRole::Gradients, Group::along(Axis::Data), buffers);
}
