"""HTTP server of a running agent for probes and its `preStop` hook, without a library.

`GET /live`: the event loop runs. `GET /ready`: the launcher is connected and this node's key exists
in etcd; does not imply a final round. `GET /status`: both and the workers, as JSON.
`POST /leave`, on the unix socket only: ask this node to leave the job; `control` is the client.
`GET /rendezvous`, for clients that prove possession of the job's key: whether this agent can use
the rendezvous store and, without records in etcd v3, its part of the job's status (`serving`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from urllib.parse import unquote

from elasticjob_agent.agent import Agent
from elasticjob_agent.control import REQUEST_SECONDS
from elasticjob_agent.core.local import local_facts
from elasticjob_agent.core.model import State
from elasticjob_agent.serving import Witness
from elasticjob_rendezvous.core.directives import Finish, Left, Refused
from elasticjob_rendezvous.core.served import PATH as RENDEZVOUS

_MAX_HEAD_BYTES = 8192


@asynccontextmanager
async def answering(
    agent: Agent,
    address: str,
    port: int | None,
    control: Path | None,
    witness: Witness | None = None,
) -> AsyncIterator[None]:
    """Serve the given TCP port and unix socket, if any. Raises OSError."""
    async with AsyncExitStack() as stack:
        if port is not None:
            probes = await asyncio.start_server(
                _Answers(agent, witness, may_leave=False), address, port, limit=_MAX_HEAD_BYTES
            )
            await stack.enter_async_context(probes)
        if control is not None:
            local = await asyncio.start_unix_server(
                _Answers(agent, witness, may_leave=True), control, limit=_MAX_HEAD_BYTES
            )
            await stack.enter_async_context(local)
            stack.callback(_remove, control)
        yield


def _remove(control: Path) -> None:
    control.unlink(missing_ok=True)


def ready(agent: Agent) -> bool:
    """Return True if this node can take part: it has its launcher and its lease."""
    return can_take_part(agent.progress.state, agent.registered)


def can_take_part(state: State, registered: bool) -> bool:
    """Return True if a node in this state can take part.

    A node that took part until the job's end stays ready, so that no probe posts a warning at the
    end of a successful job.
    """
    local = local_facts(state)
    match state.directive:
        case Finish():
            return local.round > 0
        case Left() | Refused():
            return False
    return registered and local.ready


def status(agent: Agent) -> dict[str, object]:
    """Return the status of this node, for people."""
    state = agent.progress.state
    local = local_facts(state)
    crew = state.crew
    return {
        "name": state.facts.name,
        "ready": ready(agent),
        "launcher": local.ready,
        "registered": agent.registered,
        "directive": type(state.directive).__name__,
        "workers": local.workers,
        "round": local.round,
        "baseRank": None if crew is None else crew.base_rank,
        "done": local.done,
        "leaving": local.leaving,
        "store": None if agent.trouble is None else agent.trouble.document(),
    }


class _Answers:
    """Request handler, one request per connection."""

    def __init__(self, agent: Agent, witness: Witness | None, may_leave: bool) -> None:
        self._agent = agent
        self._witness = witness
        self._may_leave = may_leave

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
            async with asyncio.timeout(REQUEST_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()
        writer.close()

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.decode("latin-1").partition(" ")
        path = rest.partition(" ")[0]
        match method, path.partition("?")[0]:
            case "GET", "/live":
                return _reply(HTTPStatus.OK, {"live": True})
            case "GET", "/ready":
                able = ready(self._agent)
                code = HTTPStatus.OK if able else HTTPStatus.SERVICE_UNAVAILABLE
                return _reply(code, {"ready": able})
            case "GET", "/status":
                return _reply(HTTPStatus.OK, status(self._agent))
            case "GET", told if told == RENDEZVOUS and self._witness is not None:
                if not self._witness.may_read(_headers(head)):
                    refusal = {"error": "requires a proof of the job's key"}
                    return _reply(HTTPStatus.FORBIDDEN, refusal)
                return _response(HTTPStatus.OK, self._witness.answer())
            case "POST", "/leave" if self._may_leave:
                self._agent.leave(unquote(path.partition("?")[2]) or "asked to")
                return _reply(HTTPStatus.ACCEPTED, {"leaving": True})
        return _reply(HTTPStatus.NOT_FOUND, {"error": f"no {method} {path} here"})


def _headers(head: bytes) -> dict[str, str]:
    """Return the request's headers, names in lower case."""
    lines = head.decode("latin-1").split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines if ":" in line)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _reply(code: HTTPStatus, body: Mapping[str, object]) -> bytes:
    return _response(code, json.dumps(body).encode() + b"\n")


def _response(code: HTTPStatus, content: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {code.value} {code.phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content
