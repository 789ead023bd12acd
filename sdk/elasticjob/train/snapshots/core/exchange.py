"""Records that the ranks of a round exchange, and the comparison of their calls. No I/O.

The first record of a process names the protocols that its library can use. Each later exchange
begins with a record of fixed size that names the call: ranks that make different calls receive each
other's records, and all of them have the error. See docs/decisions/0092-calls-of-ranks.md.
"""

from __future__ import annotations

import enum
import json
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticjob import layout
from elasticjob.train.snapshots.core.agreement import Offer, Part, SnapshotError, Version

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

RECORD_BYTES = 64
_FIRST = struct.Struct("<HHHh")
"""First record of a process: oldest and newest protocol, `_MAGIC`, `_NEGATIVE`. Each later library
must send and read it in this form. Version 0.1.0 sends the size of its first message instead, which
is not negative."""
FIRST_BYTES = _FIRST.size
_MAGIC, _NEGATIVE = 0x4A45, -1
_HEADER = struct.Struct("<BBxxIq")
INLINE_BYTES = RECORD_BYTES - _HEADER.size
"""Maximum size of a content that travels in the record itself."""
_PROPOSAL = struct.Struct("<??QB???Bq")
_BEGIN = struct.Struct("<I????qQqBfff??")
SAME_CALLS = "all ranks must make the same calls, with the same values"


class Protocols(NamedTuple):
    """Oldest and newest protocol that a library can use.

    A protocol is all later records, their order, and the decisions that each rank takes from them.
    """

    oldest: int
    newest: int


OURS = Protocols(5, 5)
"""Protocol 5 has losses in `Begin`; its first versions have no digest in `Exchange.OWN_PARTS`, and
no `Exchange.TENSORS`, which the ranks make if all digests are there, and differ. Protocol 4 has
`due` and `loss` in `Begin`, `Exchange.KEPT`, `Exchange.OWN_PARTS` at the first state that is held,
and another record of snapshots before planned stops. Protocol 3 has another decision on the
interval after a restore, and negative steps before those of parts that are written at a stop.
Protocol 2 has `damage`, `owner` and `job` in `RestoreMessage`, `Exchange.OWN_PARTS`, a second
`Exchange.STORED` after a demanded snapshot, and another decision on sharded state without parts of
the ranks."""


def pack_first(protocols: Protocols) -> bytes:
    """Encode the first record of a process."""
    return _FIRST.pack(*protocols, _MAGIC, _NEGATIVE)


def common_protocol(records: Sequence[bytes | memoryview]) -> int:
    """Return the newest protocol that all ranks can use, from their first records.

    Raises SnapshotError on all ranks that have this function if there is none.
    """
    found = [_unpack_first(record) for record in records]
    newest, oldest = min(each.newest for each in found), max(each.oldest for each in found)
    if newest >= oldest:
        return newest
    old = next(rank for rank, each in enumerate(found) if each.newest == newest)
    new = next(rank for rank, each in enumerate(found) if each.oldest == oldest)
    raise SnapshotError(
        f"rank {old} has an older version of the elasticjob library than rank {new}, and they have "
        f"no protocol of snapshots in common ({_named(found[old])} and {_named(found[new])}): "
        "install one version on all nodes. During a rolling update of an image, the job continues "
        "once all nodes have the new one"
    )


def _unpack_first(record: bytes | memoryview) -> Protocols:
    oldest, newest, magic, sign = _FIRST.unpack(record)
    return Protocols(oldest, newest) if (magic, sign) == (_MAGIC, _NEGATIVE) else Protocols(0, 0)


def _named(protocols: Protocols) -> str:
    return "{} to {}".format(*protocols) if protocols.newest else "none"


class Call(enum.IntEnum):
    """Call of `Snapshots` in which the ranks exchange records."""

    RESTORE = 0
    SAVE = 1


class End(enum.Enum):
    """Reason for which a rank makes no further call; the values are part of the protocol."""

    CLOSE = "close"
    PROCESS = "process"


class Exchange(enum.IntEnum):
    """Exchanges within the calls; the numbers are part of the protocol."""

    SETTINGS = 0
    SETTINGS_TEXTS = 1
    OFFERS = 2
    READS = 3
    BEGIN = 4
    SHARDS = 5
    FOLDERS = 6
    ADDRESSES = 7
    COPIES = 8
    HOLD = 9
    PROPOSALS = 10
    STORED = 11
    OWN_PARTS = 12
    KEPT = 13
    TENSORS = 14


class Header(NamedTuple):
    """First fields of a record.

    Args:
        size: bytes of the content of this rank, in the record or in the exchange that follows.
        step: step of `save`; 0 for `restore`.
    """

    call: int
    exchange: int
    size: int
    step: int


def text_of(call: int, step: int) -> str:
    """Return a call as the script makes it."""
    return "restore()" if call == Call.RESTORE else f"save() of step {step}"


def pack_record(header: Header, content: bytes) -> bytes:
    """Encode a record, with the content if there is room for it."""
    inline = content if len(content) <= INLINE_BYTES else b""
    return (_HEADER.pack(*header) + inline).ljust(RECORD_BYTES, b"\0")


def unpack_header(record: bytes | memoryview) -> Header:
    """Decode the first fields of a record."""
    return Header(*_HEADER.unpack(record[: _HEADER.size]))


def inline_content(record: memoryview, size: int) -> memoryview:
    """Return the content of `size` bytes in a record."""
    return record[_HEADER.size : _HEADER.size + size]


