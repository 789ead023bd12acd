"""V2 rendezvous on real etcd 3.4 and 3.5: life cycle of versions."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import etcd
import pytest

from bench.rendezvous_case import run_case
from elasticjob_rendezvous.api import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from elasticjob_rendezvous.etcd_v2 import (
    EtcdRendezvousRetryableFailure,
    EtcdRendezvousRetryImmediately,
    create_rdzv_handler,
)
from tests.integration.etcd_server import EtcdServer, wait_until
from tests.integration.etcd_v2_rig import SECONDS, VERSIONS, Run, StartRun, agreed, together
from tests.integration.torch.forked_gang import fork_server


@pytest.fixture
def run(v2_etcd: EtcdServer, start_v2_run: StartRun) -> Run:
    """Return a run on each of the shared servers."""
    return start_v2_run(v2_etcd)


def test_three_members_write_same_keys_as_torch(run: Run) -> None:
    infos = together([run.ours(3, 3) for _ in range(3)])
    assert [info.round for info in infos] == [1, 1, 1]
    keys = [run.path(f"/rdzv/v_1/rank_{rank}") for rank in range(3)]
    text = run.text()
    assert text is not None
    state = json.loads(text)
    assert text == json.dumps(
        {
            "status": "final",
            "version": "1",
            "participants": [0, 1, 2],
            "keep_alives": state["keep_alives"],
            "num_workers_waiting": 0,
        }
    )
    assert sorted(state["keep_alives"]) == keys
    assert run.client.get(run.path("/rdzv/active_version")).ttl is None
    assert run.client.get(run.path("/rdzv/version_counter")).value == "1"
    assert 7000 < run.client.get(run.path("/")).ttl <= 7200
    nodes = [run.client.get(key) for key in keys]
    assert all(0 < node.ttl <= 10 for node in nodes)
    marks = {node.value for node in nodes}  # torch leaves them empty, and reads none
    assert len(marks) == 3
    assert "" not in marks


def test_store_is_shared_within_one_version(run: Run) -> None:
    members = [run.ours(2, 2) for _ in range(2)]
    first = together(members)
    first[0].store.set("key", b"value\0")
    assert first[1].store.get("key") == b"value\0"
    node = run.client.get(run.path("/rdzv/v_1/kv/a2V5"))
    assert (node.value, node.ttl) == ("dmFsdWUA", None)
    second = together(members)
    assert second[0].round == 2
    assert not second[0].store.check(["key"])


def test_newcomer_is_announced_and_joins_next_version(run: Run) -> None:
    members = [run.ours(1, 3, last_call_timeout=3) for _ in range(2)]
    together(members)
    newcomer = run.ours(1, 3, last_call_timeout=3).enter()
    run.await_text('"num_workers_waiting": 1')
    assert [member.handler.num_nodes_waiting() for member in members] == [1, 1]
    for member in members:
        member.enter()
    infos = agreed([member.done() for member in [*members, newcomer]])
    assert infos[0].round == 2
    assert [member.handler.num_nodes_waiting() for member in members] == [0, 0]


def test_surplus_node_waits_for_free_place(run: Run) -> None:
    members = [run.ours(2, 2) for _ in range(2)]
    together(members)
    third = run.ours(2, 2).enter()
    run.await_text('"num_workers_waiting": 1')
    members[0].handler.leave()  # another node waits: its key goes at once
    members[1].enter()
    assert {info.round for info in agreed([members[1].done(), third.done()])} == {2}


def test_node_that_stops_waiting_is_not_counted(run: Run) -> None:
    member = run.ours(1, 1)
    together([member])
    other = run.ours(1, 1).enter()
    run.await_text('"num_workers_waiting": 1')
    other.handler.leave()
    with pytest.raises(RendezvousGracefulExitError):
        other.done()
    assert member.handler.num_nodes_waiting() == 0


def test_version_waits_for_maximum_until_last_call_ends(run: Run) -> None:
    first = run.ours(1, 3, last_call_timeout=2).enter()
    run.await_text('"participants": [0]')
    assert 0 < run.client.get(run.path("/rdzv/active_version")).ttl <= 10
    second = run.ours(1, 3, last_call_timeout=2).enter()
    infos = agreed([first.done(), second.done()])
    assert len(infos) == 2


def test_last_call_may_exceed_version_ttl(run: Run) -> None:
    """A single member keeps the version alive, beyond its time to live of ten seconds."""
    first = run.ours(1, 2, last_call_timeout=SECONDS).enter()
    joined = time.monotonic()
    run.await_text('"participants": [0]')
    wait_until(lambda: time.monotonic() > joined + 11, "the time to live to pass", SECONDS)
    second = run.ours(1, 2, last_call_timeout=SECONDS).enter()
    assert agreed([first.done(), second.done()])[0].round == 1


def test_full_version_skips_last_call(run: Run) -> None:
    began = time.monotonic()
    together([run.ours(1, 2, last_call_timeout=SECONDS) for _ in range(2)])
    assert time.monotonic() - began < SECONDS / 2


def test_version_below_minimum_stays_joinable(run: Run) -> None:
    run.ours(2, 2).enter()
    run.await_text('{"status": "joinable", "version": "1", "participants": [0]}')
    assert run.client.get(run.path("/rdzv/active_version")).ttl is None


def test_version_with_lost_member_is_destroyed(run: Run) -> None:
    members = [run.ours(1, 2, last_call_timeout=0.2) for _ in range(2)]
    together(members)
    lost = next(member for member in members if member.info and member.info.rank == 1)
    stays = next(member for member in members if member is not lost)
    lost.rendezvous.close()
    run.client.delete(run.path("/rdzv/v_1/rank_1"))
    wait_until(lambda: stays.handler.num_nodes_waiting() == 1, "the loss to be told", SECONDS)
    assert together([stays])[0].round == 2


def test_member_of_deleted_version_sees_waiting_node(run: Run) -> None:
    member = run.ours(1, 2)
    together([member])
    run.client.delete(run.path("/rdzv/active_version"))
    assert member.handler.num_nodes_waiting() == 1
    together([run.ours(1, 1)])
    assert member.handler.num_nodes_waiting() == 1


def test_lost_folder_is_restored_during_training(run: Run) -> None:
    """A run on etcd 3.5 loses its folder after two hours."""
    members = [run.ours(2, 2) for _ in range(2)]
    together(members)
    text = run.text()
    run.client.delete(run.path("/"), recursive=True)
    assert [member.handler.num_nodes_waiting() for member in members] == [0, 0]
    keys = [run.path(f"/rdzv/v_1/rank_{rank}") for rank in range(2)]
    wait_until(lambda: all(key in run.client for key in keys), "the keys to be back", SECONDS)
    assert run.text() == text
    assert run.client.get(run.path("/rdzv/version_counter")).value == "1"
    assert [member.handler.num_nodes_waiting() for member in members] == [0, 0]
    assert {info.round for info in together(members)} == {2}


def test_concurrent_restores_of_lost_folder_agree(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = [run.ours(2, 2) for _ in range(2)]
    together(members)
    first, second = (member.handler._rdzv_impl._place for member in members)
    assert first is not None
    assert second is not None
    for place in (first, second):
        place.release()  # it checks its key on request
    run.client.delete(run.path("/"), recursive=True)
    write, meanwhile = first._client.write, list[bool]()

    def between(key: str, *arguments: object, **options: object) -> object:
        if key == run.path("/rdzv/active_version") and not meanwhile:
            meanwhile.append(False)
            meanwhile[0] = second._restored()
        return write(key, *arguments, **options)

    monkeypatch.setattr(first._client, "write", between)
    assert first._restored()
    assert meanwhile == [True], "it took the version for destroyed"


def test_closing_is_permanent_for_all_members(run: Run) -> None:
    member = run.ours(1, 2)
    waiting = run.ours(2, 2).enter()
    run.await_text('"participants": [0]')
    member.handler.set_closed()
    assert run.text() == '{"status": "closed", "version": "1", "participants": [0]}'
    with pytest.raises(RendezvousClosedError, match=run.run_id):
        waiting.done()
    with pytest.raises(RendezvousClosedError):
        member.enter().done()
    member.handler.set_closed()
    assert member.handler.is_closed()
    assert member.handler.num_nodes_waiting() == 0


def test_run_can_be_closed_before_first_join(run: Run) -> None:
    member = run.ours(1, 1)
    assert not member.handler.is_closed()
    assert member.handler.shutdown()
    assert run.text() == '{"status": "closed"}'
    with pytest.raises(RendezvousClosedError):
        run.ours(1, 1).enter().done()


def test_shutdown_can_leave_run_open(run: Run) -> None:
    member = run.ours(1, 1, close_on_shutdown=False)
    together([member])
    assert member.handler.shutdown()
    assert not run.ours(1, 1).handler.is_closed()


def test_too_few_members_time_out_without_leftovers(run: Run) -> None:
    with pytest.raises(RendezvousTimeoutError, match=r"no rendezvous within 0.5 s"):
        run.ours(2, 2, timeout=0.5).enter().done()
    assert run.text() == '{"status": "joinable", "version": "1", "participants": []}'
    assert run.path("/rdzv/v_1/rank_0") not in run.client


def test_leaving_joiner_releases_its_place(run: Run) -> None:
    first = run.ours(3, 3).enter()
    run.await_text('"participants": [0]')
    leaver = run.ours(3, 3).enter()
    run.await_text('"participants": [0, 1]')
    leaver.handler.leave()
    with pytest.raises(RendezvousGracefulExitError):
        leaver.done()
    assert run.text() == '{"status": "joinable", "version": "1", "participants": [0]}'
    with pytest.raises(RendezvousGracefulExitError):  # and all later calls
        leaver.enter().done()
    others = [run.ours(3, 3).enter() for _ in range(2)]
    assert agreed([member.done() for member in [first, *others]])[0].round == 1


def test_abandoned_middle_place_is_not_waited_for(run: Run) -> None:
    leaver = run.ours(3, 3).enter()
    run.await_text('"participants": [0]')
    others = [run.ours(3, 3).enter()]
    run.await_text('"participants": [0, 1]')
    leaver.handler.leave()
    run.await_text('"version": "2"', '"participants": [0]')
    others += [run.ours(3, 3).enter() for _ in range(2)]
    assert agreed([member.done() for member in others])[0].round == 2


@pytest.mark.parametrize("text", ["nonsense", '{"status": "joinable", "version": 1}'])
def test_malformed_state_raises_specific_error(run: Run, text: str) -> None:
    member = run.ours(1, 1)
    run.client.set(run.path("/rdzv/active_version"), text)
    with pytest.raises(RendezvousStateError, match="malformed"):
        member.enter().done()


def test_malformed_counter_raises_specific_error(run: Run) -> None:
    member = run.ours(1, 1)
    run.client.set(run.path("/rdzv/version_counter"), "many")
    with pytest.raises(RendezvousStateError, match="counter is malformed: 'many'"):
        member.enter().done()


def test_members_with_different_sizes_are_reported(run: Run) -> None:
    run.ours(3, 3).enter()
    run.await_text('"participants": [0]')
    with pytest.raises(RendezvousStateError, match="same min and max"):
        run.ours(1, 1).enter().done()


def test_public_steps_raise_torch_errors(run: Run) -> None:
    """The public methods, called as a user of torch's class may call them."""
    one = run.ours(1, 2).rendezvous
    with pytest.raises(etcd.EtcdKeyNotFound):
        one.get_rdzv_state()
    created = one.try_create_rendezvous()
    assert json.loads(created.value) == {"status": "joinable", "version": "1", "participants": []}
    with pytest.raises(etcd.EtcdAlreadyExist):
        one.try_create_rendezvous()
    with pytest.raises(EtcdRendezvousRetryImmediately):
        one.join_rendezvous("2")
    joined, rank = one.join_rendezvous("1")
    assert rank == 0
    with pytest.raises(EtcdRendezvousRetryImmediately):
        one.confirm_membership("1", 0)
    one.handle_join_last_call("1", time.time() + 0.2)
    assert one.wait_for_peers("1").value.startswith('{"status": "frozen"')
    two = run.ours(1, 2).rendezvous
    with pytest.raises(EtcdRendezvousRetryableFailure):
        two.join_rendezvous("1")
    with pytest.raises(EtcdRendezvousRetryImmediately):
        two.announce_self_waiting("1")
    assert one.confirm_phase("1", 0) == ("1", 0, 1)
    assert one.wait_for_final("1").value == run.text()
    with pytest.raises(EtcdRendezvousRetryableFailure):
        one.wait_for_peers("1")
    assert json.loads(two.announce_self_waiting("1").value)["num_workers_waiting"] == 1
    result, state = one.get_rdzv_state()
    assert (result.value, state["num_workers_waiting"]) == (run.text(), 1)
    result, state = one.try_wait_for_state_change(result.etcd_index + 1, timeout=0.2)
    assert state["status"] == "final"
    assert result.etcd_index > joined.etcd_index
    two.wait_for_rendezvous_to_free("0")
    one.close()
    two.close()


