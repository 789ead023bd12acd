"""Second run of start-up code, in a child process of the zygote."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import elasticjob_launcher

PROGRAM = """
import os, sys
before = set(sys.modules)
from elasticjob_launcher.zygote.startup_code import startup_refusal
own = set(sys.modules) - before
os.environ["AGAIN"] = "1"
print(startup_refusal(own))
"""
LEAVES_PROCESS = """
import os, time
if "AGAIN" in os.environ and not os.fork():
    for _ in range(1200):
        if os.path.exists(os.environ["ENOUGH"]):
            break
        time.sleep(0.1)
    os._exit(0)
"""
CLOSES_DESCRIPTORS = """
import os, uuid
value = uuid.uuid4().hex
if "AGAIN" in os.environ:
    os.closerange(3, 100)
"""
ENDS_ITSELF = """
import os
if "AGAIN" in os.environ:
    os.kill(os.getpid(), 9)
"""
REFUSED = "runs at every start of Python, not in a fork: "


def refusal(folder: Path, source: str) -> str:
    """Return the refusal of this start-up code."""
    (folder / "sitecustomize.py").write_text(source)
    package = Path(elasticjob_launcher.__file__).parent.parent
    enough = folder / "enough"
    env = {**os.environ, "PYTHONPATH": f"{folder}:{package}", "ENOUGH": str(enough)}
    command = [sys.executable, "-c", PROGRAM]
    try:
        done = subprocess.run(
            command, env=env, check=True, capture_output=True, text=True, timeout=240
        )
    finally:
        enough.touch()
    return done.stdout.strip()


def test_harmless_code_is_not_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, "import json\n") == ""


def test_process_left_by_the_code_does_not_delay_the_answer(tmp_path: Path) -> None:
    assert f"{REFUSED}it starts a process" in refusal(tmp_path, LEAVES_PROCESS)


def test_code_that_prevents_its_observation_is_refused(tmp_path: Path) -> None:
    assert f"{REFUSED}run again, it ended the process" in refusal(tmp_path, CLOSES_DESCRIPTORS)


def test_code_that_ends_the_process_is_refused(tmp_path: Path) -> None:
    assert f"{REFUSED}run again, it ended the process" in refusal(tmp_path, ENDS_ITSELF)
