"""The CLI on a terminal: hostile names, messages, tracebacks and logs arrive as visible text."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import termios
from pathlib import Path
from typing import Any

import pytest

from tests.integration.local_rig import LocalRig, read_all

HOSTILE = (
    "a\x1b[2J\x1b]52;c;aGk=\x07\x1b]8;;http://evil\x1b\\\x9b31m\x85\x00\x08\x0b\x0c\x0e\x7f\r"
    "\u202e\u2066\u200f\u061c\u200b\u200d\u2028\u2029\ufeff\U000e0041\nFORGED  Ready  True\tb"
)
STAMP = "2026-01-31T12:00:00Z"
SEQUENCES = re.compile(r"\x1b\[[0-9;:]*m|\x1b\[\?25[lh]|\x1b\[[0-9]*A|\x1b\[2K|\r(?=[\x1b\n])|\r$")
"""Sequences of the live table: colours, cursor up and visibility, erased lines."""
UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\U000e0000-\U000e0fff]"
)


def on_terminal(rig: LocalRig, *arguments: object, columns: int = 400, **env: str) -> str:
    """Return the text that a command writes to its terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    attributes = termios.tcgetattr(theirs)
    attributes[1] &= ~termios.ONLCR  # the terminal adds no carriage returns
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    # COLUMNS, which the workers of pytest-xdist have, overrides the terminal's width.
    inherited = {name: value for name, value in rig.env.items() if name != "COLUMNS"}
    process = subprocess.Popen(
        rig.command(*arguments),
        env={**inherited, "TERM": "xterm-256color", **env},
        cwd=rig.job,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    written = read_all(ours)
    process.wait(60)
    return written.decode()


def stored_job(rig: LocalRig, hostile: str = HOSTILE) -> None:
    """Store a job that has ended, whose members wrote `hostile` wherever they could."""
    failure = {
        "round": 1, "pod": hostile, "nodeName": hostile, "rank": 0, "exitCode": 1,
        "class": hostile, "message": hostile, "traceback": hostile,
    }  # fmt: skip
    cause = {"kind": hostile, "members": [hostile], "detail": hostile, "reason": hostile}
    condition = {"type": "Failed", "status": "True", "reason": "X", "message": hostile}
    status = {
        "phase": "Failed",
        "nodes": 1,
        "explanation": [hostile],
        "rendezvous": {"state": "closed", "round": 1, "master": hostile, "cause": cause,
                       "waitingReason": hostile},
        "members": [{"pod": hostile, "state": hostile, "round": 1, "start": "cold",
                     "coldReason": hostile}],
        "rounds": [{"round": 1, "cause": hostile, "members": [hostile], "nodes": 1}],
        "firstFailure": failure,
        "lastFailure": {**failure, "round": 2},
        "conditions": [{**condition, "lastTransitionTime": STAMP}],
    }  # fmt: skip
    document = json.loads(rig.manifest().read_text())
    document["metadata"] |= {"namespace": "default", "uid": "u", "creationTimestamp": STAMP}
    document["metadata"]["annotations"] = {"note": hostile}
    folder = rig.state / "elasticjob" / "default" / "job"
    worker = folder / "logs" / "job-0" / "workers" / "round_1" / "0"
    worker.mkdir(parents=True)
    (folder / "status.json").write_text(json.dumps({**document, "status": status}))
    seat = {"pod": "job-0", "groupRank": 0, "baseRank": 0, "slots": 1}
    rounds = [{"round": 1, "worldSize": 1, "seats": [seat]}]
    (folder / "rounds.json").write_text(json.dumps(rounds))
    for file in (folder / "logs" / "job-0" / "trainer.log", worker / "stdout.log"):
        file.write_text(f"{hostile}\n")


def shows_text_only(written: str, known: str = "FORGED") -> None:
    assert known in written, written
    assert UNSAFE.findall(written) == []
    assert "\x1b" not in written


@pytest.mark.parametrize(
    "command",
    ["describe job", "explain job --local", "get", "get -o wide", "get job -o json",
     "get job -o yaml"],
)  # fmt: skip
def test_status_written_by_others_is_shown_as_text(tmp_path: Path, command: str) -> None:
    rig = LocalRig(tmp_path)
    stored_job(rig)
    written = on_terminal(rig, *command.split())
    if command == "get":
        written += "FORGED"  # it shows no text of members
    shows_text_only(written)
    if "json" in command or "yaml" in command:
        return
    assert not re.search(r"^FORGED  Ready", written, re.MULTILINE), "a name forged a row"


@pytest.mark.parametrize("command", ["logs job", "logs job --rank 0"])
def test_log_lines_keep_colours_and_nothing_else(tmp_path: Path, command: str) -> None:
    rig = LocalRig(tmp_path)
    lines = ["\x1b[1;31mred\x1b[2J\x1b]0;title\x07", "10%\r[0] 20%\u202e\tFORGED\r", "\x1b[8mgone"]
    stored_job(rig, "\n".join(f"[0] {line}" for line in lines))
    assert on_terminal(rig, *command.split()).split("\n") == [
        "job-0 [0] \x1b[1;31mred\\x1b[2J\\x1b]0;title\\x07\x1b[0m",
        "job-0 [0] 20%\\u202e\tFORGED",
        "job-0 [0] \x1b[8mgone\x1b[0m",
        "",
    ]


@pytest.mark.parametrize("columns", [60, 80])
def test_lines_of_a_run_and_of_its_verbs_fit_the_terminal(tmp_path: Path, columns: int) -> None:
    rig = LocalRig(tmp_path)
    rig.finish()
    name = "a-job-with-a-name-of-fifty-five-characters-as-it-may-be"
    spec: dict[str, Any] = {"maxNodes": 4, "nodes": 4}
    written = on_terminal(rig, "run", rig.manifest(name, **spec), columns=columns)
    assert "\x1b[1A" in written, "a live table"
    for command in ("get", f"describe {name}", f"explain {name}", f"rounds {name}", f"top {name}",
                    f"events {name}", "get nope"):  # fmt: skip
        options = ["--once"] if command.startswith("top") else []
        written += on_terminal(rig, *command.split(), *options, columns=columns)
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written).replace("\r", "\n").split("\n")
    errors = [line for line in lines if line.startswith("elasticjob: ")]
    assert [line for line in lines if len(line) > columns and line not in errors] == []
    assert f"{name}-3" in "".join("".join(lines).split()), "events break no name apart"
    rig.close()


