"""Python client of local jobs: real runners and workers, and jobs of a `LocalRig`."""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from elasticjob import Client, ElasticJob
from elasticjob_cli.client import BadInput, CommandError, JobFailed, SubmittedJob
from elasticjob_cli.local.control_client import send_command
from elasticjob_cli.local.job_store import JobFolder
from elasticjob_operator.model import Phase
from tests.integration.local_rig import LocalRig, rig, until

__all__ = ["rig"]

WAIT_SECONDS = 120.0
HELLO = ["python3", "-c", "import os; print('rank', os.environ['RANK'], os.environ.get('WORD'))"]
STEPS = """
import os, pathlib, time
print("rank", os.environ["RANK"], flush=True)
while not pathlib.Path("finish").exists():
    time.sleep(0.02)
"""


@pytest.fixture
def here(rig: LocalRig, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalRig]:
    """Yield a rig whose jobs this process submits; its folders are those of the rig."""
    for name in ("PYTHONPATH", "XDG_STATE_HOME", "TMPDIR"):
        monkeypatch.setenv(name, rig.env[name])
    monkeypatch.chdir(rig.job)
    (rig.job / "steps.py").write_text(STEPS)
    yield rig
    rig.finish()
    rig.nothing_left()


def waits(rig: LocalRig, **options: Any) -> ElasticJob:
    """Return a job that runs until the file `finish` is there."""
    return ElasticJob.from_manifest(rig.manifest(command=["python3", "steps.py"], **options))


def test_command_is_submitted_and_its_result_has_rounds_and_logs(here: LocalRig) -> None:
    job = ElasticJob.from_command(HELLO, name="hello", nodes=(1, 2), env={"WORD": "given"})
    submitted = Client().submit(job)
    result = submitted.result(WAIT_SECONDS)
    assert result.status.phase is Phase.SUCCEEDED
    assert [one["worldSize"] for one in result.rounds] == [2]
    assert "[1] rank 1 given" in [line.text for line in submitted.logs(rank=1)]
    assert [one.name for one in Client().jobs()] == ["hello"]
    submitted.delete()
    assert Client().jobs() == []
    with pytest.raises(CommandError, match='local job "hello" not found'):
        submitted.wait()


@pytest.mark.parametrize("wrong", ["train.py", {"kind": "ElasticJob"}, None])
def test_submission_of_another_object_names_the_remedy(wrong: object) -> None:
    with pytest.raises(BadInput, match=r"submit takes an ElasticJob, not .*from_manifest"):
        Client().submit(wrong)  # type: ignore[arg-type]


def test_first_watched_status_of_a_new_job_has_a_phase(here: LocalRig) -> None:
    here.finish()
    submitted = Client().submit(waits(here))
    phases = [status.phase for status in submitted.watch()]
    assert None not in phases
    assert phases[-1] is Phase.SUCCEEDED
    submitted.delete()


def test_manifest_job_is_watched_scaled_and_finishes(here: LocalRig) -> None:
    submitted = Client().submit(waits(here))
    here.running(nodes=2)
    phases: list[Phase | None] = []
    for status in submitted.watch():
        phases.append(status.phase)
        if status.nodes == 2:
            assert submitted.scale(3) == 3
        if status.nodes == 3 and status.phase is Phase.RUNNING:
            assert submitted.scale(9) == 3
            here.finish()
            break
    phases += [status.phase for status in submitted.watch()]
    assert phases[-1] is Phase.SUCCEEDED
    assert submitted.result().rounds[-1]["worldSize"] == 3
    assert any("rank 2" in line.text for line in submitted.logs(follow=True))
    assert submitted.explain()


def test_job_is_submitted_watched_and_awaited_inside_a_running_event_loop(here: LocalRig) -> None:
    async def notebook() -> list[str]:
        submitted = await Client().submit_async(waits(here))
        with pytest.raises(TimeoutError, match=r"has not ended within 0\.01 s"):
            await submitted.wait_async(0.01)
        beats = asyncio.create_task(_beats())
        seen = []
        async for status in submitted.watch():
            seen.append(str(status.phase))
            if status.nodes == 2:
                here.finish()
        assert (await submitted.result_async(WAIT_SECONDS)).rounds
        beats.cancel()
        assert len(SLOW) < 3, SLOW
        return seen

    SLOW.clear()
    assert asyncio.run(notebook())[-1] == "Succeeded"


