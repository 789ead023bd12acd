"""Blocking calls of the agent in threads: a lack of threads, and a disk that does not answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path, PosixPath
from typing import Any

import pytest

from elasticjob_agent import main
from elasticjob_agent.core.events import Event, WorkersProgressed
from elasticjob_agent.core.state import State, WorkerGroup
from elasticjob_agent.settings import Launch, LogSettings
from elasticjob_agent.threads import in_thread
from elasticjob_agent.worker_files import ProgressFiles, post_progress
from elasticjob_launcher.zygote.preload_cache import PreloadCache
from tests.unit.agent.builders import FACTS, agent_settings

TOO_LARGE = 1 << 47
"""Size of a process's address space: a thread with such a stack cannot be started."""


@pytest.fixture
def no_threads() -> Iterator[None]:
    before = threading.stack_size(TOO_LARGE)
    yield
    threading.stack_size(before)


@pytest.mark.usefixtures("no_threads")
def test_lack_of_threads_is_an_error_of_the_operating_system() -> None:
    with pytest.raises(OSError, match="start new thread"):
        asyncio.run(in_thread(lambda: None))


def test_progress_is_posted_again_after_a_lack_of_threads(tmp_path: Path, no_threads: None) -> None:
    files = ProgressFiles(tmp_path)
    files.prepare(1, 1)
    files.file(1, 0).write_text('{"step": 3}')
    state = State(FACTS, group=WorkerGroup(1, 1, 0, 0.0, started=True))
    posted: asyncio.Queue[Event] = asyncio.Queue()

    async def scenario() -> Event:
        posting = asyncio.create_task(
            post_progress(files, lambda: state, posted.put_nowait, asyncio.Event())
        )
        await asyncio.wait([posting], timeout=0.6)  # two polls
        assert not posting.done()
        threading.stack_size(0)
        async with asyncio.timeout(60):
            event = await posted.get()
        posting.cancel()
        return event

    event = asyncio.run(scenario())
    assert isinstance(event, WorkersProgressed)
    assert event.progress[0].step == 3


@pytest.mark.usefixtures("no_threads")
def test_launcher_goes_on_without_its_record_if_there_are_no_threads(tmp_path: Path) -> None:
    memory = PreloadCache(tmp_path / "preload.json")
    memory.read("train.py")
    memory.extend(["torch"])
    threading.stack_size(0)
    memory.extend(["numpy"])
    again = PreloadCache(tmp_path / "preload.json")
    again.read("train.py")
    assert again.modules == ["torch", "numpy"]


class HangingFolder(PosixPath):
    """Folder on a disk that does not answer."""

    def mkdir(self, *args: Any, **options: Any) -> None:
        threading.Event().wait()


@pytest.mark.timeout(60)
def test_node_starts_without_its_log_if_the_disk_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(main, "DISK_SECONDS", 0.2)
    settings = agent_settings(LogSettings(HangingFolder(tmp_path)), launch=Launch.PER_NODE)
    command = asyncio.run(main.node_command(settings))
    assert command.log_dir == ""
    assert "node-1: the output of the command is not kept: the disk does not" in caplog.text
