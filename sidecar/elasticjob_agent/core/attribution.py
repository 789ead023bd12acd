"""First failure among a node's workers, and its failure record."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from elasticjob_agent.core.classify import CRASHES, SIGABRT, SIGKILL, classified, ending_text
from elasticjob_agent.core.evidence import (
    Account,
    encodable,
    from_error_file,
    from_stderr,
    last_words,
)
from elasticjob_agent.core.hang import before_dump, last_step, stand
from elasticjob_agent.core.model import Crew, Ended, Facts, StopCause
from elasticjob_agent.hands import WorkerExited
from elasticjob_rendezvous.core.codec import encode
from elasticjob_rendezvous.core.failures import ECHOES, FAILURE_BYTES, Failure, FailureClass

MESSAGE_CHARACTERS = 1000
UNKNOWN_RANK = -1
UNCAUGHT = 1
"""Python's exit code after an uncaught exception. With any other exit, a traceback that is not at
the very end of the output was caught and logged."""
ENDED_ON_TERM = 143  # a shell's exit code for SIGTERM

_SEEKING = (None, StopCause.FAILURE, StopCause.PEER_FAILURE, StopCause.HANG)
"""Stop causes (or none) during which a worker's exit may still reveal the first failure."""


@dataclass(frozen=True, slots=True)
class _Suspect:
    failure: Failure
    ended_at_ms: int

    def blame(self) -> tuple[int, int, int, int]:
        """Return a sort key; the lowest is the first failure.

        An aborted collective shows that a peer failed earlier. A collective that timed out ends
        its process and thereby aborts the collectives of its peers.
        """
        kind = self.failure.kind
        echo = 2 if kind is FailureClass.PEER_ABORT else int(kind in ECHOES)
        return (echo, self.failure.at_ms, self.ended_at_ms, self.failure.local_rank)


def failure_of(crew: Crew, facts: Facts) -> Failure | None:
    """Return the first failure of a worker group, or None if no worker failed.

    Without a stop in progress, every exit except code 0 is a failure. During a stop for a failure,
    only a worker's own error counts: that error may have aborted its peers before its own exit.
    Exits during any other stop are not failures. Failures are ordered by the time in the error
    file, or else by the exit time.
    """
    suspects = [s for ended in crew.exits if (s := _suspect(crew, facts, ended)) is not None]
    if not suspects:
        return None
    suspects.extend(_still_ending(crew, facts))
    return min(suspects, key=_Suspect.blame).failure


def _suspect(crew: Crew, facts: Facts, ended: Ended) -> _Suspect | None:
    exit_ = ended.exit
    if ended.during is StopCause.HANG and exit_.signal is not None:
        return _hanging(crew, facts, ended)
    if exit_.exit_code == 0 or ended.during not in _SEEKING:
        return None
    report = from_error_file(crew.reports.get(exit_.local_rank, b""))
    if ended.during is None:
        uncaught = exit_.exit_code == UNCAUGHT
        account = report or from_stderr(exit_.stderr_tail, final_only=not uncaught)
        return _record(crew, facts, ended, exit_.local_rank, account)
    killed = exit_.signal is not None or exit_.exit_code == ENDED_ON_TERM
    account = report or from_stderr(exit_.stderr_tail, final_only=killed)
    if account is None:
        return None
    if exit_.signal == SIGKILL:  # sent by us: the worker was about to exit by itself
        ended = replace(ended, exit=replace(exit_, signal=None))
    suspect = _record(crew, facts, ended, exit_.local_rank, account)
    return None if suspect.failure.kind in ECHOES else suspect


