//! Connections from strangers, which must not disturb a run.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use super::rendezvous::{announcement, join_alone, local};
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
    let mut stream = TcpStream::connect(server.address()).unwrap();
    // A valid hello, as an eavesdropper could have recorded it, then an invalid tag.
    let mut hello = Vec::from(*b"FTL1");
    hello.extend([0, 0]);
    hello.extend(0u32.to_le_bytes());
    hello.extend(u32::MAX.to_le_bytes());
    hello.extend(key.run);
    hello.extend([5; 32]);
    stream.write_all(&hello).unwrap();
    let mut challenge = [0; 64];
    stream.read_exact(&mut challenge).unwrap();
    // The acceptor's own tag, replayed, is not the connector's.
    stream.write_all(&challenge[32..]).unwrap();
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
fn more_silent_connections_than_handshakes_only_delay_a_rank() {
    let key = RunKey::generate().unwrap();
    let server = ControlServer::bind(local(), &key, 1).unwrap();
    let strangers: Vec<TcpStream> = (0..80).map(|_| TcpStream::connect(server.address()).unwrap()).collect();
    join_alone(&server, &key);
    drop(strangers);
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
