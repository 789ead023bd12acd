"""The launcher's answers to other nodes that ask whether its workers live."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import time
from typing import Any

import pytest

from elasticjob_agent.hands import Started, Stopped
from tests.integration.launcher_rig import (
    JOB_KEY,
    PATIENCE_SECONDS,
    StartLauncher,
    attached,
    launcher_file,
    mark,
    start_launcher,
    start_workers,
    until,
)

__all__ = ["launcher_file", "mark", "start_launcher"]

NONCE = "00ff" * 8


async def raw_probe(port: int, line: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            writer.write(line)
            return await reader.read()
    finally:
        writer.close()


async def probe(port: int, nonce: Any = NONCE) -> dict[str, Any]:
    return json.loads(await raw_probe(port, json.dumps({"nonce": nonce}).encode() + b"\n"))


def test_the_answer_is_signed_and_says_who_and_how(start_launcher: StartLauncher) -> None:
    async def scenario() -> None:
        launcher = start_launcher()
        hands, events, hello = await attached(launcher)
        await hands.start(start_workers(4, ("sleep", "100"), ("sleep", "100"), ("/no/such",)))
        await until(events, Started)

        answer = await probe(hello.probe_port)
        mac = answer.pop("hmac")
        body = json.dumps(answer, sort_keys=True, separators=(",", ":")).encode()
        assert mac == hmac.new(JOB_KEY, NONCE.encode() + body, hashlib.sha256).hexdigest()
        assert answer == {
            "member": "pod-0", "session": "s1", "round": 4, "workers": 2, "agent_attached": True,
        }  # fmt: skip
        assert (await probe(hello.probe_port, "ab" * 8))["hmac"] != mac

        await hands.aclose()
        orphaned = await probe(hello.probe_port)
        assert (orphaned["workers"], orphaned["agent_attached"]) == (2, False)
        hands, events, _ = await attached(launcher, session="s2")
        await hands.stop(4, 0)
        await until(events, Stopped)
        stopped = await probe(hello.probe_port)
        assert (stopped["session"], stopped["round"], stopped["workers"]) == ("s2", None, 0)
        await hands.aclose()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "nonce",
    ["", "ab", "g" * 16, "AB" * 8, "abc" * 5, "ab" * 65, 12, None, ["ab" * 8], "ab" * 8 + "\n"],
)
def test_a_wrong_nonce_is_refused(start_launcher: StartLauncher, nonce: Any) -> None:
    async def scenario() -> None:
        hands, _, hello = await attached(start_launcher())
        answer = await probe(hello.probe_port, nonce)
        assert "nonce must be" in answer.pop("error")
        assert answer == {}
        await hands.aclose()

    asyncio.run(scenario())


def test_strangers_get_nothing_and_disturb_nobody(start_launcher: StartLauncher) -> None:
    async def scenario() -> None:
        hands, events, hello = await attached(start_launcher())
        idle = await asyncio.open_connection("127.0.0.1", hello.probe_port)
        assert b"not a JSON line" in await raw_probe(hello.probe_port, b"GET / HTTP/1.1\r\n\r\n")
        assert b"longer than" in await raw_probe(hello.probe_port, b"x" * 2000)
        assert (await probe(hello.probe_port))["member"] == "pod-0"
        await hands.start(start_workers(1, ("true",)))
        await until(events, Stopped)
        asked = time.monotonic()
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await idle[0].read() == b""  # who says nothing is sent away
        assert time.monotonic() - asked < 5
        idle[1].close()
        await hands.aclose()

    asyncio.run(scenario())
