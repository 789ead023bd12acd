"""Job status for backends without etcd v3: each agent serves its part, the reader merges them.

With the backends `etcd-v2` and `c10d` no store holds the records of a job. Every agent makes those
that it can report, and serves them at `GET /rendezvous` of its health port:

    {"backend": "c10d", "member": "<id>", "state": "final", "store": null,
     "records": [{"key": "state/round", "value": {…}}, …]}

Keys are those of `keys` without the job's prefix, values are the records of `members` in
their stored form. `member` is the agent that serves; `state` is the backend's own name for the
state of its rendezvous, which may be one that `RoundState` lacks (`setup`). `store` is the cause
for which the rendezvous store is unusable, if it is (`protocol.store_trouble`); agents over etcd v3
report only that.

Both sides prove that they hold the job's key (`elasticjob_launcher.proof`): the request covers the
member that is asked, a nonce and the time, the answer covers the request and its body.

Owns the form of that answer, its proof, and the merge of all agents' answers into one set of
records. Each agent writes its own answer; nothing is stored.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from elasticjob_launcher.proof import Exchange, Peer, Role, digest
from elasticjob_rendezvous.protocol.kv import KeyValue
from elasticjob_rendezvous.protocol.records.codec import (
    MalformedRecord,
    bounded_text,
    decode,
    encode,
)
from elasticjob_rendezvous.protocol.records.keys import Keys
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    OutcomeKind,
    Round,
    RoundState,
)
from elasticjob_rendezvous.protocol.records.roster import Roster
from elasticjob_rendezvous.protocol.records.timings import History, longest, slowest
from elasticjob_rendezvous.protocol.store_trouble import StoreTrouble, read_trouble

PATH = "/rendezvous"
TIME_HEADER = "X-ElasticJob-Time"
NONCE_HEADER = "X-ElasticJob-Nonce"
PROOF_HEADER = "X-ElasticJob-Proof"
NONCE_CHARACTERS = 32
SETUP = "setup"
"""State that an agent reports before a joinable rendezvous exists."""
FRESH_SECONDS = 300
"""Maximum error of the reader's clock."""


@dataclass(frozen=True, slots=True)
class AgentReport:
    """Answer of one agent. Keys are without the job's prefix, values are stored forms."""

    backend: str
    member: str
    records: Mapping[str, bytes]
    state: str = ""
    store: StoreTrouble | None = None


# -- proof --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReportRequest:
    """Question of a reader to the agent of `member`, with a nonce and the reader's Unix time."""

    member: str
    nonce: str
    at_ms: int


def headers(job_key: bytes, request: ReportRequest) -> dict[str, str]:
    """Return the headers of a request; none where the job has no key."""
    if not job_key:
        return {}
    return {
        TIME_HEADER: str(request.at_ms),
        NONCE_HEADER: request.nonce,
        PROOF_HEADER: _question(job_key, request),
    }


def proven(
    job_key: bytes, given: Mapping[str, str], member: str, now_ms: int
) -> ReportRequest | None:
    """Return the request to `member`; None unless its sender has the job's key.

    `given` has the headers by their names in lower case.
    """
    proof, at = given.get(PROOF_HEADER.lower(), ""), given.get(TIME_HEADER.lower(), "")
    if not job_key:
        return ReportRequest(member, "", now_ms)
    if not (at.isascii() and at.isdigit() and len(at) < 16):
        return None
    request = ReportRequest(member, given.get(NONCE_HEADER.lower(), ""), int(at))
    if len(request.nonce) != NONCE_CHARACTERS or abs(now_ms - request.at_ms) > FRESH_SECONDS * 1000:
        return None
    known = hmac.compare_digest(_question(job_key, request).encode(), proof.encode())
    return request if known else None


def answer_headers(job_key: bytes, request: ReportRequest, body: bytes) -> dict[str, str]:
    """Return the headers of the answer with this body; none where the job has no key."""
    return {PROOF_HEADER: _answer(job_key, request, body)} if job_key else {}


