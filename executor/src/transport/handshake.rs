//! How two processes prove to each other that they belong to one run before anything else is read from the socket.
//!
//! A challenge and response with HMAC-SHA256 over fixed-size messages: the connector says hello with a fresh nonce, the acceptor
//! answers with its own nonce and a tag over both, the connector with a tag over all of it, the acceptor with a verdict of one
//! byte. The secret never travels. What follows on the connection is neither encrypted nor signed: this keeps strangers out, it
//! does not hide a run from whoever owns the network.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::key::{RUN_BYTES, RunKey, TAG_BYTES, fill_with_random};
use super::{Party, StreamNumber, TransportError};

/// A connection that has not proved itself after so long is dropped.
pub(super) const HANDSHAKE_TIME: Duration = Duration::from_secs(3);

const MAGIC: [u8; 4] = *b"FTL1";
const NONCE_BYTES: usize = 32;
const HELLO_BYTES: usize = MAGIC.len() + 2 + 4 + 4 + RUN_BYTES + NONCE_BYTES;
const LAUNCHER: u32 = u32::MAX;

// The role is part of what is proved, so that no side's proof can be played back as the other's. Of one length.
const ACCEPTOR: &[u8] = b"foretell acceptor.";
const CONNECTOR: &[u8] = b"foretell connector";

/// Who connects to whom, and for what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) from: Party,
    pub(super) to: Party,
    pub(super) stream: StreamNumber,
}

/// What the acceptor makes of a connection from a member of the run.
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

/// Why a handshake did not succeed.
#[derive(Debug)]
pub(super) enum HandshakeError {
    /// The connection broke or stalled; trying again may help.
    Broken(io::Error),
    /// It will not help.
    Final(TransportError),
}

impl From<io::Error> for HandshakeError {
    fn from(error: io::Error) -> Self {
        HandshakeError::Broken(error)
    }
}

/// The connecting side.
pub(super) fn introduce(stream: &mut TcpStream, address: SocketAddr, key: &RunKey, hello: Hello) -> Result<(), HandshakeError> {
    let stranger = |reason| HandshakeError::Final(TransportError::NotAuthenticated { address, reason });
    let mut stream = Deadline::new(stream);
    let mut nonce = [0; NONCE_BYTES];
    fill_with_random(&mut nonce).map_err(HandshakeError::Final)?;
    let hello_bytes = encode(hello, key, nonce);
    stream.write(&hello_bytes)?;
    let challenge: [u8; NONCE_BYTES] = stream.read()?;
    let tag: [u8; TAG_BYTES] = stream.read()?;
    if !key.verify(ACCEPTOR, &[&hello_bytes, &challenge], &tag) {
        return Err(stranger("it does not hold the run's secret"));
    }
    stream.write(&key.prove(CONNECTOR, &[&hello_bytes, &challenge]))?;
    let [verdict] = stream.read()?;
    let refused = |reason| HandshakeError::Final(TransportError::Refused { party: hello.to, reason });
    match verdict {
        verdict if verdict == Verdict::Welcome.to_byte() => Ok(()),
        verdict if verdict == Verdict::Duplicate.to_byte() => Err(refused("the same rank has connected for this already")),
        _ => Err(refused("it does not expect this rank here")),
    }
}

/// The accepting side: who is there, if it belongs to the run. `decide` is only asked about those that do.
pub(super) fn receive(stream: &mut TcpStream, key: &RunKey, decide: impl Fn(&Hello) -> Verdict) -> io::Result<Option<Hello>> {
    let mut stream = Deadline::new(stream);
    let hello_bytes: [u8; HELLO_BYTES] = stream.read()?;
    let Some(hello) = decode(&hello_bytes, key) else { return Ok(None) };
    let mut challenge = [0; NONCE_BYTES];
    fill_with_random(&mut challenge).map_err(io::Error::other)?;
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
    for party in [hello.from, hello.to] {
        let number = match party {
            Party::Launcher => LAUNCHER,
            Party::Rank(rank) => u32::try_from(rank).unwrap_or(LAUNCHER),
        };
        bytes.extend(number.to_le_bytes());
    }
    bytes.extend(key.run);
    bytes.extend(nonce);
    let mut fixed = [0; HELLO_BYTES];
    fixed.copy_from_slice(&bytes);
    fixed
}

fn decode(bytes: &[u8; HELLO_BYTES], key: &RunKey) -> Option<Hello> {
    let (magic, rest) = bytes.split_first_chunk::<4>()?;
    let (stream, rest) = rest.split_first_chunk::<2>()?;
    let (from, rest) = rest.split_first_chunk::<4>()?;
    let (to, rest) = rest.split_first_chunk::<4>()?;
    let (run, _) = rest.split_first_chunk::<RUN_BYTES>()?;
    let party = |bytes: &[u8; 4]| match u32::from_le_bytes(*bytes) {
        LAUNCHER => Party::Launcher,
        rank => Party::Rank(rank as usize),
    };
    let hello = Hello { from: party(from), to: party(to), stream: StreamNumber(u16::from_le_bytes(*stream)) };
    (*magic == MAGIC && *run == key.run).then_some(hello)
}

/// A socket on which everything together must be done in [`HANDSHAKE_TIME`], however slowly the other side drips.
struct Deadline<'a> {
    stream: &'a mut TcpStream,
    until: Instant,
}

impl<'a> Deadline<'a> {
    fn new(stream: &'a mut TcpStream) -> Self {
        Deadline { stream, until: Instant::now() + HANDSHAKE_TIME }
    }

    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(Some(left)) }
    }

    fn read<const LENGTH: usize>(&mut self) -> io::Result<[u8; LENGTH]> {
        let mut bytes = [0; LENGTH];
        let mut filled = 0;
        while filled < LENGTH {
            self.stream.set_read_timeout(self.left()?)?;
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
        // Some hundred bytes fit any socket's buffer.
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write_all(bytes)
    }
}
