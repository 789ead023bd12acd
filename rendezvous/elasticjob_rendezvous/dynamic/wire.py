"""Encoding of the shared state: a pickle compatible with torch's dynamic rendezvous.

Protocol 4; refers to `_RendezvousState` and `_NodeDesc` of torch 2.13 by name, without torch.
Decoding checks every field. Encoding is deterministic.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

from elasticjob_rendezvous.api import RendezvousStateError
from elasticjob_rendezvous.dynamic.core.state import NodeDesc, State
from elasticjob_rendezvous.dynamic.pickles import Draft, Make, Name, load

TORCH_MODULE = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
STATE_CLASS = "_RendezvousState"
NODE_CLASS = "_NodeDesc"
LONGEST_STATE_BYTES = 64 << 20
_FIELDS = (
    "round",
    "complete",
    "deadline",
    "closed",
    "participants",
    "wait_list",
    "redundancy_list",
    "last_heartbeats",
)
_NODE_FIELDS = ("addr", "pid", "local_id")
_UNREADABLE = (ArithmeticError, LookupError, RecursionError, TypeError, ValueError)


def decode(data: bytes) -> State:
    """Decode a state.

    Raises:
        RendezvousStateError: the bytes are not a valid state; the message names the fault.
    """
    if len(data) > LONGEST_STATE_BYTES:
        raise RendezvousStateError(
            f"the rendezvous state is corrupt: {len(data)} bytes are more than "
            f"{LONGEST_STATE_BYTES}"
        )
    try:
        state: State = _is(load(data, _MAKE), State, "the stored value")
    except _UNREADABLE as error:
        raise RendezvousStateError(
            f"the rendezvous state is corrupt ({type(error).__name__}: {error}); "
            "another program may be writing under this run id"
        ) from error
    return state


def encode(state: State) -> bytes:
    """Encode a state.

    Raises:
        RendezvousStateError: an unknown field has a value that cannot be encoded.
    """
    try:
        return _Writer().dump(state)
    except (RecursionError, TypeError) as error:
        raise RendezvousStateError(f"the rendezvous state can't be written: {error}") from error


# -- reading ----------------------------------------------------------------------------


def _state(draft: Draft) -> State:
    values = dict(draft.attributes)
    read = {name: values.pop(name) for name in _FIELDS}
    deadline = read["deadline"]
    return State(
        round=_is(read["round"], int, "round"),
        complete=_is(read["complete"], bool, "complete"),
        deadline=None if deadline is None else _time(deadline, "deadline"),
        closed=_is(read["closed"], bool, "closed"),
        participants={
            _is(node, NodeDesc, "a node"): _is(rank, int, "a rank")
            for node, rank in _is(read["participants"], dict, "participants").items()
        },
        wait_list=_nodes(read["wait_list"], "wait_list"),
        redundancy_list=_nodes(read["redundancy_list"], "redundancy_list"),
        last_heartbeats={
            _is(node, NodeDesc, "a node"): _time(time, "a heartbeat")
            for node, time in _is(read["last_heartbeats"], dict, "last_heartbeats").items()
        },
        extra={_is(name, str, "a field"): value for name, value in values.items()},
    )


def _node(draft: Draft) -> NodeDesc:
    # torch's own pickle contains attributes, ours contains arguments.
    values = draft.attributes or dict(zip(_NODE_FIELDS, draft.arguments, strict=True))
    return NodeDesc(
        _is(values["addr"], str, "addr"),
        _is(values["pid"], int, "pid"),
        _is(values["local_id"], int, "local_id"),
    )


def _nodes(value: Any, name: str) -> frozenset[NodeDesc]:
    return frozenset(_is(node, NodeDesc, "a node") for node in _is(value, set, name))


def _is(value: Any, kind: type, name: str) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{name} is a {type(value).__name__} instead of a {kind.__name__}")
    return value


def _time(value: Any, name: str) -> datetime:
    time: datetime = _is(value, datetime, name)
    if time.tzinfo is None:
        raise ValueError(f"{name} has no time zone")
    return time


_MAKE: Mapping[Name, Make] = {
    Name(TORCH_MODULE, STATE_CLASS): _state,
    Name(TORCH_MODULE, NODE_CLASS): _node,
}


# -- writing ----------------------------------------------------------------------------


class _Writer:
    """Writer of pickle opcodes; `pickle.dumps` would import torch for the classes."""

    def __init__(self) -> None:
        self._out = io.BytesIO()
        self._known: dict[object, int] = {}

    def dump(self, state: State) -> bytes:
        self._out.write(pickle.PROTO + b"\x04")
        self._global(TORCH_MODULE, STATE_CLASS)
        self._put(())
        self._out.write(pickle.NEWOBJ)
        attributes: dict[str, object] = {
            "round": state.round,
            "complete": state.complete,
            "deadline": state.deadline,
            "closed": state.closed,
            "participants": state.participants,
            "wait_list": set(state.wait_list),
            "redundancy_list": set(state.redundancy_list),
            "last_heartbeats": state.last_heartbeats,
        }
        self._put({**attributes, **state.extra})
        self._out.write(pickle.BUILD + pickle.STOP)
        return self._out.getvalue()

    def _put(self, value: Any) -> None:
        match value:
            case None:
                self._out.write(pickle.NONE)
            case bool():
                self._out.write(pickle.NEWTRUE if value else pickle.NEWFALSE)
            case int():
                data = pickle.encode_long(value)
                self._sized(pickle.LONG4, data, "<i")
            case float():
                self._out.write(pickle.BINFLOAT + struct.pack(">d", value))
            case str():
                self._sized(pickle.BINUNICODE, value.encode("utf-8", "surrogatepass"), "<I")
            case bytes():
                self._sized(pickle.BINBYTES, value, "<I")
            case NodeDesc():
                self._once(value, lambda: self._node(value))
            case datetime() | timedelta():
                self._reduced(value)
            case timezone():
                self._once(value, lambda: self._reduced(value))
            case _:
                self._container(value)

    def _container(self, value: Any) -> None:
        match value:
            case dict():
                self._out.write(pickle.EMPTY_DICT + pickle.MARK)
                for key, item in value.items():
                    self._put(key)
                    self._put(item)
                self._out.write(pickle.SETITEMS)
            case tuple():
                self._marked(value, pickle.TUPLE)
            case list():
                self._out.write(pickle.EMPTY_LIST)
                self._marked(value, pickle.APPENDS)
            case set():
                self._out.write(pickle.EMPTY_SET)
                self._marked(sorted(value, key=repr), pickle.ADDITEMS)
            case frozenset():
                self._marked(sorted(value, key=repr), pickle.FROZENSET)
            case _:
                raise TypeError(f"a state cannot hold a {type(value).__name__}")

    def _marked(self, items: Any, opcode: bytes) -> None:
        self._out.write(pickle.MARK)
        for item in items:
            self._put(item)
        self._out.write(opcode)

    def _sized(self, opcode: bytes, data: bytes, size: str) -> None:
        self._out.write(opcode + struct.pack(size, len(data)) + data)

    def _node(self, node: NodeDesc) -> None:
        self._global(TORCH_MODULE, NODE_CLASS)
        self._put((node.addr, node.pid, node.local_id))
        self._out.write(pickle.REDUCE)

    def _reduced(self, value: datetime | timedelta | timezone) -> None:
        reduced: Any = value.__reduce__()
        kind, arguments = reduced[:2]
        self._global("datetime", kind.__name__)
        self._put(arguments)
        self._out.write(pickle.REDUCE)

    def _global(self, module: str, name: str) -> None:
        def emit() -> None:
            self._put(module)
            self._put(name)
            self._out.write(pickle.STACK_GLOBAL)

        self._once((module, name), emit)

    def _once(self, value: object, emit: Callable[[], None]) -> None:
        """Write a value the first time, and a reference to it afterwards."""
        place = self._known.get(value)
        if place is not None:
            self._out.write(pickle.LONG_BINGET + struct.pack("<I", place))
            return
        emit()
        self._known[value] = len(self._known)
        self._out.write(pickle.MEMOIZE)
