//! The handshake by which two processes prove to each other that they belong to one run. Nothing
//! else is read from a socket before it.
//!
//! It is a challenge and response with HMAC-SHA256 over messages of fixed size:
//!
//! 1. The connecting side sends a hello with a fresh nonce.
//! 2. The accepting side answers with a nonce of its own and a tag over both.
//! 3. The connecting side answers with a tag over the same.
//! 4. The accepting side answers with a verdict of one byte.
//!
//! The secret never travels. The bytes that follow are neither encrypted nor signed: the handshake
//! keeps strangers out, but does not protect a run from an attacker who controls the network.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::key::{RUN_BYTES, RunKey, TAG_BYTES, random_bytes};
use super::{Peer, StreamNumber, TransportError};

/// Time for a whole handshake. After it the connection is dropped.
pub(super) const HANDSHAKE_TIME: Duration = Duration::from_secs(3);

const MAGIC: [u8; 4] = *b"FTL1";
const NONCE_BYTES: usize = 32;
const HELLO_BYTES: usize = MAGIC.len() + 2 + 4 + 4 + RUN_BYTES + NONCE_BYTES;
/// The number of the launcher in a hello.
const LAUNCHER: u32 = u32::MAX;

// The role is part of the tag, so that one side's tag cannot be replayed as the other's. Both have
// the same length.
const ACCEPTOR: &[u8] = b"foretell acceptor.";
const CONNECTOR: &[u8] = b"foretell connector";

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
    /// A retry cannot succeed.
    Final(TransportError),
}

impl From<io::Error> for HandshakeError {
    fn from(error: io::Error) -> Self {
        HandshakeError::Broken(error)
    }
}

/// The connecting side of a handshake.
pub(super) fn initiate(stream: &mut TcpStream, address: SocketAddr, key: &RunKey, hello: Hello) -> Result<(), HandshakeError> {
    let mut stream = HandshakeStream::new(stream);
    let hello_bytes = encode(hello, key, random_bytes().map_err(HandshakeError::Final)?);
    stream.write(&hello_bytes)?;
    let challenge: [u8; NONCE_BYTES] = stream.read()?;
    let tag: [u8; TAG_BYTES] = stream.read()?;
    if !key.verify(ACCEPTOR, &[&hello_bytes, &challenge], &tag) {
        let reason = "it does not hold the run's secret";
        return Err(HandshakeError::Final(TransportError::NotAuthenticated { address, reason }));
    }
    stream.write(&key.prove(CONNECTOR, &[&hello_bytes, &challenge]))?;
    let [verdict] = stream.read()?;
    let refused = |reason| HandshakeError::Final(TransportError::Refused { peer: hello.to, reason });
    match verdict {
        verdict if verdict == Verdict::Welcome.to_byte() => Ok(()),
        verdict if verdict == Verdict::Duplicate.to_byte() => Err(refused("the same rank has connected for this already")),
        _ => Err(refused("it does not expect this rank here")),
    }
}

/// The accepting side of a handshake. Returns the hello of a process of the run that `decide`
/// welcomes; `None` for any other. `decide` is called only after the process has proved itself.
pub(super) fn respond(stream: &mut TcpStream, key: &RunKey, decide: impl Fn(&Hello) -> Verdict) -> io::Result<Option<Hello>> {
    let mut stream = HandshakeStream::new(stream);
    let hello_bytes: [u8; HELLO_BYTES] = stream.read()?;
    let Some(hello) = decode(&hello_bytes, key) else { return Ok(None) };
    let challenge: [u8; NONCE_BYTES] = random_bytes().map_err(io::Error::other)?;
    let tag = key.prove(ACCEPTOR, &[&hello_bytes, &challenge]);
    stream.write(&[challenge, tag].concat())?;
    let proof: [u8; TAG_BYTES] = stream.read()?;
    if !key.verify(CONNECTOR, &[&hello_bytes, &challenge], &proof) {
        return Ok(None);
    }
    let verdict = decide(&hello);
    stream.write(&[verdict.to_byte()])?;
    Ok((verdict == Verdict::Welcome).then_some(hello))
}

fn encode(hello: Hello, key: &RunKey, nonce: [u8; NONCE_BYTES]) -> [u8; HELLO_BYTES] {
    let mut bytes = Vec::with_capacity(HELLO_BYTES);
    bytes.extend(MAGIC);
    bytes.extend(hello.stream.0.to_le_bytes());
    for peer in [hello.from, hello.to] {
        let number = match peer {
            Peer::Launcher => LAUNCHER,
            Peer::Rank(rank) => u32::try_from(rank).unwrap_or(LAUNCHER),
        };
        bytes.extend(number.to_le_bytes());
    }
    bytes.extend(key.run);
    bytes.extend(nonce);
    let mut fixed = [0; HELLO_BYTES];
    fixed.copy_from_slice(&bytes);
    fixed
}

/// Decodes a hello of this run; `None` for anything else.
fn decode(bytes: &[u8; HELLO_BYTES], key: &RunKey) -> Option<Hello> {
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
    stream: &'a mut TcpStream,
    deadline: Instant,
}

impl<'a> HandshakeStream<'a> {
    fn new(stream: &'a mut TcpStream) -> Self {
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