def check_answer(
    job_key: bytes, request: ReportRequest, given: Mapping[str, str], body: bytes
) -> None:
    """Raise `MalformedRecord` unless the agent of `request.member` answered this request."""
    proof = given.get(PROOF_HEADER.lower(), "").encode()
    if job_key and not hmac.compare_digest(_answer(job_key, request, body).encode(), proof):
        raise MalformedRecord(PATH, "the answer has no proof of the job's key")


def read_headers(head: bytes) -> dict[str, str]:
    """Return the headers of an HTTP request or answer by their names in lower case."""
    lines = head.decode("latin-1").split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines if ":" in line)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _exchange(request: ReportRequest) -> Exchange:
    return Exchange(Peer("", ""), request.nonce, Peer(request.member, ""), "")


def _question(job_key: bytes, request: ReportRequest) -> str:
    body = str(request.at_ms).encode()
    return digest(job_key, Role.REPORT_QUESTION, _exchange(request), body, "").hex()


def _answer(job_key: bytes, request: ReportRequest, body: bytes) -> str:
    question = _question(job_key, request)
    return digest(job_key, Role.REPORT_ANSWER, _exchange(request), body, question).hex()


# -- form ---------------------------------------------------------------------------


def agent_report(
    prefix: str, backend: str, member: str, records: Mapping[str, object], state: str = ""
) -> AgentReport:
    """Return an answer made of records by their full keys."""
    stored = {key.removeprefix(prefix): encode(record) for key, record in records.items()}
    return AgentReport(backend, member, stored, state)


def written(answer: AgentReport) -> dict[str, object]:
    """Return the answer as JSON."""
    items = [{"key": key, "value": json.loads(value)} for key, value in answer.records.items()]
    document = {"backend": answer.backend, "member": answer.member, "state": answer.state}
    store = None if answer.store is None else answer.store.document()
    return {**document, "store": store, "records": items}


def read(body: bytes) -> AgentReport:
    """Read an answer. Raises `MalformedRecord`; records themselves are read by `merged`."""
    try:
        document = json.loads(body)
        records = {
            bounded_text(str(item["key"])): json.dumps(item["value"]).encode()
            for item in document["records"]
        }
        backend, member = bounded_text(document["backend"]), bounded_text(document["member"])
        state, store = bounded_text(document.get("state", "")), read_trouble(document.get("store"))
        return AgentReport(backend, member, records, state, store)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise MalformedRecord(PATH, f"{type(error).__name__}: {error}") from error


def store_trouble(answers: Iterable[AgentReport]) -> StoreTrouble | None:
    """Return the oldest store trouble that an agent reports; None once the job has ended."""
    reports = list(answers)
    if any(answer.state == RoundState.CLOSED for answer in reports):
        return None
    found = (answer.store for answer in reports if answer.store is not None)
    return min(found, key=lambda trouble: trouble.since_ms, default=None)


def setting_up(answers: Iterable[AgentReport]) -> bool:
    """Return True if all agents that report a state have found no rendezvous to join."""
    return {answer.state for answer in answers if answer.state} == {SETUP}


# -- many answers -------------------------------------------------------------------


def merged(
    prefix: str, answers: Iterable[AgentReport], present: Collection[str] | None = None
) -> tuple[KeyValue, ...]:
    """Merge all answers into one set of records, as if read from etcd, for `etcd_records.records`.

    An agent's own records about itself win; of the round the newest record wins; rank assignments
    are merged, since each agent may know only its own. Malformed records are passed on.

    Args:
        prefix: of the job, for the keys.
        answers: the newest of each agent, those of ended ones too: how a job ended is known from
            them.
        present: ids of the members that still exist; None means all.
    """
    reports = sorted(answers, key=lambda answer: answer.member)
    found: dict[str, bytes] = {}
    for answer in reports:
        for key, value in answer.records.items():
            owner = _owner(key)
            mine = owner == answer.member
            if key.startswith("members/") and present is not None and owner not in present:
                continue
            if key not in found or mine:
                found[key] = value
            elif owner is None:
                found[key] = _merged(key, found[key], value)
    _name_the_master(found)
    return tuple(
        KeyValue(prefix + key, value, at, at) for at, (key, value) in enumerate(found.items(), 1)
    )


def _owner(key: str) -> str | None:
    """Return the member that a record is about; None for those of the whole job."""
    match key.split("/"):
        case ["members", member, _] | ["failures" | "done", _, member]:
            return member
    return None