SLOW: list[float] = []


async def _beats() -> None:
    """Record delays of the event loop above a second."""
    loop = asyncio.get_running_loop()
    while True:
        before = loop.time()
        await asyncio.sleep(0.05)
        if loop.time() - before > 1:
            SLOW.append(loop.time() - before)


def test_blocking_calls_work_inside_a_running_event_loop(here: LocalRig) -> None:
    async def notebook() -> Phase | None:
        job = Client().submit(ElasticJob.from_command(HELLO, name="hello"))
        return job.result(WAIT_SECONDS).status.phase

    assert asyncio.run(notebook()) is Phase.SUCCEEDED


def test_suspended_job_is_resumed_by_its_submitter_alone(here: LocalRig) -> None:
    submitted = Client().submit(waits(here))
    here.running(nodes=2)
    submitted.suspend()
    assert submitted.wait(WAIT_SECONDS).phase is Phase.SUSPENDED
    with pytest.raises(JobFailed, match="Suspended: StoppedByUser") as stopped:
        submitted.result()
    assert stopped.value.result.rounds
    with pytest.raises(BadInput, match="is resumed with `elasticjob run`"):
        Client().job("job").resume()
    submitted.resume()
    with pytest.raises(BadInput, match='job "job" is running'):
        submitted.resume()
    here.finish()
    assert submitted.wait(WAIT_SECONDS).phase is Phase.SUCCEEDED


