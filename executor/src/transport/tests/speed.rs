//! The cost of encryption: processor time per byte of the transport, beside that of bare sockets.

use std::io::{Read, Write};
use std::net::TcpStream;

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
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

/// The protection of records, without sockets.
#[derive(Clone, Copy)]
enum Protection {
    /// AES-256-GCM at both ends.
    Encrypted,
    /// Readable bytes, over which both ends compute the same tag (GMAC).
    Tagged,
}

fn cipher(protection: Protection) -> f64 {
    let key = LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &[7; 32]).unwrap());
    let mut record = vec![1; 128 << 10];
    rate(|| {
        for number in 0..(MESSAGES * MESSAGE_BYTES / record.len()) as u64 {
            let nonce = || {
                let mut bytes = [0; 12];
                bytes[4..].copy_from_slice(&number.to_le_bytes());
                Nonce::assume_unique_for_key(bytes)
            };
            match protection {
                Protection::Encrypted => {
                    let tag = key.seal_in_place_separate_tag(nonce(), Aad::empty(), &mut record).unwrap();
                    key.open_in_place_separate_tag(nonce(), Aad::empty(), tag, &mut record, 0..).unwrap();
                }
                Protection::Tagged => {
                    let tag = key.seal_in_place_separate_tag(nonce(), Aad::from(&record), &mut []).unwrap();
                    key.open_in_place_separate_tag(nonce(), Aad::from(&record), tag, &mut [], 0..).unwrap();
                }
            }
        }
    })
}

/// `cargo test -p foretell-executor print_the_cost_of_encryption -- --ignored --nocapture`
#[test]
#[ignore = "a measurement"]
fn print_the_cost_of_encryption() {
    let measures: [(&str, &dyn Fn() -> f64); 4] = [
        ("bare sockets", &bare),
        ("the transport, encrypted", &encrypted),
        ("the cipher alone, both ends", &|| cipher(Protection::Encrypted)),
        ("a tag over readable bytes alone, both ends", &|| cipher(Protection::Tagged)),
    ];
    let mut rates = measures.map(|_| Vec::new());
    for _ in 0..7 {
        rates.iter_mut().zip(&measures).for_each(|(rates, (_, measure))| rates.push(measure()));
    }
    println!("GB per second of processor time, both ends together, the median of 7:");
    for (mut rates, (name, _)) in rates.into_iter().zip(measures) {
        rates.sort_by(f64::total_cmp);
        println!("{:8.2}  {name}", rates[rates.len() / 2]);
    }
}
