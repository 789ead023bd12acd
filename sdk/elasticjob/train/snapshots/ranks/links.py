"""Links between ranks for copies of snapshots: one TCP connection for each copy.

    receiver    magic, nonce
    sender      header: part, confirmed version, sizes; its HMAC
    receiver    "accepted" or "refused"; its HMAC
    sender      body; its HMAC
    receiver    "committed" or "refused"; its HMAC

Another connection stays open for the own parts of a rank after each step:

    receiver    magic, nonce
    sender      header with the rank; its HMAC for this use
    receiver    "accepted" or "refused"; its HMAC
    sender      for each step: header, body; their HMAC with the number of the message

All HMACs are over the nonce, with the key of the round. The receiver allocates memory only for a
header with a valid HMAC, in the second case for a sender with one, and commits only a body with
one. The sender sends the body only to a peer that has proved the key.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import hmac
import logging
import math
import os
import secrets
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

from elasticjob.train.snapshots.core.agreement import Part, Version, fields_of, part_of
from elasticjob.train.snapshots.core.replicas import Accepted
from elasticjob.train.snapshots.memory.buffers import OWN_BYTES, ReplicaBuffers
from elasticjob.train.snapshots.memory.part_files import (
    RECORD_BYTES,
    Body,
    CorruptSnapshot,
    allocate,
    allocated,
    erase,
    opened,
    read_record,
    written,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

log = logging.getLogger("elasticjob.train")

QUIET_SECONDS = 10.0
"""Maximum wait for one message of a peer."""
END_SECONDS = 5.0
RETRY_SECONDS = 10.0
"""Time between two attempts to connect to a peer for the parts of each step."""
MAX_CONNECTIONS = 64
_STEPS = 2
"""Number of steps that wait for their copy: ranks that are stopped are at most a step apart."""
_MAGIC = b"EJREPL02"
_NONCE_BYTES = _MAC_BYTES = 32
_CHUNK_BYTES = 1 << 18
_HEADER = struct.Struct("<QQiIqqQQQq")
_UNKNOWN = -1
"""Number of a checksum that the receiver calculates."""
_ACCEPTED, _COMMITTED, _REFUSED = b"a", b"c", b"r"


class PeerError(OSError):
    """Peer that did not prove the round's key, or refused a copy."""


class CommittedPart:
    """Part in a file of this node, whose content is read piece by piece.

    Args:
        part: the part that the file must hold.

    Attributes:
        head_bytes, size, checksum: fields of its record; the content is not compared with them.

    Raises:
        CorruptSnapshot: the file does not hold the part, or cannot be read.
    """

    def __init__(self, path: Path, part: Part) -> None:
        self.part, self._path = part, path
        with self._opened() as fd:
            self._record = os.pread(fd, RECORD_BYTES, 0)
            found, self.head_bytes, self.size, self.checksum = read_record(fd, path)
        if found != part:
            raise CorruptSnapshot(f"{path} holds no complete snapshot of step {part.version.step}")

    def pieces(self) -> Iterator[memoryview]:
        """Yield the content in pieces, each in the memory of the one before.

        Raises CorruptSnapshot at the end, at the latest, if another part has replaced this one
        meanwhile: a record is erased before its content, and no two parts have the same.
        """
        memory = memoryview(bytearray(min(_CHUNK_BYTES, self.size)))
        done = 0
        with self._opened() as fd:
            while done < self.size:
                count = os.preadv(fd, [memory[: self.size - done]], RECORD_BYTES + done)
                if not count:
                    break
                yield memory[:count]
                done += count
            if done < self.size or os.pread(fd, RECORD_BYTES, 0) != self._record:
                raise CorruptSnapshot(f"{self._path} was overwritten while it was read")

    def copied(self, path: Path) -> CommittedPart:
        """Replace the content of another buffer by this one; return the copy.

        If it fails, that buffer holds nothing. Damage of the content has the checksum that shows
        it. Raises OSError, or CorruptSnapshot as `pieces` does.
        """
        with opened(path, os.O_RDWR | os.O_CREAT) as fd:
            erase(fd)
            try:
                allocate(fd, RECORD_BYTES + self.size)
                offset = RECORD_BYTES
                for piece in self.pieces():
                    offset = written(fd, [piece], offset)
            except OSError:
                os.ftruncate(fd, 0)
                raise
            os.pwrite(fd, self._record, 0)
        return CommittedPart(path, self.part)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        try:
            with opened(self._path, os.O_RDONLY) as fd:
                yield fd
        except OSError as error:
            raise CorruptSnapshot(f"{self._path} cannot be read: {error.strerror}") from error


