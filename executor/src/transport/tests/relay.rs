//! A man in the middle: relays TCP connections to a server, and may change, repeat or hold back
//! what passes, and cut the connections.

use super::local;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// What happens to a piece that passes.
pub(super) enum Fate {
    /// It passes as it is, or as it was changed in place.
    Pass,
    /// It passes twice.
    Twice,
    /// It disappears.
    Drop,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    ToServer,
    FromServer,
}

/// A relay, which ends with the process of the test.
pub(super) struct Relay {
    address: SocketAddr,
    streams: Arc<Mutex<Vec<TcpStream>>>,
}

impl Relay {
    /// Relays to `server`. `meddle` gets each piece, with its direction and the number of bytes of
    /// that connection and direction before it.
    pub(super) fn start(
        server: SocketAddr,
        meddle: impl Fn(Direction, usize, &mut Vec<u8>) -> Fate + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind(local()).unwrap();
        let address = listener.local_addr().unwrap();
        let streams: Arc<Mutex<Vec<TcpStream>>> = Arc::default();
        let (meddle, kept) = (Arc::new(meddle), Arc::clone(&streams));
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(server) = TcpStream::connect(server) else { continue };
                let ends = [(&client, &server, Direction::ToServer), (&server, &client, Direction::FromServer)];
                for (from, to, direction) in ends {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let meddle = Arc::clone(&meddle);
                    std::thread::spawn(move || pass_on(from, to, |passed, piece| meddle(direction, passed, piece)));
                }
                kept.lock().unwrap().extend([client, server]);
            }
        });
        Self { address, streams }
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Ends all connections.
    pub(super) fn cut(&self) {
        for stream in self.streams.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

fn pass_on(mut from: TcpStream, mut to: TcpStream, meddle: impl Fn(usize, &mut Vec<u8>) -> Fate) {
    let mut buffer = [0; 4096];
    let mut passed = 0;
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        let mut piece = buffer[..count].to_vec();
        let fate = meddle(passed, &mut piece);
        passed += count;
        let sent = match fate {
            Fate::Pass => to.write_all(&piece),
            Fate::Twice => to.write_all(&piece).and_then(|()| to.write_all(&piece)),
            Fate::Drop => Ok(()),
        };
        if sent.is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}
