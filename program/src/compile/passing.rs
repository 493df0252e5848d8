//! Emitting what a stage sends and receives: whole shares between stages with the same mesh, pieces of them between others.

use super::emit::StageEmitter;
use super::messages::Receive;
use super::reshard::{Piece, crossing_placements};
use crate::program::{BufferId, BufferRole, Operation, Peer, PeerId, Phase, Stream};
use foretell_models::{Kernel, Pass, TensorId};

impl StageEmitter<'_> {
    pub(super) fn receive(&mut self, receive: &Receive) {
        let &Receive { tensor, micro_batch, from } = receive;
        let (lowering, routes) = (self.lowering, self.routes);
        let Some(maker) = lowering.makers[tensor.0] else { return };
        let phase = if lowering.graph.operators[maker.0].pass == Pass::Forward { Phase::Forward } else { Phase::Backward };
        match routes.receives.get(&(tensor, from)) {
            None => {
                let buffer = self.new_variant(tensor, micro_batch, lowering.sharding.settled(tensor));
                let peer = self.opposite(from);
                self.receive_into(tensor, micro_batch, phase, peer, buffer);
            }
            Some(pieces) => {
                let whole = self.new_variant(tensor, micro_batch, crossing_placements(lowering, tensor));
                for piece in pieces {
                    self.receive_piece(tensor, micro_batch, phase, piece, whole);
                }
            }
        }
    }

    /// Sends a tensor that was just made to the other stages that read it.
    pub(super) fn send(&mut self, tensor: TensorId, micro_batch: usize, phase: Phase) {
        let (lowering, routes) = (self.lowering, self.routes);
        for stage in lowering.other_readers(tensor, self.program.stage, &self.cuts.stage_of_block) {
            match routes.sends.get(&(tensor, stage)) {
                None => {
                    let buffer = self.fetch(tensor, micro_batch, lowering.sharding.settled(tensor), phase);
                    let peer = self.opposite(stage);
                    self.send_from(tensor, micro_batch, phase, peer, buffer);
                }
                Some(pieces) => {
                    // Sums are made even by a rank that has nothing to send: the others of its group make them with it.
                    let whole = self.fetch(tensor, micro_batch, crossing_placements(lowering, tensor), phase);
                    for piece in pieces {
                        self.send_piece(tensor, micro_batch, phase, piece, whole);
                    }
                }
            }
        }
    }

    /// The rank of the same position in a stage that has the same mesh.
    fn opposite(&mut self, stage: usize) -> PeerId {
        let peer = Peer { stage, ranks: None };
        let known = self.program.peers.iter().position(|one| *one == peer).unwrap_or_else(|| {
            self.program.peers.push(peer);
            self.program.peers.len() - 1
        });
        PeerId(known as u16)
    }

    fn send_from(&mut self, tensor: TensorId, micro_batch: usize, phase: Phase, peer: PeerId, buffer: BufferId) {
        let operation = Operation::Send { peer, bytes: self.program.buffer(buffer).bytes };
        self.pass(tensor, operation, Stream::SendTo(peer), [vec![buffer], vec![]], micro_batch, phase);
    }

    fn receive_into(&mut self, tensor: TensorId, micro_batch: usize, phase: Phase, peer: PeerId, buffer: BufferId) {
        let operation = Operation::Receive { peer, bytes: self.program.buffer(buffer).bytes };
        self.pass(tensor, operation, Stream::ReceiveFrom(peer), [vec![], vec![buffer]], micro_batch, phase);
    }

    fn pass(
        &mut self,
        tensor: TensorId,
        operation: Operation,
        stream: Stream,
        [reads, writes]: [Vec<BufferId>; 2],
        micro_batch: usize,
        phase: Phase,
    ) {
        let lowering = self.lowering;
        self.push(&lowering.graph.tensor(tensor).name, operation, stream, reads, writes, Some(micro_batch), phase);
    }

    /// Sends one piece of a share: from where it lies, or packed where its rows lie apart.
    fn send_piece(&mut self, tensor: TensorId, micro_batch: usize, phase: Phase, piece: &Piece, whole: BufferId) {
        let mut at = whole;
        for (dimension, (&start, &extent)) in piece.start.iter().zip(&piece.extent).enumerate() {
            at = match self.cut(at, dimension, start, extent) {
                Cut::Nothing => at,
                Cut::Run(run) => run,
                Cut::Rows { packed, rows, columns, start, part } => {
                    let take = Kernel::TakeColumns { rows, columns, start, part };
                    self.copy(tensor, micro_batch, phase, take, at, packed);
                    packed
                }
            };
        }
        self.send_from(tensor, micro_batch, phase, piece.peer, at);
    }

    /// Receives one piece of a share: to where it belongs, or packed where its rows lie apart.
    fn receive_piece(&mut self, tensor: TensorId, micro_batch: usize, phase: Phase, piece: &Piece, whole: BufferId) {
        let mut at = whole;
        let mut copies = Vec::new();
        for (dimension, (&start, &extent)) in piece.start.iter().zip(&piece.extent).enumerate() {
            at = match self.cut(at, dimension, start, extent) {
                Cut::Nothing => at,
                Cut::Run(run) => run,
                Cut::Rows { packed, rows, columns, start, part } => {
                    copies.push((Kernel::PutColumns { rows, columns, start, part }, packed, at));
                    packed
                }
            };
        }
        self.receive_into(tensor, micro_batch, phase, piece.peer, at);
        // What was packed last belongs into what was packed before it.
        for (kernel, packed, target) in copies.into_iter().rev() {
            self.copy(tensor, micro_batch, phase, kernel, packed, target);
        }
    }

    /// A part of a buffer along one dimension.
    fn cut(&mut self, buffer: BufferId, dimension: usize, start: usize, extent: usize) -> Cut {
        let shape = self.program.buffer(buffer).shape.to_vec();
        if extent == shape[dimension] {
            return Cut::Nothing;
        }
        let rows: usize = shape[..dimension].iter().product();
        let inner: usize = shape[dimension + 1..].iter().product();
        let name = self.program.buffer(buffer).name.clone();
        let mut part = shape.clone();
        part[dimension] = extent;
        if rows == 1 {
            return Cut::Run(self.piece(&name, buffer, start * inner, part));
        }
        let packed = self.buffer(&name, BufferRole::Workspace, part, self.program.buffer(buffer).data_type);
        Cut::Rows { packed, rows, columns: shape[dimension] * inner, start: start * inner, part: extent * inner }
    }

    fn copy(&mut self, tensor: TensorId, micro_batch: usize, phase: Phase, kernel: Kernel, from: BufferId, to: BufferId) {
        let operation = Operation::Compute { kernel, accumulate: false, group: None };
        self.pass(tensor, operation, Stream::Compute, [vec![from], vec![to]], micro_batch, phase);
    }
}

/// How a part lies in its whole.
enum Cut {
    /// It is the whole.
    Nothing,
    /// In one run: this place within it.
    Run(BufferId),
    /// In rows that lie apart: room for it in one run, and which columns of the whole it is.
    Rows { packed: BufferId, rows: usize, columns: usize, start: usize, part: usize },
}
