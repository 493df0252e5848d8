//! Ranks as processes: this test binary starts itself again, once per rank.

use std::process::{Child, Command, Stdio};
use std::time::Instant;

use super::rendezvous::announcement;
use super::*;

const ROLE: &str = "FORETELL_TEST_ROLE";
const RANK: &str = "FORETELL_TEST_RANK";
const WORLD_SIZE: &str = "FORETELL_TEST_WORLD_SIZE";
const SERVER: &str = "FORETELL_TEST_SERVER";
const LONG: Duration = Duration::from_secs(30);

/// Starts the ranks of a run in this role.
fn start(role: &str, world_size: usize, prepare: impl Fn(&mut Command)) -> Vec<Child> {
    let test = concat!(module_path!(), "::child").split_once("::").unwrap().1;
    (0..world_size)
        .map(|rank| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args([test, "--exact", "--nocapture", "--test-threads=1"]);
            command.env(ROLE, role).env(RANK, rank.to_string()).env(WORLD_SIZE, world_size.to_string());
            command.stdin(Stdio::null()).stdout(Stdio::null());
            prepare(&mut command);
            command.spawn().unwrap()
        })
        .collect()
}

/// Not a test, but the code of a rank that a test has started.
#[test]
fn child() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let number = |name| std::env::var(name).unwrap().parse::<usize>().unwrap();
    let (rank, world_size) = (number(RANK), number(WORLD_SIZE));
    match role.as_str() {
        "shared memory" => sum_all(shared_memory(rank, world_size), world_size),
        "tcp" => {
            let (transport, _client) = tcp(rank, world_size);
            sum_all(transport, world_size);
        }
        "victim in shared memory" => wait_for_a_victim(shared_memory(rank, world_size), world_size),
        "victim over tcp" => {
            let (transport, client) = tcp(rank, world_size);
            wait_for_a_victim(transport, world_size);
            // Survivors stay until they are told to leave: the launcher must hear of the victim
            // first.
            client.receive::<String>(Some(LONG)).unwrap();
        }
        other => panic!("no role `{other}`"),
    }
}

fn shared_memory(rank: usize, world_size: usize) -> Arc<dyn Transport> {
    let segment = Segment::from_environment().unwrap().unwrap();
    Arc::new(SharedMemory::attach(&segment, rank, world_size, wait_policy(LONG)).unwrap())
}

fn tcp(rank: usize, world_size: usize) -> (Arc<dyn Transport>, ControlClient) {
    let key = RunKey::from_environment().unwrap();
    let server = std::env::var(SERVER).unwrap().parse().unwrap();
    let listener = TcpListener::bind(local()).unwrap();
    let port = listener.local_addr().unwrap().port();
    let (client, table) = ControlClient::join(server, &key, rank, &announcement(port), LONG).unwrap();
    assert_eq!(table.ranks.len(), world_size);
    let options = TcpOptions { wait_policy: wait_policy(LONG), ..TcpOptions::default() };
    (Arc::new(Tcp::new(rank, listener, table.addresses().unwrap(), key, options).unwrap()), client)
}

fn sum_all(transport: Arc<dyn Transport>, world_size: usize) {
    let rank = transport.rank();
    let mut group = Group::new(transport, &all(world_size), StreamNumber(1)).unwrap();
    for length in [1, 1000, 200_003] {
        let mut values = whole_numbers(rank, length);
        group.all_reduce_f32(&mut values).unwrap();
        let expected: f32 = (0..world_size).map(|rank| whole_numbers(rank, length)[length / 2]).sum();
        assert_eq!(values[length / 2], expected);
        group.barrier().unwrap();
    }
}

