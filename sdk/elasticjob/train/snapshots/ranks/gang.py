"""Exchange of bytes between the ranks of a round, over torch's process group."""

from __future__ import annotations

import datetime
import functools
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticjob.train.snapshots.core.agreement import (
    STORAGE,
    Part,
    Plan,
    RankEndedError,
    SnapshotError,
)
from elasticjob.train.snapshots.core.exchange import (
    INLINE_BYTES,
    OURS,
    SAME_CALLS,
    Call,
    End,
    Exchange,
    Header,
    check_calls,
    common_protocol,
    inline_content,
    pack_first,
    pack_record,
    text_of,
    unpack_header,
)
from elasticjob.train.snapshots.memory.part_files import Body, CorruptSnapshot, allocated, populate
from elasticjob.train.snapshots.ranks import torch_group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    import torch.distributed as dist

log = logging.getLogger("elasticjob.train")

PATIENCE = datetime.timedelta(seconds=60)
"""Duration of a wait for other ranks after which a rank logs a warning, once in a round."""
_CHUNK_BYTES = 1 << 30
_SLICE_BYTES = 1 << 24
_TRAVELLING = 4
"""Number of slices in flight while the next ones are read: as many as one read has."""
_UNKNOWN = -1
"""Number of an unknown checksum."""


