//! The control connection: joining, messages in both directions, leaving.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use serde_json::{Value, json};

use super::relay::{Direction, Fate, Relay};
use super::*;

const SHORT: Duration = Duration::from_millis(300);
const LONG: Duration = Duration::from_secs(20);

pub(super) fn announcement(port: u16) -> Announcement {
    Announcement { address: Some((Ipv4Addr::UNSPECIFIED, port).into()), machine: "here".to_owned() }
}

/// Joins a run of one rank.
pub(super) fn join_alone(server: &ControlServer, key: &RunKey) -> ControlClient {
    std::thread::scope(|scope| {
        let client = scope.spawn(|| ControlClient::join(server.address(), key, 0, &announcement(1), LONG).unwrap().0);
        server.wait_for_ranks(LONG).unwrap();
        client.join().unwrap()
    })
}

/// Joins as `rank`, then loses the connection.
fn join_and_die(server: &ControlServer, key: &RunKey, rank: usize) {
    let relay = Relay::start(server.address(), |_, _, _| Fate::Pass);
    let address = relay.address();
    std::thread::scope(|scope| {
        let joining = scope.spawn(move || ControlClient::join(address, key, rank, &announcement(1), LONG).unwrap_err());
        std::thread::sleep(SHORT);
        relay.cut();
        assert!(matches!(joining.join().unwrap(), TransportError::LauncherLost { .. }));
    });
}

#[test]
fn all_ranks_get_the_table_and_exchange_messages() {
    let key = RunKey::generate().unwrap();
    let server = ControlServer::bind(local(), &key, 3).unwrap();
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let (key, address) = (&key, server.address());
            scope.spawn(move || {
                let (client, table) = ControlClient::join(address, key, rank, &announcement(1000 + rank as u16), LONG).unwrap();
                let addresses = table.addresses().unwrap();
                assert_eq!(addresses[2], "127.0.0.1:1002".parse().unwrap());
                client.send(&json!({ "loss": rank })).unwrap();
                let order: String = client.receive(Some(LONG)).unwrap();
                assert_eq!(order, format!("go {rank}"));
                let everyone: Vec<u64> = client.receive(None).unwrap();
                assert_eq!(everyone, vec![1, 2, 3]);
                assert!(matches!(client.receive::<Value>(Some(SHORT)), Err(TransportError::ControlTimedOut { .. })));
            });
        }
        server.wait_for_ranks(LONG).unwrap();
        let mut heard: Vec<usize> = (0..3)
            .map(|_| match server.next_event(LONG).unwrap() {
                (rank, Event::Message(message)) => {
                    assert_eq!(message.parse::<Value>().unwrap(), json!({ "loss": rank }));
                    assert!(matches!(message.parse::<Vec<u8>>(), Err(TransportError::MalformedMessage { .. })));
                    rank
                }
                (_, Event::Lost(error)) => panic!("{error}"),
            })
            .collect();
        heard.sort_unstable();
        assert_eq!(heard, all(3));
        (0..3).for_each(|rank| server.send(rank, &format!("go {rank}")).unwrap());
        server.broadcast(&[1, 2, 3]).unwrap();
        for _ in 0..3 {
            assert!(matches!(server.next_event(LONG).unwrap(), (_, Event::Lost(TransportError::PeerLost { .. }))));
        }
        assert!(matches!(server.send(1, "too late"), Err(TransportError::PeerLost { rank: 1, .. })));
    });
}

#[test]
fn a_missing_rank_is_named_after_the_time_out() {
    let key = RunKey::generate().unwrap();
    let server = ControlServer::bind(local(), &key, 4).unwrap();
    std::thread::scope(|scope| {
        let address = server.address();
        for rank in [0, 2] {
            let key = &key;
            scope.spawn(move || ControlClient::join(address, key, rank, &announcement(1), SHORT * 3).unwrap_err());
        }
        let error = server.wait_for_ranks(SHORT).unwrap_err();
        assert!(error.to_string().starts_with("ranks 1, 3 did not join the run within"), "{error}");
        drop(server);
    });
}