def _hanging(crew: Crew, facts: Facts, ended: Ended) -> _Suspect:
    """Return the failure of a worker that dumped its stack; its last progress gives the order.

    A worker whose collective aborted in the meantime, because its peer was stopped sooner, reports
    its own error instead.
    """
    exit_ = ended.exit
    before = before_dump(exit_.stderr_tail)
    said = from_error_file(crew.reports.get(exit_.local_rank, b"")) or from_stderr(before, True)
    if said is not None:
        return _record(crew, facts, ended, exit_.local_rank, said)
    progress = crew.progress.get(exit_.local_rank)
    at = stand(exit_.stderr_tail)
    step = last_step(crew) if progress is None else progress.step
    told = f"no progress for {facts.hang_seconds:g} s" + (f" after step {step}" * (step >= 0))
    if at is None:
        where = "it did not say where it stood"
    elif at.waits:
        where = f"it waited for its peers in {at.place}"
    else:
        where = f"it was in {at.place}"
    account = Account(
        message=f"{told}: {where}",
        traceback="" if at is None else at.traceback,
        at_ms=progress.at_ms if progress is not None and progress.at_ms else None,
    )
    found = _record(crew, facts, ended, exit_.local_rank, account)
    waits = at is not None and at.waits
    kind = FailureClass.COLLECTIVE_TIMEOUT if waits else FailureClass.HANG
    return replace(found, failure=replace(found.failure, kind=kind))


def _still_ending(crew: Crew, facts: Facts) -> Iterator[_Suspect]:
    """Yield workers that wrote an error file and have not exited yet."""
    over = {ended.exit.local_rank for ended in crew.exits}
    for local_rank, raw in crew.reports.items():
        account = from_error_file(raw)
        if local_rank not in over and account is not None:
            yield _record(crew, facts, None, local_rank, account)


def _record(
    crew: Crew, facts: Facts, ended: Ended | None, local_rank: int, account: Account | None
) -> _Suspect:
    exit_ = None if ended is None else ended.exit
    rank = UNKNOWN_RANK if crew.base_rank is None else crew.base_rank + local_rank
    ended_at_ms = 0 if exit_ is None else exit_.at_unix_ms
    failure = Failure(
        round=crew.round,
        member=facts.member,
        name=facts.name,
        rank=rank,
        local_rank=local_rank,
        kind=classified(exit_, account, rank),
        at_ms=ended_at_ms if account is None or account.at_ms is None else account.at_ms,
        exit_code=None if exit_ is None else exit_.exit_code,
        signal=None if exit_ is None else exit_.signal,
        message=_message(ended, account),
        traceback=_traceback(exit_, account),
        node=facts.node,
        step=_step(crew, local_rank),
    )
    return _Suspect(fitted(failure), ended_at_ms)


def _step(crew: Crew, local_rank: int) -> int | None:
    """Return the last step that this worker reported."""
    said = crew.progress.get(local_rank)
    return None if said is None or said.step < 0 else said.step


def _message(ended: Ended | None, account: Account | None) -> str:
    if account is not None:
        return account.message
    if ended is None:
        return ""
    if ended.exit.message:
        return ended.exit.message
    how, tail = ending_text(ended.exit), before_dump(ended.exit.stderr_tail)
    words = last_words(tail) if ended.exit.signal in (None, SIGABRT) else ""
    said = f"{how}; the last line on its standard error: {words}" if words else how
    at = stand(ended.exit.stderr_tail) if ended.exit.signal in CRASHES else None
    return said if at is None else f"{said}; it was in {at.place}"


def _traceback(exit_: WorkerExited | None, account: Account | None) -> str:
    if account is not None:
        return account.traceback
    at = None if exit_ is None or exit_.signal not in CRASHES else stand(exit_.stderr_tail)
    return "" if at is None else at.traceback


def fitted(failure: Failure) -> Failure:
    """Return the failure cut to the storage limit: message from the start, traceback to the end."""
    failure = replace(
        failure,
        message=_start(failure.message, MESSAGE_CHARACTERS),
        traceback=_end(failure.traceback, FAILURE_BYTES),
    )
    while len(encode(failure)) > FAILURE_BYTES and failure.traceback:
        failure = replace(failure, traceback=_end(failure.traceback, len(failure.traceback) // 2))
    while len(encode(failure)) > FAILURE_BYTES and failure.message:
        failure = replace(failure, message=_start(failure.message, len(failure.message) // 2))
    return failure


def _start(text: str, limit: int) -> str:
    clean = encodable(text)
    return clean if len(clean) <= limit else clean[: max(0, limit - 1)] + "…" * (limit > 0)


def _end(text: str, limit: int) -> str:
    clean = encodable(text)
    return clean if len(clean) <= limit else "…" * (limit > 0) + clean[len(clean) - limit + 1 :]
