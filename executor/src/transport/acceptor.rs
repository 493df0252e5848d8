//! Connections between processes of a run: a listening socket that lets in only those that hold the
//! run's secret, and the connecting side.

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

/// The most handshakes at once; further connections wait in the kernel's queue. Each handshake ends
/// after [`handshake::HANDSHAKE_TIME`], so strangers can delay a rank but not shut it out.
const MAX_HANDSHAKES: usize = 64;

/// The longest single attempt to connect. After it `give_up` is asked again.
const MAX_ATTEMPT: Duration = Duration::from_secs(5);

/// The owner of the connections that an [`Acceptor`] accepts.
pub(super) trait ConnectionOwner: Send + Sync + 'static {
    /// Decides about a connection from a process that has proved itself. After
    /// [`Verdict::Welcome`], [`accept`](Self::accept) follows unless the connection breaks first.
    fn admit(&self, hello: &Hello) -> Verdict;
    /// Takes over a connection that was admitted.
    fn accept(self: Arc<Self>, hello: Hello, stream: TcpStream);
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
    let handshakes = Arc::new(Semaphore::default());
    while !is_stopping.load(Ordering::Acquire) {
        let mut stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(_) => {
                // Out of file descriptors, a connection that has gone, or the end: none of them may
                // end this thread or keep it spinning.
                if !is_stopping.load(Ordering::Acquire) {
                    std::thread::sleep(Duration::from_millis(10));
                }
                continue;
            }
        };
        let permit = Semaphore::acquire(&handshakes);
        let (key, owner) = (key.clone(), Arc::clone(owner));
        // Without a thread the connection is dropped, and the peer tries again.
        let _ = spawn("foretell-handshake", move || {
            let hello = configure(&stream).and_then(|()| handshake::respond(&mut stream, &key, |hello| owner.admit(hello)));
            drop(permit);
            // Strangers get no answer, and no line in a log that they could fill.
            if let Ok(Some(hello)) = hello {
                owner.accept(hello, stream);
            }
        });
    }
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
) -> Result<TcpStream, TransportError> {
    let started = Instant::now();
    let mut pause = Duration::from_millis(2);
    loop {
        give_up()?;
        let left = timeout.saturating_sub(started.elapsed()).min(MAX_ATTEMPT);
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

fn attempt(address: SocketAddr, key: &RunKey, hello: Hello, timeout: Duration) -> Result<TcpStream, HandshakeError> {
    let mut stream = TcpStream::connect_timeout(&address, timeout)?;
    configure(&stream)?;
    handshake::initiate(&mut stream, address, key, hello)?;
    Ok(stream)
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

/// Bounds the number of handshakes at once.
#[derive(Default)]
struct Semaphore {
    count: Mutex<usize>,
    released: Condvar,
}

impl Semaphore {
    fn acquire(semaphore: &Arc<Semaphore>) -> Permit {
        let mut count = semaphore.count.lock().unwrap_or_else(PoisonError::into_inner);
        while *count >= MAX_HANDSHAKES {
            count = semaphore.released.wait(count).unwrap_or_else(PoisonError::into_inner);
        }
        *count += 1;
        Permit(Arc::clone(semaphore))
    }
}

/// One of the handshakes that a [`Semaphore`] allows, until it is dropped.
struct Permit(Arc<Semaphore>);

impl Drop for Permit {
    fn drop(&mut self) {
        *self.0.count.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.released.notify_one();
    }
}
