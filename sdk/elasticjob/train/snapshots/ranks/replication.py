"""Replication of the ranks' own parts to the memory of other nodes, in the background.

The ranks exchange their addresses and a random key over the process group. Each rank sends its part
over `links`, and receives those of other ranks. A failed copy is logged once and not retried;
training never waits for a copy. Small own parts are also sent after each step, independent of the
generations: if a node is lost, a stop copy needs the own parts of its ranks.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticjob import layout
from elasticjob.train.snapshots.core.agreement import SHARED, Part, Version
from elasticjob.train.snapshots.core.exchange import Exchange
from elasticjob.train.snapshots.core.replicas import (
    Generations,
    Member,
    State,
    copies_at,
    is_stale,
    kept,
    may_drop,
    receivers,
)
from elasticjob.train.snapshots.memory.buffers import ReplicaBuffers
from elasticjob.train.snapshots.memory.part_files import Body, CorruptSnapshot, held, read
from elasticjob.train.snapshots.ranks.links import (
    END_SECONDS,
    MAX_CONNECTIONS,
    CommittedPart,
    PeerError,
    Receiver,
    StepSender,
    send,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticjob.train.snapshots.core.agreement import Offer, Plan
    from elasticjob.train.snapshots.ranks.gang import Gang

log = logging.getLogger("elasticjob.train")

TOPOLOGY = "ELASTICJOB_TOPOLOGY_DOMAIN"
"""Variable with the zone or rack of this node, set by the user."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Settings(NamedTuple):
    """Arguments of `Snapshots` for replicas; `rate` is in bytes each second.

    Args:
        local_ranks: number of workers on this node; 0 if it is unknown.
    """

    replicas: int
    rate: float
    is_sharded: bool
    local_ranks: int = 0


def connected(
    gang: Gang, folder: Path | None, local_rank: int, settings: Settings
) -> Replication | None:
    """Return the replication of this rank; None on all ranks without memory on several nodes."""
    mine = b"" if folder is None else bytes(folder)
    folders = {bytes(each) for each in gang.gather(Exchange.FOLDERS, mine)}
    if folder is None or b"" in folders or len(folders) < 2:
        return None
    return Replication(gang, folder, local_rank, settings)


