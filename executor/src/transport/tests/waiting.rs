//! Waits that fail: aborts, time-outs, lost peers, disagreement about sizes.

use std::time::Instant;

use super::*;

#[test]
fn a_time_out_names_the_peer_and_the_stream() {
    for kind in [Kind::SharedMemory, Kind::Tcp] {
        let timeout = Duration::from_millis(150);
        let results = on_every_rank(&world_with(kind, 2, timeout), |transport| {
            let mut channel = transport.open(1 - transport.rank(), StreamNumber(3)).unwrap();
            if transport.rank() == 0 {
                let error = channel.receive(&mut [0; 10]).unwrap_err();
                assert!(
                    matches!(error, TransportError::TimedOut { rank: 1, stream: StreamNumber(3), activity: "send", .. }),
                    "{error}"
                );
            } else {
                std::thread::sleep(timeout * 3);
            }
        });
        assert_eq!(results.len(), 2);
    }
}

#[test]
fn a_full_ring_times_out_and_names_the_rank_that_does_not_receive() {
    let transports = world_with(Kind::SmallRings, 2, Duration::from_millis(150));
    let mut channel = transports[0].open(1, StreamNumber(0)).unwrap();
    let error = channel.send(&[0; 10_000]).unwrap_err();
    assert!(error.to_string().starts_with("rank 1 did not receive on stream 0 within "), "{error}");
}

#[test]
fn abort_ends_every_wait_at_once() {
    for kind in ALL_KINDS {
        let transports = world(kind, 3);
        let started = Instant::now();
        let all_aborted = std::sync::Barrier::new(3);
        std::thread::scope(|scope| {
            for transport in &transports {
                scope.spawn(|| {
                    let mut group = Group::new(Arc::clone(transport), &[0, 1, 2], StreamNumber(0)).unwrap();
                    let mut silent = Group::new(Arc::clone(transport), &[0, 1, 2], StreamNumber(1)).unwrap();
                    group.barrier().unwrap();
                    let error = if transport.rank() == 0 {
                        silent.receive(1, &mut [0; 4]).unwrap_err()
                    } else {
                        silent.receive(0, &mut [0; 4]).unwrap_err()
                    };
                    // A rank that leaves early would be a lost peer to the others.
                    all_aborted.wait();
                    assert!(matches!(error, TransportError::PeerLost { rank: 7 }), "{error}");
                });
            }
            std::thread::sleep(Duration::from_millis(200));
            transports.iter().for_each(|transport| transport.abort(Some(7)));
        });
        assert!(started.elapsed() < Duration::from_secs(1));
        assert!(matches!(
            transports[0].open(1, StreamNumber(2)).map(|mut channel| channel.receive(&mut [0])),
            Err(_) | Ok(Err(_))
        ));
    }
}

#[test]
fn the_first_abort_counts_and_without_a_rank_blames_the_launcher() {
    let segment = Segment::create(&SegmentShape::new(vec![0, 1], 1)).unwrap();
    let transport = SharedMemory::attach(&segment, 0, 2, WaitPolicy::default()).unwrap();
    segment.abort(None);
    segment.abort(Some(1));
    let error = transport.open(1, StreamNumber(0)).unwrap().receive(&mut [0]).unwrap_err();
    assert!(matches!(error, TransportError::Aborted), "{error}");
}

#[test]
fn a_peer_that_leaves_is_lost_after_its_last_bytes_are_read() {
    for kind in [Kind::SharedMemory, Kind::Tcp] {
        let mut transports = world(kind, 2);
        let leaving = transports.pop().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let mut channel = leaving.open(0, StreamNumber(0)).unwrap();
                channel.send(b"farewell").unwrap();
            });
            let mut channel = transports[0].open(1, StreamNumber(0)).unwrap();
            std::thread::sleep(Duration::from_millis(50));
            let mut bytes = [0; 8];
            channel.receive(&mut bytes).unwrap();
            assert_eq!(&bytes, b"farewell");
            let started = Instant::now();
            let error = channel.receive(&mut bytes).unwrap_err();
            assert!(matches!(error, TransportError::PeerLost { rank: 1 }), "{error}");
            assert!(started.elapsed() < Duration::from_secs(1));
        });
    }
}