def test_public_steps_see_changes_that_the_watch_has_not_reported(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watch can be behind; here it reports nothing after its first reading."""
    one, two, third = (run.ours(1, most).rendezvous for most in (2, 2, 3))
    for late in (two, third):
        with pytest.raises(EtcdRendezvousRetryableFailure):
            late.wait_for_peers("1")  # opens the watch
        monkeypatch.setattr(late._feed, "_take", lambda line: None)
    one.try_create_rendezvous()
    one.join_rendezvous("1")
    assert two.join_rendezvous("1")[1] == 1
    one.handle_join_last_call("1", time.time())
    two.wait_for_peers("1")
    one.confirm_membership("1", 0)
    two.confirm_membership("1", 1)
    one.wait_for_final("1")
    assert json.loads(third.announce_self_waiting("1").value)["num_workers_waiting"] == 1
    for rendezvous in (one, two, third):
        rendezvous.close()


def test_version_in_setup_by_another_node_is_waited_for(run: Run) -> None:
    """The maker dies: `setup` expires after five seconds."""
    member = run.ours(1, 1)
    run.client.write(run.path("/rdzv/active_version"), '{"status": "setup"}', ttl=2)
    assert together([member])[0].round == 1


def test_unconfirmed_participant_delays_version_only_until_its_timeout(run: Run) -> None:
    """The participant joins as torch's do, without a key of its own, and then falls silent."""
    member = run.ours(2, 2).enter()
    text = run.await_text('"participants": [0]')
    frozen = text.replace("joinable", "frozen").replace("[0]}", '[0, 1], "keep_alives": []}')
    run.client.test_and_set(run.path("/rdzv/active_version"), frozen, text, ttl=10)
    run.await_text("frozen", "rank_0")
    assert 0 < run.client.get(run.path("/rdzv/active_version")).ttl <= 10
    run.await_text('"version": "2"', '"participants": [0]')
    other = run.ours(2, 2).enter()
    assert agreed([member.done(), other.done()])[0].round == 2


def test_extra_data_round_trips(run: Run) -> None:
    one, two = (member.rendezvous for member in (run.ours(1, 1), run.ours(1, 1)))
    found: list[object] = []
    reader = threading.Thread(target=lambda: found.append(two.load_extra_data("1", "a", SECONDS)))
    reader.start()
    one.store_extra_data("1", "b", [1])
    assert run.client.get(run.path("/rdzv/v_1/extra_data")).value == '{"b": [1]}'
    one.store_extra_data("1", "a", {"x": None})
    reader.join(SECONDS)
    assert found == [{"x": None}]
    assert run.client.get(run.path("/rdzv/v_1/extra_data")).value == '{"b": [1], "a": {"x": null}}'
    with pytest.raises(LookupError, match=r"no extra data 'c' within 0\.2 s"):
        two.load_extra_data("1", "c", 0.2)


def test_extra_data_of_concurrent_writers_round_trips(run: Run) -> None:
    member = run.ours(1, 1).rendezvous
    threads = [
        threading.Thread(target=member.store_extra_data, args=("1", str(n), n)) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert {n: member.load_extra_data("1", str(n), 1) for n in range(8)} == {n: n for n in range(8)}


@pytest.mark.parametrize("v2_etcd", VERSIONS[-1:], indirect=True)
def test_sixty_four_processes_join_at_once(run: Run, tmp_path) -> None:
    """Few requests each, independent of their number; torch's need 2N + 8 of them."""
    members = 64
    before = requests(run)
    joined = fork_server().Process(
        target=join_at_once, args=(members, run.parameters(members, members), tmp_path / "log")
    )
    joined.start()
    joined.join()
    assert joined.exitcode == 0
    assert (requests(run) - before) / members < 40


def join_at_once(members: int, parameters: RendezvousParameters, log: Path) -> None:
    """Fork the members. A process of pytest that has used gRPC forks slowly: its fork hooks look
    at each object."""
    result = run_case(members, lambda index: create_rdzv_handler(parameters), None, SECONDS, log)
    assert result.wall_seconds < SECONDS


def requests(run: Run) -> int:
    from bench.etcd_proc import EtcdServer

    counted = EtcdServer(f"127.0.0.1:{run.server.port}", 0).requests()
    return sum(counted.values())


def test_version_is_rebuilt_when_rank_0_dies_before_publishing_address(run: Run) -> None:
    silent, other = (run.ours(1, 2, last_call_timeout=2) for _ in range(2))
    barrier = threading.Thread(target=silent.rendezvous.rendezvous_barrier, daemon=True)
    barrier.start()
    run.await_text('"participants": [0]')
    other.enter()
    barrier.join(SECONDS)
    silent.rendezvous.close()  # as if it was killed: it publishes nothing, its key expires
    assert other.done().round == 2


def test_leaver_or_closed_run_does_not_wait_for_rank_0(run: Run) -> None:
    silent, leaver, other = (run.ours(3, 3) for _ in range(3))
    barrier = threading.Thread(target=silent.rendezvous.rendezvous_barrier, daemon=True)
    barrier.start()
    run.await_text('"participants": [0]')
    leaver.enter()
    run.await_text('"participants": [0, 1]')
    other.enter()
    barrier.join(SECONDS)
    leaver.handler.leave()
    with pytest.raises(RendezvousGracefulExitError):
        leaver.done()
    silent.handler.set_closed()
    with pytest.raises(RendezvousClosedError):
        other.done()
