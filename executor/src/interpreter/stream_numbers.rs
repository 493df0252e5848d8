//! Assigns the transport's streams. No two uses between the same pair of ranks share one.

use super::stream_key::StreamKey;
use crate::transport::StreamNumber;
use foretell_program::{Group, Mesh, Rank};

/// The number of transport streams that a run opens.
pub(crate) const STREAM_COUNT: usize = 32;
const TO_LATER_RANKS: StreamNumber = StreamNumber(0);
const TO_EARLIER_RANKS: StreamNumber = StreamNumber(1);
/// For communication that is not part of a Program: barriers, and calibration among all ranks.
pub(crate) const OUTSIDE_PROGRAMS: StreamNumber = StreamNumber(2);
/// The stream of the first group. Each further group has the next one.
const FIRST_GROUP: usize = 3;

/// The transport's stream for `key`; `None` for streams without peers. `groups` holds all groups of
/// the run, in the same order on every rank.
pub(super) fn stream_number(key: &StreamKey, groups: &[Group], mesh: &Mesh, rank: Rank) -> Option<StreamNumber> {
    // Ranks are ordered by stage, then by number: within a stage, messages between replicas also go
    // in both directions.
    let place = |rank: Rank| (mesh.stage_of(rank), rank);
    let number = |from: Rank, to: Rank| if place(from) < place(to) { TO_LATER_RANKS } else { TO_EARLIER_RANKS };
    match key {
        StreamKey::Compute | StreamKey::Load | StreamKey::CopyTo(_) | StreamKey::Storage => None,
        StreamKey::Group(group) => {
            let position = groups.iter().position(|known| known == group).expect("invariant: the run knows its groups");
            Some(StreamNumber((FIRST_GROUP + position) as u16))
        }
        StreamKey::SendTo(peer) => Some(number(rank, *peer)),
        StreamKey::ReceiveFrom(peer) => Some(number(*peer, rank)),
    }
}
