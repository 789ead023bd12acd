"""Local run whose rendezvous store is away: reported once as it happens, and by every command."""

from __future__ import annotations

import os
import signal

import pytest

from tests.integration.etcd_server import binary
from tests.integration.local_rig import PATIENCE_SECONDS, LocalRig, rig, until

__all__ = ["rig"]

NAMED_SECONDS = 3.0
SLOW_SECONDS = 20.0
"""Allowance for a machine busy with other tests; the agents' own 3 s are tested elsewhere."""


def condition(rig: LocalRig) -> dict[str, str]:
    found = rig.status().get("conditions") or ()
    return next((one for one in found if one["type"] == "RendezvousUnavailable"), {})


def frozen(rig: LocalRig, number: int, pid: int, store: str, *verbs: str) -> str:
    """Stop the process of a run's store and continue it; return the run's output."""
    runner = rig.runners[-1]
    workers = rig.workers()
    os.kill(pid, signal.SIGSTOP)
    try:
        until(
            lambda: condition(rig).get("status") == "True",
            "the trouble in the status",
            NAMED_SECONDS + SLOW_SECONDS,
        )
        for verb in verbs:
            done = rig.call(verb, "job")
            assert f"{store} at unix:///" in done.stdout + done.stderr, done
            assert "cannot be reached: " in done.stdout + done.stderr, done
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: condition(rig).get("status") == "False", "its end in the status")
    until(lambda: len(rig.workers()) == 2, "both workers")
    assert (rig.workers(), rig.round()) == (workers, number)
    assert "cannot be reached" not in " ".join(rig.status()["explanation"])
    rig.finish()
    output, _ = runner.communicate(timeout=PATIENCE_SECONDS)
    assert runner.returncode == 0, output
    began = [line for line in output.splitlines() if f"{store} at unix:///" in line]
    assert len(began) == 1, output
    assert f"{store} can be used again after " in output
    return output


@pytest.mark.parametrize("backend", ["Etcd", "EtcdV2"])
def test_silent_etcd_is_reported_once_by_run_and_commands(rig: LocalRig, backend: str) -> None:
    if backend == "EtcdV2":
        rig.env["PATH"] = f"{binary('3.5').parent}{os.pathsep}{rig.env['PATH']}"
    rendezvous = {"backend": backend, "keepAliveSeconds": 3, "lastCallSeconds": 3}
    rig.start(rig.manifest(rendezvous=rendezvous), "--plain")
    number = rig.running(2)["rendezvous"]["round"]
    until(lambda: len(rig.workers()) == 2, "two workers")
    etcd = next(pid for pid, command in rig.processes().items() if "--data-dir" in command)
    verbs = ("explain",) if backend == "EtcdV2" else ("get", "describe", "explain")
    frozen(rig, number, etcd, "etcd", *verbs)
