"""Rehearsal of `core.rehearsal` in which every message is encoded to and decoded from protobuf."""

from __future__ import annotations

from functools import cache

from pyetcd.etcdrpc import kv_pb2, rpc_pb2

from elasticjob_rendezvous.core.kv import Deleted, KeyValue, Range, Txn, TxnResult, WatchEvent
from elasticjob_rendezvous.core.rehearsal import rehearse as play
from elasticjob_rendezvous.etcd import wire


@cache
def rehearse() -> bool:
    """Run the rehearsal once per process; return True if it completed. Costs a few ms of CPU."""
    return play(answered, seen)


def _message(kv: KeyValue) -> wire.Message:
    return kv_pb2.KeyValue(
        key=kv.key.encode(),
        value=kv.value,
        create_revision=kv.create_revision,
        mod_revision=kv.mod_revision,
        lease=kv.lease,
    )


def answered(txn: Txn, result: TxnResult) -> TxnResult:
    """Encode and decode a transaction and its result."""
    rpc_pb2.TxnRequest.FromString(wire.txn_request(txn).SerializeToString())
    found = iter(result.ranges)
    answers = []
    for op in txn.success if result.succeeded else txn.failure:
        answer = rpc_pb2.ResponseOp()
        if isinstance(op, Range):
            answer.response_range.kvs.extend(map(_message, next(found)[1]))
        answers.append(answer)
    reply = rpc_pb2.TxnResponse(succeeded=result.succeeded, responses=answers)
    reply.header.revision = result.revision
    reply.header.cluster_id = result.cluster_id
    return wire.txn_result(txn, rpc_pb2.TxnResponse.FromString(reply.SerializeToString()))


def seen(events: tuple[WatchEvent, ...]) -> tuple[WatchEvent, ...]:
    """Encode and decode watch events."""
    reply = rpc_pb2.WatchResponse()
    for event in events:
        if isinstance(event, Deleted):
            gone = kv_pb2.KeyValue(key=event.key.encode(), mod_revision=event.mod_revision)
            reply.events.add(type=kv_pb2.Event.DELETE, kv=gone)
        else:
            reply.events.add(kv=_message(event))
    return wire.watch_events(rpc_pb2.WatchResponse.FromString(reply.SerializeToString()).events)
