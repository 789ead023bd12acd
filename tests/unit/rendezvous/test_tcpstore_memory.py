"""Contents of a TCPStore: its maximum size, and clients that wait for several keys."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from elasticjob_rendezvous.tcpstore.memory import ENTRY_BYTES, Memory, OutOfMemory

ROOM = 10 * ENTRY_BYTES


def test_values_beyond_the_maximum_are_refused_and_others_kept() -> None:
    memory = Memory(ROOM)
    memory.set(b"a", b"x" * ENTRY_BYTES)
    for change in (
        lambda: memory.set(b"b", bytes(ROOM)),
        lambda: memory.append(b"a", bytes(ROOM)),
        lambda: memory.append(b"a", bytes(8 * ENTRY_BYTES)),
        lambda: memory.compare_set(b"a", b"x" * ENTRY_BYTES, bytes(ROOM)),
    ):
        with pytest.raises(OutOfMemory):
            change()
    assert memory.keys() == [b"a"]
    assert memory.get(b"a") == b"x" * ENTRY_BYTES


def test_number_of_keys_is_limited_by_their_own_size() -> None:
    memory = Memory(ROOM)
    for number in range(9):
        memory.add(b"%d" % number, 1)
    with pytest.raises(OutOfMemory):
        memory.add(b"9", 1)
    assert len(memory) == 9


def test_overwritten_and_deleted_values_make_room() -> None:
    memory = Memory(ROOM)
    for _ in range(100):
        memory.set(b"a", bytes(8 * ENTRY_BYTES))
        memory.set(b"a", b"")
        memory.set(b"b", bytes(ENTRY_BYTES))
        assert memory.delete(b"b") == 1
    assert memory.delete(b"b") == 0


def test_outdated_keys_are_deleted_once_the_maximum_is_reached() -> None:
    def outdated(keys: Sequence[bytes]) -> list[bytes]:
        return [key for key in keys if key.startswith(b"old")]

    memory = Memory(ROOM, outdated)
    for number in range(8):
        memory.set(b"old%d" % number, b"")
    memory.set(b"new", b"")
    assert len(memory) == 9
    memory.set(b"old7", bytes(2 * ENTRY_BYTES))
    assert memory.keys() == [b"new", b"old7"]
    with pytest.raises(OutOfMemory):
        memory.set(b"large", bytes(ROOM))
    assert memory.keys() == [b"new"]
    memory.set(b"large", bytes(7 * ENTRY_BYTES))
    with pytest.raises(OutOfMemory):
        memory.set(b"larger", bytes(ENTRY_BYTES))


def test_waiters_count_until_they_are_woken_or_forgotten() -> None:
    memory = Memory(ROOM)
    keys = [b"%d" % number for number in range(4)]
    for _ in range(100):
        assert not memory.wait("one", keys)
        assert not memory.wait("two", keys), "shares the keys"
        with pytest.raises(OutOfMemory):
            memory.wait("three", [b"other", *keys, *(bytes([n]) for n in range(5))])
        memory.forget("one")
        memory.forget("one")
        memory.forget("two")
        assert memory.waiting == 0
    memory.set(b"a", bytes(8 * ENTRY_BYTES))


def test_waiter_is_woken_by_its_last_missing_key_in_any_order() -> None:
    memory = Memory(1 << 20)
    keys = [b"%d" % number for number in range(4)]
    memory.set(keys[2], b"")
    assert not memory.wait("all", keys)
    assert not memory.wait("first", keys[:1])
    assert memory.set(keys[3], b"") == []
    assert memory.set(keys[0], b"") == ["first"]
    assert memory.set(keys[0], b"again") == []
    assert memory.set(keys[1], b"") == ["all"]
    assert memory.waiting == 0
    assert memory.wait("all", keys)
    memory.set(b"new", b"")


def test_second_wait_replaces_the_first() -> None:
    memory = Memory(1 << 20)
    assert not memory.wait("one", [b"a"])
    assert not memory.wait("one", [b"b"])
    assert memory.set(b"a", b"") == []
    assert memory.set(b"b", b"") == ["one"]
