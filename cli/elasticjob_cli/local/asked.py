"""Poller of the agents of a local job without etcd v3, over their unix sockets.

Replaces the informer cache, with its interface: unknown records are None, changes wake the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

from elasticjob_cli.local.pods import Kubelet, LocalPod
from elasticjob_operator.core.mirrored import Records, records_of_agents
from elasticjob_operator.core.observed import Pod, PodPhase, SeenTrouble
from elasticjob_rendezvous.core.codec import MalformedRecord
from elasticjob_rendezvous.core.records import RoundState
from elasticjob_rendezvous.core.served import PATH, Served, headers, read, store_trouble

PERIOD_SECONDS = 0.2
ASK_SECONDS = 2.0
FAILURES = "failures/"


class AskedAgents:
    """Latest reports of the agents of one job.

    Args:
        kubelet: holder of the pods.
        prefix: key prefix of the job's newest incarnation.
        job_key_file: secret that signs the requests.
    """

    def __init__(self, kubelet: Kubelet, prefix: Callable[[], str], job_key_file: Path) -> None:
        self._kubelet = kubelet
        self._prefix = prefix
        self._job_key_file = job_key_file
        self._said: dict[str, Served] = {}
        self._changed = asyncio.Event()

    def records(self, prefix: str) -> Records | None:
        """Return the records merged from all answers; None before the first one."""
        if not self._said:
            return None
        present = [
            uid
            for uid, pod in self._kubelet.pods.items()
            if pod.launcher_exit is None or self._unheard(pod)
        ]
        return records_of_agents(prefix, self._told(present), present)

    def trouble(self) -> SeenTrouble | None:
        """Return the store trouble that agents report; None if they report none."""
        pods = self._kubelet.pods
        said = [one for uid, one in self._said.items() if uid in pods]
        trouble = store_trouble(said)
        if trouble is None:
            return None
        return SeenTrouble(trouble, tuple(one.member for one in said if one.store))

    def heard(self, pods: tuple[Pod, ...]) -> tuple[Pod, ...]:
        """Return the pods; an ended pod counts as running until its agent reported or ended too."""
        unheard = {uid for uid, pod in self._kubelet.pods.items() if self._unheard(pod)}
        return tuple(
            replace(pod, phase=PodPhase.RUNNING, exit_code=None, ended_at=None)
            if pod.uid in unheard
            else pod
            for pod in pods
        )

    def _unheard(self, pod: LocalPod) -> bool:
        said = self._said.get(pod.uid)
        told = said is not None and said.state == RoundState.CLOSED
        return pod.launcher_exit is not None and not told and self._kubelet.agent_runs(pod)

    async def changes(self) -> AsyncIterator[str]:
        """Yield the job's prefix at each change. Supports a single consumer."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            yield self._prefix()

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            pods = list(self._kubelet.pods.values())
            answers = await asyncio.gather(*(self._asked(pod) for pod in pods))
            for answer in answers:
                if answer is not None and self._said.get(answer.member) != answer:
                    self._said[answer.member] = answer
                    self._changed.set()
            await asyncio.sleep(PERIOD_SECONDS)

    def _told(self, present: list[str]) -> list[Served]:
        """Return the reports to merge.

        For a pod that is gone, only its failures count, unless it saw the job's end: the other
        members may not know its round.
        """
        told = []
        for uid, said in self._said.items():
            if uid in present or said.state == RoundState.CLOSED:
                told.append(said)
                continue
            failures = {key: v for key, v in said.records.items() if key.startswith(FAILURES)}
            told.append(replace(said, records=failures))
        return told

    async def _asked(self, pod: LocalPod) -> Served | None:
        """Return an agent's answer; None without one, as before its start and after its end."""
        key = self._job_key_file.read_bytes().strip()
        with contextlib.suppress(OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
            async with asyncio.timeout(ASK_SECONDS):
                return read(await _get(pod.files.control, key))
        return None


async def _get(control: Path, job_key: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(control)
    try:
        pairs = headers(job_key, time.time_ns() // 1_000_000)
        lines = "".join(f"{name}: {value}\r\n" for name, value in pairs.items())
        writer.write(f"GET {PATH} HTTP/1.1\r\n{lines}\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        if head.split(b" ", 2)[1] != b"200":
            raise MalformedRecord(PATH, head.partition(b"\r\n")[0].decode("latin-1"))
        return await reader.read()
    finally:
        writer.close()
