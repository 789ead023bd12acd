"""Training script's reports, and their reading by an agent."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from elasticjob import layout
from elasticjob.train import Link, accumulation
from elasticjob_agent import worker_files
from elasticjob_agent.core.progress import WorkerProgress, worker_progress
from elasticjob_agent.worker_files import ProgressFiles, read_progress
from tests.unit.train.waiting import PATIENCE_SECONDS, until

SIDECAR = Path(layout.__file__).parents[1]


class Desk:
    """Worker's link, and the agent's side of it."""

    def __init__(self, folder: Path) -> None:
        self.files = ProgressFiles(folder)
        self.files.prepare(1, slots=1)
        self.link = self.worker()

    def worker(self) -> Link:
        return Link(
            {
                layout.PROGRESS_FILE: str(self.files.file(1, 0)),
                layout.REQUEST_FILE: str(self.files.request_file(1)),
            }
        )

    @property
    def read(self) -> WorkerProgress:
        return self.files.read(1, 1)[0]

    def ask(self, point: int = 0, seconds: float = 30.0) -> None:
        self.files.ask(1, layout.Request(point, seconds))


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_no_progress_before_the_first_step(desk: Desk) -> None:
    assert desk.read == WorkerProgress(answer=layout.Answer())


def test_steps_metrics_and_checkpoints_are_read_as_reported(desk: Desk) -> None:
    desk.link.progress(7, {"loss": 0.5, "accuracy": 0.875})
    first = desk.read
    desk.link.checkpointed(8)
    desk.link.progress(9, {})
    found = desk.read
    assert (found.step, found.checkpoint_step, found.checkpoints) == (9, 8, 1)
    assert found.metrics == {"loss": 0.5, "accuracy": 0.875}, "they stay until they are told anew"
    assert found.first_step_ms == first.at_ms <= found.at_ms
    assert not found.saves


def test_surplus_metrics_are_dropped(desk: Desk) -> None:
    desk.link.progress(1, {f"m{n}" + "x" * 40: float(n) for n in range(20)})
    assert list(desk.read.metrics.values()) == [float(n) for n in range(layout.MAX_METRICS)]
    assert all(len(name) <= layout.NAME_BYTES for name in desk.read.metrics)


def test_renamed_metrics_are_reported_under_their_new_names(desk: Desk) -> None:
    desk.link.progress(1, {"loss": 1.0, "speed": 2.0})
    desk.link.progress(2, {"accuracy": 3.0})
    assert desk.read.metrics == {"accuracy": 3.0}


@pytest.mark.parametrize("step", [0, 2**63 - 1, True, 7.9, "7"])
def test_step_is_any_whole_number(desk: Desk, step: Any) -> None:
    desk.link.progress(step, {})
    desk.link.checkpointed(step)
    assert (desk.read.step, desk.read.checkpoint_step) == (int(step), int(step))


@pytest.mark.parametrize(
    "step", [2**63, 2**70, -1, -(2**70), math.nan, math.inf, None, "seven", [1], 1j]
)
@pytest.mark.parametrize("told", [True, False], ids=["agent", "alone"])
def test_invalid_step_is_refused_everywhere(desk: Desk, step: Any, told: bool) -> None:
    link = desk.link if told else Link({})
    link.progress(3, {})
    for call in (link.checkpointed, lambda wrong: link.progress(wrong, {})):
        with pytest.raises(ValueError, match=r"^step must be a whole number from 0 to 2\*\*63 - 1"):
            call(step)
    assert (desk.read.step, desk.read.checkpoint_step) == (3 if told else -1, -1)


def test_non_finite_numbers_are_metrics(desk: Desk) -> None:
    """A diverging loss must not end the training that reports it."""
    large = 10**400
    desk.link.progress(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": large, "e": -large})
    found = dict(desk.read.metrics)
    assert math.isnan(found.pop("a"))
    assert found == {"b": math.inf, "c": -math.inf, "d": math.inf, "e": -math.inf}
    assert desk.read == desk.read, "what did not change is no news"


@pytest.mark.parametrize("value", [None, "low", [1.0], 1j])
@pytest.mark.parametrize("told", [True, False], ids=["agent", "alone"])
def test_metric_that_is_no_number_is_refused_by_name(desk: Desk, value: Any, told: bool) -> None:
    link = desk.link if told else Link({})
    link.progress(1, {"loss": 1.0})
    with pytest.raises(ValueError, match=r"^metric speed must be a number, got "):
        link.progress(2, {"loss": 0.5, "speed": value})
    link.progress(3, {"loss": 0.25})
    if told:
        assert (desk.read.step, desk.read.metrics) == (3, {"loss": 0.25})


def test_callback_that_is_not_callable_is_refused(desk: Desk) -> None:
    """The usual mistake: the function's result instead of the function."""
    with pytest.raises(ValueError, match=r"on_leave must be given a function to call, got None"):
        desk.link.on_leave(None)  # type: ignore[arg-type]
    assert not desk.read.saves


