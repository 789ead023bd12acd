"""Python client and agent in a Jupyter kernel, which always runs an event loop."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticjob_cli.client.notebook import as_html
from elasticjob_operator.model import ElasticJob
from tests.integration.etcd_server import EtcdServer
from tests.integration.local_rig import LocalRig, rig
from tests.paths import ROOT
from tests.unit.operator.builders import job

__all__ = ["rig"]

WAIT_SECONDS = 240.0
STEPS = """
import pathlib, time
while not pathlib.Path("finish").exists():
    time.sleep(0.02)
"""


@pytest.fixture
def here(rig: LocalRig) -> Iterator[LocalRig]:
    (rig.job / "steps.py").write_text(STEPS)
    rig.manifest(command=["python3", "steps.py"])
    yield rig
    rig.finish()
    rig.nothing_left()


def kernel(rig: LocalRig, *cells: str | tuple[str, str]) -> list[dict[str, Any]]:
    """Run cells in a kernel; one with a second text is interrupted once it has printed that."""
    wanted = [
        {"code": cell} if isinstance(cell, str) else {"code": cell[0], "interrupt": cell[1]}
        for cell in cells
    ]
    env = {**rig.env, "PYTHONPATH": os.pathsep.join([rig.env["PYTHONPATH"], str(ROOT)])}
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("kernel_session.py"))],
        input=json.dumps(wanted),
        env=env,
        cwd=rig.job,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
        start_new_session=True,
    )
    assert ran.returncode == 0, ran.stderr
    results: list[dict[str, Any]] = json.loads(ran.stdout)
    return results


SUBMIT = """
from pathlib import Path
from elasticjob import Client, ElasticJob
job = Client().submit(ElasticJob.from_manifest("job.yaml"))
job
"""


def test_job_is_shown_watched_and_awaited_in_cells(here: LocalRig) -> None:
    submitted, watched, displayed, ended = kernel(
        here,
        SUBMIT,
        "async for status in job.watch():\n"
        "    print(status.nodes)\n"
        "    if status.nodes == 2: break\n",
        "import asyncio\n"
        "live = asyncio.create_task(job.display_async())\n"
        "await asyncio.sleep(1)\n"
        "Path('finish').touch()\n"
        "print((await live).phase)\n",
        "job.display().phase; print(job.result().status.phase); job",
    )
    assert not any(one["error"] for one in (submitted, watched, displayed, ended))
    assert submitted["html"][0].startswith("<div><table><thead><tr><th>NAME</th>")
    assert watched["text"].split()[-1] == "2"
    assert displayed["text"] == "Succeeded\n"
    assert "<td>job-1</td><td>running</td>" in displayed["html"][0]
    assert "<td>Succeeded</td>" in displayed["html"][-1]
    assert ended["text"] == "Succeeded\n"
    assert len(ended["html"]) == 2


def test_interrupt_and_end_of_the_kernel_leave_the_job_running(here: LocalRig) -> None:
    submitted, interrupted, state = kernel(
        here, SUBMIT, ("print('waiting', flush=True); job.wait()", "waiting"), "job.scale(1)"
    )
    assert submitted["error"] == ""
    assert interrupted["error"].startswith("KeyboardInterrupt")
    assert state["error"] == ""
    assert here.running(nodes=1)["phase"] == "Running"


FUNCTION = """
import os
from dataclasses import dataclass
from elasticjob import Client, ElasticJob

@dataclass
class Loss:
    value: float

factor = 2
def train(scale):
    return Loss(factor * scale * int(os.environ["RANK"]))

job = Client().submit(ElasticJob.from_function(train, args=[0.5], nodes=2))
print(job.result(60).return_values)
"""


def test_function_of_a_cell_runs_as_a_job(here: LocalRig) -> None:
    (ran,) = kernel(here, FUNCTION)
    assert (ran["error"], ran["text"]) == ("", "{0: Loss(value=0.0), 1: Loss(value=1.0)}\n")


AGENT = """
from elasticjob_agent.api import LocalElasticAgent, WorkerSpec, create_handler
from elasticjob_rendezvous.api import RendezvousParameters

def train(lr: float) -> float:
    return 2 * lr

handler = create_handler(RendezvousParameters("elasticjob", "{endpoint}", "{run}", 1, 1))
spec = WorkerSpec(
    "trainer", local_world_size=2, rdzv_handler=handler, entrypoint=train, args=(0.1,)
)
result = LocalElasticAgent(spec).run()
print(result.failures if result.is_failed() else result.return_values)
"""

WAITS = """
import threading, time
from pathlib import Path

def waits():
    Path("started").touch()
    time.sleep(600)

def announce():
    while not Path("started").exists():
        time.sleep(0.05)
    print("started", flush=True)

threading.Thread(target=announce).start()
handler = create_handler(RendezvousParameters("elasticjob", "{endpoint}", "{run}-2", 1, 1))
LocalElasticAgent(WorkerSpec("trainer", 1, handler, entrypoint=waits)).run()
"""


def test_documented_agent_runs_in_a_cell_and_ends_at_an_interrupt(
    here: LocalRig, newest_etcd: EtcdServer
) -> None:
    place = {"endpoint": newest_etcd.url, "run": f"notebook-{os.getpid()}"}
    ran, interrupted = kernel(here, AGENT.format(**place), (WAITS.format(**place), "started"))
    assert (ran["error"], ran["text"]) == ("", "{0: 0.2, 1: 0.2}\n")
    assert interrupted["error"].startswith("KeyboardInterrupt")
    (logs,) = here.tmp.glob("elasticjob_notebook-*")  # kept of a run without success
    shutil.rmtree(logs)


def test_display_without_ipython_names_the_alternative(here: LocalRig) -> None:
    code = (
        "import sys; sys.modules['IPython'] = None\n"
        "from elasticjob import Client, ElasticJob\n"
        "command = [sys.executable, '-c', 'print()']\n"
        "job = Client().submit(ElasticJob.from_command(command, name='x'))\n"
        "job.wait(60)\n"
        "job.display()\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], env=here.env, cwd=here.job, capture_output=True, text=True
    )
    assert "display requires IPython" in ran.stderr


def test_text_of_a_job_is_escaped() -> None:
    found: ElasticJob = job()
    text = as_html(found, ["<script>alert(1)</script>\x1b[1m"])
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "\x1b" not in text
    assert "<script>" not in text
