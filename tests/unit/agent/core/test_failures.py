"""Attribution of the first failure: from exits, error files and the tails of standard error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticjob_agent.core.error_reports import (
    HEADER,
    MESSAGE_CHARACTERS,
    from_error_file,
    from_stderr,
)
from elasticjob_agent.core.failures import failure_class, first_failure_of, fit_to_limit
from elasticjob_agent.core.state import StopCause, WorkerEnded, WorkerGroup
from elasticjob_agent.worker_runtime import WorkerExited
from elasticjob_rendezvous.protocol.records.codec import encode
from elasticjob_rendezvous.protocol.records.failures import FAILURE_BYTES, Failure, FailureClass
from tests.unit.agent.builders import FACTS

TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
    main()
"""
# Output of torch 2.13 for killed peers, a taken port, and exhausted memory.
RESET = (
    "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read "
    "error [127.0.0.1]:52970: Connection reset by peer. This is typically caused by a remote "
    "worker hanging or bugs in the application."
)
CLOSED = (
    "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "
    "Connection closed by peer [127.0.0.1]:10119. This is typically caused by a remote worker "
    "crashing."
)
ENDED = (
    "elasticjob.train.RankEndedError: rank 0 has ended its process, and rank 1 has "
    "called save() of step 2: see the output of rank 0"
)
BARRIER = "RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 3000 ms"
STORE = "torch.distributed.DistNetworkError: Connection reset by peer"
TIMED_OUT = (
    "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] "
    "Timed out waiting 6000ms for recv operation to complete"
)
PORT_TAKEN = (
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
    "network address. port: 46341, useIpv6: false, code: -98, name: EADDRINUSE, message: address "
    "already in use"
)
NO_MEMORY = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't "
    "allocate memory: you tried to allocate 4000000000000000 bytes. Error code 12"
)
CUDA_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
NCCL_MEMORY = (
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94, unhandled cuda "
    "error\nLast error:\nCuda failure 2 'out of memory'"
)
SHARED_MEMORY = (
    "RuntimeError: DataLoader worker (pid 213) is killed by signal: Bus error. It is possible that "
    "dataloader's workers are out of shared memory. Please try to raise your shared memory limit."
)
LOADER = "RuntimeError: DataLoader worker (pid 213) is killed by signal: Killed. "
CHILD = (
    "subprocess.CalledProcessError: Command '['convert', 'x']' died with <Signals.SIGKILL: 9>.\n"
)
BAD_ALLOC = (
    "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n"
)
CONNECT = (
    "torch.distributed.DistNetworkError: The client socket has timed out after 2000ms while trying "
    "to connect to (127.0.0.1, 29500)."
)
ABORTED = (
    "[rank0]:[E1121 ProcessGroupNCCL.cpp:1182] NCCL communicator was aborted on rank 0.\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
)
WATCHDOG = (
    "[rank0]:[E1121 ProcessGroupNCCL.cpp:632] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=5)\nterminate called after throwing an instance of 'c10::DistBackendError'\n"
)