def test_record_with_invalid_values_is_ignored(desk: Desk) -> None:
    """The file is the user's: a negative step is invalid."""
    names = layout.pack_names(("loss",))
    values = [0.5] + [0.0] * 7
    record = layout.pack(0, 0, -(2**60), 1, 1, -5, 0, 1, values, names)
    desk.files.file(1, 0).write_bytes(record)
    assert (desk.read.step, desk.read.checkpoint_step) == (-1, -1)


def test_every_record_read_is_complete(desk: Desk) -> None:
    """Another thread writes as fast as it can."""
    over = threading.Event()

    def write() -> None:
        step = 0
        while not over.is_set():
            desk.link.progress(step, {"a": float(step), "b": float(-step)})
            step += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = [found for _ in range(2000) if (found := read_progress(desk.files.file(1, 0)))]
    finally:
        over.set()
        writer.join()
    told = [found for found in seen if found.metrics]
    assert told
    assert all(found.metrics == {"a": found.step, "b": -found.step} for found in told)


@pytest.mark.parametrize(
    "environ", [{}, {layout.PROGRESS_FILE: "/nowhere/progress", layout.REQUEST_FILE: "/nowhere/r"}]
)
def test_without_an_agent_calls_have_no_effect(environ: dict[str, str]) -> None:
    link = Link(environ)
    called: list[int] = []
    link.on_leave(lambda: called.append(1))
    link.progress(1, {"loss": 1.0})
    link.checkpointed(1)
    assert not link.should_checkpoint()
    assert called == []


def test_foreign_progress_file_is_replaced(desk: Desk) -> None:
    path = desk.files.file(1, 0)
    path.unlink()
    path.write_text("a file that is shorter than a record: a store beyond it would be fatal")
    desk.worker().progress(3, {})
    assert desk.read.step == 3


# -- saving together ----------------------------------------------------------------


def test_query_for_a_save_request_enables_saving(desk: Desk) -> None:
    assert not desk.link.should_checkpoint()
    assert desk.read.saves
    assert desk.read.points == 1


def test_all_workers_save_at_the_agreed_step(desk: Desk) -> None:
    assert not desk.link.should_checkpoint()
    desk.ask(point=3)
    assert [desk.link.should_checkpoint() for _ in range(2)] == [False, True]


def test_worker_waits_until_the_step_is_agreed(desk: Desk) -> None:
    desk.ask()
    answers: list[bool] = []
    worker = threading.Thread(target=lambda: answers.append(desk.link.should_checkpoint()))
    worker.start()
    until = time.monotonic() + PATIENCE_SECONDS
    while desk.read.points != 1:
        assert time.monotonic() < until, "the agent must see where it waits"
        time.sleep(0.01)
    worker.join(0.1)
    assert worker.is_alive()
    desk.ask(point=1)
    worker.join(PATIENCE_SECONDS)
    assert answers == [True]


def test_worker_waits_for_the_stop_after_saving_for_a_bounded_time(desk: Desk) -> None:
    desk.ask(point=1, seconds=0.3)
    assert desk.link.should_checkpoint()
    began = time.monotonic()
    desk.link.checkpointed(4)
    assert time.monotonic() - began >= 0.25
    assert not desk.link.should_checkpoint(), "training goes on when nobody comes to stop it"
    assert desk.read.checkpoint_step == 4
    assert desk.read.points > 1


def test_checkpoint_is_reported_with_the_points_before_it(desk: Desk) -> None:
    for _ in range(3):
        assert not desk.link.should_checkpoint()
    desk.link.checkpointed(4)
    assert desk.read.answer == layout.Answer(saved=3)
    desk.ask(4)
    assert desk.link.should_checkpoint()
    assert desk.read.answer == layout.Answer(saved=3), "the script has yet to save"


def test_checkpoint_is_written_before_its_answer(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int | None] = []
    write = desk.link._write_answer

    def written(answer: layout.Answer) -> None:
        found.append(desk.read.checkpoint_step)
        write(answer)

    monkeypatch.setattr(desk.link, "_write_answer", written)
    desk.link.should_checkpoint()
    desk.link.checkpointed(187)
    assert found == [187]