class Gang:
    """Ranks of this round; one rank alone if no process group is initialized.

    Bytes travel over gloo, as tensors: nothing that is received is unpickled.

    Args:
        former: gang of the call of `restore` before this one.

    Attributes:
        number: number of this gang, once the ranks have agreed on it.
    """

    def __init__(self, former: Gang | None = None) -> None:
        import torch.distributed as dist

        self.rank, self.size = 0, 1
        self._call, self._step, self._calls = Call.RESTORE, 0, 1
        self._channel = torch_group.Channel(None)
        self._has_warned = False
        # Until the ranks have agreed on a number, they find each other's ends under the former one.
        self.number, self._ends, self._has_ended = 0, 0, False
        if former is not None:
            self.number, self._ends = former.number, former._ends
            self._calls = former._calls + 1
            former._enters()
        if dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self._channel = torch_group.present_channel()
            torch_group.store_requests.start()

    def begins(self, number: int) -> None:
        """Set the gang number on which the ranks have agreed."""
        self.number, self._ends, self._calls = number, 0, 1

    def saves(self, step: int) -> None:
        """Begin a call of `save`."""
        self._call, self._step, self._calls = Call.SAVE, step, self._calls + 1
        self._enters()

    def ends(self, end: End) -> None:
        """Record for the other ranks, without waiting, that this one makes no further call."""
        if not self._has_ended:
            self._ends += 1
            self._has_ended = True
            self._note(f"{self._ends} {end.value} {self._calls}")

    def _enters(self) -> None:
        if self._has_ended:
            self._has_ended = False
            self._note("")

    def _note(self, text: str) -> None:
        if self.size > 1:
            torch_group.store_requests.make(functools.partial(self._set_note, text))

    def _set_note(self, text: str) -> None:
        store = torch_group.default_store()
        store.set(self._key(self.rank), text)
        if text:
            store.add(self._key("count"), 1)

    def _key(self, name: object) -> str:
        return f"elasticjob-snapshots/{self.number:x}/{name}"

    def _ended(self, *, is_lost: bool) -> _Ended | None:
        """Return a rank that makes no further call, and the reason; None if none is known.

        A rank that has ended its calls as often as this one may only be late with the next call.

        Args:
            is_lost: True if a connection is lost: then that rank is not slower.
        """
        found: list[_Ended] = []

        def read() -> None:
            store = torch_group.default_store()
            # Without any note, as at nearly each fault, this is the only request.
            for rank in range(self.size) if store.check([self._key("count")]) else ():
                key = self._key(rank)
                text = bytes(store.get(key)).decode() if store.check([key]) else ""
                if not text or rank == self.rank:
                    continue
                count, end, calls = text.split(" ")
                # One that has made this call too does not keep this rank waiting.
                if int(calls) != self._calls and (is_lost or int(count) > self._ends):
                    found.append(_Ended(rank, End(end)))
                    return

        if not torch_group.store_requests.is_busy:
            torch_group.store_requests.make(read)
        return found[0] if found else None

    def gather(self, exchange: Exchange, content: bytes) -> list[memoryview]:
        """Return the content of every rank, by rank. Raises SnapshotError if their calls differ."""
        if self.size == 1:
            return [memoryview(bytearray(content))]
        channel = self._channel
        if channel.unfinished:
            raise SnapshotError(
                f"rank {self.rank} has called {text_of(self._call, self._step)}, but its exchange "
                f"with the other ranks in {channel.unfinished} did not end: restart the workers"
            )
        if not channel.protocol:
            channel.protocol = common_protocol(self._all_gathered(pack_first(OURS)))
        mine = Header(self._call, exchange, len(content), self._step)
        records = self._all_gathered(pack_record(mine, content))
        headers = [unpack_header(record) for record in records]
        check_calls(headers)
        largest = max(header.size for header in headers)
        if largest > INLINE_BYTES:
            found = self._all_gathered(content.ljust(largest, b"\0"))
            return [each[: header.size] for each, header in zip(found, headers)]
        return [inline_content(each, header.size) for each, header in zip(records, headers)]

    def _all_gathered(self, content: bytes) -> list[memoryview]:
        """Return the contents of all ranks, which have the same size."""
        import torch
        import torch.distributed as dist

        buffers = [bytearray(len(content)) for _ in range(self.size)]
        found = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in buffers]
        mine = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        work = dist.all_gather(found, mine, group=self._channel.group, async_op=True)
        assert work is not None
        self._wait(work)
        return [memoryview(buffer) for buffer in buffers]

    def _wait(self, work: dist.Work) -> None:
        """Wait for the other ranks. Warn of those that do not make this call, once in a round.

        A rank that is still busy, with an evaluation of its own, is not an error.

        Raises:
            SnapshotError: a rank has ended its calls, and does not come.
            RuntimeError: the connection to a rank is lost.
        """
        while True:
            try:
                work.wait(PATIENCE)
                return
            except RuntimeError:
                if work.is_completed():
                    break
            if ended := self._ended(is_lost=False):
                torch_group.leak(self._channel.group)
                self._channel.unfinished = text_of(self._call, self._step)
                raise self._error_of(ended)
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "rank %d has waited %d s for other ranks in %s: all ranks must make the same "
                    "calls of Snapshots, after the same steps. A rank without this message is "
                    "still busy before this call, has left it out, or waits in another "
                    "collective. With recovery.hangTimeoutSeconds such a wait ends with the "
                    "stacks of all ranks",
                    self.rank,
                    PATIENCE.total_seconds(),
                    text_of(self._call, self._step),
                )
        try:
            work.wait()  # raises the error of a collective that has failed, again
        except RuntimeError as error:
            ended = self._ended(is_lost=True)
            if not ended:
                raise
            raise self._error_of(ended, f" ({error})") from error

    def _error_of(self, ended: _Ended, cause: str = "") -> SnapshotError:
        """Return the error for the end of another rank's calls, with the call of this one."""
        mine = f"rank {self.rank} has called {text_of(self._call, self._step)}"
        if ended.end is End.CLOSE:
            text = f"rank {ended.rank} has called close(), and {mine}: {SAME_CALLS}"
            return SnapshotError(text + cause)
        # It may have ended with an error that is in its output alone.
        other = f"rank {ended.rank}"
        text = f"{other} has ended its process, and {mine}: see the output of {other}"
        return RankEndedError(text + cause)

    def broadcast(self, body: Body | None, source: int) -> Body:
        """Return the body of rank `source`, which sends it from the memory that it is in."""
        if self.size == 1:
            assert body is not None
            return body
        import torch.distributed as dist

        def send(tensor: torch.Tensor) -> None:
            dist.broadcast(tensor, source, group=self._channel.group)

        return _transferred(body if self.rank == source else None, send)

    def stream(
        self,
        reading: Iterator[tuple[Body, int]] | None,
        source: int,
        received: Callable[[int, int, memoryview], None] | None = None,
    ) -> Body | None:
        """Return the body that rank `source` reads, and sends slice by slice while it reads.

        `received` is called with the size of the body, and each slice with its offset. A slice
        travels while the one after it is read, and the one before it is handed to `received`.

        It is verified if `source` raises nothing, which the ranks exchange afterwards. None on the
        other ranks if `source` could not begin. Raises CorruptSnapshot on `source` alone, after the
        other ranks have received as many bytes as without an error.
        """
        import torch
        import torch.distributed as dist

        read = _Read(reading)
        sizes = torch.tensor(read.sizes(), device="cpu")
        dist.broadcast(sizes, source, group=self._channel.group)
        head, size, checksum = map(int, sizes)
        if read.body is None and reading is None and checksum != _UNKNOWN:
            read.body = Body(head, [allocated(size)], checksum)
        if read.body is not None:
            view = read.body.views[0]
            travelling: list[tuple[int, Any]] = []

            def arrive() -> None:
                first, work = travelling.pop(0)
                work.wait()
                if received is not None:
                    received(size, first, view[first : first + _SLICE_BYTES])

            for first in range(0, size, _SLICE_BYTES):
                part = view[first : first + _SLICE_BYTES]
                if reading is None:
                    populate(part)
                read.advance(first + part.nbytes)
                tensor = torch.frombuffer(part, dtype=torch.uint8)
                work = dist.broadcast(tensor, source, group=self._channel.group, async_op=True)
                travelling.append((first, work))
                if len(travelling) > _TRAVELLING:
                    arrive()
            while travelling:
                arrive()
        read.finish()
        return read.body

    def move(self, body: Body | None, source: int, target: int) -> Body | None:
        """Send the body of rank `source` to rank `target`; return it there, else None."""
        import torch.distributed as dist

        if self.rank == source:
            _transferred(body, lambda tensor: dist.send(tensor, target, group=self._channel.group))
        if self.rank != target:
            return None
        return _transferred(
            None, lambda tensor: dist.recv(tensor, source, group=self._channel.group)
        )


