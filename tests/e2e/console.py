"""kubectl and helm, run as their users run them. Stateless."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
POLL_SECONDS = 0.25


class CommandFailed(AssertionError):
    """Failed command: its arguments, exit code and output."""

    def __init__(self, command: list[str], ended: subprocess.CompletedProcess[str]) -> None:
        said = "\n".join(part for part in (ended.stdout[-2000:], ended.stderr[-4000:]) if part)
        super().__init__(f"{' '.join(command)[:300]}: exit code {ended.returncode}\n{said}")
        self.stderr = ended.stderr


@dataclass(frozen=True, slots=True)
class Console:
    """Command-line programs of one cluster's administrator, and the environment that they need."""

    kubectl_command: tuple[str, ...]
    helm_command: tuple[str, ...]
    env: Mapping[str, str]

    def kubectl(
        self, *arguments: object, given: str = "", seconds: float = 60.0, check: bool = True
    ) -> str:
        """Run kubectl with `given` as input; return its output. `check=False` permits failure."""
        return self._run(self.kubectl_command, arguments, given, seconds, check)

    def plugin(self, *arguments: object) -> str:
        """Run `kubectl elasticjob`; return its output. kubectl's options come after a plug-in."""
        program, *where = self.kubectl_command
        return self._run((program, "elasticjob"), (*arguments, *where), "", 60.0, True)

    def helm(self, *arguments: object, seconds: float = 240.0) -> str:
        return self._run(self.helm_command, arguments, "", seconds, True)

    def json(self, *arguments: object, seconds: float = 60.0) -> Json:
        """Return the parsed output of `kubectl … -o json`."""
        found: Json = json.loads(self.kubectl(*arguments, "-o", "json", seconds=seconds))
        return found

    def items(self, *arguments: object) -> list[Json]:
        """Return the objects that `kubectl get …` lists."""
        found: list[Json] = self.json("get", *arguments)["items"]
        return found

    def find(self, *arguments: object) -> Json | None:
        """Return the object that `kubectl get …` names, None if there is none."""
        printed = self.kubectl("get", *arguments, "--ignore-not-found", "-o", "json")
        return json.loads(printed) if printed.strip() else None

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        """Start kubectl in the background, for commands that follow something."""
        return subprocess.Popen(
            [*self.kubectl_command, *map(str, arguments)],
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            text=True,
        )

    def _run(
        self,
        program: tuple[str, ...],
        arguments: tuple[object, ...],
        given: str,
        seconds: float,
        check: bool,
    ) -> str:
        command = [*program, *map(str, arguments)]
        ended = subprocess.run(
            command,
            env=self.env,
            input=given,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        if check and ended.returncode:
            raise CommandFailed(command, ended)
        return ended.stdout if check else ended.stdout + ended.stderr


def until(look: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    """Poll `look` until it returns a true value and return it; name `what` on a timeout."""
    deadline = time.monotonic() + seconds
    while not (value := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:g} s in vain for {what}")
        time.sleep(POLL_SECONDS)
    return value
