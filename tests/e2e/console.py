"""kubectl and helm, run as their users run them, and reads of the cluster. Stateless."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.cluster.cluster import Cluster
from tests.e2e.api import Api, served
from tests.e2e.api import Json as Json

POLL_SECONDS = 0.25
"""Pause between reads of the API."""
CALL_POLL_SECONDS = 1.0
"""Pause between calls of kubectl, which take the processor from the program that is waited for."""


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
    api: Api

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


@contextmanager
def opened(cluster: Cluster, env: Mapping[str, str]) -> Iterator[Console]:
    """Yield the console of a cluster's administrator with this environment."""
    kubectl = (str(cluster.kubectl_program), "--context", cluster.context)
    helm = (str(cluster.helm_program), "--kube-context", cluster.context)
    with served(kubectl, env) as api:
        yield Console(kubectl, helm, env, api)


def until(
    look: Callable[[], Any], what: str, seconds: float = 60.0, pause: float = POLL_SECONDS
) -> Any:
    """Poll `look` until it returns a true value and return it; name `what` on a timeout."""
    deadline = time.monotonic() + seconds
    while not (value := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:g} s in vain for {what}")
        time.sleep(pause)
    return value