/// The last rank is killed. The others wait for its message and must soon learn that it is gone.
fn wait_for_a_victim(transport: Arc<dyn Transport>, world_size: usize) {
    let victim = world_size - 1;
    let rank = transport.rank();
    let mut group = Group::new(transport, &all(world_size), StreamNumber(0)).unwrap();
    group.barrier().unwrap();
    if rank == victim {
        // SAFETY: sends a signal to this very process.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        std::thread::sleep(LONG);
    }
    let started = Instant::now();
    // Each over its own channel, so that no rank blames a survivor that left first.
    let error = group.receive(victim, &mut [0; 8]).unwrap_err();
    assert!(matches!(error, TransportError::PeerLost { rank, .. } if rank == victim), "{error}");
    assert!(started.elapsed() < Duration::from_secs(2));
}

fn with_segment(role: &str, world_size: usize) -> Vec<Child> {
    let segment = Segment::create(&SegmentShape::new(all(world_size), 2)).unwrap();
    start(role, world_size, |command| segment.pass_to(command))
}

fn with_server(role: &str, world_size: usize) -> (Vec<Child>, ControlServer) {
    let key = RunKey::generate().unwrap();
    let server = ControlServer::bind(local(), &key, world_size).unwrap();
    let children = start(role, world_size, |command| {
        key.pass_to(command);
        command.env(SERVER, server.address().to_string());
    });
    server.wait_for_ranks(LONG).unwrap();
    (children, server)
}

fn assert_all_succeed(children: Vec<Child>) {
    for (rank, mut child) in children.into_iter().enumerate() {
        assert!(child.wait().unwrap().success(), "rank {rank} failed");
    }
}

/// All ranks but the last, which was killed.
fn assert_survivors_succeed(mut children: Vec<Child>) {
    let mut victim = children.pop().unwrap();
    // The victim is reaped last: the others must not depend on the launcher to notice its end.
    assert_all_succeed(children);
    assert!(!victim.wait().unwrap().success());
}

#[test]
fn processes_sum_through_inherited_shared_memory() {
    (1..=4).for_each(|size| assert_all_succeed(with_segment("shared memory", size)));
}

#[test]
fn processes_join_the_launcher_and_sum_over_tcp() {
    (1..=4).for_each(|size| assert_all_succeed(with_server("tcp", size).0));
}

#[test]
fn a_killed_process_is_noticed_in_shared_memory() {
    assert_survivors_succeed(with_segment("victim in shared memory", 3));
}

#[test]
fn a_killed_process_is_noticed_over_tcp_and_by_the_launcher() {
    let (children, server) = with_server("victim over tcp", 3);
    let (rank, event) = server.next_event(LONG).unwrap();
    assert!(rank == 2 && matches!(event, Event::Lost(TransportError::PeerLost { rank: 2, .. })), "{rank}: {event:?}");
    assert!(matches!(server.broadcast("leave"), Err(TransportError::PeerLost { rank: 2, .. })));
    assert_survivors_succeed(children);
}

#[test]
fn no_file_descriptor_or_thread_stays_behind() {
    // In a process of its own, where no other test opens files: see `leaves_nothing`.
    let test = concat!(module_path!(), "::leaves_nothing").split_once("::").unwrap().1;
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--test-threads=1"]).env(ROLE, "none");
    assert!(command.stdout(Stdio::null()).status().unwrap().success());
}

/// Does nothing unless the test above has started it.
#[test]
fn leaves_nothing() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let list = |path: &str| {
        let mut names: Vec<_> = std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()).collect();
        names.sort();
        names
    };
    let count = || list("/proc/self/fd").len();
    let (before, files) = (count(), list("/dev/shm"));
    for kind in ALL_KINDS {
        on_every_rank(&world(kind, 3), |transport| {
            Group::new(transport, &[0, 1, 2], StreamNumber(0)).unwrap().barrier().unwrap();
        });
    }
    let (children, server) = with_server("tcp", 2);
    assert_all_succeed(children);
    drop(server);
    assert_eq!(list("/dev/shm"), files);
    // Handshake threads may take a moment to end.
    let started = Instant::now();
    while count() > before && started.elapsed() < Duration::from_secs(5) {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(count(), before);
    let threads = list("/proc/self/task").len();
    assert!(threads <= 2, "{threads} threads are left");
}