def _merged(key: str, one: bytes, other: bytes) -> bytes:
    """Return the newer or fuller of two values of one key, or both merged."""
    keys = Keys("/")
    try:
        if "/" + key == keys.round:
            rounds = decode(Round, key, one), decode(Round, key, other)
            return encode(_newer(*rounds))
        match key.split("/"):
            case ["roster", _]:
                return encode(_seated(decode(Roster, key, one), decode(Roster, key, other)))
            case ["history", _]:
                return encode(
                    _merged_history(decode(History, key, one), decode(History, key, other))
                )
    except MalformedRecord:
        return one
    return one


_STATES = (RoundState.JOINABLE, RoundState.FROZEN, RoundState.FINAL, RoundState.CLOSED)
_ENDS = (OutcomeKind.STOPPED, OutcomeKind.TIMED_OUT, OutcomeKind.SUCCEEDED, OutcomeKind.FAILED)
_CAUSES = (
    CauseKind.START,
    CauseKind.JOIN,
    CauseKind.SCALE_DOWN,
    CauseKind.LEAVE,
    CauseKind.PREEMPTION,
    CauseKind.LOSS,
    CauseKind.DATA_LOST,
    CauseKind.UNCONFIRMED,
    CauseKind.MASTER_PORT,
    CauseKind.FAILURE,
)
"""Causes from the least to the most specific one. The most specific report wins: an agent that has
just joined reports each round as a start."""


def _newer(one: Round, other: Round) -> Round:
    ended = one.state is RoundState.CLOSED and other.state is RoundState.CLOSED
    older, newer = sorted((one, other), key=_outcome_order if ended else _round_order)
    if older.number != newer.number:
        return newer
    cause = max(older.cause, newer.cause, key=_weight)
    charged = max(older.charged, newer.charged, key=len)
    name = newer.master_name or older.master_name
    return replace(newer, cause=cause, charged=charged, master_name=name)


def _round_order(found: Round) -> tuple[int, int]:
    return found.number, _STATES.index(found.state)


def _outcome_order(found: Round) -> tuple[int, int]:
    """Return the sort key of an outcome: a failure known to one agent is that of the whole job."""
    return -1 if found.outcome is None else _ENDS.index(found.outcome.kind), found.number


def _weight(cause: Cause) -> tuple[int, int]:
    known = cause.kind in _CAUSES  # others may be added to the enum
    return _CAUSES.index(cause.kind) if known else len(_CAUSES), len(cause.members)


def _seated(one: Roster, other: Roster) -> Roster:
    """Merge two rosters; an assignment without a member is unknown to its agent."""
    if len(one.seats) != len(other.seats):
        return max(one, other, key=lambda roster: len(roster.seats))
    seats = (
        mine if mine.id else theirs for mine, theirs in zip(one.seats, other.seats, strict=True)
    )
    return replace(one, seats=tuple(seats), restarts=max(one.restarts, other.restarts))


def _merged_history(one: History, other: History) -> History:
    cold = [found.cold_nodes for found in (one, other) if found.cold_nodes is not None]
    return replace(
        slowest(one, other),
        cause=max(one.cause, other.cause, key=_weight),
        nodes=max(one.nodes, other.nodes),
        final_ms=max(one.final_ms, other.final_ms),
        detect_ms=longest(one.detect_ms, other.detect_ms),
        stop_ms=longest(one.stop_ms, other.stop_ms),
        join_ms=longest(one.join_ms, other.join_ms),
        cold_nodes=None if not cold else sum(cold),  # each agent reports its own node
        cold_reason=one.cold_reason or other.cold_reason,
    )


def _name_the_master(found: dict[str, bytes]) -> None:
    """Fill in the pod of rank 0, whose name only its own agent knows."""
    key = Keys("/").round.removeprefix("/")
    try:
        current = decode(Round, key, found[key])
        roster = decode(Roster, "roster", found[f"roster/{current.number}"])
    except (KeyError, MalformedRecord):
        return
    if not current.master_name and roster.seats and roster.seats[0].id:
        found[key] = encode(replace(current, master_name=roster.seats[0].name))
