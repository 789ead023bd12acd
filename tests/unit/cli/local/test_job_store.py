"""Folders of local jobs: ownership and access."""

from __future__ import annotations

import errno
import json
import os
import pwd
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from elasticjob_cli import settings
from elasticjob_cli.errors import BadInput, CommandError
from elasticjob_cli.local import job_store
from elasticjob_cli.local.job_store import (
    JobFolder,
    Run,
    add_event,
    find_job,
    list_jobs,
    write_json,
)
from elasticjob_cli.local.stored_job import read_job
from tests.unit.full_disk import room
from tests.unit.operator.builders import job


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def saved(name: str, namespace: str = "default") -> JobFolder:
    folder = JobFolder(namespace, name)
    folder.acquire()
    write_json(folder.status_file, {"metadata": {"name": name}})
    folder.release()
    return folder


def test_job_is_held_by_one_runner_at_a_time() -> None:
    first, second = JobFolder("default", "a"), JobFolder("default", "a")
    first.acquire()
    first.write_run(Run(4711, "/sock", "/m.yaml", 0.0))
    assert second.running()
    with pytest.raises(BadInput, match=r"already running .*process 4711, from /m.yaml"):
        second.acquire()
    first.release()
    assert not second.running()
    second.acquire()
    assert second.run() == Run(4711, "/sock", "/m.yaml", 0.0)  # until the former status is read
    second.clear()
    assert second.run() is None
    assert first.running(), "the lock stays"
    second.release()


def test_jobs_are_listed_by_namespace_and_name() -> None:
    for name, namespace in (("b", "default"), ("a", "default"), ("c", "team")):
        saved(name, namespace)
    JobFolder("default", "empty").path.mkdir()
    assert [folder.name for folder in list_jobs("default")] == ["a", "b"]
    assert [folder.name for folder in list_jobs(None)] == ["a", "b", "c"]
    with pytest.raises(CommandError, match=r'"x" not found in namespace "default"; there is: a, b'):
        find_job("default", "x")


def test_status_is_overwritten_in_place_on_full_disk(
    state_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = state_home / "status.json"
    write_json(path, {"status": {"phase": "Running", "members": ["a", "b"]}})
    size = path.stat().st_size
    monkeypatch.setattr(job_store, "replace_atomically", full)
    with room(size):
        said = write_json(path, {"status": {"phase": "Succeeded", "members": ["a", "b"]}})
    assert said is not None
    assert said.errno == errno.ENOSPC
    succeeded = {"status": {"phase": "Succeeded", "members": ["a", "b"]}}
    assert json.loads(path.read_bytes()) == succeeded
    with pytest.raises(OSError, match="File too large"), room(size):
        write_json(path, {"status": {"phase": "x" * size}})
    assert json.loads(path.read_bytes()) == succeeded, "the old one is put back"
    with pytest.raises(OSError, match="No space left"):
        write_json(state_home / "new.json", {})


@pytest.mark.parametrize("name", ["..", "a/b", "", "A", "-a", "a" * 64, "a\n"])
def test_job_name_cannot_leave_its_folder(name: str) -> None:
    with pytest.raises(BadInput, match="must be a DNS label"):
        JobFolder("default", name)
    with pytest.raises(BadInput, match="must be a DNS label"):
        JobFolder(name, "job")


def test_folder_that_cannot_be_created_is_named(
    state_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (state_home / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(state_home / "file"))
    with pytest.raises(CommandError, match="set XDG_STATE_HOME to a folder that can"):
        JobFolder("default", "a").acquire()


def test_foreign_folders_are_skipped(state_home: Path) -> None:
    saved("a")
    for strange in ("default/A b", "Team X/a"):
        folder = state_home / "elasticjob" / strange
        folder.mkdir(parents=True)
        (folder / "status.json").write_text("{}")
    assert [folder.name for folder in list_jobs(None)] == ["a"]


def damaged(**spec: object) -> str:
    """Return a job whose spec has been damaged."""
    document = job().manifest()
    return json.dumps({**document, "spec": {**document["spec"], **spec}})


def test_status_of_another_release_is_read_without_its_unknown_parts() -> None:
    folder = saved("a")
    status = {"phase": "Succeeded", "restarts": "x", "conditions": [7], "nodes": 3}
    write_json(folder.status_file, {**job().manifest(), "status": status})
    found = read_job(folder).status
    assert (found.phase, found.restarts, found.conditions, found.nodes) == ("Succeeded", 0, [], 3)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "must be JSON; the fault is in line 1, column 1"),
        ('{"metadata":', "must be JSON; the fault is in line 1, column 13"),
        ('"\udcff"', "must be JSON, in UTF-8"),
        ("[" * 100_000, "must be JSON, in UTF-8 and not nested too deeply"),
        ("[]", "must be an ElasticJob with metadata"),
        ('{"metadata": {"name": "a"}}', ": apiVersion: must be set"),
        (damaged(maxRestarts="x"), ": spec.maxRestarts: must be an integer; got 'x'"),
        (damaged(setup=[7]), ": spec.setup[0]: must be a string; got 7"),
    ],
)
def test_unreadable_status_is_reported_with_remedy(text: str, why: str) -> None:
    folder = saved("a", "team")
    folder.status_file.write_text(text, errors="surrogateescape")
    with pytest.raises(CommandError) as refused:
        read_job(folder)
    said = str(refused.value)
    assert said.startswith(f'the status of local job "a" cannot be read: {folder.status_file}: ')
    assert why in said
    assert "`elasticjob delete a -n team` deletes it" in said
    folder.status_file.unlink()
    folder.status_file.mkdir()
    with pytest.raises(CommandError, match="Is a directory"):
        folder.object()


