//! A man in the middle without the run's secret: whatever he changes is noticed, and nothing that
//! he changed is used.

use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};

use super::relay::{Direction, Fate, Relay};
use super::rendezvous::announcement;
use super::*;

const LONG: Duration = Duration::from_secs(20);
/// Length of a hello, an answer, a proof and a verdict: records begin after them.
const HANDSHAKE: [usize; 2] = [78 + 16, 48 + 17];

/// Two ranks, of which the lower one reaches the higher one through `relay`.
fn relayed_world(timeout: Duration, relay: impl FnOnce(SocketAddr) -> Relay) -> Vec<Arc<dyn Transport>> {
    let key = RunKey::generate().unwrap();
    let listeners: Vec<TcpListener> = (0..2).map(|_| TcpListener::bind(local()).unwrap()).collect();
    let direct: Vec<_> = listeners.iter().map(|listener| listener.local_addr().unwrap()).collect();
    let relayed = relay(direct[1]).address();
    let options = TcpOptions { connect_timeout: timeout, wait_policy: wait_policy(timeout) };
    let transports = listeners.into_iter().enumerate().map(|(rank, listener)| {
        let peers = if rank == 0 { vec![direct[0], relayed] } else { direct.clone() };
        Tcp::new(rank, listener, peers, key.clone(), options).unwrap()
    });
    erase(transports.collect())
}

/// Sums values of both ranks in all-reduces of several lengths.
fn sum(transport: Arc<dyn Transport>) -> Result<(), TransportError> {
    let mut group = Group::new(transport, &[0, 1], StreamNumber(0))?;
    for length in [3, 2000, 100_000] {
        let mut values = vec![1.5_f32; length];
        group.all_reduce_f32(&mut values)?;
        assert!(values.iter().all(|value| *value == 3.0), "a changed value was used");
    }
    Ok(())
}

#[test]
fn a_byte_flipped_anywhere_between_ranks_ends_the_run_before_its_use() {
    // Sequences of flipped bytes: in the first length, the first tag, payloads and later tags.
    for at in [0, 7, 8, 23, 24, 35, 36, 90, 8100, 60_000, 200_000, 400_000] {
        for direction in [Direction::ToServer, Direction::FromServer] {
            let target = HANDSHAKE[direction as usize] + at;
            let transports = relayed_world(LONG, |server| {
                Relay::start(server, move |seen, passed, piece| {
                    if seen == direction
                        && let Some(byte) = target.checked_sub(passed).and_then(|index| piece.get_mut(index))
                    {
                        *byte ^= 0x80;
                    }
                    Fate::Pass
                })
            });
            let results = on_every_rank(&transports, |transport| {
                let result = sum(Arc::clone(&transport));
                if result.is_err() {
                    // As the launcher does when a rank has failed.
                    transports.iter().for_each(|transport| transport.abort(None));
                }
                result
            });
            let receiver = if direction == Direction::ToServer { 1 } else { 0 };
            let from = Peer::Rank(1 - receiver);
            let error = results[receiver].as_ref().expect_err("the change went unnoticed");
            assert!(matches!(error, TransportError::Tampered { peer } if *peer == from), "byte {at}: {error}");
        }
    }
}

#[test]
fn pieces_repeated_or_left_out_between_ranks_are_noticed() {
    for is_repeated in [true, false] {
        let has_meddled = Arc::new(AtomicBool::new(false));
        let transports = relayed_world(Duration::from_secs(2), |server| {
            Relay::start(server, move |direction, passed, _| {
                let is_target = direction == Direction::ToServer && passed > 20_000;
                match (is_target && !has_meddled.swap(is_target, Ordering::SeqCst), is_repeated) {
                    (true, true) => Fate::Twice,
                    (true, false) => Fate::Drop,
                    (false, _) => Fate::Pass,
                }
            })
        });
        let results = on_every_rank(&transports, |transport| {
            let result = sum(Arc::clone(&transport));
            if result.is_err() {
                transports.iter().for_each(|transport| transport.abort(None));
            }
            result
        });
        assert!(matches!(results[1], Err(TransportError::Tampered { peer: Peer::Rank(0) })), "{results:?}");
    }
}

