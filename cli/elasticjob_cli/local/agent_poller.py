"""Poller of the agents of a local job without etcd v3, over their unix sockets.

Replaces the informer cache, with its interface: unknown records are None, changes wake the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

from elasticjob_cli.local.kubelet import Kubelet, LocalPod
from elasticjob_operator.domain.observed.etcd_records import Records, merge_reports
from elasticjob_operator.domain.observed.state import Pod, PodPhase, SeenTrouble
from elasticjob_rendezvous.protocol.records.agent_reports import (
    PATH,
    AgentReport,
    ReportRequest,
    check_answer,
    headers,
    read,
    read_headers,
    store_trouble,
)
from elasticjob_rendezvous.protocol.records.codec import MalformedRecord
from elasticjob_rendezvous.protocol.records.members import RoundState

PERIOD_SECONDS = 0.2
REQUEST_SECONDS = 2.0
FAILURES = "failures/"


class AgentPoller:
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
        self._reports: dict[str, AgentReport] = {}
        self._changed = asyncio.Event()

    def records(self, prefix: str) -> Records | None:
        """Return the records merged from all answers; None before the first one."""
        if not self._reports:
            return None
        present = [
            uid
            for uid, pod in self._kubelet.pods.items()
            if pod.launcher_exit is None or self._is_unreported(pod)
        ]
        return merge_reports(prefix, self._mergeable(present), present)

    def trouble(self) -> SeenTrouble | None:
        """Return the store trouble that agents report; None if they report none."""
        pods = self._kubelet.pods
        said = [one for uid, one in self._reports.items() if uid in pods]
        trouble = store_trouble(said)
        if trouble is None:
            return None
        return SeenTrouble(trouble, tuple(one.member for one in said if one.store))

    def with_reports(self, pods: tuple[Pod, ...]) -> tuple[Pod, ...]:
        """Return the pods; an ended pod counts as running until its agent reported or ended too."""
        unreported = {uid for uid, pod in self._kubelet.pods.items() if self._is_unreported(pod)}
        return tuple(
            replace(pod, phase=PodPhase.RUNNING, exit_code=None, ended_at=None)
            if pod.uid in unreported
            else pod
            for pod in pods
        )

    def _is_unreported(self, pod: LocalPod) -> bool:
        said = self._reports.get(pod.uid)
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
            answers = await asyncio.gather(*(self._poll(pod) for pod in pods))
            for answer in answers:
                if answer is not None and self._reports.get(answer.member) != answer:
                    self._reports[answer.member] = answer
                    self._changed.set()
            await asyncio.sleep(PERIOD_SECONDS)

    def _mergeable(self, present: list[str]) -> list[AgentReport]:
        """Return the reports to merge.

        For a pod that is gone, only its failures count, unless it saw the job's end: the other
        members may not know its round.
        """
        told = []
        for uid, said in self._reports.items():
            if uid in present or said.state == RoundState.CLOSED:
                told.append(said)
                continue
            failures = {key: v for key, v in said.records.items() if key.startswith(FAILURES)}
            told.append(replace(said, records=failures))
        return told

    async def _poll(self, pod: LocalPod) -> AgentReport | None:
        """Return an agent's answer; None without one, as before its start and after its end."""
        key = self._job_key_file.read_bytes().strip()
        with contextlib.suppress(OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
            async with asyncio.timeout(REQUEST_SECONDS):
                return read(await _get(pod.files.control, pod.uid, key))
        return None


async def _get(control: Path, member: str, job_key: bytes) -> bytes:
    request = ReportRequest(member, secrets.token_hex(16), time.time_ns() // 1_000_000)
    reader, writer = await asyncio.open_unix_connection(control)
    try:
        pairs = headers(job_key, request)
        lines = "".join(f"{name}: {value}\r\n" for name, value in pairs.items())
        writer.write(f"GET {PATH} HTTP/1.1\r\n{lines}\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        if head.split(b" ", 2)[1] != b"200":
            raise MalformedRecord(PATH, head.partition(b"\r\n")[0].decode("latin-1"))
        body = await reader.read()
        check_answer(job_key, request, read_headers(head), body)
        return body
    finally:
        writer.close()
