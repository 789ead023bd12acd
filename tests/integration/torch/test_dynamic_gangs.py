"""Gangs of real processes on real stores: they form, lose members, grow and close."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticjob_rendezvous.dynamic import wire
from tests.integration.etcd_server import EtcdServer
from tests.integration.torch.dynamic_gang import (
    Failed,
    Gang,
    Joined,
    Kind,
    Member,
    agree,
    join,
    until,
)

OURS, TORCH = Kind.OURS, Kind.TORCH
MakeGang = Callable[..., Gang]


@pytest.fixture(scope="module")
def etcd_v2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd"), "3.4", arguments=["--enable-v2"])
    try:
        yield server.start()
    finally:
        server.close()


@pytest.fixture
def gang(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeGang]:
    gangs: list[Gang] = []

    def make(store: str, min_nodes: int, max_nodes: int) -> Gang:
        endpoint = ""
        if store == "file":
            endpoint = str(tmp_path / "store")
        elif store == "etcd-v2":
            server = request.getfixturevalue("etcd_v2")
            endpoint = f"127.0.0.1:{server.port}"
            wipe(server)
        gangs.append(Gang(store, endpoint, min_nodes, max_nodes))
        return gangs[-1]

    yield make
    for each in gangs:
        each.close()


def wipe(server: EtcdServer) -> None:
    import etcd

    client = etcd.Client("127.0.0.1", server.port)
    try:
        client.delete("/torch", recursive=True, dir=True)
    except etcd.EtcdKeyNotFound:
        return


def settled(*members: Member) -> list[Joined]:
    """Join with all members, and again while nodes wait."""
    calls = {member: member.start("join") for member in members}

    def quiet() -> bool:
        if not all(call.done() for call in calls.values()):
            restless = [m for m, call in calls.items() if call.done() and m.call("waiting")]
        else:
            restless = [m for m in members if m.call("waiting")]
            if not restless:
                return True
        calls.update({member: member.start("join") for member in restless})
        return False

    until(quiet, "a round of all")
    return [call.result() for call in calls.values()]


each_store = pytest.mark.parametrize("store", ["tcp", "file", "etcd-v2"])


@each_store
def test_members_form_rounds_with_new_master_each(gang: MakeGang, store: str) -> None:
    members = gang(store, 4, 4).add(*[OURS] * 4, keep_alive_interval=5)
    first, second = join(*members), join(*members)
    assert (agree(first), agree(second)) == (0, 1)
    assert [each.rank for each in first] == [0, 1, 2, 3]
    assert first[0].master != second[0].master
    members[0].call("put", "key", "value")
    assert members[3].call("get", "key") == b"value"


@each_store
def test_killed_member_is_removed_and_others_continue(gang: MakeGang, store: str) -> None:
    members = gang(store, 2, 4).add(*[OURS] * 4)
    assert agree(join(*members)) == 0
    members[0].signal(signal.SIGKILL)
    rest = members[1:]
    until(lambda: all(m.call("waiting") > 0 for m in rest), "the loss to be seen")
    assert agree(join(*rest)) == 1


def test_member_paused_beyond_keep_alive_rejoins(gang: MakeGang) -> None:
    members = gang("tcp", 2, 3).add(*[OURS] * 3)
    join(*members)
    paused, others = members[0], members[1:]
    paused.signal(signal.SIGSTOP)
    until(lambda: all(m.call("waiting") > 0 for m in others), "the loss to be seen")
    assert agree(join(*others)) == 1
    paused.signal(signal.SIGCONT)
    until(lambda: paused.call("waiting") > 0, "it to see that it was given up")
    back = paused.start("join")
    until(lambda: all(m.call("waiting") > 0 for m in others), "it to wait")
    assert agree([*join(*others), back.result()]) == 2


def test_pause_within_keep_alive_disturbs_no_round(gang: MakeGang) -> None:
    members = gang("tcp", 2, 3).add(*[OURS] * 3, keep_alive_interval=10)
    join(*members)
    members[0].signal(signal.SIGSTOP)
    seen = [m.call("waiting") for _ in range(20) for m in members[1:]]
    members[0].signal(signal.SIGCONT)
    assert set(seen) == {0}
    assert members[0].call("waiting") == 0


def test_member_killed_during_join_is_not_waited_for(gang: MakeGang) -> None:
    g = gang("tcp", 3, 3)
    one, two, dead = g.add(*[OURS] * 3)
    dead.start("join")
    until(lambda: not dead.call("closed"), "it to join")
    dead.signal(signal.SIGKILL)
    (third,) = g.add(OURS)
    # It may have formed a round with two of ours before its loss was noticed: they rejoin, as
    # agents do.
    assert agree(settled(one, two, third)) in (0, 1)


def test_surplus_members_wait_replace_and_end_with_job(gang: MakeGang) -> None:
    g = gang("tcp", 2, 2)
    members = g.add(*[OURS] * 2)
    join(*members)
    spares = g.add(*[OURS] * 2)
    standing_by = [spare.start("join") for spare in spares]
    until(lambda: members[0].call("waiting") == 0, "nobody to ask for a round")
    members[0].kill()
    g.members.remove(members[0])
    until(lambda: members[1].call("waiting") > 0, "a free place")
    again = members[1].start("join")
    until(lambda: again.done() and any(c.done() for c in standing_by), "a spare to step in")
    (stepped_in,) = [call for call in standing_by if call.done()]
    assert agree([again.result(), stepped_in.result()]) >= 1
    (left,) = [call for call in standing_by if call is not stepped_in]
    members[1].call("close")
    with pytest.raises(Failed) as failed:
        left.result()
    assert failed.value.name == "RendezvousGracefulExitError"


def test_closing_and_timeouts_raise_specific_errors(gang: MakeGang) -> None:
    g = gang("tcp", 2, 3)
    (alone,) = g.add(OURS, join_timeout=1)
    with pytest.raises(Failed) as failed:
        alone.call("join")
    assert failed.value.name == "RendezvousTimeoutError"
    members = g.add(*[OURS] * 2)
    join(*members)
    assert members[0].call("shutdown") is True
    until(lambda: members[1].call("closed"), "the end to be seen")
    with pytest.raises(Failed) as failed:
        alone.call("join")
    assert failed.value.name == "RendezvousClosedError"


def test_shutdown_ends_join_and_others_complete_it(gang: MakeGang) -> None:
    g = gang("tcp", 2, 2)
    one, two, three = g.add(*[OURS] * 3, keep_alive_interval=5)
    joining = one.start("join")
    until(lambda: not one.call("closed") and not joining.done(), "it to join")
    assert one.call("shutdown") is True
    with pytest.raises(Failed) as failed:
        joining.result()
    assert failed.value.name == "RendezvousGracefulExitError"
    assert agree(join(two, three)) == 0


def test_lost_store_host_raises_connection_error(gang: MakeGang) -> None:
    g = gang("tcp", 2, 2)
    members = g.add(*[OURS] * 2)
    join(*members)
    g.host.signal(signal.SIGKILL)
    until(lambda: error_of(members[0], "closed") != "", "the store to be missed")
    assert error_of(members[0], "closed") == "RendezvousConnectionError"
    assert error_of(members[1], "join") == "RendezvousConnectionError"
    assert members[0].call("shutdown") is False


def error_of(member: Member, name: str) -> str:
    try:
        member.call(name)
    except Failed as failed:
        return failed.name
    return ""


def test_blocking_store_read_does_not_stop_keep_alive(gang: MakeGang) -> None:
    members = gang("tcp", 2, 2).add(*[OURS] * 2)
    join(*members)
    blocked = members[0].start("get", "later")
    others = members[1]
    longer_than_a_keep_alive = time.monotonic() + 4.5
    while time.monotonic() < longer_than_a_keep_alive:
        assert others.call("waiting") == 0
        blocked.done()
    others.call("put", "later", "now")
    assert blocked.result() == b"now"


def test_thirty_two_members_join_at_once(gang: MakeGang) -> None:
    members = gang("tcp", 32, 32).add(*[OURS] * 32, keep_alive_interval=20)
    rounds = join(*members)
    assert agree(rounds) == 0
    assert [each.rank for each in rounds] == list(range(32))
    assert agree(join(*members)) == 1


# -- with torch's own --------------------------------------------------------------------


@each_store
@pytest.mark.parametrize("completer", [OURS, TORCH])
def test_torch_and_native_members_form_one_gang(
    gang: MakeGang, store: str, completer: Kind
) -> None:
    """The last of four completes the round and assigns the ranks; all read them."""
    g = gang(store, 2, 4)
    before = [OURS, TORCH, TORCH if completer is OURS else OURS]
    # A member silent for three intervals loses its place, which may happen on a busy machine.
    members = g.add(*before, completer, last_call_timeout=60, keep_alive_interval=20)
    calls = [member.start("join") for member in members[:3]]
    until(lambda: not members[0].call("closed"), "the first three to begin")
    calls.append(members[3].start("join"))
    first = [call.result() for call in calls]
    agree(first)
    kinds = [*before, completer]
    assert 0 in [one.rank for one, kind in zip(first, kinds, strict=True) if kind is OURS]
    second = join(*members)
    agree(second)
    # A plain torchrun keeps the address of its first round, whatever is published later.
    assert second[0].master == first[0].master
    members[1].call("put", "key", "of torch")
    assert members[0].call("get", "key") == b"of torch"
    members[0].call("put", "other", "of ours")
    assert members[1].call("get", "other") == b"of ours"


@each_store
def test_mixed_gang_grows_shrinks_and_closes(gang: MakeGang, store: str) -> None:
    g = gang(store, 2, 5)
    # All return within a last call, even with one poll a second.
    one, two = g.add(OURS, TORCH, last_call_timeout=4)
    agree(join(one, two))
    three, four = g.add(OURS, TORCH, last_call_timeout=4)
    joining = [three.start("join"), four.start("join")]
    until(lambda: min(one.call("waiting"), two.call("waiting")) == 2, "the newcomers")
    agree([*join(one, two), *(call.result() for call in joining)])
    four.signal(signal.SIGKILL)
    until(lambda: one.call("waiting") and three.call("waiting"), "the loss to be seen by ours")
    rejoining = [one.start("join"), three.start("join")]
    # torch's own learns of it when ours wait.
    until(lambda: two.call("waiting") > 0, "torch's to see that ours wait")
    agree([*join(two), *(call.result() for call in rejoining)])
    two.call("close")
    until(lambda: one.call("closed") and three.call("closed"), "the end to be seen")
    assert error_of(one, "join") == "RendezvousClosedError"


def test_torch_member_ends_after_native_member_closes(gang: MakeGang) -> None:
    members = gang("tcp", 2, 2).add(OURS, TORCH, keep_alive_interval=5)
    agree(join(*members))
    members[0].call("shutdown")
    until(lambda: members[1].call("closed"), "the end to be seen")
    assert error_of(members[1], "join") == "RendezvousClosedError"


def test_paused_torch_member_is_removed_by_native_member(gang: MakeGang) -> None:
    g = gang("tcp", 2, 3)
    one, two, torchs = g.add(OURS, OURS, TORCH)
    agree(join(one, two, torchs))
    torchs.signal(signal.SIGSTOP)
    until(lambda: one.call("waiting") > 0 and two.call("waiting") > 0, "the loss to be seen")
    agree(join(one, two))


def test_store_of_a_paused_torch_agent_stays_the_workers_store(gang: MakeGang) -> None:
    g = gang("tcp", 1, 3)
    patient: dict[str, Any] = {"last_call_timeout": 6, "keep_alive_interval": 20}
    (theirs,) = g.add(TORCH, sharing=True, **patient)
    (alone,) = join(theirs)
    (ours,) = g.add(OURS, **patient)
    joins = [ours.start("join")]
    until(lambda: theirs.call("waiting") == 1, "the node of ours to wait")
    joins.append(theirs.start("join"))
    until(lambda: ours.call("participants") == 2, "both nodes to be in the round")
    theirs.signal(signal.SIGSTOP)
    until(lambda: ours.call("awaited_store") != "", "rank 0 to wait for the store")
    assert not joins[0].done()
    theirs.signal(signal.SIGCONT)
    assert agreed_store([each.result() for each in joins]) == alone.master


@pytest.mark.parametrize("store", ["tcp", "etcd-v2"])
def test_torch_members_that_fill_the_gang_keep_its_workers_store(
    gang: MakeGang, store: str
) -> None:
    """torch's nodes remember the store of their first round, and complete a full round."""
    g = gang(store, 4, 4)
    theirs = g.add(TORCH, TORCH, sharing=True)
    ours = g.add(OURS, OURS)
    joins = [member.start("join") for member in theirs]
    until(lambda: all(member.call("participants") == 2 for member in theirs), "torch's to join")
    joins += [member.start("join") for member in ours]
    first = agreed_store([each.result() for each in joins])
    for _ in range(2):
        joins = [member.start("join") for member in ours]
        until(lambda: all(member.call("participants") == 2 for member in ours), "ours to join")
        joins += [member.start("join") for member in theirs]
        assert agreed_store([each.result() for each in joins]) == first


