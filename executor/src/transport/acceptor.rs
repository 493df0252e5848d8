//! A listening socket that lets in members of the run only, and is not disturbed by anybody else.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::net::sockopt;

use super::TransportError;
use super::handshake::{self, HandshakeError, Hello, Verdict};
use super::key::RunKey;

/// So many connections may be proving themselves at once; more wait in the kernel's queue. Each is dropped after
/// [`handshake::HANDSHAKE_TIME`], so strangers can delay members but not shut them out.
const MOST_PENDING: usize = 64;

/// So long a single attempt to connect lasts at the most; then it is seen whether there is still a reason to try.
const LONGEST_ATTEMPT: Duration = Duration::from_secs(5);

/// What becomes of connections that belong to the run.
pub(super) trait Door: Send + Sync + 'static {
    /// Whether this connection is wanted; if so, `enter` follows, unless it breaks in between.
    fn admit(&self, hello: &Hello) -> Verdict;
    /// The connection, proved and admitted.
    fn enter(self: Arc<Self>, hello: Hello, stream: TcpStream);
}

/// The thread that accepts connections, ended when this is dropped.
pub(super) struct Acceptor {
    listener: Arc<TcpListener>,
    stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Acceptor {
    pub(super) fn start<D: Door>(listener: TcpListener, key: RunKey, door: Arc<D>) -> Result<Self, TransportError> {
        listener.set_nonblocking(false).map_err(|error| TransportError::system("configure the listening socket", error))?;
        let listener = Arc::new(listener);
        let stopping = Arc::new(AtomicBool::new(false));
        let thread = spawn("foretell-accept", {
            let (listener, stopping) = (Arc::clone(&listener), Arc::clone(&stopping));
            move || accept_all(&listener, &stopping, &key, &door)
        })?;
        Ok(Acceptor { listener, stopping, thread: Some(thread) })
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Release);
        // Linux wakes a thread that sits in accept() on a socket that is shut down.
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn accept_all<D: Door>(listener: &TcpListener, stopping: &AtomicBool, key: &RunKey, door: &Arc<D>) {
    let pending = Arc::new(Pending::default());
    while !stopping.load(Ordering::Acquire) {
        let mut stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(_) => {
                // Out of descriptors, or the connection is gone already, or we are stopping: none may end or spin this thread.
                if !stopping.load(Ordering::Acquire) {
                    std::thread::sleep(Duration::from_millis(10));
                }
                continue;
            }
        };
        let place = Pending::enter(&pending);
        let (key, door) = (key.clone(), Arc::clone(door));
        // If no thread can be had the connection is dropped; its owner tries again.
        let _ = spawn("foretell-handshake", move || {
            let hello = prepare(&stream).and_then(|()| handshake::receive(&mut stream, &key, |hello| door.admit(hello)));
            drop(place);
            // Strangers get no answer and no line in a log, which they could fill.
            if let Ok(Some(hello)) = hello {
                door.enter(hello, stream);
            }
        });
    }
}

/// The connecting side: tries until `timeout`, or until `give_up` finds a reason to stop, to reach `address` and to be let in
/// there as `hello` says.
pub(super) fn connect(
    address: SocketAddr,
    key: &RunKey,
    hello: Hello,
    timeout: Duration,
    give_up: impl Fn() -> Result<(), TransportError>,
) -> Result<TcpStream, TransportError> {
    let started = Instant::now();
    let mut pause = Duration::from_millis(2);
    loop {
        give_up()?;
        let left = timeout.saturating_sub(started.elapsed()).min(LONGEST_ATTEMPT);
        let attempt = if left.is_zero() {
            Err(HandshakeError::Broken(io::ErrorKind::TimedOut.into()))
        } else {
            attempt(address, key, hello, left)
        };
        let error = match attempt {
            Ok(stream) => return Ok(stream),
            Err(HandshakeError::Final(error)) => return Err(error),
            Err(HandshakeError::Broken(error)) => error,
        };
        if started.elapsed() + pause >= timeout {
            return Err(TransportError::system(format!("connect to {} at {address} within {timeout:?}", hello.to), error));
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(200));
    }
}

fn attempt(address: SocketAddr, key: &RunKey, hello: Hello, left: Duration) -> Result<TcpStream, HandshakeError> {
    let mut stream = TcpStream::connect_timeout(&address, left)?;
    prepare(&stream)?;
    handshake::introduce(&mut stream, address, key, hello)?;
    Ok(stream)
}

/// What every connection of a run needs: small messages at once, and a peer whose machine vanished noticed in half a minute.
fn prepare(stream: &TcpStream) -> io::Result<()> {
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

/// Counts the connections that are proving themselves.
#[derive(Default)]
struct Pending {
    count: Mutex<usize>,
    fewer: Condvar,
}

impl Pending {
    fn enter(pending: &Arc<Pending>) -> Place {
        let mut count = pending.count.lock().unwrap_or_else(PoisonError::into_inner);
        while *count >= MOST_PENDING {
            count = pending.fewer.wait(count).unwrap_or_else(PoisonError::into_inner);
        }
        *count += 1;
        Place(Arc::clone(pending))
    }
}

struct Place(Arc<Pending>);

impl Drop for Place {
    fn drop(&mut self) {
        *self.0.count.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.fewer.notify_one();
    }
}
