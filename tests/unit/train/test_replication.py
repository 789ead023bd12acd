"""Copies of snapshots over TCP: authentication, damage, bounds, rate, silent peers."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticjob.train.snapshots.core.agreement import (
    SHARED,
    Offer,
    Part,
    Version,
    decide,
    part_at_stop,
)
from elasticjob.train.snapshots.core.exchange import Exchange
from elasticjob.train.snapshots.core.replicas import Generations, State
from elasticjob.train.snapshots.memory.buffers import OWN_BYTES, MemoryBuffers, ReplicaBuffers
from elasticjob.train.snapshots.memory.part_files import (
    RECORD_BYTES,
    Body,
    CorruptSnapshot,
    held,
    read,
)
from elasticjob.train.snapshots.ranks import links
from elasticjob.train.snapshots.ranks.gang import Gang
from elasticjob.train.snapshots.ranks.links import (
    CommittedPart,
    PeerError,
    Receiver,
    StepSender,
    send,
)
from elasticjob.train.snapshots.ranks.replication import Replication, Settings

KEY = b"k" * 32
PATIENCE_SECONDS = 60.0
RATE = 1e12


def part(step: int, rank: int = 1) -> Part:
    return Part(Version(step, 7), rank, 2, step - 1)


def body(size: int = 600_000) -> Body:
    content = bytearray(bytes(range(250)) * (size // 250))
    return Body(3, [memoryview(content)])


def logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    """Wait until the thread of the receiver has logged a text."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while text not in caplog.text:
        assert time.monotonic() < deadline, caplog.text
        time.sleep(0.01)


@pytest.fixture
def buffers(tmp_path: Path) -> ReplicaBuffers:
    return ReplicaBuffers(tmp_path)


@pytest.fixture
def address(buffers: ReplicaBuffers) -> Iterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    receiver = Receiver(listener, KEY, frozenset({1}), buffers)
    receiver.start()
    yield listener.getsockname()
    receiver.close()


def test_copy_is_committed_when_the_sender_returns(
    buffers: ReplicaBuffers, address: tuple[str, int]
) -> None:
    send(address, KEY, part(1), body(), None, RATE)
    send(address, KEY, part(2), body(), Version(1, 7), RATE)
    send(address, KEY, part(3), body(3_000_000), Version(1, 7), RATE)
    found = buffers.parts()
    assert set(found) == {part(1), part(3)}
    assert bytes(read(found[part(3)], part(3)).views[0]) == bytes(body(3_000_000).views[0])
    # The node's own snapshots are other files.
    assert MemoryBuffers(buffers.folder, 1).parts() == {}