def agreed_store(rounds: list[Joined]) -> tuple[str, int]:
    agree(rounds)
    return rounds[0].master


JOINS_UNTIL_SIGTERM = """
import signal, sys
from elasticjob_rendezvous import c10d
from elasticjob_rendezvous.api import RendezvousGracefulExitError, RendezvousParameters

handler = c10d.create_rdzv_handler(
    RendezvousParameters("c10d", sys.argv[1], "run", 2, 2, "127.0.0.1", store_type="file")
)
signal.signal(signal.SIGTERM, lambda *_: handler.shutdown())
print("joining", flush=True)
try:
    handler.next_rendezvous()
except RendezvousGracefulExitError:
    print("left")
"""


def test_sigterm_during_first_rendezvous_exits_cleanly(tmp_path: Path) -> None:
    from elasticjob_rendezvous import c10d
    from elasticjob_rendezvous.api import RendezvousParameters

    path = str(tmp_path / "store")
    with subprocess.Popen(
        [sys.executable, "-c", JOINS_UNTIL_SIGTERM, path], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "joining\n"
        backend, _ = c10d.create_backend(
            RendezvousParameters("c10d", path, "run", 2, 2, store_type="file")
        )
        until(lambda: backend.get_state() is not None, "it to join")
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=60)[0] == "left\n"
        assert process.returncode == 0
    found = backend.get_state()
    assert found is not None
    state = wire.decode(found[0])
    assert (state.participants, state.last_heartbeats, state.closed) == ({}, {}, False)
