//! Collectives over the simulated network, with faults that a seed decides and every order in which
//! ranks and bytes may move. A seed always gives the same run. Every run must end, each rank with
//! the right values or with an error that names a rank that really failed.

use std::collections::{BTreeMap, BTreeSet};

use rand::RngExt as _;
use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;

use super::super::simulated::{Fault, NEVER, PlannedFault, Scheduling, SimulatedNetwork};
use super::*;

/// How long ranks wait for each other.
const LIMIT: Duration = Duration::from_secs(10);

/// Faults that end no run while they are short, and those that may end one.
const SHORT: [Fault; 4] = [Fault::Stall, Fault::Suspend, Fault::Delay, Fault::Partition];
const DEADLY: [Fault; 8] =
    [Fault::Crash, Fault::Stall, Fault::Break, Fault::Swallow, Fault::Partition, Fault::Drop, Fault::Duplicate, Fault::Flip];

/// Runs some collectives that the seed chooses, and checks their results.
fn work(transport: Arc<dyn Transport>, seed: u64) -> Result<(), TransportError> {
    let (rank, size) = (transport.rank(), transport.world_size());
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut group = Group::new(transport, &all(size), StreamNumber(0))?;
    let sums = |length: usize| {
        let mut sums = vec![0.0; length];
        for rank in 0..size {
            sums.iter_mut().zip(whole_numbers(rank, length)).for_each(|(sum, number)| *sum += number);
        }
        sums
    };
    for _ in 0..3 {
        let length = [1, 7, 500, 3000][random.random_range(0..4)];
        match random.random_range(0..5) {
            0 => group.barrier()?,
            1 => {
                let mut values = whole_numbers(rank, length);
                group.all_reduce_f32(&mut values)?;
                assert_eq!(values, sums(length), "wrong sums");
            }
            2 => {
                let own = chunk_range(length, size, rank);
                let mut part = vec![0.0; own.len()];
                group.reduce_scatter_f32(&whole_numbers(rank, length), &mut part)?;
                assert_eq!(part, sums(length)[own], "wrong sums");
            }
            3 => {
                let mut bytes = some_bytes(if rank == size - 1 { 9 } else { rank }, length);
                group.broadcast(size - 1, &mut bytes)?;
                assert_eq!(bytes, some_bytes(9, length), "wrong bytes");
            }
            _ => {
                let mut gathered = vec![0; length * size];
                group.all_gather(&some_bytes(rank, length), &mut gathered)?;
                assert!((0..size).all(|rank| gathered[rank * length..][..length] == some_bytes(rank, length)), "wrong bytes");
            }
        }
    }
    Ok(())
}

/// The faults of a seed: up to four short ones, and in every other run a deadly one.
fn plan(random: &mut ChaCha8Rng, size: usize) -> Vec<PlannedFault> {
    let mut planned = Vec::new();
    for _ in 0..random.random_range(0..5) {
        let fault = SHORT[random.random_range(0..SHORT.len())];
        // Nobody waits while the whole run is stopped, so that may take any time.
        let lasts = if fault == Fault::Suspend { LIMIT * random.random_range(1..1000) } else { LIMIT / 10 };
        planned.push(PlannedFault { rank: random.random_range(0..size), at: random.random_range(1..60), fault, lasts });
    }
    if random.random_ratio(1, 2) {
        let fault = DEADLY[random.random_range(0..DEADLY.len())];
        let lasts = if random.random_ratio(1, 2) { NEVER } else { LIMIT * 2 };
        planned.push(PlannedFault { rank: random.random_range(0..size), at: random.random_range(1..60), fault, lasts });
    }
    planned
}

/// One run: the results by rank, and the network at the end.
fn simulate(seed: u64) -> (Vec<Result<(), TransportError>>, Arc<SimulatedNetwork>) {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let size = random.random_range(2..6);
    let planned = plan(&mut random, size);
    let network = SimulatedNetwork::new(size, Scheduling::Turns, LIMIT, seed, planned);
    let transports: Vec<Arc<dyn Transport>> = (0..size).map(|rank| network.transport(rank)).collect();
    let results = on_every_rank(&transports, |transport| {
        let rank = transport.rank();
        network.enter(rank);
        let result = work(transport, seed);
        network.leave(rank);
        result
    });
    (results, network)
}

#[test]
fn every_simulated_run_ends_right_or_names_a_rank_that_failed() {
    let seeds = std::env::var("FORETELL_FAULT_SEEDS").map_or(150, |count| count.parse().unwrap());
    let first = std::env::var("FORETELL_FAULT_SEED").map_or(0, |seed| seed.parse().unwrap());
    let (mut right, mut failed) = (0, 0);
    let mut injected: BTreeMap<Fault, usize> = BTreeMap::new();
    for seed in first..first + seeds {
        let (results, network) = simulate(seed);
        let hit = network.hit();
        let has_failed: BTreeSet<usize> =
            results.iter().enumerate().filter(|(_, result)| result.is_err()).map(|(rank, _)| rank).collect();
        for (rank, result) in results.iter().enumerate() {
            let named = match result {
                Ok(()) => continue,
                Err(TransportError::Aborted) if hit.contains(&rank) => continue,
                Err(TransportError::PeerLost { rank, .. } | TransportError::TimedOut { rank, .. }) => *rank,
                Err(TransportError::Tampered { peer: Peer::Rank(rank) }) => *rank,
                Err(error) => panic!("seed {seed}, rank {rank}: {error}"),
            };
            let is_true = hit.contains(&named) || has_failed.contains(&named);
            assert!(is_true, "seed {seed}, rank {rank} blames rank {named}: {results:?}");
        }
        assert!(has_failed.is_empty() || !hit.is_empty(), "seed {seed} fails without a cause: {results:?}");
        network.injected().into_iter().for_each(|(fault, count)| *injected.entry(fault).or_default() += count);
        *(if has_failed.is_empty() { &mut right } else { &mut failed }) += 1;
    }
    println!("{seeds} runs from seed {first}: {right} right, {failed} with a true error; faults: {injected:?}");
    assert!(seeds < 100 || (right > 0 && failed > 0 && injected.len() == 10));
}

#[test]
fn a_seed_replays_the_same_run() {
    for seed in 0..4 {
        let [one, other] = [simulate(seed).1, simulate(seed).1];
        assert_eq!((one.turns(), one.injected(), one.hit()), (other.turns(), other.injected(), other.hit()));
    }
}
