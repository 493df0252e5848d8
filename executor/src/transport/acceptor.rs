//! Connections between processes of a run: a listening socket that lets in only those that hold the
//! run's secret, and the connecting side.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::net::sockopt;

use super::TransportError;
use super::handshake::{self, HandshakeError, Hello, Verdict};
use super::key::RunKey;
use super::patience::Retries;
use super::session::Session;

/// The most connections that have not proved themselves, and the most of them from one address. For
/// one more, the oldest is dropped. A member proves itself within milliseconds, and tries again if
/// it was dropped, so strangers can delay it but not shut it out.
const MAX_UNPROVEN: usize = 256;
const MAX_UNPROVEN_OF_ADDRESS: usize = 64;
/// Connections that the kernel may complete before this process accepts them.
const BACKLOG: i32 = 4096;
/// Stack of a thread that does a handshake; the cryptography takes a tenth of it.
const HANDSHAKE_STACK_BYTES: usize = 256 << 10;

/// The longest single attempt to connect. After it `give_up` is asked again.
const MAX_ATTEMPT: Duration = Duration::from_secs(5);

/// The owner of the connections that an [`Acceptor`] accepts.
pub(super) trait ConnectionOwner: Send + Sync + 'static {
    /// Decides about a connection from a process that has proved itself. After
    /// [`Verdict::Welcome`], [`accept`](Self::accept) follows unless the connection breaks first.
    fn admit(&self, hello: &Hello) -> Verdict;
    /// Takes back a welcome: the connection broke before its process knew of it, so the process
    /// will try again.
    fn withdraw(&self, hello: &Hello);
    /// Takes over a connection that was admitted. Returns `false` if it cannot.
    fn accept(self: Arc<Self>, hello: &Hello, stream: TcpStream, session: Session) -> bool;
}

