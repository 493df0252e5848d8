//! The handshake by which two processes prove to each other that they belong to one run, and agree
//! on the keys of their connection. Nothing else is read from a socket before it.
//!
//! It is the Noise protocol's pattern `NNpsk2` with the run's secret as the pre-shared key
//! (<https://noiseprotocol.org/noise.html>), in messages of fixed size:
//!
//! 1. The connecting side sends a fresh public key, and says what the connection is for.
//! 2. The accepting side answers with a fresh public key and a tag that only a holder of the secret
//!    can make.
//! 3. The connecting side answers with such a tag.
//! 4. The accepting side answers with an encrypted verdict of one byte.
//!
//! The secret is never sent, and every tag covers all messages before it. The keys of the records
//! that follow ([`Session`]) come from both fresh keys and the secret: a secret that leaks later
//! does not reveal what was encrypted.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use snow::{Builder, HandshakeState, TransportState};

use super::key::{RUN_BYTES, RunKey};
use super::session::{RECORD_TAG_BYTES, Session};
use super::{Peer, StreamNumber, TransportError};

/// Time for a whole handshake. After it the connection is dropped.
pub(super) const HANDSHAKE_TIME: Duration = Duration::from_secs(3);

const PATTERN: &str = "Noise_NNpsk2_25519_ChaChaPoly_SHA256";
const MAGIC: [u8; 4] = *b"FTL2";
const PUBLIC_KEY_BYTES: usize = 32;
const PURPOSE_BYTES: usize = MAGIC.len() + 2 + 4 + 4 + RUN_BYTES;
/// With a pre-shared key even the first message has a tag, though one that anybody can make.
const HELLO_BYTES: usize = PUBLIC_KEY_BYTES + PURPOSE_BYTES + RECORD_TAG_BYTES;
const ANSWER_BYTES: usize = PUBLIC_KEY_BYTES + RECORD_TAG_BYTES;
const PROOF_BYTES: usize = RECORD_TAG_BYTES;
const VERDICT_BYTES: usize = 1 + RECORD_TAG_BYTES;
/// The number of the launcher in a hello.
const LAUNCHER: u32 = u32::MAX;

/// The purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) from: Peer,
    pub(super) to: Peer,
    pub(super) stream: StreamNumber,
}

/// The accepting side's decision about a connection from a process of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Welcome,
    Duplicate,
    Unexpected,
}

impl Verdict {
    fn to_byte(self) -> u8 {
        match self {
            Verdict::Welcome => 0,
            Verdict::Duplicate => 1,
            Verdict::Unexpected => 2,
        }
    }
}

/// Why a handshake failed.
#[derive(Debug)]
pub(super) enum HandshakeError {
    /// The connection broke or stalled; a retry may succeed.
    Broken(io::Error),
    /// The other end still holds an earlier connection for the same; a retry may succeed once it
    /// has noticed that this one is broken.
    Busy(TransportError),
    /// A retry cannot succeed.
    Final(TransportError),
}

impl From<io::Error> for HandshakeError {
    fn from(error: io::Error) -> Self {
        HandshakeError::Broken(error)
    }
}

/// The connecting side of a handshake. Returns the connection's keys.
pub(super) fn initiate(stream: &TcpStream, address: SocketAddr, key: &RunKey, hello: Hello) -> Result<Session, HandshakeError> {
    let not_authenticated = |reason| HandshakeError::Final(TransportError::NotAuthenticated { address, reason });
    let mut stream = HandshakeStream::new(stream);
    let mut noise = Builder::new(pattern()?).psk(2, &key.secret).and_then(Builder::build_initiator).map_err(broken)?;
    let mut hello_bytes = [0; HELLO_BYTES];
    noise.write_message(&encode(hello, key), &mut hello_bytes).map_err(broken)?;
    stream.write(&hello_bytes)?;
    let answer: [u8; ANSWER_BYTES] = stream.read()?;
    noise.read_message(&answer, &mut []).map_err(|_| not_authenticated("it does not hold the run's secret"))?;
    let (mut noise, session) = established(noise, Role::Connecting).map_err(HandshakeError::Final)?;
    let mut proof = [0; PROOF_BYTES];
    noise.write_message(&[], &mut proof).map_err(broken)?;
    stream.write(&proof)?;
    let sealed: [u8; VERDICT_BYTES] = stream.read()?;
    let mut verdict = [0];
    noise.read_message(&sealed, &mut verdict).map_err(|_| not_authenticated("its answer was changed on the way"))?;
    let refused = |reason| TransportError::Refused { peer: hello.to, reason };
    match verdict[0] {
        verdict if verdict == Verdict::Welcome.to_byte() => Ok(session),
        verdict if verdict == Verdict::Duplicate.to_byte() => {
            Err(HandshakeError::Busy(refused("the same rank has connected for this already")))
        }
        _ => Err(HandshakeError::Final(refused("it does not expect this rank here"))),
    }
}

/// A process of the run that asks for a connection. It has proved that it holds the secret and
/// waits for a verdict.
pub(super) struct Proved<'a> {
    stream: HandshakeStream<'a>,
    noise: TransportState,
    session: Session,
    pub(super) hello: Hello,
}