RECORDED = TRACEBACK + '  File "torch/distributed/elastic/multiprocessing/errors/x.py", line 5\n'
GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "train.py", line 3, in <module>
  |     raise ExceptionGroup('two loaders failed', failures)
  | ExceptionGroup: two loaders failed (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "train.py", line 9, in load
    | ValueError: shard 3 is empty
    +---------------- 2 ----------------
    | OSError: [Errno 5] I/O error
    +------------------------------------
"""
DUMP = """
Current thread 0x00007f11f5c5a740 (most recent call first):
  File "/app/data.py", line 12 in decode
  File "/app/train.py", line 44 in <module>
  File "/tmp/x/launcher.pyz/elasticjob_launcher/zygote/run_module.py", line 88 in _as_script
  File "<string>", line 1 in <module>
"""


def because(cause: str) -> str:
    """Return the traceback of an exception that was raised from another."""
    link = "The above exception was the direct cause of the following exception:"
    return f"{cause.rstrip()}\n\n{link}\n\n{TRACEBACK}trainer.StepFailed: step 7\n"


def exited(
    local_rank: int = 0,
    code: int | None = 1,
    signum: int | None = None,
    at: int = 10_000,
    stderr: str = "",
    message: str = "",
    memory: bool = False,
) -> WorkerExited:
    code = None if signum else code
    pid = 50 + local_rank
    return WorkerExited(1, local_rank, pid, code, signum, at, message, stderr, memory)


def report(message: str, stamp: Any = None, callstack: str = "frames") -> bytes:
    extra = {"py_callstack": callstack, "timestamp": stamp}
    return json.dumps({"message": {"message": message, "extraInfo": extra}}).encode()


def group(
    *exits: WorkerExited | WorkerEnded, reports: dict[int, bytes] | None = None, base_rank: int = 0
) -> WorkerGroup:
    ended = tuple(
        exit_ if isinstance(exit_, WorkerEnded) else WorkerEnded(exit_) for exit_ in exits
    )
    return WorkerGroup(1, 4, base_rank, 0.0, started=True, exits=ended, reports=reports or {})


def culprit(*exits: WorkerExited | WorkerEnded, **options: Any) -> Failure:
    failure = first_failure_of(group(*exits, **options), FACTS)
    assert failure is not None
    return failure


# -- classes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exit_", "kind"),
    [
        (exited(code=1), FailureClass.USER_ERROR),
        (exited(stderr=TRACEBACK + "ValueError: boom\n"), FailureClass.USER_ERROR),
        (exited(stderr=TRACEBACK + "[rank0]: ConnectionResetError: [Errno 104] Connection reset "
                "by peer\n"), FailureClass.USER_ERROR),
        (exited(stderr=TRACEBACK + RESET), FailureClass.PEER_ABORT),
        (exited(stderr=TRACEBACK + CLOSED), FailureClass.PEER_ABORT),
        (exited(stderr=TRACEBACK + ENDED), FailureClass.PEER_ABORT),
        (exited(stderr=TRACEBACK + BARRIER), FailureClass.COLLECTIVE_TIMEOUT),
        (exited(stderr=TRACEBACK + STORE), FailureClass.PEER_ABORT),
        (exited(stderr=TRACEBACK + TIMED_OUT), FailureClass.COLLECTIVE_TIMEOUT),
        (exited(stderr=TRACEBACK + CONNECT), FailureClass.COLLECTIVE_TIMEOUT),
        (exited(signum=6, stderr=WATCHDOG), FailureClass.COLLECTIVE_TIMEOUT),
        (exited(signum=6, stderr=ABORTED), FailureClass.PEER_ABORT),
        (exited(signum=6, stderr=BAD_ALLOC), FailureClass.HOST_OUT_OF_MEMORY),
        (exited(signum=6, stderr="free(): double free detected"), FailureClass.SIGNAL),
        (exited(stderr=TRACEBACK + "TimeoutError: the socket Timed out waiting 5ms"),
         FailureClass.USER_ERROR),
        (exited(stderr=TRACEBACK + PORT_TAKEN), FailureClass.MASTER_PORT),
        (exited(stderr=TRACEBACK + "OSError: [Errno 98] Address already in use"),
         FailureClass.USER_ERROR),
        (exited(stderr=TRACEBACK + "MemoryError\n"), FailureClass.HOST_OUT_OF_MEMORY),
        (exited(stderr=TRACEBACK + NO_MEMORY), FailureClass.HOST_OUT_OF_MEMORY),
        (exited(stderr=TRACEBACK + SHARED_MEMORY), FailureClass.HOST_OUT_OF_MEMORY),
        (exited(stderr=TRACEBACK + "ray.exceptions.OutOfMemoryError: Task was killed"),
         FailureClass.HOST_OUT_OF_MEMORY),
        (exited(stderr=TRACEBACK + CUDA_MEMORY), FailureClass.CUDA_OUT_OF_MEMORY),
        (exited(stderr=TRACEBACK + "torch.cuda.OutOfMemoryError: CUDA out of memory."),
         FailureClass.CUDA_OUT_OF_MEMORY),
        (exited(stderr=TRACEBACK + NCCL_MEMORY), FailureClass.CUDA_OUT_OF_MEMORY),
        (exited(signum=9), FailureClass.SIGNAL),
        (exited(signum=9, memory=True), FailureClass.HOST_OUT_OF_MEMORY),
        (exited(signum=11, memory=True), FailureClass.SIGNAL),
        (exited(stderr=TRACEBACK + LOADER, memory=True), FailureClass.HOST_OUT_OF_MEMORY),
        (exited(stderr=TRACEBACK + LOADER), FailureClass.USER_ERROR),
        (exited(stderr=because(TRACEBACK + LOADER), memory=True), FailureClass.HOST_OUT_OF_MEMORY),
        (exited(stderr=because(TRACEBACK + LOADER)), FailureClass.USER_ERROR),
        (exited(stderr=TRACEBACK + CHILD, memory=True), FailureClass.HOST_OUT_OF_MEMORY),
        (exited(stderr=TRACEBACK + CHILD), FailureClass.USER_ERROR),
        (exited(code=139, stderr="Segmentation fault"), FailureClass.SIGNAL),
        (exited(code=137), FailureClass.SIGNAL),
        (exited(code=137, memory=True), FailureClass.HOST_OUT_OF_MEMORY),
        (exited(code=139, stderr=TRACEBACK + "ValueError: x"), FailureClass.USER_ERROR),
        (exited(code=255), FailureClass.USER_ERROR),
        (exited(stderr=TRACEBACK + "ValueError: x", memory=True), FailureClass.USER_ERROR),
        (exited(signum=11, stderr="Segmentation fault"), FailureClass.SIGNAL),
        (exited(stderr=RECORDED + "ConnectionRefusedError: [Errno 111] Connection refused"),
         FailureClass.USER_ERROR),
        (exited(stderr=because(TRACEBACK + CLOSED)), FailureClass.PEER_ABORT),
        (exited(stderr=because(TRACEBACK + TIMED_OUT)), FailureClass.COLLECTIVE_TIMEOUT),
        (exited(stderr=because(TRACEBACK + CUDA_MEMORY)), FailureClass.CUDA_OUT_OF_MEMORY),
        (exited(stderr=because(because(TRACEBACK + "MemoryError"))),
         FailureClass.HOST_OUT_OF_MEMORY),
        (exited(stderr=because(TRACEBACK + "KeyError: 'x'")), FailureClass.USER_ERROR),
        (exited(stderr=GROUP.replace("ValueError: shard 3 is empty", "MemoryError")),
         FailureClass.HOST_OUT_OF_MEMORY),
        (exited(stderr=GROUP.replace("OSError: [Errno 5] I/O error", CLOSED)),
         FailureClass.PEER_ABORT),
        (exited(stderr=GROUP), FailureClass.USER_ERROR),
        (exited(code=127, message="no such program"), FailureClass.LAUNCH_ERROR),
        (exited(code=126), FailureClass.LAUNCH_ERROR),
    ],
)  # fmt: skip
def test_failure_class_from_error_text(exit_: WorkerExited, kind: FailureClass) -> None:
    assert culprit(exit_).kind is kind


def test_abort_at_exit_is_not_the_failure_reason() -> None:
    tail = TRACEBACK + "ValueError: boom\nterminate called without an active exception\n"
    failure = culprit(exited(signum=6, stderr=tail))
    assert (failure.kind, failure.signal) == (FailureClass.USER_ERROR, 6)
    assert failure.message == "ValueError: boom"
    assert failure.traceback.endswith("ValueError: boom")
    peer = culprit(exited(signum=6, stderr=tail.replace("ValueError: boom", CLOSED)))
    assert peer.kind is FailureClass.PEER_ABORT


def test_timed_out_worker_precedes_workers_it_aborted() -> None:
    first = exited(0, at=100, stderr=TRACEBACK + CLOSED)
    assert culprit(first, exited(1, at=900, stderr=TRACEBACK + TIMED_OUT)).local_rank == 1


def test_worker_with_own_error_precedes_worker_with_collective_timeout() -> None:
    waited = exited(0, at=100, stderr=TRACEBACK + TIMED_OUT)
    assert culprit(waited, exited(1, at=900, stderr=TRACEBACK + "ValueError: x")).local_rank == 1


def test_taken_master_port_of_another_rank_than_0_is_user_error() -> None:
    exit_ = exited(stderr=TRACEBACK + PORT_TAKEN)
    assert culprit(exit_, base_rank=2).kind is FailureClass.USER_ERROR


def test_connection_loss_below_torch_frames_is_peer_abort() -> None:
    frames = '  File "torch/distributed/distributed_c10d.py", line 3252, in all_reduce\n'
    tail = TRACEBACK + frames + "BrokenPipeError: [Errno 32] Broken pipe"
    assert culprit(exited(stderr=tail)).kind is FailureClass.PEER_ABORT


def test_user_error_below_torch_frames_is_user_error() -> None:
    frames = '  File "torch/distributed/distributed_c10d.py", line 3252, in all_reduce\n'
    assert culprit(exited(stderr=TRACEBACK + frames + "ValueError: x")).kind is (
        FailureClass.USER_ERROR
    )


# -- messages -----------------------------------------------------------------------


def test_traceback_is_read_from_stderr_without_torch_prefixes() -> None:
    lines = (TRACEBACK + "ValueError: boom\nmore of it\n").splitlines()
    prefixed = "warming up\n" + "\n".join(f"[rank3]: {line}" for line in lines)
    failure = culprit(exited(stderr=prefixed))
    assert failure.message == "ValueError: boom\nmore of it"
    assert failure.traceback.startswith("Traceback (most recent call last):\n  File")


@pytest.mark.parametrize("prefix", ["", "[rank0]:"])
def test_warnings_of_native_code_after_a_traceback_are_no_part_of_its_message(prefix: str) -> None:
    warning = (
        f"{prefix}[W1127 03:12:33.615816734 ProcessGroupNCCL.cpp:1575] Warning: WARNING: "
        "destroy_process_group() was not called before program exit (function operator())\n"
    )
    memory = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    account = from_stderr(warning + TRACEBACK + memory + "\n" + warning * 8, final_only=True)
    assert account is not None
    assert account.message == memory
    assert account.traceback == TRACEBACK + memory


def test_errors_of_native_code_stay_in_the_message() -> None:
    error = "[E1127 03:12:33.615816734 ProcessGroupNCCL.cpp:683] [Rank 0] Watchdog caught a timeout"
    account = from_stderr(f"{TRACEBACK}RuntimeError: stopped\n{error}\n")
    assert account is not None
    assert account.message == f"RuntimeError: stopped\n{error}"


@pytest.mark.parametrize(
    ("exit_", "message"),
    [
        (exited(code=3), "exit code 3"),
        (exited(code=3, stderr="loading\nno data at /data\n\n"),
         "exit code 3; the last line on its standard error: no data at /data"),
        (exited(signum=9, stderr="loading\n"), "killed by SIGKILL"),
        (exited(signum=40), "killed by signal 40"),
        (exited(code=139, stderr="Segmentation fault\n"),
         "exit code 139: a command in it was killed by SIGSEGV; the last line on its standard "
         "error: Segmentation fault"),
        (exited(code=127, message="'train' was not found"), "'train' was not found"),
        (exited(signum=6, stderr="free(): double free detected in tcache 2\n"),
         "killed by SIGABRT; the last line on its standard error: free(): double free detected in "
         "tcache 2"),
        (exited(signum=11, stderr="loading\nFatal Python error: Segmentation fault\n" + DUMP),
         "killed by SIGSEGV; it was in decode (data.py, line 12)"),
        (exited(signum=9, stderr="Fatal Python error: Aborted\n" + DUMP), "killed by SIGKILL"),
        (exited(stderr=TRACEBACK + "\x1b[1;35mValueError\x1b[0m: \x1b[35mno\x1b[0m\n"),
         "ValueError: no"),
        (exited(stderr=GROUP), "ExceptionGroup: two loaders failed (2 sub-exceptions): "
         "ValueError: shard 3 is empty\nOSError: [Errno 5] I/O error"),
        (exited(stderr='x\n  File "/a/train.py", line 3\n    def (\nSyntaxError: invalid syntax\n'),
         "SyntaxError: invalid syntax (train.py, line 3)"),
        (exited(stderr=TRACEBACK + '  File "/a/model.py", line 3\n    def (\nSyntaxError: no\n'),
         "SyntaxError: no (model.py, line 3)"),
        (exited(stderr="g.py\", line 3\nRuntimeError: the head was cut off\n"),
         "RuntimeError: the head was cut off"),
    ],
)  # fmt: skip
def test_failure_message(exit_: WorkerExited, message: str) -> None:
    assert culprit(exit_).message == message


def test_traceback_includes_exception_causes() -> None:
    whole = because(because(TRACEBACK + "KeyError: 'x'"))
    account = from_stderr("noise\n" + whole)
    assert account is not None
    assert account.traceback == whole.strip()
    assert [cause.message for cause in account.causes] == [
        "trainer.StepFailed: step 7",
        "KeyError: 'x'",
    ]
    cut = from_stderr(whole[len("Traceback") :])
    assert cut is not None
    assert [cause.message for cause in cut.causes][1:] == ["KeyError: 'x'"]


@pytest.mark.parametrize(
    ("code", "after", "said"),
    [
        (1, 0, "RuntimeError"),
        (1, 30, "RuntimeError"),
        (4, 0, "RuntimeError"),
        (4, 30, "exit code 4; the last line on its standard error: going on"),
    ],
)
def test_caught_and_logged_exception_is_not_the_failure_reason(
    code: int, after: int, said: str
) -> None:
    failure = culprit(exited(code=code, stderr=TRACEBACK + CLOSED + "\ngoing on" * after))
    assert failure.message.startswith(said)
    caught = said != "RuntimeError"
    assert failure.kind is (FailureClass.USER_ERROR if caught else FailureClass.PEER_ABORT)


def test_long_message_keeps_traceback_frames() -> None:
    failure = culprit(exited(stderr=TRACEBACK + "ValueError: " + "x" * 12_000))
    assert failure.traceback.startswith(TRACEBACK)


def test_causes_in_error_file_count() -> None:
    failure = culprit(
        exited(), reports={0: report("StepFailed: 7", 1, because(TRACEBACK + CLOSED))}
    )
    assert failure.kind is FailureClass.PEER_ABORT
    assert failure.message == "StepFailed: 7"


def test_search_of_endless_exception_chain_is_bounded() -> None:
    chain = TRACEBACK + "E: x\n"
    for _ in range(2000):
        chain = because(chain)
    bars = "\n".join(
        f"  {'| ' * depth}+ Exception Group {HEADER}\n  {'| ' * (depth + 1)}E: x\n"
        f"  {'| ' * depth}+---------------- 1 ----------------"
        for depth in range(500)
    )
    for text in (chain, bars, f"{bars}\n{chain}"):
        assert from_error_file(report("x", 1, text)) is not None
        from_stderr(text)


def test_crash_location_omits_own_frames() -> None:
    failure = culprit(exited(signum=11, stderr="Fatal Python error: Segmentation fault\n" + DUMP))
    assert failure.kind is FailureClass.SIGNAL
    assert failure.traceback.splitlines() == [
        "Stack (most recent call last):",
        '  File "/app/train.py", line 44, in <module>',
        '  File "/app/data.py", line 12, in decode',
    ]


@pytest.mark.parametrize(
    ("raw", "message", "at_ms"),
    [
        (report("ValueError: x", "1700000000"), "ValueError: x", 1_700_000_000_000),
        (report("ValueError: x", 1700000000.25), "ValueError: x", 1_700_000_000_250),
        (report("ValueError: x", "yesterday"), "ValueError: x", None),
        (report("ValueError: x", float("1e999")), "ValueError: x", None),
        (report("ValueError: x", [1]), "ValueError: x", None),
        (b'{"message": "plain", "timestamp": 1700000000}', "plain", 1_700_000_000_000),
        (b'{"message": {"message": "bare"}}', "bare", None),
        (b'{"message": {"message": "odd", "extraInfo": "text"}}', "odd", None),
        (b'{"message": "half \\ud800 a pair"}', "half ? a pair", None),
        (b'\xff\xfe{"message": "x"}', None, None),
        (b'{"message": "cut', None, None),
        (b'{"message": {"message": 3}}', None, None),
        (b'{"message": ""}', None, None),
        (b'["message"]', None, None),
        (b"[" * 100_000, None, None),
        (b"", None, None),
    ],
)
def test_error_files_of_every_kind(raw: bytes, message: str | None, at_ms: int | None) -> None:
    account = from_error_file(raw)
    assert (account and account.message) == message
    assert (account and account.at_ms) == at_ms


@given(st.binary(max_size=300))
def test_malformed_error_file_does_not_raise(raw: bytes) -> None:
    from_error_file(raw)


@given(st.text(max_size=300))
def test_malformed_stderr_does_not_raise(tail: str) -> None:
    account = from_stderr(tail)
    assert account is None or account.message.encode() is not None


def test_both_ends_of_very_long_message_are_classified() -> None:
    """The search's time may grow with the square of the length."""
    noise = "gloo " * 200_000
    raw = json.dumps({"message": {"message": f"{BARRIER}\n{noise}\nthe last word"}}).encode()
    account = from_error_file(raw)
    assert account is not None
    assert len(account.message) < MESSAGE_CHARACTERS + 10
    assert account.message.startswith(BARRIER)
    assert account.message.endswith("the last word")
    assert failure_class(None, account, 0) is FailureClass.COLLECTIVE_TIMEOUT


@given(st.text(max_size=9000), st.text(max_size=20_000))
def test_failure_record_always_fits_its_size_limit(message: str, traceback: str) -> None:
    failure = Failure(
        1, "m" * 40, "n" * 63, 0, 0, FailureClass.USER_ERROR, 5, 1, None, message, traceback, "w"
    )
    assert len(encode(fit_to_limit(failure))) <= FAILURE_BYTES


def test_long_traceback_with_control_characters_keeps_its_end() -> None:
    failure = culprit(exited(), reports={0: report("E: x", 1, "\x00" * 9000 + "the last frame")})
    assert failure.traceback.endswith("the last frame")
    assert len(encode(failure)) <= FAILURE_BYTES


# -- the culprit --------------------------------------------------------------------


def test_no_failed_worker_gives_no_failure() -> None:
    assert first_failure_of(group(exited(code=0), exited(1, code=0)), FACTS) is None
    assert first_failure_of(group(reports={0: report("x", 1)}), FACTS) is None, (
        "it may have been caught"
    )


def test_first_exit_is_first_failure_without_error_files() -> None:
    assert culprit(exited(1, at=500), exited(0, at=900)).local_rank == 1


def test_error_file_dates_its_worker_by_its_own_timestamp() -> None:
    failure = culprit(
        exited(0, at=9_000), exited(1, at=9_100), reports={1: report("ValueError: x", 8.0)}
    )
    assert (failure.local_rank, failure.at_ms) == (1, 8_000)


def test_still_exiting_worker_with_error_file_can_be_first_failure() -> None:
    failure = culprit(
        exited(0, at=9_000, stderr=TRACEBACK + RESET), reports={1: report("ValueError: x", 8.0)}
    )
    assert (failure.local_rank, failure.exit_code, failure.signal) == (1, None, None)


def test_aborted_collective_is_not_first_failure_beside_a_cause() -> None:
    failure = culprit(
        exited(0, at=100, stderr=TRACEBACK + CLOSED), exited(1, at=900, stderr="ValueError: x")
    )
    assert failure.local_rank == 1


def test_traceback_of_exiting_worker_killed_by_agent_counts() -> None:
    failure = culprit(
        exited(0, at=100, stderr=TRACEBACK + CLOSED),
        WorkerEnded(
            exited(1, signum=9, at=200, stderr=TRACEBACK + "ValueError: x"), StopCause.FAILURE
        ),
    )
    assert (failure.local_rank, failure.kind) == (1, FailureClass.USER_ERROR)
    assert failure.signal is None, "that was ours"


@pytest.mark.parametrize(
    "during", [StopCause.URGENT, StopCause.PLANNED, StopCause.LEAVE, StopCause.END]
)
def test_errors_during_stop_without_failure_do_not_count(during: StopCause) -> None:
    exit_ = exited(stderr=TRACEBACK + "ValueError: x")
    assert (
        first_failure_of(group(WorkerEnded(exit_, during), reports={0: report("x", 1)}), FACTS)
        is None
    )


@pytest.mark.parametrize(
    ("exit_", "blamed"),
    [
        (exited(code=1, stderr=TRACEBACK + "ValueError: x"), True),
        (exited(signum=9, stderr=TRACEBACK + "ValueError: x"), True),
        (exited(signum=9, stderr=TRACEBACK + "ValueError: x" + "\ngoing on" * 9), False),
        (exited(code=143), False),
        (exited(signum=9), False),
        (exited(code=1, stderr=TRACEBACK + CLOSED), False),
    ],
)
def test_during_peer_failure_only_own_error_counts(exit_: WorkerExited, blamed: bool) -> None:
    found = first_failure_of(group(WorkerEnded(exit_, StopCause.PEER_FAILURE)), FACTS)
    assert (found is not None) is blamed


def test_error_file_is_printable() -> None:
    hostile = "bad\x1b]52;c;aGk=\x07\x9b\u202e\x1b[31m red"
    told = from_error_file(json.dumps({"message": {"message": hostile}}).encode())
    assert told is not None
    assert told.message == r"bad\x1b]52;c;aGk=\x07\x9b\u202e red"


@pytest.mark.parametrize(
    ("exits", "reports", "expected"),
    [
        ((exited(1, code=3, stderr="no data at /data"),), {}, True),
        ((exited(1, code=3),), {1: report("exit code 3", 1)}, False),
        ((exited(1, code=127, message="'train' was not found"),), {}, False),
    ],
)
def test_message_describes_the_exit_of_a_worker_without_error(
    exits: tuple[WorkerExited, ...], reports: dict[int, bytes], expected: bool
) -> None:
    assert culprit(*exits, reports=reports).describes_exit is expected


WORKER = """
import subprocess, sys, time
subprocess.run([sys.executable, "-c", "from elasticjob_torchrun import nested; nested.refuse()"])
time.sleep(60)
"""


def test_worker_that_torchrun_aborted_has_an_error_of_its_script(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    worker_env = {
        "ELASTICJOB_ROUND": f"test-{os.getpid()}",  # above the worker no process has it
        "TORCHELASTIC_ERROR_FILE": str(file),
        "RANK": "1",
    }
    worker = subprocess.run(
        [sys.executable, "-c", WORKER],
        env={**os.environ, **worker_env},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert worker.returncode == -signal.SIGABRT, worker.stderr
    found = culprit(exited(signum=6, stderr=worker.stderr), reports={0: file.read_bytes()})
    assert found.kind is FailureClass.USER_ERROR
    assert "spec.launch" in found.message
    other = culprit(exited(signum=6), reports={0: report(found.message, 1)})
    assert other.kind is FailureClass.SIGNAL, "the text alone is no evidence"