#[test]
fn bytes_that_vanish_between_ranks_leave_counts_that_differ() {
    let is_dead = Arc::new(AtomicBool::new(false));
    let dead = Arc::clone(&is_dead);
    let transports = relayed_world(LONG, |server| {
        Relay::start(server, move |_, _, _| if dead.load(Ordering::SeqCst) { Fate::Drop } else { Fate::Pass })
    });
    let stream = StreamNumber(3);
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| {
            let mut channel = transports[1].open(0, stream).unwrap();
            channel.receive(&mut [0; 100]).unwrap();
            is_dead.store(true, Ordering::SeqCst);
            // The same error as any other rank's when the launcher ends the run.
            assert!(matches!(channel.receive(&mut [0; 100]), Err(TransportError::Aborted)));
        });
        let mut channel = transports[0].open(1, stream).unwrap();
        channel.send(&[1; 100]).unwrap();
        let starved = || transports[1].starved().first().copied();
        let has_stopped = || is_dead.load(Ordering::SeqCst) && starved().is_some();
        while !has_stopped() {
            std::thread::yield_now();
        }
        let sent = transports[0].sent(1, stream).unwrap();
        let waits = Starved { peer: 0, stream, received: Some(sent) };
        assert_eq!(starved(), Some(waits), "the peer has sent nothing more");
        channel.send(&[1; 100]).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(starved(), Some(waits));
        assert!(transports[0].sent(1, stream).unwrap() > sent);
        transports[1].abort(None);
        receiving.join().unwrap();
    });
}

#[test]
fn a_job_that_is_rewritten_on_its_way_is_not_taken() {
    let key = RunKey::generate().unwrap();
    let server = ControlServer::bind(local(), &key, 1).unwrap();
    let is_armed = Arc::new(AtomicBool::new(false));
    let (armed, job) = (Arc::clone(&is_armed), json!({ "timeline": "/tmp/expected" }));
    let relay = Relay::start(server.address(), move |direction, _, piece| {
        if direction == Direction::FromServer && armed.load(Ordering::SeqCst) {
            // He finds nothing to read, so he changes what he can.
            assert!(!piece.windows(8).any(|window| window == b"expected"), "the job is readable");
            piece.iter_mut().skip(20).for_each(|byte| *byte = byte.wrapping_add(1));
        }
        Fate::Pass
    });
    std::thread::scope(|scope| {
        let (key, address, armed) = (&key, relay.address(), &is_armed);
        let rank = scope.spawn(move || {
            let (client, _) = ControlClient::join(address, key, 0, &announcement(1), LONG).unwrap();
            armed.store(true, Ordering::SeqCst);
            client.send(&"ready").unwrap();
            client.receive::<Value>(Some(LONG)).unwrap_err()
        });
        server.wait_for_ranks(LONG).unwrap();
        assert!(matches!(server.next_event(LONG).unwrap(), (0, Event::Message(_))));
        server.send(0, &job).unwrap();
        assert!(matches!(rank.join().unwrap(), TransportError::Tampered { peer: Peer::Launcher }));
    });
}

#[test]
fn a_verdict_that_is_forged_is_not_believed() {
    let key = RunKey::generate().unwrap();
    let server = ControlServer::bind(local(), &key, 1).unwrap();
    let relay = Relay::start(server.address(), |direction, passed, piece| {
        if direction == Direction::FromServer && passed == 48 {
            piece[0] ^= 1;
        }
        Fate::Pass
    });
    let error = ControlClient::join(relay.address(), &key, 0, &announcement(1), LONG).unwrap_err();
    assert!(error.to_string().contains("its answer was changed on the way"), "{error}");
}