def test_failed_job_raises_its_first_failure(here: LocalRig) -> None:
    job = ElasticJob.from_object({**waits(here, maxRestarts=0).document, "status": {}})
    (here.job / "steps.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(JobFailed, match=r"did not succeed: Failed: [\s\S]*exit code 3"):
        Client().submit(job).result(WAIT_SECONDS)


def test_running_job_is_not_submitted_again_and_is_deleted(here: LocalRig) -> None:
    submitted = Client().submit(waits(here))
    with pytest.raises(BadInput, match='job "job" is already running on this machine'):
        Client().submit(waits(here))
    assert submitted.phase is not Phase.FAILED
    Client().job("job").delete()
    assert not submitted._place.names()
    until(lambda: not here.processes(), "the runner to exit")


def test_job_continues_when_its_submitter_has_ended(here: LocalRig) -> None:
    waits(here)
    code = (
        "from elasticjob import Client, ElasticJob\n"
        "Client().submit(ElasticJob.from_manifest('job.yaml'))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WAIT_SECONDS)
    here.running(nodes=2)
    here.finish()
    assert Client().job("job").wait(WAIT_SECONDS).phase is Phase.SUCCEEDED


def test_namespaces_have_jobs_of_their_own(here: LocalRig) -> None:
    job = Client(namespace="team").submit(ElasticJob.from_command(HELLO, name="hello"))
    job.wait(WAIT_SECONDS)
    assert Client().jobs() == []
    read = job.read()
    assert read.metadata.namespace == "team"
    again = ElasticJob.from_object(read)
    assert again.namespace == "team"
    assert again.document["metadata"] == {"name": "hello", "namespace": "team"}
    with pytest.raises(BadInput, match='names namespace "team", the client "other"'):
        Client(namespace="other").submit(again)
    moved = Client().submit(again)
    assert moved.wait(WAIT_SECONDS).phase is Phase.SUCCEEDED
    assert Client().jobs() == []


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ElasticJob.from_command("python3 x.py"), "command must be a list of words"),
        (lambda: ElasticJob.from_command(HELLO, nodes=(3, 2)), "nodes must be a number or"),
        (lambda: ElasticJob.from_command(HELLO, nodes="2:4"), "nodes must be .*, not '2:4'"),  # type: ignore[arg-type]
        (lambda: ElasticJob.from_command(HELLO, nodes=2.5), "nodes must be .*, not 2.5"),  # type: ignore[arg-type]
        (lambda: ElasticJob.from_command(HELLO, nodes=(1, 2, 3)), "nodes must be a number"),  # type: ignore[arg-type]
        (lambda: ElasticJob.from_command(["python3", 3]), "not .'python3', 3"),  # type: ignore[list-item]
        (lambda: ElasticJob.from_command(HELLO, env=["A=1"]), "env must be a mapping such as"),  # type: ignore[arg-type]
        (lambda: ElasticJob.from_object(None), "ElasticJob.from_manifest reads a file"),  # type: ignore[arg-type]
        (lambda: ElasticJob.from_object([1]), "must be a manifest's document"),  # type: ignore[arg-type]
        (lambda: ElasticJob.from_object({"kind": "Pod"}), "the job is not valid"),
        (lambda: ElasticJob.from_function(3), "without a call, and its arguments as args"),  # type: ignore[arg-type]
        (lambda: ElasticJob.from_function(print, args="abc"), "args must be a list"),
        (lambda: ElasticJob.from_function(print, args=3), "args must be a list"),  # type: ignore[arg-type]
        (lambda: ElasticJob.from_function(print, kwargs=[1]), "kwargs must be a mapping"),  # type: ignore[arg-type]
        (lambda: ElasticJob.from_manifest(None), "must be the path of a file, not None"),  # type: ignore[arg-type]
        (lambda: Client().job(3), "the name of a job must be a text, not 3"),  # type: ignore[arg-type]
        (lambda: ElasticJob.from_manifest("none.yaml"), "none.yaml: must be a readable file"),
        (lambda: ElasticJob.from_manifest(__file__), "script's job is made by ElasticJob.from_com"),
        (lambda: ElasticJob("train.py"), "made by ElasticJob.from_command.*, not from 'train.py'"),  # type: ignore[arg-type]
        (lambda: ElasticJob.from_command([""]), "command must be a list of words"),
        (lambda: ElasticJob.from_command(HELLO, folder=3), "folder must be the path"),  # type: ignore[arg-type]
        (lambda: ElasticJob.from_function(print, folder=3), "folder must be the path"),  # type: ignore[arg-type]
        (lambda: ElasticJob.from_function(asyncio.sleep, args=[1]), "function must not be async"),
        (lambda: ElasticJob.from_function(until, args=[1]), "missing a required argument: 'what'"),
        (lambda: ElasticJob.from_function(until, kwargs={1: 2}), "keywords must be strings"),  # type: ignore[dict-item]
        (lambda: Client(namespace=3), "namespace must be a text, not 3"),  # type: ignore[arg-type]
        (lambda: Client(context=3), "context must be a text, not 3"),  # type: ignore[arg-type]
        (lambda: Client(kubeconfig=3), "kubeconfig must be the path of a file, not 3"),  # type: ignore[arg-type]
        (lambda: Client(cluster="yes"), "cluster must be True, False or None, not 'yes'"),  # type: ignore[arg-type]
        (lambda: Client(cluster=False, context="x"), "leave out one of the two"),
        (lambda: submitted(python=3), "python must be the path of an interpreter, not 3"),
        (lambda: ElasticJob.from_command(HELLO).renamed("No"), "metadata.name"),
    ],
)
def test_invalid_definition_is_refused(here: LocalRig, make: object, said: str) -> None:
    assert callable(make)
    with pytest.raises(BadInput, match=said):
        make()


def test_arguments_that_a_decorator_gives_are_not_required() -> None:
    def main(config: str) -> str:
        return config

    @functools.wraps(main)
    def with_config() -> str:
        return main("config")

    assert ElasticJob.from_function(with_config).call is not None


def submitted(**options: Any) -> SubmittedJob:
    return Client().submit(ElasticJob.from_command(HELLO), **options)