def check_calls(headers: Sequence[Header]) -> None:
    """Raise SnapshotError on all ranks if one is in another call or another exchange of it."""
    first = headers[0]
    calls = [text_of(each.call, each.step) for each in headers]
    for rank, each in enumerate(headers):
        if each.call != first.call:
            raise _difference(f"rank 0 has called {calls[0]}, and rank {rank} {calls[rank]}")
    if first.call == Call.SAVE:
        check_same("save()", [{"step": each.step} for each in headers])
    for rank, each in enumerate(headers):
        if each.exchange != first.exchange:
            raise _difference(
                f"rank 0 exchanges {_exchange(first)} in {calls[0]}, and rank {rank} "
                f"{_exchange(each)}"
            )


def _difference(text: str) -> SnapshotError:
    """Return the error for different calls of the ranks, which all of them raise."""
    error = SnapshotError(f"{text}: {SAME_CALLS}")
    error.is_of_calls = True
    return error


def _exchange(header: Header) -> str:
    names = {int(each): each.name.lower().replace("_", " ") for each in Exchange}
    return names.get(header.exchange, f"number {header.exchange}")


def check_same(call: str, values: Sequence[Mapping[str, object]]) -> None:
    """Raise SnapshotError on all ranks if a value differs between them.

    Args:
        call: the call to which the values belong.
        values: the values of each rank by their names.
    """
    for name, first in values[0].items():
        for rank, each in enumerate(values):
            if each[name] != first:
                raise _difference(
                    f"{call} has {name}={first} on rank 0, and {name}={each[name]} on rank {rank}"
                )


def check_tensors(tensors: Sequence[Sequence[str]]) -> None:
    """Raise SnapshotError on all ranks if they have other distributed tensors.

    Args:
        tensors: path, type and shape of each distributed tensor of each rank.
    """
    first = tensors[0]
    for rank, each in enumerate(tensors):
        found = [(one, "rank 0", f"rank {rank}") for one in first if one not in each]
        found += [(one, f"rank {rank}", "rank 0") for one in each if one not in first]
        if found:
            tensor, there, elsewhere = found[0]
            raise _difference(
                f"save() has the distributed tensor {tensor} on {there}, and not on {elsewhere} (a "
                "state that differs between ranks, as of the stages of a pipeline, belongs in "
                "rank_state, as local tensors)"
            )
        for mine, other in zip(first, each):
            if mine != other:
                raise _difference(
                    f"save() has the distributed tensor {mine} on rank 0 where rank {rank} has "
                    f"{other} (build the state in the same order on all ranks, such as by sorted "
                    "names)"
                )


class Proposal(NamedTuple):
    """Record of one rank before a snapshot.

    Args:
        has_rank_state, stores: of the call of `save`, the same on all ranks.
        steps: number of steps until the next snapshot.
        copies: `State` of its copies on other nodes.
        is_time: True if a snapshot in storage is due by its clock.
        is_busy: True while it writes to storage.
        holds: True if it can hold the state of each step for a copy at a stop.
        missing: places where it lacks parts of the last snapshot, by `Missing`.
        complete_step: step of the newest snapshot in storage that it knows of.
    """

    has_rank_state: bool
    stores: bool
    steps: int
    copies: int
    is_time: bool
    is_busy: bool
    holds: bool
    missing: int
    complete_step: int

    def packed(self) -> bytes:
        return _PROPOSAL.pack(*self)


def unpack_proposals(contents: Iterable[bytes | memoryview]) -> list[Proposal]:
    """Decode the proposals of all ranks. Raises SnapshotError if their calls differ."""
    found = [Proposal(*_PROPOSAL.unpack(content)) for content in contents]
    calls = [{"rank_state": each.has_rank_state, "store": each.stores} for each in found]
    check_same("save()", calls)
    return found


class Begin(NamedTuple):
    """Record of one rank at the start of a round, once the ranks have agreed on a snapshot.

    Args:
        bits: random bits, of which those of rank 0 number the gang.
        is_measured: True if the interval of its snapshots depends on measurements.
        has_place: True if it has memory or storage.
        stores: True if it has storage.
        holds: True if it can hold the state of each step for a copy at a stop.
        reached_step, step_ns: fields of `Reached`.
        due: step at which the workers of earlier rounds would have taken the next regular snapshot.
        loss: `layout.Loss` of the steps that are lost.
        faults, seconds, cost: fields of `Losses` by the end of the last round.
        has_lost: True if that round lost steps which no restore has counted yet.
        follows_faults: True if the interval of its snapshots depends on these losses.
    """

    bits: int
    is_measured: bool
    has_place: bool
    stores: bool
    holds: bool
    reached_step: int
    step_ns: int
    due: int = layout.NO_STEP
    loss: int = layout.Loss.UNKNOWN
    faults: float = 0.0
    seconds: float = 0.0
    cost: float = 0.0
    has_lost: bool = False
    follows_faults: bool = False

    def packed(self) -> bytes:
        return _BEGIN.pack(*self)


def unpack_begins(contents: Iterable[bytes | memoryview]) -> list[Begin]:
    """Decode the records of all ranks."""
    return [Begin(*_BEGIN.unpack(content)) for content in contents]


class RestoreMessage(NamedTuple):
    """Message of one rank before a restore.

    Args:
        offer: the parts that it can read.
        trouble: error of storage that it cannot read; empty otherwise.
        is_silent: True if storage has not answered it yet.
        is_listed: True if the offer has the content of storage.
        begun, complete: steps of the newest snapshot that earlier rounds began to store, and of the
            newest one that they stored.
        damage: error of a part that is damaged, or that it cannot decode; empty without one.
        owner: job to which the storage belongs; empty if it is unknown.
        job: this job, which a pod of an earlier operator does not know; empty if it is unknown.
    """

    offer: Offer
    trouble: str = ""
    is_silent: bool = False
    is_listed: bool = False
    begun: int = layout.NO_STEP
    complete: int = layout.NO_STEP
    damage: str = ""
    owner: str = ""
    job: str = ""


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