class Replication:
    """Replication of one rank: its listener, its copies of the current generation."""

    def __init__(
        self,
        gang: Gang,
        folder: Path,
        local_rank: int,
        settings: Settings,
    ) -> None:
        replicas, self._rate, is_sharded, local_ranks = settings
        self._is_sharded = is_sharded
        self._folder, self._local_rank, self._rank = folder, local_rank, gang.rank
        self._buffers = ReplicaBuffers(folder, local_ranks)
        self._state = State.IDLE
        self._sender: threading.Thread | None = None
        self._is_logged = self._has_dropped = False
        self._failed: PeerError | None = None  # not logged yet
        self._step, self._later = layout.NO_STEP, 0  # of this rank; number of those after it
        self.generations = Generations()
        self._listener = _listener()
        answers = _exchanged(gang, folder, self._listener)
        self._key = bytes.fromhex(answers[0]["key"])
        self._addresses = [(each["address"], each["port"]) for each in answers]
        places = domains([(each["domain"], each["topology"]) for each in answers])
        self.members = [
            Member(rank, each["node"], places[rank]) for rank, each in enumerate(answers)
        ]
        to = receivers(self.members, replicas)
        self._receivers = to[gang.rank]
        self._step_senders = [
            StepSender(self._addresses[rank], self._key, gang.rank, self._rate)
            for rank in self._receivers
        ]
        self._here = copies_at(self.members, replicas, str(folder), is_sharded)
        senders = frozenset(rank for rank, ranks in to.items() if gang.rank in ranks)
        self._receiver = None
        if self._listener is not None:
            self._receiver = Receiver(self._listener, self._key, senders, self._buffers)
            self._receiver.start()

    @property
    def state(self) -> State:
        return self._state

    @property
    def replicated_step(self) -> int:
        """Step of the confirmed copies; `NO_STEP` before the first of this round, or if the last
        ones failed."""
        found = self.generations
        if found.confirmed is None or not found.is_complete:
            return layout.NO_STEP
        return found.confirmed.step

    def restored(self, offers: Sequence[Offer], plan: Plan | None) -> None:
        """Keep the copies that another restore would need until there are newer ones.

        Local rank 0 removes all others, since the memory limit may leave no room for new copies.
        """
        confirmed = kept(offers, self.members, plan, self._is_sharded)
        self.generations = Generations(confirmed)
        if self._local_rank == 0:
            self._buffers.remove_steps(None if plan is None else plan.version)
            needed = (confirmed, None if plan is None else plan.version)
            for part, path in self._buffers.parts().items():
                if is_stale(part, needed, len(self.members), self._is_sharded):
                    self._buffers.remove(path)

    def continued(self, confirmed: Version) -> None:
        """Continue with the version that the previous replication of this gang has confirmed."""
        self.generations = Generations(confirmed)

    def exchanged(self, states: Sequence[State]) -> bool:
        """Evaluate the states of all ranks; return True if the next generation may begin."""
        begins = self.generations.exchanged(states)
        if self.generations.has_confirmed and not self._has_dropped and self._local_rank == 0:
            self._has_dropped = True
            for part, path in self._buffers.parts().items():
                if may_drop(part, self._here, self.generations):
                    self._buffers.remove(path)
        return begins

    def announce(self, version: Version) -> None:
        """Begin a generation; `send` follows once its parts are committed."""
        self.generations.begin(version)
        self._state = State.RUNNING

    def send(self, parts: Sequence[Part]) -> None:
        """Copy the committed parts of the announced generation in the background."""
        self._sender = threading.Thread(
            target=self._send,
            args=(list(parts), self.generations.confirmed),
            name="elasticjob-replicas",
            daemon=True,
        )
        self._sender.start()

    def saves(self, step: int) -> None:
        """Log a failed copy at the second step after it.

        A peer whose process ends breaks off its copies, and at the end of a training one that is
        ahead by one step refuses those of ranks that have not called `close` yet. Neither is an
        error, and there is no second step then: all members take it together.
        """
        if step == self._step:
            return
        self._step, self._later = step, self._later + 1
        if self._failed is not None and self._later > 1:
            failed, self._failed = self._failed, None
            self._warn(failed)

    def send_step(self, part: Part, body: Body) -> None:
        """Copy this rank's own part of a step in the background, outside the generations.

        The content of `body` does not change.
        """
        for each in self._step_senders:
            each.offer(part, body)

    def flush_steps(self, seconds: float) -> None:
        """Wait up to `seconds` until the part of the last step is sent."""
        deadline = time.monotonic() + seconds
        for each in self._step_senders:
            each.flush(max(0.0, deadline - time.monotonic()))

    def give_up(self) -> None:
        """End the announced generation: this rank has no part to copy."""
        self._state = State.FAILED

    def wait(self, seconds: float) -> None:
        """Wait for the copies in progress, for a limited time."""
        if self._sender is not None:
            self._sender.join(max(0.0, seconds))

    def close(self) -> None:
        """Wait for the copies in progress, for a limited time; accept no more."""
        for each in self._step_senders:
            each.close()
        self.wait(END_SECONDS)
        if self._receiver is not None:
            self._receiver.close()

    def _send(self, parts: list[Part], keep: Version | None) -> None:
        state = State.FAILED
        try:
            # Copies here come first: later snapshots overwrite the parts while peers receive them.
            # The shared part is the last one here, and no peer receives it: a copy that breaks off
            # leaves a version that lacks a part, which no gang restores.
            bodies = self._kept_here(sorted(parts, key=lambda part: part.rank == SHARED), keep)
            for part, body in bodies:
                self._copy(part, body, keep)
            state = State.DONE
        except CorruptSnapshot as error:  # a newer snapshot has taken its place
            log.debug("cannot copy a snapshot to other nodes: %s", error)
        except PeerError as error:
            log.debug("cannot copy a snapshot: %s", error)
            if self._failed is not None:  # the ranks have begun another generation since
                self._warn(error)
            self._later, self._failed = 0, error
        except OSError as error:
            self._warn(error)
        finally:
            self._state = state

    def _warn(self, error: OSError) -> None:
        if not self._is_logged:
            self._is_logged = True
            log.warning(
                "cannot copy a snapshot to another node: %s. The state of rank %d is lost if its "
                "node is; training goes on",
                error,
                self._rank,
            )

    def _own_files(self) -> list[Path]:
        return [*self._folder.glob("shared.*"), *self._folder.glob(f"rank-{self._local_rank}.*")]

    def _kept_here(
        self, parts: list[Part], keep: Version | None
    ) -> list[tuple[Part, Body | CommittedPart]]:
        """Copy the parts to this node if the state is sharded; return those for other nodes.

        The copy stays until this generation ends, and is sent piece by piece. Otherwise the next
        snapshot would overwrite what is sent, so it is read before.
        """
        found = {part: path for path in self._own_files() if (part := held(path)) is not None}
        own: list[tuple[Part, Body | CommittedPart]] = []
        for part in parts:
            path = found.get(part, self._folder / "missing")
            if self._is_sharded:
                copy = CommittedPart(path, part).copied(self._buffers.target(part, keep))
                if part.rank != SHARED:
                    own.append((part, copy))
            elif part.rank != SHARED:
                own.append((part, read(path, part)))
        return own

    def _copy(self, part: Part, body: Body | CommittedPart, keep: Version | None) -> None:
        for rank in self._receivers:
            try:
                send(self._addresses[rank], self._key, part, body, keep, self._rate)
            except OSError as error:
                reason = str(error) or type(error).__name__
                raise PeerError(f"rank {rank}: {reason}") from error


def domains(places: Sequence[tuple[str, str]]) -> list[str]:
    """Return the domain of each rank, of whose machine and topology domain are given.

    It is the topology domain if every rank has one and there are two or more, else the machine.
    """
    named = {topology for _, topology in places}
    is_used = len(named) > 1 and "" not in named
    return [topology if is_used else machine for machine, topology in places]


def _exchanged(gang: Gang, folder: Path, listener: socket.socket | None) -> list[dict[str, Any]]:
    """Exchange addresses, and the key that rank 0 draws."""
    address, port = ("", 0) if listener is None else listener.getsockname()[:2]
    try:
        machine = _BOOT_ID.read_text("ascii").strip()
    except OSError:
        machine = str(folder)
    own = {"node": str(folder), "domain": machine, "address": address, "port": port}
    own["topology"] = os.environ.get(TOPOLOGY, "")
    if gang.rank == 0:
        own["key"] = secrets.token_hex(32)
    gathered = gang.gather(Exchange.ADDRESSES, json.dumps(own).encode())
    return [json.loads(bytes(content)) for content in gathered]


def _listener() -> socket.socket | None:
    """Listen at the address from which this node reaches the first one."""
    try:
        master = os.environ.get("MASTER_ADDR") or "localhost"
        family, _, _, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            own = probe.getsockname()[0]
        found = socket.socket(family, socket.SOCK_STREAM)
        try:
            found.bind((own, 0))
            found.listen(MAX_CONNECTIONS)
        except OSError:
            found.close()
            raise
        return found
    except OSError as error:
        log.warning("cannot listen for snapshots of other nodes: %s", error)
        return None
