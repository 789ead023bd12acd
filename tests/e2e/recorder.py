"""Recorder of a job's history as seen from outside: changes of its rendezvous in etcd, of its
status and of its pods, with their time of arrival.

All arrive through the API server, so that their paths have the same delay.
"""

from __future__ import annotations

import base64
import json
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from tests.e2e.console import CommandFailed, Console, Json, until
from tests.e2e.installation import ETCD_POD, SYSTEM, etcdctl

STATES = ("joinable", "frozen", "final", "closed")
_RESTART_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Seen:
    """Change `what` of a job (its uid), observed at `at`, in local seconds since the epoch."""

    at: float
    job: str
    what: Json


@dataclass
class Follower:
    """Reader of an endless command's lines in a thread; it restarts the command when it ends."""

    start: Callable[[], subprocess.Popen[str]]
    take: Callable[[float, Json], None]
    _stopped: bool = False
    _process: subprocess.Popen[str] | None = None
    _thread: threading.Thread | None = None

    def begin(self) -> None:
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._stopped = True
        if self._process is not None:
            self._process.kill()
        if self._thread is not None:
            self._thread.join(timeout=60)

    def _follow(self) -> None:
        while not self._stopped:
            with suppress(CommandFailed, subprocess.TimeoutExpired):
                self._read()
            time.sleep(_RESTART_SECONDS)

    def _read(self) -> None:
        with self.start() as process:
            self._process = process
            if self._stopped:
                process.kill()
            assert process.stdout is not None
            for line in process.stdout:
                at = time.time()
                with suppress(ValueError):  # cut off in the middle
                    self.take(at, json.loads(line))


@dataclass
class Recorder:
    """Recorded changes, in order of arrival."""

    console: Console
    rounds: list[Seen] = field(default_factory=list)
    members: list[Seen] = field(default_factory=list)
    statuses: list[Seen] = field(default_factory=list)
    deletions: list[Seen] = field(default_factory=list)
    _followers: list[Follower] = field(default_factory=list)

    def begin(self) -> None:
        jobs = "/apis/elasticjob.dev/v1alpha1/elasticjobs?watch=true"
        pods = "/api/v1/pods?watch=true&labelSelector=elasticjob.dev/job-uid"
        self._followers = [
            Follower(self._start_etcd, self._take_etcd),
            Follower(lambda: self.console.start("get", "--raw", jobs), self._take_job),
            Follower(lambda: self.console.start("get", "--raw", pods), self._take_pod),
        ]
        for follower in self._followers:
            follower.begin()

    def end(self) -> None:
        for follower in self._followers:
            follower.end()

    # -- queries -------

    def lags(self) -> list[float]:
        """Return, for each change of a round in etcd, the delay until a status showed it."""
        shown: dict[str, list[tuple[float, tuple[int, int]]]] = {}
        for seen in self.statuses:
            shown.setdefault(seen.job, []).append((seen.at, _place(seen.what)))
        found = []
        for change in self.rounds:
            place = _place(change.what)
            later = [at for at, there in shown.get(change.job, ()) if there >= place]
            if later:
                found.append(max(0.0, min(later) - change.at))
        return found

    def final_at(self, job: str, number: int, within: float = 60.0) -> float:
        """Return the time at which this round became final, by its coordinator's clock."""
        place = (number, STATES.index("final"))

        def found() -> list[Seen]:
            return [seen for seen in self.rounds if seen.job == job and _place(seen.what) == place]

        until(found, f"etcd to make round {number} of {job} final", within)
        return float(found()[0].what["sinceMs"]) / 1000

    def leave_seconds(self, pod_uid: str, within: float = 60.0) -> float:
        """Wait for a pod's deletion and its member's leave; return the seconds between them."""

        def told() -> list[Seen]:
            return [seen for seen in self.deletions if seen.what["uid"] == pod_uid]

        def left() -> list[Seen]:
            return [seen for seen in self.members if seen.what["id"] == pod_uid]

        until(lambda: told() and left(), f"the pod {pod_uid} to be deleted and to leave", within)
        return left()[0].at - told()[0].at

    # -- input -------

    def _start_etcd(self) -> subprocess.Popen[str]:
        words = etcdctl(self.console, "watch", "--prefix", "/elasticjob/", "-w", "json")
        return self.console.start("-n", SYSTEM, "exec", ETCD_POD, "-c", "etcd", "--", *words)

    def _take_etcd(self, at: float, batch: Json) -> None:
        for event in batch.get("Events") or ():
            pair = event["kv"]
            parts = base64.b64decode(pair["key"]).decode().split("/")
            if len(parts) < 6:
                continue  # not a job's
            job, below = parts[3], parts[5:]
            value = base64.b64decode(pair.get("value") or "")
            content = json.loads(value) if value else {}
            match below:
                case ["state", "round"] if content:
                    self.rounds.append(Seen(at, job, content))
                case ["members", member, _]:
                    # Deleted, or leaving: the other members know in both cases.
                    if not content or content.get("state") == "leaving":
                        self.members.append(Seen(at, job, {"id": member}))

    def _take_job(self, at: float, event: Json) -> None:
        metadata = event["object"].get("metadata") or {}
        rendezvous = (event["object"].get("status") or {}).get("rendezvous")
        if rendezvous and "uid" in metadata:
            self.statuses.append(Seen(at, metadata["uid"], rendezvous))

    def _take_pod(self, at: float, event: Json) -> None:
        metadata = event["object"].get("metadata") or {}
        if metadata.get("deletionTimestamp"):
            job = metadata["labels"]["elasticjob.dev/job-uid"]
            self.deletions.append(Seen(at, job, {"uid": metadata["uid"]}))


def _place(rendezvous: Json) -> tuple[int, int]:
    """Return the position of a round's record in the life of a job: later ones compare greater."""
    number = rendezvous.get("number") or rendezvous.get("round") or 0
    state = rendezvous.get("state")
    return int(number), STATES.index(state) if state in STATES else -1
