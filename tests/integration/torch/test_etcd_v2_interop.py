"""Rendezvous of torch's own `etcd` handler together with ElasticJob's, on etcd 3.4 and 3.5."""

from __future__ import annotations

import json
import uuid

import pytest

from elasticjob_rendezvous.api import RendezvousClosedError
from tests.integration.etcd_server import EtcdServer, wait_until
from tests.integration.etcd_v2_rig import SECONDS, Member, Run, StartRun, agreed, together

# torch's lease threads die of their first unexpected answer: etcd 3.5 cannot renew a folder.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception in thread:pytest.PytestUnhandledThreadExceptionWarning"
)


@pytest.fixture
def run(v2_etcd: EtcdServer, start_v2_run: StartRun) -> Run:
    """Return a run on each of the shared servers."""
    return start_v2_run(v2_etcd)


def gang(run: Run, ours: int, torchs: int, smallest: int, **settings: float) -> list[Member]:
    size = ours + torchs
    return [run.ours(smallest, size, **settings) for _ in range(ours)] + [
        run.torchs(smallest, size, **settings) for _ in range(torchs)
    ]


@pytest.mark.parametrize(("ours", "torchs"), [(1, 1), (1, 3), (3, 1)])
def test_mixed_gang_meets_repeatedly(run: Run, ours: int, torchs: int) -> None:
    members = gang(run, ours, torchs, ours + torchs)
    for number in ("1", "2"):
        infos = together(members)
        text = run.text()
        assert text is not None
        state = json.loads(text)
        assert (state["status"], state["version"]) == ("final", number)
        assert json.dumps(state) == text
        infos[0].store.set("said by 0", number)
        assert {info.store.get("said by 0") for info in infos} == {number.encode()}


def test_newcomer_is_visible_to_both_implementations(run: Run) -> None:
    members = [run.ours(1, 4, last_call_timeout=3), run.torchs(1, 4, last_call_timeout=3)]
    together(members)
    for newcomer in (
        run.ours(1, 4, last_call_timeout=3),
        run.torchs(1, 4, last_call_timeout=3),
    ):
        newcomer.enter()
        wait_until(
            lambda: all(member.handler.num_nodes_waiting() > 0 for member in members),
            "the newcomer to be told of",
            SECONDS,
        )
        for member in members:
            member.enter()
        members.append(newcomer)
        agreed([member.done() for member in members])


def test_place_of_leaver_is_taken_by_torch_member(run: Run) -> None:
    leaver = run.ours(2, 2).enter()
    run.await_text('"participants": [0]')
    leaver.handler.leave()
    run.await_text('"participants": []')
    together([run.torchs(2, 2), run.ours(2, 2)])


def test_close_by_either_implementation_closes_for_both(run: Run) -> None:
    ours, torchs = gang(run, 1, 1, 2)
    together([ours, torchs])
    torchs.handler.set_closed()
    assert ours.handler.is_closed()
    with pytest.raises(RendezvousClosedError):
        ours.enter().done()


def test_torch_sees_run_closed_by_native_member(run: Run) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousClosedError as TorchsError

    ours, torchs = gang(run, 1, 1, 2)
    together([ours, torchs])
    assert ours.handler.shutdown()
    assert torchs.handler.is_closed()
    with pytest.raises(TorchsError):
        torchs.enter().done()


def test_extra_data_is_exchanged_in_both_directions(run: Run) -> None:
    ours, torchs = (member.rendezvous for member in gang(run, 1, 1, 2))
    run.client.write(run.path("/rdzv/v_1"), None, dir=True)
    ours.store_extra_data("1", "a", [1])
    torchs.store_extra_data("1", "b", {"c": 2})
    assert torchs.load_extra_data("1", "a") == [1]
    assert ours.load_extra_data("1", "b", 5) == {"c": 2}


@pytest.mark.parametrize("run_id", [7, "two words"])
def test_implementations_agree_on_any_run_id(run: Run, run_id: object) -> None:
    name = f"{run.run_id} {run_id}" if isinstance(run_id, str) else uuid.uuid4().int >> 64
    run.run_id = name  # type: ignore[assignment]
    members = gang(run, 1, 1, 2)
    assert [member.handler.get_run_id() for member in members] == [name, name]
    infos = together(members)
    infos[0].store.set("key", "value")
    assert infos[1].store.get("key") == b"value"