def send(
    address: tuple[str, int],
    key: bytes,
    part: Part,
    body: Body | CommittedPart,
    keep: Version | None,
    rate: float,
) -> None:
    """Send a part to a peer and wait until it is committed there.

    Raises OSError, or CorruptSnapshot if the part was overwritten; the peer then commits nothing.

    Args:
        keep: version that the peer must not overwrite.
        rate: largest number of bytes each second.
    """
    deadline = time.monotonic() + 2 * QUIET_SECONDS + 4 * body.size / rate
    with socket.create_connection(address, QUIET_SECONDS) as link:
        header = _packed(part, keep, body)
        nonce = _introduced(link, key, b"offer", header)
        proof = hmac.new(key, b"body" + nonce + header, hashlib.sha256)
        began, sent = time.monotonic(), 0
        for chunk in _pieces(body) if isinstance(body, Body) else body.pieces():
            proof.update(chunk)
            link.sendall(chunk)
            sent += chunk.nbytes
            now = time.monotonic()
            if now > deadline:
                raise PeerError("the peer is too slow")
            if began + sent / rate > now:
                time.sleep(began + sent / rate - now)
        link.sendall(proof.digest())
        link.settimeout(max(QUIET_SECONDS, deadline - time.monotonic()))
        _expect(link, key, nonce, _COMMITTED)


def _pieces(body: Body) -> Iterator[memoryview]:
    for view in body.views:
        for first in range(0, view.nbytes, _CHUNK_BYTES):
            yield view.cast("B")[first : first + _CHUNK_BYTES]


def _introduced(link: socket.socket, key: bytes, purpose: bytes, header: bytes) -> bytes:
    """Send a header to a peer that accepts it and proves the key; return the nonce."""
    link.settimeout(QUIET_SECONDS)
    hello = _received(link, len(_MAGIC) + _NONCE_BYTES)
    if hello[: len(_MAGIC)] != _MAGIC:
        raise PeerError("the peer is not a receiver of replicas")
    nonce = bytes(hello[len(_MAGIC) :])
    link.sendall(header + _mac(key, purpose, nonce, header))
    _expect(link, key, nonce, _ACCEPTED)
    return nonce


class StepSender:
    """Sender of this rank's own part of each step to a peer, in the background.

    Training never waits for a peer: newer steps replace those in the queue. A failed connection is
    made again after `RETRY_SECONDS`; a peer of an older version of the library refuses each one.

    Args:
        rate: largest number of bytes each second.
    """

    def __init__(self, address: tuple[str, int], key: bytes, rank: int, rate: float) -> None:
        self._address, self._key, self._rank, self._rate = address, key, rank, rate
        self._waiting: collections.deque[tuple[Part, Body]] = collections.deque(maxlen=_STEPS)
        self._changed = threading.Condition()
        self._is_closed = self._is_urgent = False
        self._thread = threading.Thread(target=self._run, name="elasticjob-steps", daemon=True)

    def offer(self, part: Part, body: Body) -> None:
        """Send a part, whose content does not change, once those before it are sent."""
        with self._changed:
            self._waiting.append((part, body))
            self._changed.notify_all()
        if self._thread.ident is None:
            self._thread.start()

    def flush(self, seconds: float) -> None:
        """Send the queued parts without a rate limit; wait up to `seconds` until they are sent."""
        with self._changed:
            self._is_urgent = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_closed or not self._waiting, seconds)
            self._is_urgent = False

    def close(self) -> None:
        """Send nothing more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while self._next() is not None:
            try:
                with socket.create_connection(self._address, QUIET_SECONDS) as link:
                    try:
                        self._send_all(link)
                    finally:  # a fork may hold the descriptor
                        link.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                log.debug("cannot copy the own state of each step to a peer: %s", error)
                if self._is_urgent:
                    with self._changed:
                        self._waiting.clear()
                        self._changed.notify_all()
                self._pause(RETRY_SECONDS)

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._is_urgent, seconds)

    def _next(self) -> tuple[Part, Body] | None:
        """Wait for a part; return the first one in the queue, or None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            return None if self._is_closed else self._waiting[0]

    def _send_all(self, link: socket.socket) -> None:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # the peer answers no step
        named = _packed(Part(Version(0, 0), self._rank, 0, 0), None, Body(0, []))
        nonce = _introduced(link, self._key, b"steps", named)
        number = 0
        while (found := self._next()) is not None:
            part, body = found
            header = _packed(part, None, body)
            proof = _step_proof(self._key, nonce, number, header)
            for view in body.views:
                proof.update(view)
            link.sendall(b"".join((header, *body.views, proof.digest())))
            with self._changed:
                if self._waiting and self._waiting[0] is found:
                    self._waiting.popleft()
                    self._changed.notify_all()
            number += 1
            self._pause(body.size / self._rate)


