"""`torchrun --rdzv-backend=elasticjob`, unmodified, alone and in gangs with ElasticJob's agents."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elasticjob_rendezvous.protocol.records.members import CauseKind, OutcomeKind
from tests.integration.agent_rig import STEADY, until
from tests.integration.torch.torchrun_gang import SLOW_SECONDS, MixedGang, ended, gang

__all__ = ["gang"]
pytestmark = pytest.mark.timeout(400)

REDUCE = """
import os, pathlib, sys
import torch, torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
ones = torch.ones(8)
dist.all_reduce(ones)
rank = dist.get_rank()
text = f"{int(ones[0])} {os.environ['TORCHELASTIC_USE_AGENT_STORE']} {'grpc' in sys.modules}"
(pathlib.Path(sys.argv[1]) / f"reduced-{rank}").write_text(text)
dist.barrier()
dist.destroy_process_group()
"""


def agreed(workers: list[dict[str, Any]], *names: str) -> None:
    for name in names:
        assert len({worker[name] for worker in workers}) == 1, name


def test_two_torchruns_with_different_worker_counts_agree_and_finish(gang: MixedGang) -> None:
    first = gang.torchrun("2", "--nproc-per-node=2", name="n-0")
    second = gang.torchrun("2", "--nproc-per-node=1", name="n-1")
    workers = gang.started(1, 3, SLOW_SECONDS)
    assert [worker["GROUP_RANK"] for worker in workers] == ["0", "0", "1"]
    assert [worker["LOCAL_RANK"] for worker in workers] == ["0", "1", "0"]
    agreed(workers, "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    assert {worker["TORCHELASTIC_USE_AGENT_STORE"] for worker in workers} == {"False"}
    gang.finish()
    assert [first.wait(SLOW_SECONDS), second.wait(SLOW_SECONDS)] == [0, 0], gang.outputs()
    closed = gang.round()
    assert closed.outcome is not None
    assert closed.outcome.kind is OutcomeKind.SUCCEEDED


@pytest.mark.parametrize("names", [("n-0", "n-1"), ("n-1", "n-0")], ids=["torchrun", "ours"])
def test_mixed_process_group_forms_with_either_rank_0(
    gang: MixedGang, tmp_path: Path, names: tuple[str, str]
) -> None:
    script = tmp_path / "reduce.py"
    script.write_text(REDUCE)
    command = (str(script), str(gang.folder))
    theirs = gang.torchrun("2", name=names[0], command=command)
    ours = gang.agent("2", name=names[1], command=command, conf=STEADY)
    codes = [theirs.wait(SLOW_SECONDS), ours.wait(SLOW_SECONDS)]
    assert codes == [0, 0], gang.outputs()
    for rank in (0, 1):
        assert (gang.folder / f"reduced-{rank}").read_text() == "2 False False"


def test_mixed_gang_handles_join_loss_and_drain(gang: MixedGang) -> None:
    gang.torchrun("1:3", name="n-0", conf=STEADY)
    ours = gang.agent("1:3", name="n-1", conf=STEADY)
    lost = gang.torchrun("1:3", name="n-2", conf=STEADY)
    before = gang.started(1, 3, SLOW_SECONDS)

    gang.kill_node(lost)
    smaller = gang.started(2, 2)
    agreed(smaller, "MASTER_ADDR", "MASTER_PORT")
    assert smaller[0]["MASTER_PORT"] != before[0]["MASTER_PORT"]
    assert gang.round().cause.kind is CauseKind.LOSS

    joined = gang.torchrun("1:3", name="n-3")
    larger = gang.started(3, 3, SLOW_SECONDS)
    assert [worker["GROUP_RANK"] for worker in larger] == ["0", "1", "2"]
    for worker in (*before, *smaller):
        ended(worker["pid"])

    joined.signal(signal.SIGTERM)
    joined.wait(SLOW_SECONDS)
    gang.started(4, 2)
    assert gang.round().cause.kind is CauseKind.LEAVE

    ours.signal(signal.SIGTERM)
    assert ours.wait(SLOW_SECONDS) == 0
    (last,) = gang.started(5, 1)
    assert last["TORCHELASTIC_RESTART_COUNT"] == "0", "nothing of that was a failure"


def test_workers_that_ignore_sigterm_end_before_next_round(gang: MixedGang, tmp_path: Path) -> None:
    gang.script.write_text(
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + gang.script.read_text()
    )
    conf = "last_call_timeout=0,settle=0.3,confirm=8,stop_grace=1"
    gang.torchrun("1:2", name="n-0", conf=conf)
    (before,) = gang.started(1, 1, SLOW_SECONDS)
    gang.agent("1:2", name="n-1", conf=conf)
    until(lambda: gang.round().number == 2, "the round that the newcomer opens", SLOW_SECONDS)
    gang.started(2, 2)  # 20 s at most: torch's agent alone would take 30
    assert not Path(f"/proc/{before['pid']}").exists()
    assert gang.round().cause.kind is CauseKind.JOIN


def test_failed_torchrun_worker_is_charged_to_shared_budget(gang: MixedGang) -> None:
    gang.torchrun("2", name="n-0")
    gang.agent("2", name="n-1", conf=STEADY)
    gang.started(1, 2, SLOW_SECONDS)
    gang.fail(0)
    gang.started(2, 2, SLOW_SECONDS)
    # Only once it is known that no member was lost at that time.
    until(lambda: gang.round().charged == (1,), "the verdict")
    assert gang.round().cause.kind is CauseKind.FAILURE


def test_unreachable_endpoint_is_reported_by_torchrun(gang: MixedGang) -> None:
    alone = gang.torchrun("1", "--rdzv-endpoint=127.0.0.1:1", conf="connect_timeout=1")
    assert alone.wait(SLOW_SECONDS) == 1
    assert "127.0.0.1:1" in alone.output()
    assert "RendezvousConnectionError" in alone.output()


def test_unannounced_workers_raise_error_with_remedy(
    gang: MixedGang,
) -> None:
    alone = gang.torchrun("1", "--nproc-per-node=1", conf=f"slots=2,{STEADY}")
    assert alone.wait(SLOW_SECONDS) == 1
    assert "--rdzv-conf slots=1,role=default" in alone.output()


def test_import_of_torch_elastic_registers_backend_without_loading_it() -> None:
    program = (
        "import sys\n"
        "from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as known\n"
        "assert 'elasticjob' in known._registry\n"
        "loaded = {'grpc', 'asyncio', 'elasticjob_rendezvous.api'} & set(sys.modules)\n"
        "print(sorted(loaded - {'asyncio'}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=SLOW_SECONDS
    )
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
