"""The wire protocol of torch's TCPStore, as bytes. Pure; stated of torch 2.5 to 2.13.

A request is one byte, then its parts: numbers are little-endian, a string or a value is
its length (8 bytes) and its bytes, a list of keys is their count (8 bytes) and the keys.
A connection begins with a validation and a ping, whose number the server sends back.
There is no version and no name in it: who speaks something else is only noticed by that.

| request | parts | answer |
|---|---|---|
| VALIDATE | a fixed number, 4 bytes | none |
| PING | any number, 4 bytes | the same number |
| SET, APPEND | key, value | none |
| COMPARE_SET | key, expected, desired | the value then |
| GET | key | the value; a client waits for the key first |
| ADD | key, 8 bytes signed | the sum, 8 bytes signed |
| CHECK | keys | 1 byte: 0 all are there, 1 not all |
| WAIT | keys | 1 byte, 0, once all are there |
| CANCEL_WAIT | none | 1 byte, 1 (after a 0 that crossed it, perhaps) |
| NUM_KEYS | none | 8 bytes |
| DELETE_KEY | key | 8 bytes: how many were deleted |
| MULTI_GET | keys | the values |
| MULTI_SET | count, then key and value of each | none |
| LIST_KEYS | none | all keys, prefix and all |

Queues (14 to 16) are not served: nothing of a rendezvous uses them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum

MAGIC = 0x3C85F7CE
KEY_PREFIX = b"/"
"""A client puts it before every key, so that torch's and ours see the same ones."""
MAX_KEY_BYTES = 8 * 1024
MAX_VALUE_BYTES = 8 * 1024 * 1024
MAX_KEYS = 128 * 1024

READY, NOT_READY = 0, 1
STOP_WAITING, WAIT_CANCELED = 0, 1

U8 = struct.Struct("<B")
U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")
I64 = struct.Struct("<q")


class Query(IntEnum):
    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    NUM_KEYS = 7
    DELETE_KEY = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    CANCEL_WAIT = 12
    PING = 13
    LIST_KEYS = 17


class Malformed(ValueError):
    """What came is not this protocol, or beyond its limits."""


def hello(nonce: int) -> bytes:
    """The first bytes of a connection; the answer is the nonce."""
    return U8.pack(Query.VALIDATE) + U32.pack(MAGIC) + U8.pack(Query.PING) + U32.pack(nonce)


def block(data: bytes) -> bytes:
    return U64.pack(len(data)) + data


def query(kind: Query, *parts: bytes) -> bytes:
    """A request with parts that are whole already."""
    return U8.pack(kind) + b"".join(parts)


def keys_of(keys: Sequence[bytes]) -> bytes:
    return U64.pack(len(keys)) + b"".join(map(block, keys))


def stored(key: str) -> bytes:
    """A key as it is stored."""
    return KEY_PREFIX + key.encode()


def value_of(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