#[test]
fn a_message_of_another_length_is_an_error_without_overrun() {
    for kind in [Kind::SharedMemory, Kind::SmallRings, Kind::Tcp] {
        on_every_rank(&world_with(kind, 2, Duration::from_millis(500)), |transport| {
            let mut channel = transport.open(1 - transport.rank(), StreamNumber(0)).unwrap();
            if transport.rank() == 0 {
                channel.send(&[1; 100]).unwrap();
                // Stay until the peer has failed. Otherwise its error might be that this rank left.
                let _ = channel.receive(&mut [0]);
            } else {
                let error = channel.receive(&mut [0; 60]).unwrap_err();
                assert!(matches!(error, TransportError::LengthMismatch { rank: 0, expected: 60, announced: 100, .. }), "{error}");
            }
        });
    }
}

#[test]
fn a_channel_opens_once_and_only_to_others() {
    for kind in [Kind::SharedMemory, Kind::Tcp] {
        on_every_rank(&world(kind, 2), |transport| {
            let (rank, peer) = (transport.rank(), 1 - transport.rank());
            let mut channel = transport.open(peer, StreamNumber(0)).unwrap();
            assert!(matches!(transport.open(peer, StreamNumber(0)), Err(TransportError::AlreadyOpen { .. })));
            assert!(matches!(transport.open(rank, StreamNumber(0)), Err(TransportError::NoSuchPeer { .. })));
            assert!(matches!(transport.open(9, StreamNumber(0)), Err(TransportError::NoSuchPeer { rank: 9, .. })));
            // Neither rank leaves before the other has checked.
            channel.send(&[]).unwrap();
            channel.receive(&mut []).unwrap();
        });
    }
    let transports = world(Kind::SharedMemory, 2);
    assert!(matches!(transports[0].open(1, StreamNumber(99)), Err(TransportError::NoSuchStream { streams: 4, .. })));
}

#[test]
fn a_segment_accepts_each_rank_once_and_only_valid_shapes() {
    let segment = Segment::create(&SegmentShape::new(vec![4, 7], 2)).unwrap();
    let first = SharedMemory::attach(&segment, 7, 8, WaitPolicy::default()).unwrap();
    assert!(SharedMemory::attach(&segment, 7, 8, WaitPolicy::default()).is_err());
    assert!(SharedMemory::attach(&segment, 5, 8, WaitPolicy::default()).is_err());
    drop(first);
    assert!(SharedMemory::attach(&segment, 7, 8, WaitPolicy::default()).is_ok());
    for (ranks, streams, ring_bytes) in
        [(vec![], 1, 4096), (vec![0], 0, 4096), (vec![0], 1, 5000), (vec![0], 1, 0), (vec![0], 1, 1 << 40)]
    {
        assert!(Segment::create(&SegmentShape { ranks, streams, ring_bytes }).is_err());
    }
}

#[test]
fn a_thread_that_may_not_spin_sleeps_until_nudged() {
    use crate::clock::thread_cpu_time;
    use std::sync::atomic::{AtomicBool, Ordering};
    const SPIN: Duration = Duration::from_millis(200);
    let wait_policy = WaitPolicy { spin: SPIN, timeout: Duration::from_secs(20) };
    let stream = StreamNumber(1);
    // CPU time of a thread that waits 100 ms for a message. It may never spin, or only from the
    // middle on.
    let cpu_time = |is_nudged: bool| {
        let segment = Segment::create(&SegmentShape::new(all(2), 4)).unwrap();
        let transports = [0, 1].map(|rank| SharedMemory::attach(&segment, rank, 2, wait_policy).unwrap());
        let may_spin = Arc::new(AtomicBool::new(false));
        let mut sender = transports[0].open(1, stream).unwrap();
        let mut receiver = transports[1].open(0, stream).unwrap();
        std::thread::scope(|scope| {
            let may = Arc::clone(&may_spin);
            let waiting = scope.spawn(move || {
                spin_only_while(move || may.load(Ordering::SeqCst));
                let before = thread_cpu_time();
                receiver.receive(&mut [0; 8]).unwrap();
                Duration::from_nanos(thread_cpu_time() - before)
            });
            std::thread::sleep(Duration::from_millis(50));
            if is_nudged {
                may_spin.store(true, Ordering::SeqCst);
                transports[1].nudge(stream);
            }
            std::thread::sleep(Duration::from_millis(50));
            sender.send(&[0; 8]).unwrap();
            waiting.join().unwrap()
        })
    };
    let asleep = cpu_time(false);
    assert!(asleep < Duration::from_millis(5), "it spun for {asleep:?}");
    // On a busy machine a spinning thread may get little CPU time, so one success in 30 attempts is
    // enough.
    assert!((0..30).any(|_| cpu_time(true) > asleep * 2), "it never spins; asleep it took {asleep:?}");
}
