"""HTTP server of a running agent: probes, its `preStop` hook, and its report about the job.

`GET /live`: the event loop runs. `GET /ready`: the launcher is connected and this node's key
exists in etcd; does not imply a final round. `GET /status`: both and the workers, as JSON.
`POST /leave`, on the unix socket only: ask this node to leave the job; `control` is the client.
`GET /rendezvous`, for clients that prove possession of the job's key: whether this agent can
use the rendezvous store and, without records in etcd v3, its part of the job's status. The
agent's end is delayed until a reader has seen the job's outcome. Format:
`elasticjob_rendezvous.protocol.records.agent_reports`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from urllib.parse import unquote

from elasticjob_agent.agent import Agent
from elasticjob_agent.control import REQUEST_SECONDS
from elasticjob_agent.core.job_records import ObservedJob, observe_step, records
from elasticjob_agent.core.poll_step import PollingState
from elasticjob_agent.core.reports import local_state
from elasticjob_agent.core.state import State
from elasticjob_launcher.admission import Caps
from elasticjob_rendezvous.listener import Keep, Listener, listening_socket
from elasticjob_rendezvous.protocol.config import Identity
from elasticjob_rendezvous.protocol.directives import Finish, Left, Refused
from elasticjob_rendezvous.protocol.records.agent_reports import PATH as RENDEZVOUS
from elasticjob_rendezvous.protocol.records.agent_reports import (
    SETUP,
    AgentReport,
    ReportRequest,
    agent_report,
    answer_headers,
    proven,
    read_headers,
    written,
)
from elasticjob_rendezvous.protocol.records.members import RoundState
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.store_trouble import StoreTrouble

STAY_SECONDS = 10.0
"""Maximum time to wait at the end for a reader, if there has been one lately."""
READING_SECONDS = 30.0
"""Maximum age of the last request of a reader that is expected to read again."""


class JobReporter:
    """Reporter of one agent's view of its job.

    Args:
        identity: identity of this agent's node.
        job_key: key that readers must prove to have; empty allows every reader.
        setting_up: returns True before a joinable rendezvous exists.
    """

    def __init__(
        self,
        identity: Identity,
        session: str,
        prefix: str,
        bounds: RendezvousParams,
        backend: str,
        job_key: bytes = b"",
        setting_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self._own = identity
        self._session = session
        self._prefix = prefix
        self._bounds = bounds
        self._backend = backend
        self._job_key = job_key
        self._setting_up = setting_up
        self._known = ObservedJob()
        self._state: PollingState | None = None
        self._requested_at = float("-inf")
        self._end_read = asyncio.Event()
        self.trouble: Callable[[], StoreTrouble | None] = lambda: None
        """Returns the problem with the rendezvous store; None while it is usable."""
        self.workers: Callable[[], int] = lambda: identity.slots
        self.launch: Callable[[], str] = lambda: identity.launch
        """Returns the number of workers of this agent's node; 0 while it is unknown."""

    def stepped(self, before: PollingState, after: PollingState) -> None:
        """Record a step of the agent's rendezvous."""
        now_ms = time.time_ns() // 1_000_000
        self._known = observe_step(self._known, before, after, self._identity(), now_ms)
        self._state = after

    def parse_request(self, headers: Mapping[str, str]) -> ReportRequest | None:
        """Return the request with these headers; None unless they prove possession of the key."""
        return proven(self._job_key, headers, self._own.id, time.time_ns() // 1_000_000)

    def proof(self, request: ReportRequest, body: bytes) -> dict[str, str]:
        """Return the headers that prove the answer to a request."""
        return answer_headers(self._job_key, request, body)

    def answer(self) -> bytes:
        """Return the body of the answer, and note that there is a reader."""
        self._requested_at = time.monotonic()
        if self._known.state is RoundState.CLOSED:
            self._end_read.set()
        return json.dumps(written(replace(self._report(), store=self.trouble()))).encode()

    async def end_read(self) -> None:
        """Wait until the job's end was read, if the job ended and there was a reader lately."""
        reading = time.monotonic() - self._requested_at < READING_SECONDS
        if self._known.state is not RoundState.CLOSED or not reading:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STAY_SECONDS):
                await self._end_read.wait()

    def _identity(self) -> Identity:
        slots = self.workers() or self._own.slots
        return replace(self._own, slots=slots, launch=self.launch())

    def _report(self) -> AgentReport:
        state, identity = self._state, self._identity()
        if state is None:
            return AgentReport(self._backend, identity.id, {})
        found = records(self._known, state, identity, self._session, self._prefix, self._bounds)
        state_name = str(self._known.state) if self._known.number else ""
        if state_name == RoundState.JOINABLE and self._setting_up():
            state_name = SETUP
        return agent_report(self._prefix, self._backend, identity.id, found, state_name)


