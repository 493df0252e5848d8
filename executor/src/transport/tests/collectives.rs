//! Every collective compared with a naive implementation, over every transport.

use super::*;
use crate::half::SixteenBits;

const LENGTHS: [usize; 8] = [0, 1, 3, 5, 1023, 2048, 40_001, 300_007];

#[test]
fn all_reduce_sums_over_all_ranks() {
    for kind in ALL_KINDS {
        for size in 1..=4 {
            let transports = world(kind, size);
            let results = on_every_rank(&transports, |transport| {
                let rank = transport.rank();
                let mut group = Group::new(transport, &all(size), StreamNumber(1)).unwrap();
                LENGTHS.map(|length| {
                    let mut values = whole_numbers(rank, length);
                    group.all_reduce_f32(&mut values).unwrap();
                    values
                })
            });
            for (index, length) in LENGTHS.into_iter().enumerate() {
                let expected = naive_sum(whole_numbers, size, length);
                for result in &results {
                    assert!(result[index] == expected, "{kind:?}, {size} ranks, {length} numbers");
                }
            }
        }
    }
}

fn naive_sum(numbers: impl Fn(usize, usize) -> Vec<f32>, size: usize, length: usize) -> Vec<f32> {
    (0..size)
        .map(|rank| numbers(rank, length))
        .fold(vec![0.0; length], |sum, values| sum.iter().zip(values).map(|(left, right)| left + right).collect())
}

#[test]
fn all_reduce_gives_the_same_bits_everywhere_and_every_time() {
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    for size in 2..=4 {
        for length in [777, 100_003] {
            let mut all_results = Vec::new();
            for kind in ALL_KINDS {
                all_results.extend(on_every_rank(&world(kind, size), |transport| {
                    let mut values = uneven_numbers(transport.rank(), length);
                    Group::new(transport, &all(size), StreamNumber(0)).unwrap().all_reduce_f32(&mut values).unwrap();
                    bits(values)
                }));
            }
            assert!(all_results.windows(2).all(|pair| pair[0] == pair[1]), "{size} ranks, {length} numbers");
        }
    }
}

/// Values rounded to sixteen bits, as bytes.
fn half_bytes(half: SixteenBits, values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|&value| half.nearest(value).to_le_bytes()).collect()
}

fn from_half_bytes(half: SixteenBits, bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<2>().0.iter().map(|&bits| half.to_single(u16::from_le_bytes(bits))).collect()
}

/// Numbers so small that their sums do not overflow in fp16.
fn small_numbers(rank: usize, length: usize) -> Vec<f32> {
    uneven_numbers(rank, length).into_iter().map(|x| 1e-3 * x).collect()
}

#[test]
fn half_precision_sums_are_rounded_once_per_member_that_is_added() {
    for half in [SixteenBits::Bf16, SixteenBits::Fp16] {
        for kind in ALL_KINDS {
            for size in 1..=4 {
                let results = on_every_rank(&world(kind, size), |transport| {
                    let rank = transport.rank();
                    let mut group = Group::new(transport, &all(size), StreamNumber(1)).unwrap();
                    LENGTHS.map(|length| {
                        let own = half_bytes(half, &small_numbers(rank, length));
                        let mut values = own.clone();
                        group.all_reduce(ElementType::SixteenBits(half), &mut values).unwrap();
                        let mut part = vec![0; 2 * chunk_range(length, size, rank).len()];
                        group.reduce_scatter(ElementType::SixteenBits(half), &own, &mut part).unwrap();
                        (values, part)
                    })
                });
                for (index, length) in LENGTHS.into_iter().enumerate() {
                    let rounded = |rank, length| from_half_bytes(half, &half_bytes(half, &small_numbers(rank, length)));
                    let exact = naive_sum(rounded, size, length);
                    let magnitude =
                        naive_sum(|rank, length| small_numbers(rank, length).iter().map(|x| x.abs()).collect(), size, length);
                    // For each member that is added, half a unit in the last place of a partial
                    // sum, which is at most the sum of magnitudes.
                    let rounding = if half == SixteenBits::Bf16 { 2.0_f32.powi(-8) } else { 2.0_f32.powi(-11) };
                    let close = |sums: &[f32], first: usize| {
                        sums.iter().enumerate().all(|(at, sum)| {
                            let allowed = 1.1 * rounding * (size - 1) as f32 * magnitude[first + at] + 1e-7;
                            (sum - exact[first + at]).abs() <= allowed
                        })
                    };
                    for (rank, result) in results.iter().enumerate() {
                        let (whole, part) = &result[index];
                        assert!(*whole == results[0][index].0, "{half:?} {kind:?}: ranks differ, {size} ranks, {length} numbers");
                        assert!(close(&from_half_bytes(half, whole), 0), "{half:?} {kind:?}: {size} ranks, {length} numbers");
                        let range = chunk_range(length, size, rank);
                        let part = from_half_bytes(half, part);
                        assert_eq!(part.len(), range.len());
                        assert!(close(&part, range.start), "{half:?} {kind:?}: a part of {size} ranks, {length} numbers");
                    }
                }
            }
        }
    }
}

