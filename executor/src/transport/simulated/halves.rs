//! What a rank has of the simulated network: its transport and the halves of its channels.

use super::super::endpoint::{Endpoint, ReceiveHalf, SendHalf, WaitPolicy, WakeSource};
use super::super::link::Starved;
use super::super::message::{Incoming, Outgoing};
use super::super::patience::Retries;
use super::super::session::Session;
use super::super::{Channel, Peer, StreamNumber, Transport, TransportError};
use super::state::{CAPACITY, LinkKey, NEVER, Record, State, TICK};
use super::{Scheduling, SimulatedNetwork};
use rand::RngExt as _;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The transport of one rank.
pub(super) struct SimulatedTransport {
    pub(super) network: Arc<SimulatedNetwork>,
    pub(super) rank: usize,
}

impl Transport for SimulatedTransport {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.network.size
    }

    fn open(&self, peer: usize, stream: StreamNumber) -> Result<Channel, TransportError> {
        let (network, key) = (&self.network, (self.rank, peer, stream));
        let now = || network.start + network.state().now;
        let waited = network.patience();
        let mut retries = Retries::new(waited, TICK, now());
        loop {
            let mut state = network.begin(self.rank, key)?;
            if state.first_arrival(key) <= state.now {
                state.connecting.remove(&key);
                break;
            }
            state.connecting.insert(key);
            drop(state);
            let late = TransportError::TimedOut { rank: peer, stream, activity: "connect", waited };
            network.sleep(self.rank, retries.pause(now()).ok_or(late)?)?;
        }
        let half = |from: usize, to: usize| -> Result<SimulatedHalf, TransportError> {
            let mut secret = [7; 32];
            secret[..3].copy_from_slice(&[from as u8, to as u8, stream.0 as u8]);
            let session = Session::new(&secret, &secret)?;
            let (network, key) = (Arc::clone(&self.network), (from, to, stream));
            Ok(SimulatedHalf { network, rank: self.rank, peer, key, session, opened: VecDeque::new() })
        };
        Ok(Channel { sender: Box::new(half(self.rank, peer)?), receiver: Box::new(half(peer, self.rank)?) })
    }

    fn nudge(&self, _stream: StreamNumber) {}

    fn abort(&self, _lost: Option<usize>) {
        self.network.state().aborted.insert(self.rank);
        self.network.wake();
    }

    fn starved(&self) -> Vec<Starved> {
        let state = self.network.state();
        // A connection that can be made now, and bytes that have arrived, are not missing where a
        // busy thread has not taken them yet: simulated seconds pass within milliseconds.
        let is_missing = |key: LinkKey| state.first_arrival(key) > state.now;
        let connecting = state.connecting.iter().filter(|key| key.0 == self.rank && is_missing(**key));
        let connecting = connecting.map(|&(_, peer, stream)| Starved { peer, stream, received: None });
        let waiting = state.links.iter().filter(|(key, _)| key.1 == self.rank && !state.has_arrived(**key));
        let waiting = waiting.filter_map(|(&(peer, _, stream), link)| {
            Some(Starved { peer, stream, received: Some(link.traffic.starved_after()?) })
        });
        connecting.chain(waiting).collect()
    }

    fn sent(&self, peer: usize, stream: StreamNumber) -> Option<u64> {
        self.network.state().links.get(&(self.rank, peer, stream)).map(|link| link.traffic.sent())
    }
}

struct SimulatedHalf {
    network: Arc<SimulatedNetwork>,
    rank: usize,
    peer: usize,
    key: LinkKey,
    session: Session,
    /// Bytes of the last record that the rank has not taken yet.
    opened: VecDeque<u8>,
}

impl SimulatedHalf {
    /// The most bytes that an operation moves: with turns, as the seed says.
    fn most(&self, state: &mut State) -> usize {
        match self.network.order {
            Scheduling::Threads => CAPACITY,
            Scheduling::Turns => state.random.random_range(1..2000),
        }
    }
}

impl SendHalf for SimulatedHalf {
    fn try_send(&mut self, message: &mut Outgoing<'_>) -> Result<usize, TransportError> {
        let network = Arc::clone(&self.network);
        let mut state = network.begin(self.rank, self.key)?;
        if state.link(self.key).is_broken {
            return Err(TransportError::lost(Peer::Rank(self.peer), None));
        }
        if !state.has_space(self.key) {
            return Ok(0);
        }
        let most = self.most(&mut state);
        let [header, payload] = message.rest();
        let mut bytes: Vec<u8> = header.iter().chain(payload).copied().take(most).collect();
        let count = bytes.len();
        let tag = self.session.sealer.seal(&mut bytes)?;
        state.deliver(self.key, Record { arrival: Duration::ZERO, bytes, tag });
        message.advance(count);
        drop(state);
        network.bell.ring();
        Ok(count)
    }
}

impl ReceiveHalf for SimulatedHalf {
    fn try_receive(&mut self, message: &mut Incoming<'_>) -> Result<usize, TransportError> {
        let network = Arc::clone(&self.network);
        let mut state = network.begin(self.rank, self.key)?;
        if self.opened.is_empty() && state.has_arrived(self.key) {
            let Some(mut record) = state.link(self.key).records.pop_front() else { return Ok(0) };
            self.session.opener.open(&mut record.bytes, record.tag, Peer::Rank(self.peer))?;
            self.opened.extend(record.bytes);
        }
        if self.opened.is_empty() && state.is_lost(self.key) {
            return Err(TransportError::lost(Peer::Rank(self.peer), None));
        }
        let most = self.most(&mut state).min(message.remaining()).min(self.opened.len());
        let bytes: Vec<u8> = self.opened.drain(..most).collect();
        state.link(self.key).traffic.add_received(bytes.len());
        drop(state);
        message.accept(&bytes).map_err(|wrong| TransportError::LengthMismatch {
            rank: self.peer,
            stream: self.key.2,
            expected: wrong.expected,
            announced: wrong.announced,
        })?;
        network.bell.ring();
        Ok(bytes.len())
    }
}

impl Endpoint for SimulatedHalf {
    fn peer(&self) -> usize {
        self.peer
    }

    fn stream(&self) -> StreamNumber {
        self.key.2
    }

    fn ready(&self) -> bool {
        let state = self.network.look(self.rank);
        let can_move = match self.key.0 == self.rank {
            true => state.has_space(self.key) || state.links.get(&self.key).is_some_and(|link| link.is_broken),
            false => !self.opened.is_empty() || state.has_arrived(self.key) || state.is_lost(self.key),
        };
        can_move || state.require_alive(self.rank).is_err()
    }

    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::Doorbell(&self.network.bell)
    }

    fn check(&self) -> Result<(), TransportError> {
        self.network.state().require_alive(self.rank)
    }

    fn wait_policy(&self) -> WaitPolicy {
        match self.network.order {
            Scheduling::Threads => WaitPolicy { spin: Duration::ZERO, timeout: self.network.patience() },
            // It never blocks: `ready` lets the others run.
            Scheduling::Turns => WaitPolicy { spin: NEVER, timeout: self.network.patience() },
        }
    }

    fn now(&self) -> Instant {
        self.network.now()
    }
}
