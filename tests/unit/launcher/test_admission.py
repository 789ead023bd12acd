"""Admission of connections: which one gives way, and when accepting pauses."""

from __future__ import annotations

from collections.abc import Hashable

from elasticjob_launcher.admission import Admission, Caps


def admission(**caps: int | None) -> Admission[Hashable]:
    return Admission(Caps(**{"unproven": 12, "per_address": 8, **caps}))  # type: ignore[arg-type]


def test_oldest_connection_of_an_address_at_its_cap_makes_room() -> None:
    some = admission()
    assert [some.arrive(number, "a") for number in range(8)] == [None] * 8
    assert [some.arrive(number, "a") for number in (8, 9)] == [0, 1]
    assert some.arrive("honest", "b") is None


def test_address_with_most_connections_makes_room_for_others() -> None:
    some = admission()
    for number in range(8):
        some.arrive(("a", number), "a")
    for number in range(4):
        some.arrive(("b", number), "b")
    assert not some.paused
    assert some.arrive("honest", "c") == ("a", 0)


def test_accepting_pauses_while_no_address_has_more_than_a_few() -> None:
    some = admission()
    for number in range(12):
        assert some.arrive(number, str(number // 4)) is None
    assert some.paused
    some.leave(3)
    assert not some.paused


def test_kept_connection_makes_room_and_is_never_closed_for_others() -> None:
    some = admission(kept=2)
    some.arrive("kept", "a")
    assert some.keep("kept")
    assert {some.arrive(number, "a") for number in range(20)} == {None, *range(12)}


def test_connection_beyond_cap_of_kept_ones_is_refused() -> None:
    some = admission(kept=3, kept_per_address=2)
    for number in range(3):
        some.arrive(number, "a")
    assert [some.keep(number) for number in range(3)] == [True, True, False]
    for address in "bc":
        some.arrive(address, address)
    assert [some.keep(address) for address in "bc"] == [True, False]
    some.leave(0)
    assert some.keep("c"), "a connection that ended makes room"


def test_closed_connection_cannot_be_kept() -> None:
    some = admission(per_address=1, kept=9)
    some.arrive("old", "a")
    assert some.arrive("new", "a") == "old"
    assert not some.keep("old")
    some.leave("old")
    assert some.keep("new")