#[test]
fn reduce_scatter_and_all_gather_are_the_two_halves_of_all_reduce() {
    for kind in ALL_KINDS {
        for size in 1..=4 {
            on_every_rank(&world(kind, size), |transport| {
                let rank = transport.rank();
                let mut group = Group::new(transport, &all(size), StreamNumber(2)).unwrap();
                for length in LENGTHS {
                    let expected = naive_sum(whole_numbers, size, length);
                    let own = chunk_range(length, size, rank);
                    let mut part = vec![0.0; own.len()];
                    group.reduce_scatter_f32(&whole_numbers(rank, length), &mut part).unwrap();
                    assert!(part == expected[own], "{kind:?}, rank {rank} of {size}, {length} numbers");
                    let mut whole = vec![0.0; length];
                    group.all_gather_f32(&part, &mut whole).unwrap();
                    assert!(whole == expected, "{kind:?}, rank {rank} of {size}, {length} numbers");
                }
            });
        }
    }
}

#[test]
fn all_gather_collects_the_bytes_of_all_members() {
    for kind in ALL_KINDS {
        for size in 1..=4 {
            on_every_rank(&world(kind, size), |transport| {
                let rank = transport.rank();
                let mut group = Group::new(transport, &all(size), StreamNumber(0)).unwrap();
                for length in [0, 1, 7, 300_001] {
                    let mut output = vec![0; length * size];
                    group.all_gather(&some_bytes(rank, length), &mut output).unwrap();
                    assert!(output == (0..size).flat_map(|rank| some_bytes(rank, length)).collect::<Vec<_>>());
                }
            });
        }
    }
}

#[test]
fn broadcast_copies_the_roots_bytes_to_all() {
    for kind in ALL_KINDS {
        for size in 1..=4 {
            on_every_rank(&world(kind, size), |transport| {
                let rank = transport.rank();
                let mut group = Group::new(transport, &all(size), StreamNumber(3)).unwrap();
                for root in 0..size {
                    for length in [0, 1, 131_072, 500_001] {
                        let mut bytes = some_bytes(rank, length);
                        group.broadcast(root, &mut bytes).unwrap();
                        assert!(bytes == some_bytes(root, length), "{kind:?}, {size} ranks, root {root}, {length} bytes");
                    }
                }
            });
        }
    }
}

#[test]
fn all_to_all_transposes_the_pieces() {
    for kind in ALL_KINDS {
        for size in 1..=4 {
            on_every_rank(&world(kind, size), |transport| {
                let rank = transport.rank();
                let mut group = Group::new(transport, &all(size), StreamNumber(0)).unwrap();
                let piece = |from: usize, to: usize, length: usize| some_bytes(from * 10 + to, length);
                for length in [0, 1, 5, 100_001] {
                    let input: Vec<u8> = (0..size).flat_map(|to| piece(rank, to, length)).collect();
                    let mut output = vec![0; input.len()];
                    group.all_to_all(&input, &mut output).unwrap();
                    assert!(output == (0..size).flat_map(|from| piece(from, rank, length)).collect::<Vec<_>>());
                }
            });
        }
    }
}

#[test]
fn a_shift_passes_all_bytes_to_the_next_member() {
    for kind in ALL_KINDS {
        for size in 1..=4 {
            on_every_rank(&world(kind, size), |transport| {
                let rank = transport.rank();
                let mut group = Group::new(transport, &all(size), StreamNumber(0)).unwrap();
                for length in [0, 1, 5, 3_000_001] {
                    let mut output = vec![0; length];
                    group.shift(&some_bytes(rank, length), &mut output).unwrap();
                    assert!(output == some_bytes((rank + size - 1) % size, length));
                }
                assert!(group.shift(&[1, 2], &mut [0]).is_err());
            });
        }
    }
}

