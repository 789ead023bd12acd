"""Messages on the wire, and the agent's requests among them."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob_launcher.wire import (
    Attach,
    Command,
    Lines,
    Release,
    Signal,
    Start,
    Stop,
    WireError,
    encode,
    parse_request,
)

WORKER = {"local_rank": 0, "argv": ["true"], "env": {"A": "b"}, "log_dir": "", "prefix": "[0] "}


def test_messages_do_not_depend_on_chunk_boundaries() -> None:
    stream = encode({"a": 1}) + b"\n" + encode({"b": "\udc80ü\n"}) + encode({"c": []})
    for size in range(1, len(stream)):
        lines = Lines()
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
        messages = [message for piece in pieces for message in lines.feed(piece)]
        assert messages == [{"a": 1}, {"b": "\udc80ü\n"}, {"c": []}]


@pytest.mark.parametrize("line", [b"{\n", b"[]\n", b"\xff\n", b"[" * 100_000 + b"\n", b"x" * 101])
def test_malformed_message_is_an_error(line: bytes) -> None:
    lines = Lines(limit_bytes=100)
    with pytest.raises(WireError):
        lines.feed(line)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            {
                "type": "attach",
                "member": "m",
                "session": "s",
                "job_key": "00ff",
                "orphan_seconds": 3,
            },
            Attach("m", "s", b"\x00\xff", 3.0),
        ),
        (
            {"type": "attach", "member": "m", "session": "s", "job_key": ""},
            Attach("m", "s", b"", None),
        ),
        (
            {"type": "start", "round": 1, "workers": [WORKER], "max_log_bytes": 9},
            Start(1, [WORKER], 9),
        ),
        (
            {"type": "command", "env": {"A": "b"}, "log_dir": "/logs", "max_log_bytes": 9},
            Command({"A": "b"}, "/logs", 9),
        ),
        ({"type": "stop", "round": 1, "grace_seconds": 0.5}, Stop(1, 0.5, ends_step=True)),
        (
            {"type": "stop", "round": 1, "grace_seconds": 9, "dump": True, "copies": False},
            Stop(1, 9.0, dump=True, copies=False),
        ),
        (
            {
                "type": "stop",
                "round": 1,
                "grace_seconds": 9,
                "copies": False,
                "ends_step": True,
            },
            Stop(1, 9.0, copies=False, ends_step=True),
        ),
        (
            {"type": "stop", "round": 1, "grace_seconds": 9, "copies": True, "ends_step": False},
            Stop(1, 9.0),
        ),
        ({"type": "signal", "round": 1, "signum": 15}, Signal(1, 15)),
        ({"type": "release", "exit_code": 3, "message": "m"}, Release(3, "m")),
    ],
)
def test_requests_are_typed(message: dict[str, Any], expected: object) -> None:
    assert parse_request(message) == expected


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"type": "attach", "member": 1, "session": "s", "job_key": ""}, "member"),
        ({"type": "attach", "member": "m", "session": "s", "job_key": "xy"}, "job_key"),
        ({"type": "start", "round": True, "workers": [], "max_log_bytes": 9}, "round"),
        ({"type": "start", "round": 1, "workers": {}, "max_log_bytes": 9}, "workers"),
        ({"type": "start", "round": 1, "workers": [1], "max_log_bytes": 9}, "workers"),
        ({"type": "start", "round": 1, "workers": [{**WORKER, "argv": "x"}]}, "argv"),
        ({"type": "start", "round": 1, "workers": [{**WORKER, "env": {"A": 1}}]}, "env"),
        ({"type": "command", "env": [], "log_dir": "", "max_log_bytes": 9}, "env"),
        ({"type": "command", "env": {}, "log_dir": None, "max_log_bytes": 9}, "log_dir"),
        ({"type": "stop", "round": 1, "grace_seconds": -1}, "grace_seconds"),
        ({"type": "stop", "round": 1, "grace_seconds": float("nan")}, "grace_seconds"),
        ({"type": "signal", "round": 1, "signum": 0}, "signum"),
        ({"type": "release", "exit_code": 256, "message": ""}, "exit_code"),
        ({}, "type"),
    ],
)
def test_invalid_request_names_its_field(message: dict[str, Any], field: str) -> None:
    with pytest.raises(WireError, match=field):
        parse_request(message)
