"""Conversion between the values of `protocol.kv` and etcd's protobuf messages. No I/O.

Our own keys are UTF-8. Other bytes survive a round trip (surrogateescape), so
that a foreign key cannot break a range.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pyetcd.etcdrpc import kv_pb2, rpc_pb2

from elasticjob_rendezvous.protocol.kv import (
    Compare,
    Delete,
    Deleted,
    Is,
    KeyValue,
    Op,
    Order,
    Put,
    Range,
    RangeResult,
    Target,
    Txn,
    TxnResult,
    WatchEvent,
)

Message = Any
"""Generated protobuf message; the generated modules have no usable types."""

_RESULT = {
    Is.EQUAL: rpc_pb2.Compare.EQUAL,
    Is.NOT_EQUAL: rpc_pb2.Compare.NOT_EQUAL,
    Is.GREATER: rpc_pb2.Compare.GREATER,
    Is.LESS: rpc_pb2.Compare.LESS,
}


def _raw(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def _text(key: bytes) -> str:
    return key.decode("utf-8", "surrogateescape")


def interval(key: str, prefix: bool) -> tuple[bytes, bytes]:
    """Return etcd's (key, range_end) for one key, or for all keys with that prefix."""
    raw = _raw(key)
    if not prefix:
        return raw, b""
    stem = raw.rstrip(b"\xff")
    if not stem:  # no key is greater than all keys with this prefix
        return raw or b"\0", b"\0"
    return raw, stem[:-1] + bytes([stem[-1] + 1])


def range_request(target: Range) -> Message:
    key, end = interval(target.key, target.prefix)
    request = rpc_pb2.RangeRequest(key=key, range_end=end, limit=target.limit)
    if target.order is Order.CREATE:
        request.sort_target = rpc_pb2.RangeRequest.CREATE
        request.sort_order = rpc_pb2.RangeRequest.ASCEND
    return request


def page_request(target: Range, start: str, revision: int) -> Message:
    """Return the request for the keys of `target`'s prefix from `start` on, at a revision."""
    _, end = interval(target.key, target.prefix)
    return rpc_pb2.RangeRequest(
        key=_raw(start), range_end=end, limit=target.limit, revision=revision
    )


def put_request(op: Put) -> Message:
    return rpc_pb2.PutRequest(key=_raw(op.key), value=op.value, lease=op.lease)


def _operation(op: Op) -> Message:
    match op:
        case Put():
            return rpc_pb2.RequestOp(request_put=put_request(op))
        case Range():
            return rpc_pb2.RequestOp(request_range=range_request(op))
        case Delete():
            key, end = interval(op.key, op.prefix)
            removal = rpc_pb2.DeleteRangeRequest(key=key, range_end=end)
            return rpc_pb2.RequestOp(request_delete_range=removal)


def _comparison(compare: Compare) -> Message:
    if compare.target is Target.CREATE:
        return rpc_pb2.Compare(
            key=_raw(compare.key),
            result=_RESULT[compare.operator],
            target=rpc_pb2.Compare.CREATE,
            create_revision=compare.revision,
        )
    return rpc_pb2.Compare(
        key=_raw(compare.key),
        result=_RESULT[compare.operator],
        target=rpc_pb2.Compare.MOD,
        mod_revision=compare.revision,
    )


def txn_request(txn: Txn) -> Message:
    return rpc_pb2.TxnRequest(
        compare=[_comparison(compare) for compare in txn.compares],
        success=[_operation(op) for op in txn.success],
        failure=[_operation(op) for op in txn.failure],
    )


def watch_create_request(
    target: Range, start_revision: int, deletions_only: bool = False
) -> Message:
    key, end = interval(target.key, target.prefix)
    create = rpc_pb2.WatchCreateRequest(
        key=key,
        range_end=end,
        start_revision=start_revision,
        progress_notify=True,
        filters=[rpc_pb2.WatchCreateRequest.NOPUT] if deletions_only else [],
    )
    return rpc_pb2.WatchRequest(create_request=create)


def progress_request() -> Message:
    return rpc_pb2.WatchRequest(progress_request=rpc_pb2.WatchProgressRequest())


def key_value(kv: Message) -> KeyValue:
    return KeyValue(_text(kv.key), kv.value, kv.create_revision, kv.mod_revision, kv.lease)


def range_result(reply: Message) -> RangeResult:
    return RangeResult(
        revision=reply.header.revision,
        cluster_id=reply.header.cluster_id,
        kvs=tuple(map(key_value, reply.kvs)),
        count=reply.count,
    )


def txn_result(txn: Txn, reply: Message) -> TxnResult:
    taken = txn.success if reply.succeeded else txn.failure
    return TxnResult(
        succeeded=reply.succeeded,
        revision=reply.header.revision,
        cluster_id=reply.header.cluster_id,
        ranges=tuple(
            (op, tuple(map(key_value, answer.response_range.kvs)))
            for op, answer in zip(taken, reply.responses, strict=True)
            if isinstance(op, Range)
        ),
    )


def watch_events(events: Iterable[Message]) -> tuple[WatchEvent, ...]:
    return tuple(
        Deleted(_text(event.kv.key), event.kv.mod_revision)
        if event.type == kv_pb2.Event.DELETE
        else key_value(event.kv)
        for event in events
    )