#[test]
fn a_rank_that_joins_and_dies_is_named_at_once() {
    let key = RunKey::generate().unwrap();
    let server = ControlServer::bind(local(), &key, 2).unwrap();
    let started = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // The rank may be lost during either wait.
            let first = server.wait_for_ranks(SHORT);
            let last =
                if matches!(first, Err(TransportError::MissingRanks { .. })) { server.wait_for_ranks(LONG) } else { first };
            assert!(matches!(last, Err(TransportError::PeerLost { rank: 1, .. })), "{last:?}");
        });
        join_and_die(&server, &key, 1);
    });
    assert!(started.elapsed() < LONG / 2);
}

#[test]
fn the_loss_of_the_launcher_ends_a_ranks_wait() {
    let key = RunKey::generate().unwrap();
    let server = ControlServer::bind(local(), &key, 1).unwrap();
    std::thread::scope(|scope| {
        let (key, address) = (&key, server.address());
        let rank = scope.spawn(move || {
            let (client, _) = ControlClient::join(address, key, 0, &announcement(1), LONG).unwrap();
            client.receive::<Value>(None).unwrap_err()
        });
        server.wait_for_ranks(LONG).unwrap();
        drop(server);
        assert!(matches!(rank.join().unwrap(), TransportError::LauncherLost { .. }));
    });
}

#[test]
fn a_rank_joins_once_and_only_within_the_world() {
    let key = RunKey::generate().unwrap();
    let server = ControlServer::bind(local(), &key, 1).unwrap();
    let client = join_alone(&server, &key);
    let error = ControlClient::join(server.address(), &key, 0, &announcement(1), SHORT).unwrap_err();
    assert_eq!(error.to_string(), "the launcher refused the connection: the same rank has connected for this already");
    let error = ControlClient::join(server.address(), &key, 1, &announcement(1), LONG).unwrap_err();
    assert_eq!(error.to_string(), "the launcher refused the connection: it does not expect this rank here");
    client.send("still here").unwrap();
    assert!(matches!(server.next_event(LONG).unwrap(), (0, Event::Message(_))));
}

#[test]
fn a_key_survives_as_text_and_hides_its_secret_in_debug_output() {
    let key = RunKey::generate().unwrap();
    assert_eq!(RunKey::from_text(&key.to_text()).unwrap(), key);
    assert_ne!(RunKey::generate().unwrap(), key);
    assert!(!format!("{key:?}").contains(&key.to_text()[32..64]));
    for text in ["", "abc", &"g".repeat(96), &"a".repeat(95), &"a".repeat(98)] {
        assert!(RunKey::from_text(text).is_err());
    }
}

#[test]
fn a_rank_whose_heartbeats_do_not_arrive_is_silent() {
    let key = RunKey::generate().unwrap();
    let server = ControlServer::bind(local(), &key, 2).unwrap();
    let is_cut_off = Arc::new(AtomicBool::new(false));
    let relay = {
        let is_cut_off = Arc::clone(&is_cut_off);
        Relay::start(server.address(), move |direction, _, _| {
            if direction == Direction::ToServer && is_cut_off.load(Ordering::SeqCst) { Fate::Drop } else { Fate::Pass }
        })
    };
    let limit = LEAST_PEER_TIMEOUT;
    // The launcher looks several times a second.
    let silent_after = |time: Duration| {
        let started = Instant::now();
        loop {
            std::thread::sleep(Duration::from_millis(50));
            let silent = server.silent_ranks(limit);
            if !silent.is_empty() || started.elapsed() > time {
                break silent;
            }
        }
    };
    std::thread::scope(|scope| {
        // One joins, and is cut off before the other one is there.
        let (key, address) = (&key, relay.address());
        scope.spawn(move || drop(ControlClient::join(address, key, 1, &announcement(1), LONG)));
        assert!(matches!(server.wait_for_ranks(SHORT), Err(TransportError::MissingRanks { .. })));
        assert_eq!(silent_after(limit * 2), [0; 0]);
        is_cut_off.store(true, Ordering::SeqCst);
        assert_eq!(silent_after(limit * 4), [1]);
        relay.cut();
    });
}