class Receiver:
    """Listener that commits the copies of other ranks to this node's memory.

    Args:
        senders: ranks whose parts this rank receives.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        senders: frozenset[int],
        buffers: ReplicaBuffers,
    ) -> None:
        self._listener = listener
        self._key = key
        self._senders = senders
        self._buffers = buffers
        self._accepted = Accepted()
        self._links: dict[int, socket.socket] = {}  # on which ranks copy each step
        self._lock = threading.Lock()
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS + len(senders))
        self._is_closed = self._is_logged = False
        self._thread = threading.Thread(
            target=self._serve, name="elasticjob-replica-listener", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        with self._lock:
            ended = [self._listener, *self._links.values()]
        for each in ended:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # ends `accept` and `recv`
        self._thread.join(END_SECONDS)
        self._listener.close()

    def _serve(self) -> None:
        while not self._is_closed:
            try:
                link, _ = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(0.1)  # no free descriptor
                continue
            if self._free.acquire(blocking=False):
                threading.Thread(target=self._answer, args=(link,), daemon=True).start()
            else:
                link.close()

    def _answer(self, link: socket.socket) -> None:
        try:
            with link:
                link.settimeout(QUIET_SECONDS)
                self._receive(link)
        except (OSError, ValueError, MemoryError) as error:
            log.debug("a copy of a peer was refused: %s", error)
        finally:
            self._free.release()

    def _receive(self, link: socket.socket) -> None:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        link.sendall(_MAGIC + nonce)
        # Memory is allocated only for a peer that has proved the key.
        deadline = time.monotonic() + QUIET_SECONDS
        first = bytes(_received(link, _HEADER.size + _MAC_BYTES, deadline=deadline))
        header, proof = first[: _HEADER.size], first[_HEADER.size :]
        if hmac.compare_digest(proof, _mac(self._key, b"steps", nonce, header)):
            self._receive_steps(link, nonce, _unpacked(header)[0].rank)
            return
        if not hmac.compare_digest(proof, _mac(self._key, b"offer", nonce, header)):
            raise PeerError("the peer does not have the key of this round")
        part, keep, head, size, checksum = _unpacked(header)
        room = self._buffers.room_for(part, keep)
        is_wanted = part.rank in self._senders and head <= size <= room
        self._reply(link, nonce, _ACCEPTED if is_wanted else _REFUSED)
        if not is_wanted:
            return
        whole = hmac.new(self._key, b"body" + nonce + header, hashlib.sha256)
        content = _received(link, size, whole)
        is_good = hmac.compare_digest(bytes(_received(link, _MAC_BYTES)), whole.digest())
        if is_good:
            # A new checksum would hide damage in the memory of the sender.
            is_good = self._commit(part, Body(head, [content], checksum), keep)
        self._reply(link, nonce, _COMMITTED if is_good else _REFUSED)

    def _receive_steps(self, link: socket.socket, nonce: bytes, rank: int) -> None:
        """Commit the own parts of a rank after each step until its connection ends."""
        if rank not in self._senders:
            self._reply(link, nonce, _REFUSED)
            return
        with self._lock:  # before the reply: a later connection of this rank then ends this one
            if self._is_closed:
                return
            former, self._links[rank] = self._links.get(rank), link
            if former is not None:  # half open, as after a partition
                with contextlib.suppress(OSError):
                    former.shutdown(socket.SHUT_RDWR)
        try:
            self._reply(link, nonce, _ACCEPTED)
            link.settimeout(None)  # a step may take as long as it likes
            number = 0
            while True:
                header = bytes(_received(link, _HEADER.size))
                part, _, head, size, _ = _unpacked(header)
                if part.rank != rank or not head <= size <= OWN_BYTES:
                    raise PeerError("the peer sent a part that is not its own, or too large")
                proof = _step_proof(self._key, nonce, number, header)
                content = _received(link, size, proof)
                if not hmac.compare_digest(bytes(_received(link, _MAC_BYTES)), proof.digest()):
                    raise PeerError("a part of a step was changed on its way")
                with self._lock:
                    if not self._is_closed:
                        self._buffers.commit_step(part, Body(head, [content]))
                number += 1
        finally:
            with self._lock:
                if self._links.get(rank) is link:
                    del self._links[rank]

    def _commit(self, part: Part, body: Body, keep: Version | None) -> bool:
        with self._lock:
            if self._is_closed or not self._accepted.accepts(part):
                return False
            try:
                self._buffers.commit(part, body, keep)
            except OSError as error:
                level = logging.DEBUG if self._is_logged else logging.WARNING
                log.log(level, "cannot hold a copy of rank %d: %s", part.rank, error.strerror)
                self._is_logged = True
                return False
            return True

    def _reply(self, link: socket.socket, nonce: bytes, answer: bytes) -> None:
        link.sendall(answer + _mac(self._key, b"reply", nonce, answer))


def _packed(part: Part, keep: Version | None, body: Body | CommittedPart) -> bytes:
    kept = (-1, 0) if keep is None else keep
    checksum = _UNKNOWN if body.checksum is None else body.checksum
    return _HEADER.pack(*fields_of(part), *kept, body.head_bytes, body.size, checksum)


def _unpacked(header: bytes) -> tuple[Part, Version | None, int, int, int | None]:
    """Return part, version to keep, size of the description, size of the body and checksum."""
    step, gang, rank, ranks, before, *kept, head, size, checksum = _HEADER.unpack(header)
    keep = None if kept[0] < 0 else Version(*kept)
    known = checksum if 0 <= checksum < 1 << 32 else None
    return part_of(step, gang, rank, ranks, before), keep, head, size, known


def _step_proof(key: bytes, nonce: bytes, number: int, header: bytes) -> hmac.HMAC:
    """Return the HMAC of one message of a `StepSender`, without its body."""
    begin = b"step" + nonce + number.to_bytes(8, "big") + header
    return hmac.new(key, begin, hashlib.sha256)


def _mac(key: bytes, purpose: bytes, nonce: bytes, content: bytes) -> bytes:
    return hmac.new(key, purpose + nonce + content, hashlib.sha256).digest()


def _expect(link: socket.socket, key: bytes, nonce: bytes, expected: bytes) -> None:
    found = bytes(_received(link, 1 + _MAC_BYTES))
    if not hmac.compare_digest(found[1:], _mac(key, b"reply", nonce, found[:1])):
        raise PeerError("the peer does not have the key of this round")
    if found[:1] != expected:
        raise PeerError("the peer refused the copy")


def _received(
    link: socket.socket, size: int, proof: Any = None, deadline: float = math.inf
) -> memoryview:
    view, done = allocated(size), 0
    while done < size:
        count = link.recv_into(view[done : done + _CHUNK_BYTES])
        if not count:
            raise PeerError(f"the connection ended after {done} of {size} bytes")
        if time.monotonic() > deadline:
            raise PeerError("the peer is too slow")
        if proof is not None:
            proof.update(view[done : done + count])
        done += count
    return view
