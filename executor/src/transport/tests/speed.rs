//! The cost of encryption: processor time per byte of the transport, beside that of bare sockets.

use std::io::{Read, Write};
use std::net::TcpStream;

use rustix::time::{ClockId, clock_gettime};

use super::*;

const MESSAGE_BYTES: usize = 4 << 20;
const MESSAGES: usize = 64;

/// GB moved per second of this process's processor time, user and system, sender and receiver
/// together.
fn rate(work: impl FnOnce()) -> f64 {
    let now = || {
        let time = clock_gettime(ClockId::ProcessCPUTime);
        time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
    };
    let before = now();
    work();
    (MESSAGES * MESSAGE_BYTES) as f64 / (now() - before) * 1e-9
}

fn encrypted() -> f64 {
    let transports = erase(tcp_world(2, Duration::from_secs(60)));
    let channels: Vec<_> = on_every_rank(&transports, |transport| transport.open(1 - transport.rank(), StreamNumber(0)).unwrap());
    let [mut sender, mut receiver] = <[Channel; 2]>::try_from(channels).unwrap();
    let (bytes, mut into) = (vec![1; MESSAGE_BYTES], vec![0; MESSAGE_BYTES]);
    rate(|| {
        std::thread::scope(|scope| {
            scope.spawn(|| (0..MESSAGES).for_each(|_| sender.send(&bytes).unwrap()));
            (0..MESSAGES).for_each(|_| receiver.receive(&mut into).unwrap());
        });
    })
}

fn bare() -> f64 {
    let listener = TcpListener::bind(local()).unwrap();
    let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let mut receiver = listener.accept().unwrap().0;
    let (bytes, mut into) = (vec![1; MESSAGE_BYTES], vec![0; MESSAGE_BYTES]);
    rate(|| {
        std::thread::scope(|scope| {
            scope.spawn(|| (0..MESSAGES).for_each(|_| sender.write_all(&bytes).unwrap()));
            (0..MESSAGES).for_each(|_| receiver.read_exact(&mut into).unwrap());
        });
    })
}

/// `cargo test -p foretell-executor print_the_cost_of_encryption -- --ignored --nocapture`
#[test]
#[ignore = "a measurement"]
fn print_the_cost_of_encryption() {
    let mut pairs: Vec<(f64, f64)> = (0..7).map(|_| (encrypted(), bare())).collect();
    pairs.sort_by(|one, other| (one.0 / one.1).total_cmp(&(other.0 / other.1)));
    let (encrypted, bare) = pairs[pairs.len() / 2];
    println!("GB per second of processor time, both ends together: {encrypted:.2} encrypted, {bare:.2} bare sockets");
}