def test_submission_of_a_running_job_names_the_calls_of_the_client(here: LocalRig) -> None:
    job = ElasticJob.from_command(["sleep", "60"], name="taken")
    first = Client().submit(job)
    for again in (job, ElasticJob.from_function(print, name="taken")):
        with pytest.raises(BadInput, match="already running") as refused:
            Client().submit(again)
        assert 'job.renamed("NAME")' in str(refused.value)
        assert "--name" not in str(refused.value)
    first.delete()


def test_words_of_a_command_may_be_paths() -> None:
    job = ElasticJob.from_command(["cat", Path("a b")])  # type: ignore[list-item]
    assert job.object.trainer().command == ["cat", "a b"]


def test_invalid_arguments_of_a_submitted_job_are_refused_and_leave_it(here: LocalRig) -> None:
    job = Client().submit(ElasticJob.from_command(["sleep", "60"], name="kept"))
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: job.scale(-1), "nodes must be a number from 0 on, not -1"),
        (lambda: job.scale("3"), "nodes must be a number from 0 on, not '3'"),  # type: ignore[arg-type]
        (lambda: job.scale(True), "nodes must be a number from 0 on, not True"),
        (lambda: job.scale(16_385), "the number of nodes must be from 0 to 16384, not 16385"),
        (lambda: job.wait("3"), "timeout must be a number of seconds or None, not '3'"),  # type: ignore[arg-type]
        (lambda: job.wait(float("nan")), "timeout must be a number of seconds"),
        (lambda: job.result(timedelta(seconds=3)), "timeout must be a number of seconds"),  # type: ignore[arg-type]
        (lambda: asyncio.run(job.wait_async("3")), "timeout must be a number of seconds"),  # type: ignore[arg-type]
        (lambda: job.logs(rank=-1), "rank must be a number from 0 on"),
        (lambda: job.logs(tail=-3), "tail must be a number from 0 on"),
        (lambda: job.logs(since="yesterday"), "since must be a datetime.timedelta"),  # type: ignore[arg-type]
    ]
    for call, said in wrong:
        with pytest.raises(BadInput, match=said):
            call()
    with pytest.raises(BadInput, match="the number of nodes must be from 0 to 16384, not -1"):
        send_command(JobFolder("default", "kept"), "scale", nodes=-1)
    assert Client().job("kept").read().spec.nodes in (None, 1)
    run = JobFolder("default", "kept").run()
    assert run is not None
    away = Path(run.control).rename(f"{run.control}.away")
    with pytest.raises(CommandError, match='job "kept" ended before it answered'):
        job.scale(1)
    away.rename(run.control)
    job.delete()


def test_refusal_of_the_runner_is_raised(here: LocalRig) -> None:
    job = ElasticJob.from_command(["nothing-there"], name="x")
    with pytest.raises(BadInput, match="'nothing-there' is not on PATH"):
        Client().submit(job)
    until(lambda: not here.processes(), "the runner to be gone")


def test_interrupted_submission_leaves_nothing(
    here: LocalRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    job = waits(here)
    monkeypatch.setattr("elasticjob_cli.client.places.time.sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Client().submit(job)
    monkeypatch.undo()
    until(lambda: not here.processes(), "the runner to be gone")


def test_import_of_the_package_loads_no_client() -> None:
    code = (
        "import sys, elasticjob, elasticjob.train\n"
        "loaded = {n.partition('.')[0] for n in sys.modules}\n"
        "assert loaded.isdisjoint({'elasticjob_cli', 'pydantic', 'typer', 'asyncio'}), loaded\n"
        "from elasticjob import Client, ElasticJob\n"
        "assert 'elasticjob_cli.client' in sys.modules and 'Client' in dir(elasticjob)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))


def test_client_without_its_packages_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "pydantic.py").write_text("raise ModuleNotFoundError(name='pydantic')\n")
    code = "from elasticjob import Client"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert "pydantic is missing: pip install elasticjob" in ran.stderr


def test_handle_names_its_job() -> None:
    assert repr(SubmittedJob(Client()._place, "digits")) == "<SubmittedJob digits>"