/// The thread that accepts connections. Dropping it ends the thread.
pub(super) struct Acceptor {
    listener: Arc<TcpListener>,
    is_stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Acceptor {
    pub(super) fn start<O: ConnectionOwner>(listener: TcpListener, key: RunKey, owner: Arc<O>) -> Result<Self, TransportError> {
        listener.set_nonblocking(false).map_err(|error| TransportError::system("configure the listening socket", error))?;
        // A flood of connections must not fill the short queue that the standard library asks for.
        rustix::net::listen(&listener, BACKLOG)
            .map_err(|error| TransportError::system("configure the listening socket", error))?;
        let listener = Arc::new(listener);
        let is_stopping = Arc::new(AtomicBool::new(false));
        let thread = spawn("foretell-accept", {
            let (listener, is_stopping) = (Arc::clone(&listener), Arc::clone(&is_stopping));
            move || accept_all(&listener, &is_stopping, &key, &owner)
        })?;
        Ok(Acceptor { listener, is_stopping, thread: Some(thread) })
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        self.is_stopping.store(true, Ordering::Release);
        // On Linux, shutting down a listening socket wakes the thread that is in accept().
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn accept_all<O: ConnectionOwner>(listener: &TcpListener, is_stopping: &AtomicBool, key: &RunKey, owner: &Arc<O>) {
    let unproven = Arc::new(Unproven::default());
    while !is_stopping.load(Ordering::Acquire) {
        let (stream, address) = match listener.accept() {
            Ok(accepted) => accepted,
            Err(_) => {
                // Out of file descriptors, a connection that has gone, or the end: none of them may
                // end this thread or keep it spinning.
                if !is_stopping.load(Ordering::Acquire) {
                    unproven.drop_oldest();
                    std::thread::sleep(Duration::from_millis(10));
                }
                continue;
            }
        };
        let stream = Arc::new(stream);
        let number = unproven.add(address.ip(), &stream);
        let (key, owner, all) = (key.clone(), Arc::clone(owner), Arc::clone(&unproven));
        let handshake = move || {
            let session = shake_hands(&stream, &key, &*owner, || all.remove(number));
            all.remove(number);
            // Strangers get no verdict, and no line in a log that they could fill.
            let Ok(Some((hello, session))) = session else { return };
            let is_taken = Arc::into_inner(stream).is_some_and(|stream| Arc::clone(&owner).accept(&hello, stream, session));
            if !is_taken {
                owner.withdraw(&hello);
            }
        };
        let thread = std::thread::Builder::new().name("foretell-handshake".into()).stack_size(HANDSHAKE_STACK_BYTES);
        // Without a thread the connection is dropped, and the peer tries again.
        if thread.spawn(handshake).is_err() {
            unproven.remove(number);
        }
    }
}

/// The accepting side of a handshake. Returns the hello and the keys of a process of the run that
/// `owner` welcomes. Calls `proven` before the peer is admitted: strangers can no longer displace
/// its connection.
fn shake_hands<O: ConnectionOwner>(
    stream: &TcpStream,
    key: &RunKey,
    owner: &O,
    proven: impl FnOnce(),
) -> io::Result<Option<(Hello, Session)>> {
    configure(stream)?;
    let Some(proved) = handshake::respond(stream, key)? else { return Ok(None) };
    proven();
    let hello = proved.hello;
    let verdict = owner.admit(&hello);
    let answered = proved.answer(verdict);
    if answered.is_err() && verdict == Verdict::Welcome {
        owner.withdraw(&hello);
    }
    Ok(answered?.map(|session| (hello, session)))
}

/// Connects to `address` for the purpose that `hello` states, retrying for `timeout`.
///
/// # Errors
/// The error of `give_up`, as soon as it returns one; that of a refusal; or that of the last
/// attempt.
pub(super) fn connect(
    address: SocketAddr,
    key: &RunKey,
    hello: Hello,
    timeout: Duration,
    give_up: impl Fn() -> Result<(), TransportError>,
) -> Result<(TcpStream, Session), TransportError> {
    let mut retries = Retries::new(timeout, MAX_ATTEMPT, Instant::now());
    loop {
        give_up()?;
        let left = retries.left(Instant::now()).min(MAX_ATTEMPT);
        let attempt = if left.is_zero() {
            Err(HandshakeError::Broken(io::ErrorKind::TimedOut.into()))
        } else {
            attempt(address, key, hello, left)
        };
        let error = match attempt {
            Ok(connected) => return Ok(connected),
            Err(HandshakeError::Final(error)) => return Err(error),
            Err(HandshakeError::Busy(refusal)) => refusal,
            Err(HandshakeError::Broken(error)) => {
                TransportError::system(format!("connect to {} at {address} within {timeout:?}", hello.to), error)
            }
        };
        let Some(pause) = retries.pause(Instant::now()) else { return Err(error) };
        std::thread::sleep(pause);
    }
}

fn attempt(address: SocketAddr, key: &RunKey, hello: Hello, timeout: Duration) -> Result<(TcpStream, Session), HandshakeError> {
    let stream = TcpStream::connect_timeout(&address, timeout)?;
    configure(&stream)?;
    let session = handshake::initiate(&stream, address, key, hello)?;
    Ok((stream, session))
}

/// Sets the options of every connection of a run: small messages go out at once, and a peer whose
/// machine has vanished is noticed within half a minute.
fn configure(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(10))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(5))?;
    sockopt::set_tcp_keepcnt(stream, 4)?;
    Ok(())
}

pub(super) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, TransportError> {
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(work)
        .map_err(|error| TransportError::system(format!("start the thread `{name}`"), error))
}

/// The connections that have not proved themselves yet, the oldest first.
#[derive(Default)]
struct Unproven(Mutex<UnprovenList>);

#[derive(Default)]
struct UnprovenList {
    connections: VecDeque<UnprovenConnection>,
    /// The number of the next connection.
    next: u64,
}

struct UnprovenConnection {
    number: u64,
    address: IpAddr,
    stream: Arc<TcpStream>,
}

impl Unproven {
    /// Adds a connection and drops the oldest one if there are too many. Returns its number.
    fn add(&self, address: IpAddr, stream: &Arc<TcpStream>) -> u64 {
        let mut list = self.list();
        let of_address = list.connections.iter().filter(|connection| connection.address == address).count();
        if of_address >= MAX_UNPROVEN_OF_ADDRESS {
            let oldest = list.connections.iter().position(|connection| connection.address == address);
            list.drop_at(oldest);
        } else if list.connections.len() >= MAX_UNPROVEN {
            list.drop_at(Some(0));
        }
        let number = list.next;
        list.next += 1;
        list.connections.push_back(UnprovenConnection { number, address, stream: Arc::clone(stream) });
        number
    }

    fn drop_oldest(&self) {
        self.list().drop_at(Some(0));
    }

    /// Removes a connection whose handshake is over.
    fn remove(&self, number: u64) {
        self.list().connections.retain(|connection| connection.number != number);
    }

    fn list(&self) -> MutexGuard<'_, UnprovenList> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl UnprovenList {
    fn drop_at(&mut self, index: Option<usize>) {
        if let Some(connection) = index.and_then(|index| self.connections.remove(index)) {
            // The thread of its handshake wakes up and closes it.
            let _ = connection.stream.shutdown(Shutdown::Both);
        }
    }
}
