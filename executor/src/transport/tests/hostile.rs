//! Connections from strangers, which must not disturb a run.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::rendezvous::{announcement, join_alone};
use super::*;

const LONG: Duration = Duration::from_secs(20);

#[test]
fn a_wrong_secret_is_refused_by_both_sides() {
    let key = RunKey::generate().unwrap();
    let other = RunKey::generate().unwrap();
    let same_run_other_secret = RunKey::from_text(&format!("{}{}", &key.to_text()[..32], &other.to_text()[32..])).unwrap();
    let server = ControlServer::bind(local(), &key, 1).unwrap();
    let error = ControlClient::join(server.address(), &same_run_other_secret, 0, &announcement(1), LONG).unwrap_err();
    assert!(matches!(error, TransportError::NotAuthenticated { .. }), "{error}");
    assert!(error.to_string().contains("does not hold the run's secret"), "{error}");
    let error = ControlClient::join(server.address(), &other, 0, &announcement(1), Duration::from_millis(300)).unwrap_err();
    assert!(error.to_string().starts_with("cannot connect to the launcher at 127.0.0.1"), "{error}");
    // The right key is still accepted.
    join_alone(&server, &key);
}

#[test]
fn a_recorded_hello_without_the_secret_is_not_let_in() {
    let key = RunKey::generate().unwrap();
    let server = ControlServer::bind(local(), &key, 1).unwrap();
    // An eavesdropper records a valid hello, and sends it again.
    let mut hello = [0; 78];
    let eavesdropper = TcpListener::bind(local()).unwrap();
    let address = eavesdropper.local_addr().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| ControlClient::join(address, &key, 0, &announcement(1), Duration::from_millis(300)));
        let mut recorded = eavesdropper.accept().unwrap().0;
        recorded.read_exact(&mut hello).unwrap();
        drop(eavesdropper);
    });
    let mut stream = TcpStream::connect(server.address()).unwrap();
    stream.write_all(&hello).unwrap();
    let mut answer = [0; 48];
    stream.read_exact(&mut answer).unwrap();
    // The acceptor's own tag, replayed, is not the connector's.
    stream.write_all(&answer[32..]).unwrap();
    assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
    join_alone(&server, &key);
}

#[test]
fn garbage_and_silence_on_the_port_do_not_disturb_joining_ranks() {
    let key = RunKey::generate().unwrap();
    let server = ControlServer::bind(local(), &key, 2).unwrap();
    let mut strangers: Vec<TcpStream> = (0..20).map(|_| TcpStream::connect(server.address()).unwrap()).collect();
    for (index, stranger) in strangers.iter_mut().enumerate() {
        match index % 3 {
            0 => {}
            1 => drop(stranger.write_all(&some_bytes(index, 100_000))),
            _ => drop(stranger.write_all(b"GET / HTTP/1.1\r\n\r\n")),
        }
    }
    let started = Instant::now();
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let (key, address) = (&key, server.address());
            scope.spawn(move || ControlClient::join(address, key, rank, &announcement(1), LONG).unwrap());
        }
        server.wait_for_ranks(LONG).unwrap();
    });
    assert!(started.elapsed() < Duration::from_secs(2));
}

