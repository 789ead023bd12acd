"""`elasticjob logs -f` on a cluster that does not answer any more."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from elasticjob_cli.commands import cluster_logs
from elasticjob_cli.commands.cluster_reader import ClusterReader
from elasticjob_cli.errors import CommandError
from elasticjob_cli.kubectl import NoAnswer, Refused
from elasticjob_cli.main import plugin
from elasticjob_operator.model import ElasticJob
from tests.unit.cli.commands.test_explain import kubectl, whole

__all__ = ["kubectl"]


def followed_until(
    kubectl: Path, monkeypatch: pytest.MonkeyPatch, errors: list[CommandError | None]
) -> tuple[BaseException | None, str]:
    """Follow the logs of a job; return the exception and the errors printed.

    The reads of the job after the first one fail with these errors, and succeed for None.
    """
    whole(kubectl)
    for name in ("job-0", "job-1", "job-0+follow", "job-1+follow"):
        (kubectl / name).write_text("2026-01-31T12:00:02Z [1] two")
    original, left = ClusterReader.job, [None, *errors]

    def job(there: ClusterReader, name: str) -> ElasticJob:
        error = left.pop(0)
        if error is not None:
            raise error
        return original(there, name)

    monkeypatch.setattr(ClusterReader, "job", job)
    monkeypatch.setattr(cluster_logs, "LIST_SECONDS", 0.05)
    monkeypatch.setattr(cluster_logs, "BATCH_SECONDS", 0.01)
    result = CliRunner().invoke(plugin("logs"), ["logs", "job", "-f"])
    return result.exception, result.stderr


def test_following_ends_at_the_second_read_in_a_row_without_an_answer(
    kubectl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = NoAnswer("the API server does not answer")
    error, said = followed_until(kubectl, monkeypatch, [silent, None, silent, silent])
    assert error is silent
    assert said.splitlines() == ["elasticjob: the API server does not answer; trying again"] * 2


def test_following_ends_with_the_error_of_a_cluster_out_of_reach(
    kubectl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = Refused("the connection was refused")
    error, _ = followed_until(kubectl, monkeypatch, [refused])
    assert error is refused


def test_following_of_a_deleted_job_ends_without_an_error(
    kubectl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, _ = followed_until(kubectl, monkeypatch, [Refused("job not found", "NotFound")])
    assert error is None


def test_kubectl_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_logs, "END_SECONDS", 0.1)
    program = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('begun', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.terminate()
        cluster_logs._await_end(process)
        assert process.returncode == -signal.SIGKILL