def test_peer_without_the_key_is_refused_and_learns_nothing(
    buffers: ReplicaBuffers, address: tuple[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "elasticjob.train")
    with pytest.raises(OSError, match=r"connection ended|reset"):
        send(address, b"x" * 32, part(1), body(), None, RATE)
    assert buffers.parts() == {}
    logged(caplog, "does not have the key of this round")
    send(address, KEY, part(1), body(), None, RATE)
    assert set(buffers.parts()) == {part(1)}


def test_recorded_connection_cannot_be_replayed(
    buffers: ReplicaBuffers, address: tuple[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "elasticjob.train")
    header = links._packed(part(1), None, body())
    nonce = b"n" * 32
    proof = hmac.new(KEY, b"offer" + nonce + header, hashlib.sha256).digest()
    with socket.create_connection(address, PATIENCE_SECONDS) as link:
        link.sendall(header + proof)
        assert len(link.recv(100)) == 40
        assert link.recv(100) == b""
    logged(caplog, "does not have the key of this round")


def test_receiver_without_the_key_gets_no_content() -> None:
    received = bytearray()

    def pretend(listener: socket.socket) -> None:
        link, _ = listener.accept()
        with link:
            link.sendall(links._MAGIC + b"n" * 32)
            links._received(link, links._HEADER.size + 32)
            link.sendall(b"a" + bytes(32))
            received.extend(link.recv(100))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        impostor = threading.Thread(target=pretend, args=(listener,))
        impostor.start()
        with pytest.raises(PeerError, match="does not have the key"):
            send(listener.getsockname(), KEY, part(1), body(), None, RATE)
        impostor.join()
    assert not received


def test_body_that_was_changed_on_its_way_is_refused(
    buffers: ReplicaBuffers, address: tuple[str, int]
) -> None:
    with socket.create_connection(address, PATIENCE_SECONDS) as link:
        hello = links._received(link, 40)
        nonce = bytes(hello[8:])
        header = links._packed(part(1), None, body())
        link.sendall(header + links._mac(KEY, b"offer", nonce, header))
        links._expect(link, KEY, nonce, b"a")
        content = bytes(body().views[0])
        link.sendall(content[:-1] + b"!" + links._mac(KEY, b"body", nonce, header + content))
        with pytest.raises(PeerError, match="refused the copy"):
            links._expect(link, KEY, nonce, b"c")
    assert buffers.parts() == {}


@pytest.mark.parametrize("changed", ["rank", "size"])
def test_part_that_is_not_expected_is_refused_before_its_content(
    buffers: ReplicaBuffers,
    address: tuple[str, int],
    changed: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if changed == "size":
        monkeypatch.setattr(ReplicaBuffers, "room_for", lambda *_: 1000)
    with pytest.raises(PeerError, match="refused the copy"):
        send(address, KEY, part(1, rank=5 if changed == "rank" else 1), body(), None, RATE)
    assert buffers.parts() == {}


def test_delayed_copy_does_not_overwrite_a_newer_one(
    buffers: ReplicaBuffers, address: tuple[str, int]
) -> None:
    send(address, KEY, part(4), body(), None, RATE)
    with pytest.raises(PeerError, match="refused the copy"):
        send(address, KEY, part(3), body(), None, RATE)
    assert set(buffers.parts()) == {part(4)}


def test_second_buffers_of_snapshots_have_precedence_over_copies(
    buffers: ReplicaBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = os.statvfs(buffers.folder)
    monkeypatch.setattr(os, "statvfs", lambda _: sizes)
    free = buffers.free_bytes()
    memory = MemoryBuffers(buffers.folder, 1)
    memory.commit(part(1), body())
    assert free - buffers.free_bytes() == body().size + 64
    memory.commit(part(2), body())
    assert buffers.free_bytes() == free


def test_copy_may_take_the_room_of_the_one_that_it_overwrites(
    buffers: ReplicaBuffers, address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        send(address, KEY, part(step), body(), Version(1, 7), RATE)
    monkeypatch.setattr(ReplicaBuffers, "free_bytes", lambda self: 0)
    send(address, KEY, part(3), body(), Version(1, 7), RATE)
    assert set(buffers.parts()) == {part(1), part(3)}
    with pytest.raises(PeerError, match="refused the copy"):
        send(address, KEY, part(4), body(900_000), Version(1, 7), RATE)


def test_stale_copies_are_removed_after_a_restore(buffers: ReplicaBuffers) -> None:
    """Ranks 2 and 3 are gone; their older copies would take the room of the new ones."""
    version = [Version(step, 7) for step in (1, 2)]
    kept = Part(version[1], SHARED, 3, 1, reshards=True)
    parts = [kept._replace(rank=rank) for rank in (SHARED, 0, 1, 2)]
    for each in (*parts, *(each._replace(version=version[0]) for each in parts)):
        buffers.commit(each, body(500), None)
    offer = Offer(replicas=tuple(buffers.parts()))
    assert len(offer.replicas) == 8
    for local_rank, left in ((1, 8), (0, 4)):
        replication = Replication(Gang(), buffers.folder, local_rank, Settings(1, RATE, True))
        replication.restored([offer], decide([offer], True))
        replication.close()
        assert len(buffers.parts()) == left
    assert set(buffers.parts()) == set(parts)


def test_replicated_step_is_of_this_round_and_not_before_a_failure(tmp_path: Path) -> None:
    replication = Replication(Gang(), tmp_path, 0, Settings(1, RATE, False))
    seen = []
    replication.generations = Generations(Version(3, 7))  # as after a restore
    for step, state in ((4, State.FAILED), (5, State.DONE), (6, State.RUNNING), (6, State.FAILED)):
        replication.announce(Version(step, 8))
        replication.exchanged([state])
        seen.append(replication.replicated_step)
    replication.close()
    assert seen == [-1, 5, 5, -1]


class Peer:
    """Gang of two ranks on two nodes, seen from rank 0, of which the other one is at `address`."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.rank, self.size, self._address = 0, 2, address

    def gather(self, exchange: Exchange, content: bytes) -> list[bytes]:
        said = json.loads(content)
        self.key = bytes.fromhex(said["key"])
        host, port = self._address
        other = {"node": "other", "domain": "other", "topology": "", "address": host, "port": port}
        return [content, json.dumps(other).encode()]


def replicating(folder: Path, peer: Peer) -> tuple[Replication, list[Part]]:
    """Return the replication of sharded state by rank 0, and its committed parts of step 1."""
    replication = Replication(peer, folder, 0, Settings(1, RATE, True))  # type: ignore[arg-type]
    parts = [part(1, 0), part(1, SHARED)]
    memory = MemoryBuffers(folder, 0)
    for each in parts:
        memory.commit(each, body())
    replication.announce(Version(1, 7))
    return replication, parts


@pytest.mark.parametrize("order", [1, -1])
def test_slow_peer_does_not_cost_the_shared_part(tmp_path: Path, order: int) -> None:
    """Later snapshots overwrite the parts while the peer receives its copy."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        peer = Peer(listener.getsockname())
        replication, parts = replicating(tmp_path, peer)
        replication.send(parts[::order])
        link, _ = listener.accept()  # the peer, which answers later
        memory = MemoryBuffers(tmp_path, 0)
        for step in (2, 3):
            for rank in (0, SHARED):
                memory.commit(part(step, rank), body())
        buffers = ReplicaBuffers(tmp_path / "peer")
        buffers.folder.mkdir()
        receiver = Receiver(listener, peer.key, frozenset({0}), buffers)
        with link:
            receiver._receive(link)
        replication.close()
        assert replication.state is State.DONE
        assert set(buffers.parts()) == {part(1, 0)}, "the peer has the shared part itself"
        assert set(ReplicaBuffers(tmp_path).parts()) == set(parts)


@pytest.mark.parametrize("order", [1, -1])
def test_node_that_is_cut_off_has_no_shared_part_without_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: int
) -> None:
    copied, seen = CommittedPart.copied, []

    def dies(self: CommittedPart, path: Path) -> CommittedPart:
        seen.append(self.part.rank)
        if len(seen) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return copied(self, path)

    monkeypatch.setattr(CommittedPart, "copied", dies)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        replication, parts = replicating(tmp_path, Peer(listener.getsockname()))
        replication.send(parts[::order])
        replication.close()
        assert replication.state is State.FAILED
        assert seen == [0, SHARED]
        assert set(ReplicaBuffers(tmp_path).parts()) == {parts[0]}
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()  # no peer holds a part of a version that is given up


def test_part_that_is_overwritten_while_it_is_sent_is_not_committed_by_the_peer(
    tmp_path: Path,
    buffers: ReplicaBuffers,
    address: tuple[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = MemoryBuffers(tmp_path, 1)
    memory.commit(part(1), body())
    source = CommittedPart(tmp_path / "rank-1.0", part(1))
    preadv = os.preadv
    seen: list[int] = []

    def overwritten(fd: int, views: list[memoryview], offset: int) -> int:
        seen.append(offset)
        if len(seen) == 2:
            newest = memory.parts()
            for step in (1, 2):
                memory.commit(part(max(newest).version.step + step), body())
        return preadv(fd, views, offset)

    monkeypatch.setattr(os, "preadv", overwritten)
    with pytest.raises(CorruptSnapshot, match="was overwritten while it was read"):
        send(address, KEY, part(1), source, None, RATE)
    assert len(seen) == 3
    assert buffers.parts() == {}
    seen.clear()
    source = CommittedPart(tmp_path / "rank-1.0", part(3))
    with pytest.raises(CorruptSnapshot, match="was overwritten while it was read"):
        source.copied(tmp_path / "replica-1.0")
    assert held(tmp_path / "replica-1.0") is None


def test_copy_to_a_buffer_that_is_removed_meanwhile_leaves_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    MemoryBuffers(tmp_path, 1).commit(part(1), body())
    target = tmp_path / "replica-1.0"
    preadv = os.preadv

    def removed(fd: int, views: list[memoryview], offset: int) -> int:
        if offset > RECORD_BYTES:
            target.unlink(missing_ok=True)
        return preadv(fd, views, offset)

    monkeypatch.setattr(os, "preadv", removed)
    with pytest.raises(CorruptSnapshot, match="cannot be read"):
        CommittedPart(tmp_path / "rank-1.0", part(1)).copied(target)
    assert not target.exists()


def test_damage_before_a_copy_has_no_valid_checksum_after_it(
    tmp_path: Path, buffers: ReplicaBuffers, address: tuple[str, int]
) -> None:
    MemoryBuffers(tmp_path, 1).commit(part(1), body())
    with (tmp_path / "rank-1.0").open("r+b") as file:
        file.seek(RECORD_BYTES + 9)
        file.write(b"!")
    copy = CommittedPart(tmp_path / "rank-1.0", part(1)).copied(tmp_path / "copy")
    send(address, KEY, part(1), copy, None, RATE)
    for path in (tmp_path / "copy", buffers.parts()[part(1)]):
        assert held(path) == part(1)
        with pytest.raises(CorruptSnapshot, match="checksum mismatch"):
            read(path, part(1))


def test_copy_has_the_content_and_replaces_a_longer_one(tmp_path: Path) -> None:
    MemoryBuffers(tmp_path, 1).commit(part(1), body())
    target = tmp_path / "replica-1.0"
    target.write_bytes(b"x" * 900_000)
    copy = CommittedPart(tmp_path / "rank-1.0", part(1)).copied(target)
    assert (copy.part, copy.size, copy.head_bytes) == (part(1), 600_000, 3)
    assert bytes(read(target, part(1)).views[0]) == bytes(body().views[0])
    assert b"".join(map(bytes, copy.pieces())) == bytes(body().views[0])
    with pytest.raises(CorruptSnapshot, match="holds no complete snapshot of step 2"):
        CommittedPart(target, part(2))
    with pytest.raises(CorruptSnapshot, match="cannot be read"):
        CommittedPart(tmp_path / "missing", part(1))


def test_header_that_arrives_too_slowly_is_given_up(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "QUIET_SECONDS", 1.0)

    def trickle(link: socket.socket) -> None:
        for _ in range(links._HEADER.size):  # the proof after it never arrives
            link.sendall(b"x")
            time.sleep(0.2)

    with socket.create_connection(address, PATIENCE_SECONDS) as link:
        links._received(link, 40)
        with pytest.raises(OSError, match=r"Broken pipe|reset"):
            trickle(link)


def test_copy_without_room_is_refused_and_logged_once(
    buffers: ReplicaBuffers,
    address: tuple[str, int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    for step in (1, 2):
        with pytest.raises(PeerError, match="refused the copy"):
            send(address, KEY, part(step), body(), None, RATE)
    assert caplog.text.count("cannot hold a copy of rank 1: No space left") == 1


class Failing:
    """Replication of a rank whose copies to its peer fail."""

    def __init__(self, folder: Path, address: tuple[str, int], key: bytes) -> None:
        self.memory = MemoryBuffers(folder, 0)
        self.replication = Replication(Gang(), folder, 0, Settings(1, RATE, False))
        self.replication._key, self.replication._addresses = key, [address]
        self.replication._receivers = (0,)

    def copies(self, step: int) -> None:
        self.memory.commit(part(step, 0), body())
        self.replication.announce(Version(step, 7))
        self.replication.send([part(step, 0)])
        self.replication.wait(PATIENCE_SECONDS)
        assert self.replication.state is State.FAILED


FAILURES = {
    "refused": "rank 0: the peer refused the copy",  # it receives those of rank 1 alone
    "broken off": "rank 0: the connection ended after 0 of 33 bytes",
    "ended": "rank 0: [Errno 111] Connection refused",
}


@pytest.fixture(params=FAILURES)
def failing(
    request: pytest.FixtureRequest, tmp_path: Path, address: tuple[str, int]
) -> Iterator[tuple[Failing, str]]:
    key = b"x" * 32 if request.param == "broken off" else KEY
    with socket.socket() as ended:
        ended.bind(("127.0.0.1", 0))  # it does not listen
        to = ended.getsockname() if request.param == "ended" else address
        found = Failing(tmp_path, to, key)
        yield found, FAILURES[request.param]
        found.replication.close()


@pytest.mark.parametrize("later", [(), (10,), (10, 11), (10, 11, 11)])
def test_copy_that_fails_as_the_peer_ends_is_no_warning(
    failing: tuple[Failing, str], caplog: pytest.LogCaptureFixture, later: tuple[int, ...]
) -> None:
    """The peer may be ahead by a step, and have called `close`, or it was killed."""
    caplog.set_level(logging.DEBUG, "elasticjob.train")
    rank, text = failing
    rank.replication.saves(10)
    rank.copies(10)
    for step in later:
        rank.replication.saves(step)
    rank.replication.close()
    own = [record for record in caplog.records if "cannot copy a snapshot" in record.message]
    assert [(record.levelname, text in record.message) for record in own] == [("DEBUG", True)]


@pytest.mark.parametrize("goes_on", ["two steps", "another copy"])
def test_copy_that_fails_during_a_training_is_one_warning(
    failing: tuple[Failing, str], caplog: pytest.LogCaptureFixture, goes_on: str
) -> None:
    rank, text = failing
    rank.replication.saves(10)
    rank.copies(10)
    for step in (11, 12, 13, 14) if goes_on == "two steps" else ():
        rank.replication.saves(step)
    for step in (14, 18):
        rank.copies(step)
    [record] = caplog.records
    assert record.message.startswith(f"cannot copy a snapshot to another node: {text}. The state")


def test_copy_without_own_memory_is_a_warning_at_once(
    tmp_path: Path,
    address: tuple[str, int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rank = Failing(tmp_path, address, KEY)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(rank.replication, "_kept_here", full)
    rank.copies(10)
    rank.replication.close()
    assert "cannot copy a snapshot to another node: [Errno 28] No space left" in caplog.text


def test_sender_keeps_to_its_rate(address: tuple[str, int]) -> None:
    began = time.monotonic()
    send(address, KEY, part(1), body(1_000_000), None, 2e6)
    assert time.monotonic() - began > 0.45


def test_silent_peer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "QUIET_SECONDS", 0.2)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(OSError, match="timed out"),
    ):
        send(listener.getsockname(), KEY, part(1), body(), None, RATE)


def test_silent_connections_do_not_keep_a_peer_from_sending(
    buffers: ReplicaBuffers, address: tuple[str, int]
) -> None:
    silent = [socket.create_connection(address, PATIENCE_SECONDS) for _ in range(8)]
    send(address, KEY, part(1), body(), None, RATE)
    assert set(buffers.parts()) == {part(1)}
    for link in silent:
        link.close()


def own(step: int, rank: int = 1) -> Part:
    """Return the own part of a rank after a step, as for a copy at a stop."""
    return part_at_stop(Version(step, 7), 10, 2)._replace(rank=rank)


def small(step: int) -> Body:
    return Body(3, [memoryview(bytes([step]) * 100)])


def steps_at(buffers: ReplicaBuffers) -> set[int]:
    return {part.version.step for part in MemoryBuffers(buffers.folder, 0).parts()}


def await_steps(buffers: ReplicaBuffers, steps: set[int]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while steps_at(buffers) != steps:
        assert time.monotonic() < deadline, steps_at(buffers)
        time.sleep(0.01)


@pytest.fixture
def sender(address: tuple[str, int]) -> Iterator[StepSender]:
    sender = StepSender(address, KEY, 1, RATE)
    yield sender
    sender.close()


def test_own_parts_of_the_last_two_steps_are_at_the_peer(
    buffers: ReplicaBuffers, sender: StepSender
) -> None:
    for step in range(1, 6):
        sender.offer(own(step), small(step))
        await_steps(buffers, {step - 1, step} - {0})
    found = MemoryBuffers(buffers.folder, 0).parts()
    assert {part: bytes(read(path, part).views[0]) for part, path in found.items()} == {
        own(4): bytes([4]) * 100,
        own(5): bytes([5]) * 100,
    }
    assert buffers.parts() == {}  # no copies of a generation


def test_newest_steps_replace_those_that_wait(buffers: ReplicaBuffers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = StepSender(listener.getsockname(), KEY, 1, RATE)
        for step in range(1, 8):
            sender.offer(own(step), small(step))
        receiver = Receiver(listener, KEY, frozenset({1}), buffers)
        receiver.start()
        await_steps(buffers, {6, 7})
        sender.close()
        receiver.close()


def test_sender_of_steps_connects_again_after_an_error(
    buffers: ReplicaBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "RETRY_SECONDS", 0.01)
    listener = socket.create_server(("127.0.0.1", 0))
    sender = StepSender(listener.getsockname(), KEY, 1, RATE)
    sender.offer(own(1), small(1))
    listener.accept()[0].close()
    receiver = Receiver(listener, KEY, frozenset({1}), buffers)
    receiver.start()
    await_steps(buffers, {1})
    sender.close()
    receiver.close()


@pytest.mark.parametrize(("key", "rank"), [(b"x" * 32, 1), (KEY, 5)])
def test_sender_of_steps_without_the_key_or_of_another_rank_is_refused(
    buffers: ReplicaBuffers,
    address: tuple[str, int],
    key: bytes,
    rank: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "elasticjob.train")
    sender = StepSender(address, key, rank, RATE)
    sender.offer(own(1, rank), small(1))
    logged(caplog, "cannot copy the own state of each step to a peer")
    sender.close()
    assert steps_at(buffers) == set()


@pytest.mark.parametrize("change", ["content", "rank", "size", "order", None])
def test_changed_message_of_a_step_ends_the_connection(
    buffers: ReplicaBuffers, address: tuple[str, int], change: str | None
) -> None:
    with socket.create_connection(address, PATIENCE_SECONDS) as link:
        named = links._packed(Part(Version(0, 0), 1, 0, 0), None, Body(0, []))
        nonce = links._introduced(link, KEY, b"steps", named)
        size = OWN_BYTES + 1 if change == "size" else 100
        header = links._packed(
            own(1, 2 if change == "rank" else 1), None, Body(3, [memoryview(bytes(size))])
        )
        proof = links._step_proof(KEY, nonce, 1 if change == "order" else 0, header)
        proof.update(bytes(size))
        content = b"!" * size if change == "content" else bytes(size)
        message = header + content + proof.digest()
        if change is None:
            link.sendall(message)
            await_steps(buffers, {1})
        else:
            with contextlib.suppress(ConnectionError):  # it may end before the whole is sent
                link.sendall(message)
            with pytest.raises(OSError, match=r"reset|pipe|ended"):
                links._received(link, 1)
            assert steps_at(buffers) == set()


def test_connections_for_steps_end_with_the_receiver(buffers: ReplicaBuffers) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    receiver = Receiver(listener, KEY, frozenset({1}), buffers)
    receiver.start()
    with socket.create_connection(listener.getsockname(), PATIENCE_SECONDS) as link:
        named = links._packed(Part(Version(0, 0), 1, 0, 0), None, Body(0, []))
        links._introduced(link, KEY, b"steps", named)
        receiver.close()
        assert link.recv(1) == b""


def test_copies_of_steps_stay_as_long_as_the_restored_version_needs_them(
    buffers: ReplicaBuffers,
) -> None:
    for step in (4, 5):
        buffers.commit_step(own(step), small(step))
    buffers.commit_step(own(3), small(3))  # delayed
    assert steps_at(buffers) == {4, 5}
    memory = MemoryBuffers(buffers.folder, 0)
    memory.commit(part(4, SHARED), body())
    plan = decide([Offer(memory=(part(4, SHARED),))])
    replication = Replication(Gang(), buffers.folder, 0, Settings(1, RATE, False))
    replication.restored([], plan)
    replication.close()
    assert {path.name for path in buffers.folder.glob("step-*")} == {"step-1.0"}


def test_copies_of_an_earlier_gang_are_overwritten_first(buffers: ReplicaBuffers) -> None:
    for step in (8, 9):
        buffers.commit_step(own(step), small(step))
    for step in (5, 6):  # the ranks have gone back
        buffers.commit_step(own(step)._replace(version=Version(step, 8)), small(step))
        assert steps_at(buffers) == {5, 9} if step == 5 else {5, 6}


def test_copies_of_steps_take_no_room_of_snapshots(
    buffers: ReplicaBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers.commit_step(own(1), small(1))
    monkeypatch.setattr(ReplicaBuffers, "free_bytes", lambda _: 10)
    buffers.commit_step(own(2), small(2))
    assert steps_at(buffers) == {1}


def test_flush_waits_until_the_last_step_is_sent(
    buffers: ReplicaBuffers, address: tuple[str, int]
) -> None:
    sender = StepSender(address, KEY, 1, rate=1.0)  # a pause of minutes between two steps
    for step in (1, 2):
        sender.offer(own(step), small(step))
    sender.flush(PATIENCE_SECONDS)
    assert not sender._waiting
    await_steps(buffers, {1, 2})
    sender.close()


def test_flush_gives_up_a_peer_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "RETRY_SECONDS", PATIENCE_SECONDS)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    sender = StepSender(address, KEY, 1, RATE)
    sender.offer(own(1), small(1))
    sender.flush(PATIENCE_SECONDS)
    assert not sender._waiting
    sender.close()


def test_newer_connection_of_a_rank_ends_the_one_before_it(address: tuple[str, int]) -> None:
    named = links._packed(Part(Version(0, 0), 1, 0, 0), None, Body(0, []))
    with socket.create_connection(address, PATIENCE_SECONDS) as first:
        links._introduced(first, KEY, b"steps", named)
        with socket.create_connection(address, PATIENCE_SECONDS) as second:
            links._introduced(second, KEY, b"steps", named)
            first.settimeout(PATIENCE_SECONDS)
            assert first.recv(1) == b""