class _Ended(NamedTuple):
    """Rank that makes no further call, and the reason."""

    rank: int
    end: End


class _Read:
    """Read of a part whose first error waits for the end; without effect for None."""

    def __init__(self, reading: Iterator[tuple[Body, int]] | None) -> None:
        self._reading = reading
        self._done = 0
        self._error: CorruptSnapshot | None = None
        self.body: Body | None = None
        self._step()

    def sizes(self) -> list[int]:
        """Return the sizes of description and body, and the checksum; unknown without a body."""
        if self.body is None or self.body.checksum is None:
            return [0, 0, _UNKNOWN]
        return [self.body.head_bytes, self.body.size, self.body.checksum]

    def advance(self, end: int) -> None:
        """Read up to this number of bytes."""
        while self._reading is not None and self._done < end:
            self._step()

    def finish(self) -> None:
        """Verify the checksum. Raises CorruptSnapshot for that, or an earlier error."""
        while self._reading is not None:
            self._step()
        if self._error is not None:
            raise self._error

    def _step(self) -> None:
        if self._reading is None:
            return
        try:
            self.body, self._done = next(self._reading)
        except StopIteration:
            self._reading = None
        except CorruptSnapshot as error:
            self._reading, self._error = None, error


def streams(plan: Plan, ranks: int) -> bool:
    """Return True if a rank sends the shared part to all others while it reads it.

    Not from storage, which may not answer: then the part is exchanged after the read.
    """
    return plan.shared.place != STORAGE and len(plan.shared.readers) < ranks


def _transferred(body: Body | None, transfer: Callable[[torch.Tensor], object]) -> Body:
    """Send a body, or receive one into new memory with None. Its content is not copied."""
    import torch

    sizes = torch.zeros(3, dtype=torch.int64, device="cpu")
    if body is not None:
        checksum = _UNKNOWN if body.checksum is None else body.checksum
        sizes = torch.tensor([body.head_bytes, body.size, checksum], device="cpu")
    transfer(sizes)
    head, size, checksum = map(int, sizes)
    view = allocated(size) if body is None else body.contiguous()
    for first in range(0, size, _CHUNK_BYTES):
        transfer(torch.frombuffer(view[first : first + _CHUNK_BYTES], dtype=torch.uint8))
    return Body(head, [view], None if checksum == _UNKNOWN else checksum)


def exchanged(gang: Gang, plan: Plan, bodies: dict[Part, Body]) -> tuple[Body, Body | None]:
    """Return the shared part and this rank's own; ranks without them receive them."""
    readers = plan.shared.readers
    shared = bodies.get(plan.shared.part)
    if len(readers) < gang.size and not streams(plan, gang.size):
        shared = gang.broadcast(shared, readers[0])
    assert shared is not None
    if not plan.own:
        return shared, None
    if len(plan.own) != gang.size:
        return shared, None
    own = bodies.get(plan.own[gang.rank].part)
    for rank, source in enumerate(plan.own):
        reader = source.readers[0]
        if reader != rank:
            body = bodies[source.part] if gang.rank == reader else None
            own = gang.move(body, reader, rank) or own
    return shared, own
