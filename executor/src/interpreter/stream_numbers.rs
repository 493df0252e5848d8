//! Which of the transport's streams carries which communication.

use super::stream_key::StreamKey;
use crate::transport::StreamNumber;
use foretell_program::{Group, Mesh, Rank};

/// Numbers of the transport's streams that a run uses.
pub(crate) const STREAM_COUNT: usize = 32;
const TO_LATER_STAGES: StreamNumber = StreamNumber(0);
const TO_EARLIER_STAGES: StreamNumber = StreamNumber(1);
/// For what is not part of a Program: barriers, calibration.
pub(crate) const OUTSIDE_PROGRAMS: StreamNumber = StreamNumber(2);
const FIRST_GROUP: usize = 3;

/// The transport's number of the stream of a key. `groups` are all groups of the run, in the order that every rank has them. None of what has
/// no peers.
pub(crate) fn stream_number(key: &StreamKey, groups: &[Group], mesh: &Mesh, rank: Rank) -> Option<StreamNumber> {
    let number = |from: Rank, to: Rank| if mesh.stage_of(from) < mesh.stage_of(to) { TO_LATER_STAGES } else { TO_EARLIER_STAGES };
    match key {
        StreamKey::Compute | StreamKey::Load | StreamKey::CopyTo(_) => None,
        // No two groups share a stream, whichever ranks are in both.
        StreamKey::Group(group) => {
            let position = groups.iter().position(|one| one == group).unwrap_or(groups.len());
            Some(StreamNumber((FIRST_GROUP + position) as u16))
        }
        StreamKey::SendTo(peer) => Some(number(rank, *peer)),
        StreamKey::ReceiveFrom(peer) => Some(number(*peer, rank)),
    }
}