@pytest.mark.parametrize("text", ["", "[1]", '[{"round": 1}]', "7", "{}"])
def test_unreadable_rounds_are_empty(text: str) -> None:
    folder = saved("a")
    folder.rounds_file.write_text(text)
    assert not folder.rounds()


@pytest.mark.parametrize("home", ["", "relative", None])
def test_missing_home_falls_back_to_account_home(
    home: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    if home is None:
        monkeypatch.delenv("HOME", raising=False)
    else:
        monkeypatch.setenv("HOME", home)
    account = pwd.getpwuid(os.getuid()).pw_dir
    assert settings.state_root() == Path(account, ".local/state/elasticjob")

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", nobody)
    with pytest.raises(CommandError, match="set XDG_STATE_HOME or HOME to a folder"):
        settings.state_root()


@pytest.mark.parametrize("value", ["", "relative/path"])
def test_relative_state_home_is_ignored(
    value: str, state_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", value)
    monkeypatch.setenv("HOME", str(state_home))
    assert settings.state_root() == state_home / ".local" / "state" / "elasticjob"


def test_python_of_the_container(monkeypatch: pytest.MonkeyPatch, state_home: Path) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    monkeypatch.setenv("VIRTUAL_ENV", "/some/venv")
    monkeypatch.setenv("ELASTICJOB_PREFIX", "another job's")
    inherited = settings.container_environment(None)
    assert inherited["PATH"] == "/usr/bin"  # an active environment stays as it is
    assert "ELASTICJOB_PREFIX" not in inherited
    named = settings.container_environment(state_home / "bin" / "python3")
    assert named["PATH"] == f"{state_home / 'bin'}:/usr/bin"
    monkeypatch.delenv("VIRTUAL_ENV")
    assert settings.container_environment(None)["PATH"].endswith(":/usr/bin")


def test_long_temporary_folder_is_avoided(
    monkeypatch: pytest.MonkeyPatch, state_home: Path
) -> None:
    deep = state_home / ("d" * 80)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    made = settings.run_dir()
    try:
        assert len(str(made.path)) <= settings.LONGEST_RUN_DIR
        assert made.path.stat().st_mode & 0o077 == 0
    finally:
        made.close()
    assert not made.path.exists()


def test_events_are_kept_up_to_a_size_and_damaged_ones_left_out() -> None:
    folder = saved("a")
    for number in range(100):
        at = datetime(2026, 1, 31, 12, 0, tzinfo=UTC) + timedelta(milliseconds=number)
        add_event(folder.events_file, f"event {number}\n", at, most_bytes=2000)
    assert folder.events_file.stat().st_size <= 2000
    found = folder.events()
    assert 10 < len(found) < 40
    assert found[-1] == {"time": "2026-01-31T12:00:00.099Z", "message": "event 99\n"}
    with folder.events_file.open("ab") as file:
        file.write(b'[1]\n{"time": 3}\n\xff\n{"ti')
    assert folder.events() == found
    folder.acquire()
    folder.clear()
    assert folder.events() == []  # a new run begins without those of the last one
    folder.release()
