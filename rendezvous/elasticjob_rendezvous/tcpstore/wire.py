"""Wire protocol of torch's TCPStore, as bytes. No I/O; applies to torch 2.5 to 2.13.

A request is one byte followed by its parts: numbers are little-endian, a string or a value is
its length (8 bytes) and its bytes, a list of keys is their count (8 bytes) and the keys.
A connection begins with a validation and a ping, whose number the server returns.
The protocol has no version and no name: only this exchange reveals a foreign protocol.

| request | parts | answer |
|---|---|---|
| VALIDATE | a fixed number, 4 bytes | none |
| PING | any number, 4 bytes | the same number |
| SET, APPEND | key, value | none |
| COMPARE_SET | key, expected, desired | the resulting value |
| GET | key | the value; a client waits for the key first |
| ADD | key, 8 bytes signed | the sum, 8 bytes signed |
| CHECK | keys | 1 byte: 0 all exist, 1 some are missing |
| WAIT | keys | 1 byte, 0, once all exist |
| CANCEL_WAIT | none | 1 byte, 1 (possibly after a 0 that crossed it) |
| NUM_KEYS | none | 8 bytes |
| DELETE_KEY | key | 8 bytes: number of deleted keys |
| MULTI_GET | keys | the values |
| MULTI_SET | count, then key and value of each | none |
| LIST_KEYS | none | all keys, with their prefix |

Queues (14 to 16) are not supported: no rendezvous uses them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum

MAGIC = 0x3C85F7CE
KEY_PREFIX = b"/"
"""Prefix that every client adds to every key; the same as torch's."""
MAX_KEY_BYTES = 8 * 1024
MAX_VALUE_BYTES = 8 * 1024 * 1024
MAX_KEYS = 128 * 1024
MAX_KEYS_BYTES = 16 * 1024 * 1024
"""Maximum memory of a list of keys: about 50,000 of a usual length."""

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
    """Message that violates this protocol or exceeds its limits."""


def hello(nonce: int) -> bytes:
    """Return the first bytes of a connection; the server answers with the nonce."""
    return U8.pack(Query.VALIDATE) + U32.pack(MAGIC) + U8.pack(Query.PING) + U32.pack(nonce)


def block(data: bytes) -> bytes:
    return U64.pack(len(data)) + data


def query(kind: Query, *parts: bytes) -> bytes:
    """Return a request of parts that are already encoded."""
    return U8.pack(kind) + b"".join(parts)


def keys_of(keys: Sequence[bytes]) -> bytes:
    return U64.pack(len(keys)) + b"".join(map(block, keys))


def stored(key: str) -> bytes:
    """Return a key in its stored form."""
    return KEY_PREFIX + key.encode()


def value_of(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
