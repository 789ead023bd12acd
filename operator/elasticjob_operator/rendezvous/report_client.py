"""Client of one agent's status: request, answer, and the proof that both hold the job's key."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass

from elasticjob_rendezvous.protocol.records.agent_reports import (
    PATH,
    ReportRequest,
    check_answer,
    headers,
    read_headers,
)
from elasticjob_rendezvous.protocol.records.codec import MalformedRecord

REQUEST_SECONDS = 2.0
"""Timeout of a request in seconds."""
MAX_REPORT_BYTES = 8 * 1024 * 1024
"""Maximum size of an answer of any agent."""
POLL_ERRORS = (
    OSError,
    TimeoutError,
    ValueError,
    asyncio.IncompleteReadError,
    asyncio.LimitOverrunError,
)
"""Errors of `fetch_report` and of parsing its answer."""


@dataclass(frozen=True, slots=True)
class Agent:
    """Agent to poll: its pod's uid and address."""

    member: str
    address: str


async def fetch_report(
    agent: Agent, port: int, job_key: bytes, most_bytes: int = MAX_REPORT_BYTES
) -> bytes:
    """Return one agent's proven answer. Raises one of `POLL_ERRORS` without a usable one."""
    async with asyncio.timeout(REQUEST_SECONDS):
        reader, writer = await asyncio.open_connection(agent.address, port)
        try:
            host = f"[{agent.address}]" if ":" in agent.address else agent.address
            return await request_report(
                reader, writer, f"{host}:{port}", agent.member, job_key, most_bytes
            )
        finally:
            writer.close()


async def request_report(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    host: str,
    member: str,
    job_key: bytes,
    most_bytes: int,
) -> bytes:
    """Return the proven answer of this member's agent over a connection to it.

    Raises one of `POLL_ERRORS` without a usable one.
    """
    request = ReportRequest(member, secrets.token_hex(16), time.time_ns() // 1_000_000)
    writer.write(_http_request(host, headers(job_key, request)))
    head = await reader.readuntil(b"\r\n\r\n")
    line = head.partition(b"\r\n")[0].split(b" ", 2)
    if line[1:2] != [b"200"]:
        raise MalformedRecord(PATH, f"it answers {b' '.join(line[1:]).decode('latin-1')}")
    body = await _body(reader, most_bytes)
    check_answer(job_key, request, read_headers(head), body)
    return body


def _http_request(host: str, proof: Mapping[str, str]) -> bytes:
    lines = {"Host": host, **proof, "Connection": "close"}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"GET {PATH} HTTP/1.1\r\n{head}\r\n".encode("latin-1")


async def _body(reader: asyncio.StreamReader, most_bytes: int) -> bytes:
    """Read until the agent closes the connection."""
    parts, room = [], most_bytes
    while part := await reader.read(65536):
        room -= len(part)
        if room < 0:
            raise MalformedRecord(PATH, f"its answer is longer than {most_bytes} bytes")
        parts.append(part)
    return b"".join(parts)
