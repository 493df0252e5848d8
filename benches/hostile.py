"""Hostile peers for `attacks.py`: floods, mutated bytes, and a man in the middle. All of them talk to the loopback
interface only, and stop by themselves."""
import os
import pathlib
import socket
import threading
import time

LOOPBACK = "127.0.0.1"


def listening_ports(pids):
    """The TCP ports at which these processes listen, in order."""
    inodes = set()
    for pid in pids:
        for link in pathlib.Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(link))
            except OSError:
                pass
    ports = set()
    for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
            ports.add(int(fields[1].split(":")[1], 16))
    return sorted(ports)


def free_port():
    with socket.create_server((LOOPBACK, 0)) as listener:
        return listener.getsockname()[1]


def connect(port, timeout=1.0):
    """A connection, or None if it is refused."""
    try:
        return socket.create_connection((LOOPBACK, port), timeout=timeout)
    except OSError:
        return None


def flood(ports, choice, connections):
    """Opens so many connections, most of which stay open for a while; some send a little. Returns how many opened."""
    held, opened = [], 0
    for _ in range(connections):
        peer = connect(choice.choice(ports))
        if peer is None:
            continue
        opened += 1
        try:
            match choice.randrange(4):
                case 0:
                    peer.sendall(choice.randbytes(choice.randrange(1, 300)))
                case 1:
                    peer.close()
        except OSError:
            pass
        held.append(peer)
        # This process's own limit of open files.
        if len(held) > 600:
            held.pop(0).close()
    for peer in held:
        peer.close()
    return opened


def mutated(valid, choice):
    """A copy of some valid bytes with one to four changes."""
    data = bytearray(valid)
    for _ in range(choice.randrange(1, 5)):
        at = choice.randrange(len(data) + 1)
        match choice.randrange(5):
            case 0 if at < len(data):
                data[at] ^= 1 << choice.randrange(8)
            case 1:
                del data[at:at + choice.randrange(1, 40)]
            case 2:
                data[at:at] = bytes(data[at:at + choice.randrange(1, 80)]) * choice.randrange(1, 20)
            case 3:
                data[at:at] = choice.choice([b"\xff" * 8, b"\0" * 8, b"\x7f\xff\xff\xff", choice.randbytes(16)])
            case _:
                del data[at:]
    return bytes(data)


def send_mutated(ports, valid, choice, inputs):
    """Sends so many mutated inputs, each on a connection of its own. Half of them do not wait for the answer."""
    for _ in range(inputs):
        peer = connect(choice.choice(ports))
        if peer is None:
            continue
        try:
            peer.settimeout(0.05)
            peer.sendall(mutated(valid, choice))
            if choice.randrange(2):
                peer.recv(4096)
        except OSError:
            pass
        peer.close()


class Relay:
    """A man in the middle before one port. `tamper(is_answer, start, piece)` returns what he sends on in place of a
    piece, whose first byte is number `start` of its direction."""

    def __init__(self, port, target, tamper):
        self.target, self.tamper = target, tamper
        # What those that connected first have sent.
        self.recorded = bytearray()
        self.listener = socket.create_server((LOOPBACK, port))
        self.is_open = True
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while self.is_open:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = connect(self.target)
            if far is None:
                near.close()
                continue
            far.settimeout(None)
            for source, sink, is_answer in ((near, far, False), (far, near, True)):
                threading.Thread(target=self.pump, args=(source, sink, is_answer), daemon=True).start()

    def pump(self, source, sink, is_answer):
        start = 0
        try:
            while piece := source.recv(65536):
                if not is_answer and len(self.recorded) < 4096:
                    self.recorded += piece
                sink.sendall(self.tamper(is_answer, start, piece))
                start += len(piece)
        except OSError:
            pass
        for peer in (source, sink):
            try:
                peer.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self):
        self.is_open = False
        self.listener.close()


class Tampering:
    """Changes, drops or repeats what is at one place of one direction, once."""

    def __init__(self, choice):
        self.is_answer, self.place = choice.random() < 0.5, choice.randrange(3000)
        self.kind, self.bit = choice.choice(["flip", "drop", "replay"]), choice.randrange(8)
        self.is_done = False

    def __call__(self, is_answer, start, piece):
        at = self.place - start
        if self.is_done or is_answer != self.is_answer or not 0 <= at < len(piece):
            return piece
        self.is_done = True
        match self.kind:
            case "flip":
                return piece[:at] + bytes([piece[at] ^ 1 << self.bit]) + piece[at + 1:]
            case "drop":
                return piece[:at]
            case _:
                return piece + piece[at:]


def wait_until(condition, seconds):
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True
