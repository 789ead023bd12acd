"""Exchange of bytes between the ranks of a round, over torch's process group."""

from __future__ import annotations

import datetime
import json
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticjob import layout
from elasticjob.train.agreement import STORAGE, Offer, Part, Plan, SnapshotError, Version
from elasticjob.train.part_files import Body, CorruptSnapshot, allocated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

log = logging.getLogger("elasticjob.train")

PATIENCE = datetime.timedelta(seconds=60)
"""Wait for the other ranks after which a rank warns, once in a round."""
_CHUNK_BYTES = 1 << 30
_SLICE_BYTES = 1 << 24
_UNKNOWN = -1
"""Number of an unknown checksum."""


class Gang:
    """Ranks of this round; one rank alone if no process group is initialized.

    Bytes travel over gloo, as tensors: nothing that is received is unpickled.
    """

    def __init__(self) -> None:
        import torch.distributed as dist

        self.rank, self.size = 0, 1
        self.call = "restore()"
        """Call of `Snapshots` in which the ranks exchange bytes."""
        self._group = None
        self._has_warned = False
        if dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            if dist.get_backend() != "gloo":
                self._group = dist.new_group(backend="gloo")

    def gather(self, content: bytes, *, is_fixed: bool = False) -> list[memoryview]:
        """Return the content of every rank, by rank; `is_fixed` if all have the same size."""
        import torch

        if self.size == 1:
            return [memoryview(bytearray(content))]
        sizes = [len(content)] * self.size
        if not is_fixed:
            counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            self._all_gather(counts, torch.tensor([len(content)]))
            sizes = [int(count) for count in counts]
        largest = max(sizes)
        if not largest:
            return [memoryview(b"") for _ in range(self.size)]
        padded = torch.zeros(largest, dtype=torch.uint8)
        if content:
            padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        buffers = [bytearray(largest) for _ in range(self.size)]
        found = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in buffers]
        self._all_gather(found, padded)
        return [memoryview(each)[:size] for each, size in zip(buffers, sizes)]

    def _all_gather(self, found: list[torch.Tensor], mine: torch.Tensor) -> None:
        """Gather; warn of ranks that do not make this call, as the wait may last until a timeout.

        A rank that is still busy, with an evaluation of its own, is no error.
        """
        import torch.distributed as dist

        work = dist.all_gather(found, mine, group=self._group, async_op=True)
        assert work is not None
        if not self._has_warned:
            try:
                work.wait(PATIENCE)
                return
            except RuntimeError:
                if not work.is_completed():
                    self._has_warned = True
                    log.warning(
                        "rank %d has waited %d s for other ranks in %s: all ranks must make the "
                        "same calls of Snapshots, after the same steps. A rank without this "
                        "message is still busy before this call, has left it out, or waits in "
                        "another collective. With recovery.hangTimeoutSeconds such a wait ends "
                        "with the stacks of all ranks",
                        self.rank,
                        PATIENCE.total_seconds(),
                        self.call,
                    )
        work.wait()  # raises the error of a collective that has failed, again

    def broadcast(self, body: Body | None, source: int) -> Body:
        """Return the body of rank `source`, which sends it from the memory that it is in."""
        if self.size == 1:
            assert body is not None
            return body
        import torch.distributed as dist

        def send(tensor: torch.Tensor) -> None:
            dist.broadcast(tensor, source, group=self._group)

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
        sizes = torch.tensor(read.sizes())
        dist.broadcast(sizes, source, group=self._group)
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
                read.advance(first + part.nbytes)
                tensor = torch.frombuffer(part, dtype=torch.uint8)
                work = dist.broadcast(tensor, source, group=self._group, async_op=True)
                travelling.append((first, work))
                if len(travelling) > 1:
                    arrive()
            while travelling:
                arrive()
        read.finish()
        return read.body

    def move(self, body: Body | None, source: int, target: int) -> Body | None:
        """Send the body of rank `source` to rank `target`; return it there, else None."""
        import torch.distributed as dist

        if self.rank == source:
            _transferred(body, lambda tensor: dist.send(tensor, target, group=self._group))
        if self.rank != target:
            return None
        return _transferred(None, lambda tensor: dist.recv(tensor, source, group=self._group))


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


def check_same(call: str, values: Sequence[Mapping[str, object]]) -> None:
    """Raise SnapshotError on all ranks if a value differs between them.

    Args:
        call: the call to which the values belong.
        values: the values of each rank by their names.
    """
    for name, first in values[0].items():
        for rank, each in enumerate(values):
            if each[name] != first:
                raise SnapshotError(
                    f"{call} has {name}={first} on rank 0, and {name}={each[name]} on rank {rank}: "
                    "all ranks must make the same calls, with the same values"
                )


def streams(plan: Plan, ranks: int) -> bool:
    """Return True if a rank sends the shared part to all others while it reads it.

    Not from storage, which may not answer: then the part is exchanged after the read.
    """
    return plan.shared.place != STORAGE and len(plan.shared.readers) < ranks


def _transferred(body: Body | None, transfer: Callable[[torch.Tensor], object]) -> Body:
    """Send a body, or receive one into new memory with None. Its content is not copied."""
    import torch

    sizes = torch.zeros(3, dtype=torch.int64)
    if body is not None:
        checksum = _UNKNOWN if body.checksum is None else body.checksum
        sizes = torch.tensor([body.head_bytes, body.size, checksum])
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


def own_parts(gang: Gang, plan: Plan, bodies: dict[Part, Body]) -> Iterator[Body]:
    """Yield the own parts of all ranks that wrote the snapshot, one after another, on all ranks.

    Removes each part from `bodies` once it is sent.
    """
    for source in plan.own:
        reader = source.readers[0]
        yield gang.broadcast(bodies.pop(source.part) if gang.rank == reader else None, reader)


class RestoreMessage(NamedTuple):
    """Message of one rank before a restore.

    Args:
        offer: the parts that it can read.
        trouble: error of storage that it cannot read; empty otherwise.
        is_silent: True if storage has not answered it yet.
        is_listed: True if the offer has the content of storage.
        begun, complete: steps of the newest snapshot that earlier rounds began to store, and of the
            newest one that they stored.
    """

    offer: Offer
    trouble: str = ""
    is_silent: bool = False
    is_listed: bool = False
    begun: int = layout.NO_STEP
    complete: int = layout.NO_STEP


def pack_message(message: RestoreMessage) -> bytes:
    """Encode the message of a rank."""
    parts = [[[*part.version, *part[1:]] for part in parts] for parts in message.offer]
    return json.dumps([parts, *message[1:]]).encode()


def unpack_message(content: memoryview) -> RestoreMessage:
    """Decode the message of a rank."""
    places, *others = json.loads(bytes(content))
    offer = Offer(*(tuple(_part(*fields) for fields in parts) for parts in places))
    return RestoreMessage(offer, *others)


def _part(step: int, gang: int, *fields: Any) -> Part:
    return Part(Version(step, gang), *fields)