def test_answer_that_arrives_during_a_read_has_its_checkpoint(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.link.should_checkpoint()
    reads, pread = [0], os.pread

    def interrupted(descriptor: int, size: int, offset: int) -> bytes:
        reads[0] += 1
        if reads[0] == 2:
            desk.link.checkpointed(187)
        return pread(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", interrupted)
    path = desk.files.file(1, 0)
    found = [read_progress(path) for _ in range(2)]
    shown = [(each.checkpoint_step, each.answer) for each in found if each is not None]
    assert shown == [(187, layout.Answer()), (187, layout.Answer(saved=1))]


def test_answer_that_is_being_written_is_read_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = desk.files.file(1, 0)
    desk.link.should_checkpoint()
    desk.link.checkpointed(187)
    whole = path.read_bytes()
    end = layout.LOSS_START
    torn = whole[: end - 1] + bytes([whole[end - 1] ^ 1]) + whole[end:]
    contents = [torn, whole]
    monkeypatch.setattr(worker_files, "_read_file", lambda *_: (contents.pop(0), 0))
    found = read_progress(path)
    assert found is not None
    assert (found.checkpoint_step, found.answer) == (187, layout.Answer(saved=1))
    assert contents == []


def test_progress_with_an_answer_is_parsed_once(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.link.should_checkpoint()
    desk.link.checkpointed(187)
    parsed: list[bytes] = []

    def parse(content: bytes, written_ms: int) -> WorkerProgress | None:
        parsed.append(content)
        return worker_progress(content, written_ms)

    monkeypatch.setattr(worker_files, "worker_progress", parse)
    found = read_progress(desk.files.file(1, 0))
    assert found is not None
    assert found.answer == layout.Answer(saved=1)
    assert parsed == [desk.files.file(1, 0).read_bytes()]


@pytest.mark.parametrize(
    "error", ["rank 1: /claim: No space left on device", "ä" * 500, "a\x1b[1m"]
)
def test_failed_save_is_reported_with_its_error_and_nothing_waits(desk: Desk, error: str) -> None:
    desk.ask(1, seconds=600)  # beyond the time limit of this test
    assert desk.link.should_checkpoint()
    desk.link.save_failed(error)
    assert not desk.link.should_checkpoint()
    answer = desk.read.answer
    assert answer is not None
    assert (answer.saved, answer.failed) == (0, 1)
    assert answer.error[:100] == error.replace("\x1b", "\\x1b")[:100]
    assert len(answer.error.encode()) <= layout.ERROR_BYTES + 3
    assert desk.read.snapshots is None


def test_answer_of_an_earlier_library_is_absent() -> None:
    content = layout.pack(0, 1, 2, 3, 4, 5, 6, 0, [0.0] * 8, layout.pack_names(()))
    report = layout.pack_report(layout.SnapshotReport(step=2))
    assert layout.unpack_answer(content + report) is None
    torn = content + report + layout.pack_answer(layout.Answer(1, 2, "text"))[:-1]
    assert layout.unpack_answer(torn) is None
    assert layout.unpack_report(torn) == layout.SnapshotReport(step=2)


def test_worker_without_checkpoint_report_waits_at_the_next_query(desk: Desk) -> None:
    desk.ask(point=1, seconds=0.3)
    assert desk.link.should_checkpoint()
    began = time.monotonic()
    assert not desk.link.should_checkpoint()
    assert time.monotonic() - began >= 0.25
    assert desk.read.points == 2


def test_own_checkpoint_of_the_script_does_not_wait(desk: Desk) -> None:
    desk.ask(point=5, seconds=60)
    assert not desk.link.should_checkpoint()
    desk.link.checkpointed(4)
    assert desk.read.checkpoint_step == 4


def test_script_that_ends_on_sigterm_takes_no_step_before_the_signal(desk: Desk) -> None:
    """The launcher sends SIGTERM, perhaps after the agent has withdrawn the request."""
    desk.ask(point=1, seconds=0.5)
    assert desk.link.should_checkpoint()
    began = time.monotonic()
    withdraw = threading.Timer(0.1, desk.files.ask, (1, None))
    withdraw.start()
    desk.link.checkpointed(4)
    assert time.monotonic() - began >= 0.4
    withdraw.join()
    assert not desk.link.should_checkpoint()


def test_stop_in_progress_ends_the_wait(desk: Desk, request: pytest.FixtureRequest) -> None:
    """A script that handles SIGTERM itself continues to its own end."""
    own = signal.signal(signal.SIGTERM, lambda *_: None)
    request.addfinalizer(lambda: signal.signal(signal.SIGTERM, own))
    desk.ask(point=1, seconds=60)
    assert desk.link.should_checkpoint()
    worker = threading.Thread(target=desk.link.should_checkpoint)
    worker.start()
    worker.join(0.1)
    assert worker.is_alive()
    desk.files.ask(1, None)
    worker.join(PATIENCE_SECONDS)
    assert not worker.is_alive()


def test_worker_past_the_agreed_point_awaits_the_stop(desk: Desk) -> None:
    assert not desk.link.awaits_stop
    desk.link.should_checkpoint()
    desk.ask(point=3)
    assert not desk.link.awaits_stop
    desk.link.should_checkpoint()
    assert not desk.link.awaits_stop, "a step remains"
    assert desk.link.should_checkpoint()
    assert desk.link.awaits_stop
    desk.link.save_failed("full")
    assert not desk.link.awaits_stop, "the training goes on"


def test_worker_whose_stop_did_not_come_awaits_it_no_more(desk: Desk) -> None:
    desk.ask(point=1, seconds=0.0)
    assert desk.link.should_checkpoint()
    desk.link.checkpointed(1)
    assert not desk.link.awaits_stop


@pytest.mark.parametrize("is_withdrawn", [False, True])
def test_worker_that_waits_for_an_agreement_awaits_the_stop(desk: Desk, is_withdrawn: bool) -> None:
    desk.ask(point=0, seconds=600)
    worker = threading.Thread(target=desk.link.should_checkpoint, daemon=True)
    worker.start()
    until(lambda: desk.link.awaits_stop)
    if is_withdrawn:  # the stop is in progress
        desk.files.ask(1, None)
        assert desk.link.awaits_stop
    desk.ask(point=1, seconds=0.0)
    worker.join(PATIENCE_SECONDS)
    assert not worker.is_alive()


def test_progress_calls_the_callback_at_the_agreed_step(desk: Desk) -> None:
    called: list[int] = []
    step = 0
    desk.link.on_leave(lambda: called.append(step))
    assert desk.read.saves
    desk.ask(point=2, seconds=0.1)
    for step in (1, 2, 3):
        desk.link.progress(step, {})
    assert called == [2]
    assert desk.read.points >= 3, "it came past the place"


def test_script_that_queries_itself_gets_no_callback(desk: Desk) -> None:
    called: list[int] = []
    desk.link.on_leave(lambda: called.append(1))
    assert not desk.link.should_checkpoint()
    desk.ask(point=2)
    desk.link.progress(1, {})
    assert desk.link.should_checkpoint()
    assert called == []


def test_request_is_text_with_fixed_fields() -> None:
    hold = layout.pack_request(layout.Request(0, 25.0))
    at = layout.pack_request(layout.Request(12, 25.0))
    assert hold.split() == [b"checkpoint", b"hold", b"0" * 20, b"00025.000"]
    assert at.split() == [b"checkpoint", b"at", b"0" * 18 + b"12", b"00025.000"]
    assert layout.unpack_request(at) == (12, 25.0)
    blank = layout.pack_request(None)
    assert len(hold) == len(at) == len(blank) == layout.REQUEST_BYTES
    assert layout.unpack_request(blank) is None
    assert blank[0] == layout.BLANK
    parts = sorted(layout.WRITE_ORDER)
    assert [start for start, _ in parts] + [layout.REQUEST_BYTES] == [0] + [end for _, end in parts]


@pytest.mark.parametrize("written", range(1, len(layout.WRITE_ORDER)))
@pytest.mark.parametrize("before", [None, layout.Request(0, 20.0)], ids=["blank", "hold"])
def test_partially_written_request_is_never_misread(
    written: int, before: layout.Request | None
) -> None:
    """Between two writes the content is the old request, none, or a mere `hold`."""
    content = bytearray(layout.pack_request(before))
    new = layout.pack_request(layout.Request(77, 25.0))
    for start, end in layout.WRITE_ORDER[:written]:
        content[start:end] = new[start:end]
    found = layout.unpack_request(bytes(content))
    assert found is None or found.point in (0, 77)
    if before is None:
        assert content[0] == layout.BLANK


@pytest.mark.parametrize(
    ("world", "batch", "micro", "times"),
    [("8", 64, 8, 1), ("4", 64, 8, 2), ("3", 64, 8, 3), ("1", 64, 8, 8), ("8", 4, 8, 1)],
)
def test_ranks_accumulate_up_to_the_global_batch(
    monkeypatch: pytest.MonkeyPatch, world: str, batch: int, micro: int, times: int
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    assert accumulation(batch, micro) == times
    with pytest.raises(ValueError, match="at least 1, got 0"):
        accumulation(0, micro)


# -- text ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "step", "checkpoint", "saves", "metrics"),
    [
        ('{"step": 7, "loss": 0.5}', 7, -1, False, {"loss": 0.5}),
        ('{"step": 7, "checkpoint": 5, "saves": true}', 7, 5, True, {}),
        ('{"checkpoint": 5}', -1, 5, False, {}),
        ('{"step": -3, "checkpoint": "x", "saves": 1, "loss": "low"}', -1, -1, False, {"saves": 1}),
        ('{"step": true, "loss": 1e999, "big": ' + "9" * 400 + "}", -1, -1, False, {}),
    ],
)
def test_script_without_the_library_writes_json(
    text: str, step: int, checkpoint: int, saves: bool, metrics: dict[str, float]
) -> None:
    found = worker_progress(text.encode(), written_ms=99)
    assert found is not None
    assert (found.step, found.checkpoint_step, found.saves) == (step, checkpoint, saves)
    assert found.metrics == metrics
    assert found.at_ms == (99 if step >= 0 else 0)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"{" * 100_000, b"EJP1", b"EJP1" + b"\1" * 400, b"\xff\xfe"]
)
def test_invalid_progress_file_is_ignored(content: bytes) -> None:
    assert worker_progress(content, 0) is None


@pytest.mark.timeout(60)
def test_special_file_in_place_of_a_progress_file_does_not_block_the_agent(tmp_path: Path) -> None:
    pipe, link, huge = tmp_path / "pipe", tmp_path / "link", tmp_path / "huge"
    os.mkfifo(pipe)
    (tmp_path / "true").write_text('{"step": 1}')
    link.symlink_to(tmp_path / "true")
    huge.write_bytes(b'{"step": 1, "x": "' + b"x" * 100_000 + b'"}')
    for path in (pipe, link, huge, tmp_path, tmp_path / "missing"):
        assert read_progress(path) is None
    assert read_progress(tmp_path / "true") is not None


# -- usage --------------------------------------------------------------------------


def test_script_uses_the_module(desk: Desk) -> None:
    script = (
        "from elasticjob import train\n"
        "train.on_leave(print)\n"
        "train.progress(5, loss=0.25)\n"
        "train.checkpointed(5)\n"
        "train.should_checkpoint()\n"
    )
    env = {
        "PYTHONPATH": str(SIDECAR),
        layout.PROGRESS_FILE: str(desk.files.file(1, 0)),
        layout.REQUEST_FILE: str(desk.files.request_file(1)),
    }
    desk.files.prepare(1, slots=1)
    subprocess.run([sys.executable, "-W", "error", "-c", script], env=env, check=True, umask=0o077)
    assert (desk.read.step, desk.read.checkpoint_step) == (5, 5)
    assert desk.files.file(1, 0).stat().st_mode & 0o777 == 0o644, "the agent is another user"


CHILDREN = """
import multiprocessing, os, sys
from elasticjob import train
train.on_leave(print)  # when it is imported, and so in each child that imports it anew
if __name__ == "__main__":
    train.progress(1)
    for method in ("spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            pool.apply(train.progress, (7,))
    train.progress(2)
    if len(sys.argv) == 1:  # another script in the same process takes its place
        os.execv(sys.executable, [sys.executable, __file__, "again"])
    train.progress(3)
"""


def test_reimporting_child_processes_do_not_report(desk: Desk, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(CHILDREN)
    env = {
        "PYTHONPATH": str(SIDECAR),
        layout.PROGRESS_FILE: str(desk.files.file(1, 0)),
        layout.REQUEST_FILE: str(desk.files.request_file(1)),
    }
    desk.files.prepare(1, slots=1)
    subprocess.run([sys.executable, "-W", "error", str(script)], env=env, check=True)
    assert (desk.read.step, desk.read.saves) == (3, True)


def test_library_imports_no_heavy_module() -> None:
    script = (
        "import sys; from elasticjob import train; print(len(sys.modules)); print(*sys.modules)"
    )
    ran = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import sys; sys.path.append({str(SIDECAR)!r}); {script}",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(ran.stdout.split())
    assert not loaded & {"json", "typing_extensions", "asyncio", "socket", "elasticjob_agent"}
