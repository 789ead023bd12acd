#!/usr/bin/python3
"""Wrapper of runc for a machine without CAP_SYS_RESOURCE, such as one in a container.

A privileged container requests every capability, but a process cannot grant one it does not have:
the wrapper removes it from the engine's request, and raises negative OOM scores to 0.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

RUNC = "/usr/sbin/runc"
CAPABILITY = "CAP_SYS_RESOURCE"


def without_resource(process: dict[str, Any]) -> dict[str, Any]:
    """Return the engine's process description without the settings this machine cannot grant."""
    granted = {
        kind: [name for name in names if name != CAPABILITY]
        for kind, names in (process.get("capabilities") or {}).items()
    }
    return process | {
        "capabilities": granted,
        "oomScoreAdj": max(process.get("oomScoreAdj") or 0, 0),
    }


def option(words: list[str], *names: str) -> str | None:
    """Return the value of the option with one of these names, as `--name value` or `=value`."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else following
    return None


def main(words: list[str]) -> None:
    """Edit the description that runc will read, then exec runc."""
    if "create" in words or "run" in words:
        config = Path(option(words, "--bundle", "-b") or ".", "config.json")
        described = json.loads(config.read_text())
        described["process"] = without_resource(described["process"])
        config.write_text(json.dumps(described))
    elif "exec" in words and (process := option(words, "--process", "-p")):
        path = Path(process)
        path.write_text(json.dumps(without_resource(json.loads(path.read_text()))))
    os.execv(RUNC, [RUNC, *words])


if __name__ == "__main__":
    main(sys.argv[1:])