#[test]
fn nobody_passes_a_barrier_before_the_last_has_come() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    for kind in ALL_KINDS {
        for size in 1..=4 {
            let arrived = AtomicUsize::new(0);
            on_every_rank(&world(kind, size), |transport| {
                let rank = transport.rank();
                let mut group = Group::new(transport, &all(size), StreamNumber(0)).unwrap();
                for round in 1..=20 {
                    if (rank + round) % size == 0 {
                        std::thread::sleep(Duration::from_micros(300));
                    }
                    arrived.fetch_add(1, Ordering::SeqCst);
                    group.barrier().unwrap();
                    assert!(arrived.load(Ordering::SeqCst) >= round * size);
                    group.barrier().unwrap();
                }
            });
        }
    }
}

#[test]
fn groups_of_some_ranks_in_any_order_work_at_the_same_time() {
    for kind in ALL_KINDS {
        on_every_rank(&world(kind, 4), |transport| {
            let rank = transport.rank();
            let members = if rank % 2 == 0 { [2, 0] } else { [1, 3] };
            let mut group = Group::new(transport, &members, StreamNumber(1)).unwrap();
            assert_eq!(members[group.position()], rank);
            let mut values = whole_numbers(rank, 30_000);
            group.all_reduce_f32(&mut values).unwrap();
            let partner = whole_numbers((rank + 2) % 4, 30_000);
            assert!(values.iter().zip(whole_numbers(rank, 30_000)).zip(partner).all(|((sum, own), other)| *sum == own + other));
        });
    }
}

#[test]
fn two_threads_of_a_rank_on_two_streams_never_mix_messages() {
    for kind in ALL_KINDS {
        on_every_rank(&world(kind, 3), |transport| {
            let rank = transport.rank();
            std::thread::scope(|scope| {
                for stream in 0..3u16 {
                    let transport = Arc::clone(&transport);
                    scope.spawn(move || {
                        let mut group = Group::new(transport, &[0, 1, 2], StreamNumber(stream)).unwrap();
                        for round in 0..50 {
                            let length = 1 + round * 97 + usize::from(stream) * 1000;
                            let mut values = whole_numbers(rank + usize::from(stream), length);
                            group.all_reduce_f32(&mut values).unwrap();
                            let expected =
                                (0..3).map(|rank| whole_numbers(rank + usize::from(stream), length)[length - 1]).sum::<f32>();
                            assert_eq!(values[length - 1], expected);
                        }
                    });
                }
            });
        });
    }
}

#[test]
fn messages_between_two_ranks_arrive_whole_and_in_order() {
    for kind in ALL_KINDS {
        on_every_rank(&world(kind, 2), |transport| {
            let (rank, peer) = (transport.rank(), 1 - transport.rank());
            let mut group = Group::new(transport, &all(2), StreamNumber(0)).unwrap();
            for length in [0, 1, 3, 5000, 2, 1_000_003] {
                if rank == 0 {
                    group.send(peer, &some_bytes(length, length)).unwrap();
                } else {
                    let mut bytes = vec![0; length];
                    group.receive(peer, &mut bytes).unwrap();
                    assert!(bytes == some_bytes(length, length));
                }
            }
            // An odd number of bytes came before, so elements lie at odd addresses in the ring.
            let mut values = whole_numbers(rank, 50_001);
            group.all_reduce_f32(&mut values).unwrap();
            assert!(values == naive_sum(whole_numbers, 2, 50_001));
        });
    }
}

#[test]
fn chunks_cover_each_element_once_and_differ_by_at_most_one() {
    for length in 0..40 {
        for parts in 1..7 {
            let chunks: Vec<_> = (0..parts).map(|index| chunk_range(length, parts, index)).collect();
            assert_eq!(chunks.iter().cloned().flatten().collect::<Vec<_>>(), (0..length).collect::<Vec<_>>());
            assert!(chunks.iter().all(|chunk| chunk.len().abs_diff(length / parts) <= 1));
        }
    }
}

#[test]
fn wrong_sizes_and_ranks_outside_the_group_are_refused() {
    let transports = world(Kind::SharedMemory, 1);
    let error = Group::new(Arc::clone(&transports[0]), &[1, 2], StreamNumber(0)).unwrap_err();
    assert_eq!(error.to_string(), "rank 0 must be exactly once among the members of the group on stream 0");
    assert!(Group::new(Arc::clone(&transports[0]), &[0, 0], StreamNumber(0)).is_err());
    let mut group = Group::new(Arc::clone(&transports[0]), &[0], StreamNumber(0)).unwrap();
    let error = group.reduce_scatter_f32(&[1.0, 2.0], &mut [0.0]).unwrap_err();
    assert_eq!(error.to_string(), "rank 0 called reduce-scatter with 4 bytes where 8 are needed");
    assert!(group.all_gather(&[1], &mut [0, 0]).is_err());
    assert!(group.broadcast(1, &mut []).is_err());
}