_MAX_HEAD_BYTES = 8192
BACKLOG = 128
CAPS = Caps(unproven=256, per_address=64)
"""The kubelet and the operator each send one request at a time."""


@asynccontextmanager
async def serve_status(
    agent: Agent,
    address: str,
    port: int | None,
    control: Path | None,
    reporter: JobReporter | None = None,
) -> AsyncIterator[None]:
    """Serve the given TCP port and unix socket, if any. Raises OSError."""
    async with AsyncExitStack() as stack:
        if port is not None:
            handler = _RequestHandler(agent, reporter, may_leave=False)
            sock = listening_socket(address, port, BACKLOG)
            listener = Listener(sock, CAPS, handler.serve_once, _MAX_HEAD_BYTES)
            stack.push_async_callback(listener.close)
        if control is not None:
            local = await asyncio.start_unix_server(
                _RequestHandler(agent, reporter, may_leave=True), control, limit=_MAX_HEAD_BYTES
            )
            await stack.enter_async_context(local)
            stack.callback(_remove_socket, control)
        yield


def _remove_socket(control: Path) -> None:
    control.unlink(missing_ok=True)


def ready(agent: Agent) -> bool:
    """Return True if this node can take part: it has its launcher and its lease."""
    return can_take_part(agent.progress.state, agent.registered)


def can_take_part(state: State, registered: bool) -> bool:
    """Return True if a node in this state can take part.

    A node that took part until the job's end stays ready, so that no probe posts a warning at the
    end of a successful job.
    """
    local = local_state(state)
    match state.directive:
        case Finish():
            return local.round > 0
        case Left() | Refused():
            return False
    return registered and local.ready


def status(agent: Agent) -> dict[str, object]:
    """Return the status of this node, for people."""
    state = agent.progress.state
    local = local_state(state)
    group = state.group
    return {
        "name": state.facts.name,
        "ready": ready(agent),
        "launcher": local.ready,
        "registered": agent.registered,
        "directive": type(state.directive).__name__,
        "workers": local.workers,
        "round": local.round,
        "baseRank": None if group is None else group.base_rank,
        "done": local.done,
        "leaving": local.leaving,
        "store": None if agent.trouble is None else agent.trouble.document(),
    }


class _RequestHandler:
    """Request handler, one request per connection."""

    def __init__(self, agent: Agent, reporter: JobReporter | None, may_leave: bool) -> None:
        self._agent = agent
        self._reporter = reporter
        self._may_leave = may_leave

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
            async with asyncio.timeout(REQUEST_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()
        writer.close()

    async def serve_once(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keep: Keep
    ) -> None:
        """Answer a request of a `Listener`'s connection, which is never kept."""
        await self(reader, writer)

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
            case "GET", path if path == RENDEZVOUS and self._reporter is not None:
                request = self._reporter.parse_request(read_headers(head))
                if request is None:
                    refusal = {"error": "requires a proof of the job's key"}
                    return _reply(HTTPStatus.FORBIDDEN, refusal)
                body = self._reporter.answer()
                return _response(HTTPStatus.OK, body, self._reporter.proof(request, body))
            case "POST", "/leave" if self._may_leave:
                self._agent.leave(unquote(path.partition("?")[2]) or "asked to")
                return _reply(HTTPStatus.ACCEPTED, {"leaving": True})
        return _reply(HTTPStatus.NOT_FOUND, {"error": f"no {method} {path} here"})


def _reply(code: HTTPStatus, body: Mapping[str, object]) -> bytes:
    return _response(code, json.dumps(body).encode() + b"\n")


def _response(code: HTTPStatus, content: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    head = (
        f"HTTP/1.1 {code.value} {code.phrase}\r\nContent-Type: application/json\r\n{more}"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content