#[test]
fn two_thousand_silent_connections_and_more_only_delay_a_rank() {
    let key = RunKey::generate().unwrap();
    let server = ControlServer::bind(local(), &key, 1).unwrap();
    let address = server.address();
    // The test may be allowed fewer open files, and half of them are the server's.
    let most = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(1 << 20) as usize;
    let idle: Vec<TcpStream> = (0..2000.min(most / 4)).map_while(|_| TcpStream::connect(address).ok()).collect();
    assert!(idle.len() > 150, "{}", idle.len());
    let is_joined = AtomicBool::new(false);
    let started = Instant::now();
    std::thread::scope(|scope| {
        // Each new connection takes the place of the oldest one.
        scope.spawn(|| {
            let mut more = VecDeque::new();
            while !is_joined.load(Ordering::Relaxed) {
                more.extend(TcpStream::connect(address));
                if more.len() > 100 {
                    more.pop_front();
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let joined = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| join_alone(&server, &key)));
        is_joined.store(true, Ordering::Relaxed);
        assert!(joined.is_ok());
    });
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
}

#[test]
fn a_rank_whose_first_connections_broke_joins_and_opens_channels() {
    use crate::transport::handshake::{Hello, initiate};
    let key = RunKey::generate().unwrap();
    let server = ControlServer::bind(local(), &key, 1).unwrap();
    let hello = Hello { from: Peer::Rank(0), to: Peer::Launcher, stream: StreamNumber(0) };
    for _ in 0..3 {
        // It is welcome, and gone before it has announced itself.
        let stream = TcpStream::connect(server.address()).unwrap();
        let _ = initiate(&stream, server.address(), &key, hello);
    }
    join_alone(&server, &key);
    let listener = TcpListener::bind(local()).unwrap();
    let (lower, higher) = (listener.local_addr().unwrap(), TcpListener::bind(local()).unwrap());
    let addresses = vec![lower, higher.local_addr().unwrap()];
    let second = Tcp::new(1, higher, addresses.clone(), key.clone(), TcpOptions::default()).unwrap();
    let hello = Hello { from: Peer::Rank(0), to: Peer::Rank(1), stream: StreamNumber(0) };
    for _ in 0..3 {
        // The listener may not have noticed yet that the connection before is gone.
        let is_welcome = (0..1000).any(|_| {
            std::thread::sleep(Duration::from_millis(2));
            let stream = TcpStream::connect(addresses[1]).unwrap();
            initiate(&stream, addresses[1], &key, hello).is_ok()
        });
        assert!(is_welcome);
    }
    let first = Tcp::new(0, listener, addresses, key, TcpOptions::default()).unwrap();
    let mut sending = first.open(1, StreamNumber(0)).unwrap();
    let mut receiving = second.open(0, StreamNumber(0)).unwrap();
    sending.send(&[7]).unwrap();
    let mut byte = [0];
    receiving.receive(&mut byte).unwrap();
    assert_eq!(byte, [7]);
}

#[test]
fn a_silent_connection_is_dropped_after_some_seconds() {
    let key = RunKey::generate().unwrap();
    let server = ControlServer::bind(local(), &key, 1).unwrap();
    let mut stranger = TcpStream::connect(server.address()).unwrap();
    stranger.set_read_timeout(Some(LONG)).unwrap();
    let started = Instant::now();
    assert_eq!(stranger.read(&mut [0; 1]).unwrap(), 0);
    assert!((2..5).contains(&started.elapsed().as_secs()));
}

#[test]
fn strangers_on_a_ranks_port_do_not_disturb_the_others() {
    let key = RunKey::generate().unwrap();
    let listeners: Vec<TcpListener> = (0..2).map(|_| TcpListener::bind(local()).unwrap()).collect();
    let addresses: Vec<_> = listeners.iter().map(|listener| listener.local_addr().unwrap()).collect();
    let transports: Vec<Arc<dyn Transport>> = listeners
        .into_iter()
        .enumerate()
        .map(|(rank, listener)| {
            Arc::new(Tcp::new(rank, listener, addresses.clone(), key.clone(), TcpOptions::default()).unwrap())
                as Arc<dyn Transport>
        })
        .collect();
    let mut stranger = TcpStream::connect(addresses[1]).unwrap();
    stranger.write_all(&some_bytes(1, 4000)).unwrap();
    let sums = on_every_rank(&transports, |transport| {
        let mut values = [1.0 + transport.rank() as f32; 5000];
        Group::new(transport, &[0, 1], StreamNumber(0)).unwrap().all_reduce_f32(&mut values).unwrap();
        values[4999]
    });
    assert_eq!(sums, [3.0, 3.0]);
}