def test_dumb_terminal_gets_lines_without_control_sequences(tmp_path: Path) -> None:
    rig = LocalRig(tmp_path)
    rig.finish()
    written = on_terminal(rig, "run", rig.manifest(), TERM="dumb")
    written += on_terminal(rig, "top", "job", TERM="dumb")
    assert re.search(r"^\[ +[\d.]+ s\] pod job-0 started$", written, re.M)
    assert "STEPS/S" in written
    assert "\x1b" not in written
    rig.close()


def test_no_color_leaves_a_live_table_without_colours(tmp_path: Path) -> None:
    rig = LocalRig(tmp_path)
    rig.finish()
    written = on_terminal(rig, "run", rig.manifest(), NO_COLOR="1")
    assert "\x1b[1A" in written
    assert re.findall(r"\x1b\[[0-9;]*3[0-7][0-9;]*m", written) == []
    rig.close()


FAILING = """
import json, os, sys
hostile = {hostile!r}
print("log", hostile, flush=True)
raise ValueError(hostile)
"""


@pytest.mark.parametrize("options", [["--plain", "--logs"], ["--logs"]])
def test_run_shows_the_failure_of_a_hostile_script_as_text(
    tmp_path: Path, options: list[str]
) -> None:
    rig = LocalRig(tmp_path)
    (rig.job / "work.py").write_text(FAILING.format(hostile=HOSTILE))
    spec: dict[str, Any] = {"maxNodes": 1, "nodes": 1, "maxRestarts": 0}
    written = on_terminal(rig, "run", rig.manifest(**spec), *options)
    plain = SEQUENCES.sub("", written)
    assert "FORGED" in plain
    assert "failed: " in plain
    assert UNSAFE.findall(plain) == []
    for command in ("describe job", "explain job"):
        shows_text_only(on_terminal(rig, *command.split()), "http://evil")
    rig.close()