impl Proved<'_> {
    /// Tells the process what was decided. Returns the connection's keys if it is welcome.
    pub(super) fn answer(mut self, verdict: Verdict) -> io::Result<Option<Session>> {
        let mut sealed = [0; VERDICT_BYTES];
        self.noise.write_message(&[verdict.to_byte()], &mut sealed).map_err(io::Error::other)?;
        self.stream.write(&sealed)?;
        Ok((verdict == Verdict::Welcome).then_some(self.session))
    }
}

/// The accepting side of a handshake, up to the verdict. `None` for any process that is not of this
/// run.
pub(super) fn respond<'a>(stream: &'a TcpStream, key: &RunKey) -> io::Result<Option<Proved<'a>>> {
    let mut stream = HandshakeStream::new(stream);
    let hello_bytes: [u8; HELLO_BYTES] = stream.read()?;
    let mut noise = Builder::new(pattern()?).psk(2, &key.secret).and_then(Builder::build_responder).map_err(io::Error::other)?;
    let mut purpose = [0; PURPOSE_BYTES];
    let Ok(PURPOSE_BYTES) = noise.read_message(&hello_bytes, &mut purpose) else { return Ok(None) };
    let Some(hello) = decode(&purpose, key) else { return Ok(None) };
    let mut answer = [0; ANSWER_BYTES];
    noise.write_message(&[], &mut answer).map_err(io::Error::other)?;
    stream.write(&answer)?;
    let proof: [u8; PROOF_BYTES] = stream.read()?;
    let (mut noise, session) = established(noise, Role::Accepting).map_err(io::Error::other)?;
    if noise.read_message(&proof, &mut []).is_err() {
        return Ok(None);
    }
    Ok(Some(Proved { stream, noise, session, hello }))
}

#[derive(Clone, Copy)]
enum Role {
    Connecting,
    Accepting,
}

/// The state after both fresh keys are known, with the keys for records.
fn established(mut noise: HandshakeState, role: Role) -> Result<(TransportState, Session), TransportError> {
    let (from_connecting, from_accepting) = noise.dangerously_get_raw_split();
    let session = match role {
        Role::Connecting => Session::new(&from_connecting, &from_accepting)?,
        Role::Accepting => Session::new(&from_accepting, &from_connecting)?,
    };
    let unusable = |_| TransportError::Credentials { reason: "the handshake did not agree on keys" };
    Ok((noise.into_transport_mode().map_err(unusable)?, session))
}

fn pattern() -> io::Result<snow::params::NoiseParams> {
    PATTERN.parse().map_err(io::Error::other)
}

fn broken(error: snow::Error) -> HandshakeError {
    HandshakeError::Broken(io::Error::other(error))
}

fn encode(hello: Hello, key: &RunKey) -> [u8; PURPOSE_BYTES] {
    let mut bytes = Vec::with_capacity(PURPOSE_BYTES);
    bytes.extend(MAGIC);
    bytes.extend(hello.stream.0.to_le_bytes());
    for peer in [hello.from, hello.to] {
        let number = match peer {
            Peer::Launcher => LAUNCHER,
            Peer::Rank(rank) => u32::try_from(rank).expect("invariant: 32 bits count the ranks"),
        };
        bytes.extend(number.to_le_bytes());
    }
    bytes.extend(key.run);
    let mut fixed = [0; PURPOSE_BYTES];
    fixed.copy_from_slice(&bytes);
    fixed
}

/// Decodes the purpose of a connection of this run; `None` for anything else.
fn decode(bytes: &[u8; PURPOSE_BYTES], key: &RunKey) -> Option<Hello> {
    let (magic, rest) = bytes.split_first_chunk::<4>()?;
    let (stream, rest) = rest.split_first_chunk::<2>()?;
    let (from, rest) = rest.split_first_chunk::<4>()?;
    let (to, rest) = rest.split_first_chunk::<4>()?;
    let (run, _) = rest.split_first_chunk::<RUN_BYTES>()?;
    let peer = |bytes: &[u8; 4]| match u32::from_le_bytes(*bytes) {
        LAUNCHER => Peer::Launcher,
        rank => Peer::Rank(rank as usize),
    };
    let hello = Hello { from: peer(from), to: peer(to), stream: StreamNumber(u16::from_le_bytes(*stream)) };
    (*magic == MAGIC && *run == key.run).then_some(hello)
}

/// A socket whose reads and writes must all be done within [`HANDSHAKE_TIME`], however slowly the
/// other side sends.
struct HandshakeStream<'a> {
    stream: &'a TcpStream,
    deadline: Instant,
}

impl<'a> HandshakeStream<'a> {
    fn new(stream: &'a TcpStream) -> Self {
        HandshakeStream { stream, deadline: Instant::now() + HANDSHAKE_TIME }
    }

    /// The time left, as a socket option takes it.
    fn time_left(&self) -> io::Result<Option<Duration>> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(Some(left)) }
    }

    fn read<const LENGTH: usize>(&mut self) -> io::Result<[u8; LENGTH]> {
        let mut bytes = [0; LENGTH];
        let mut filled = 0;
        while filled < LENGTH {
            self.stream.set_read_timeout(self.time_left()?)?;
            match self.stream.read(&mut bytes[filled..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(bytes)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        // A hundred bytes fit into any socket's buffer, so one time-out is enough.
        self.stream.set_write_timeout(self.time_left()?)?;
        self.stream.write_all(bytes)
    }
}
