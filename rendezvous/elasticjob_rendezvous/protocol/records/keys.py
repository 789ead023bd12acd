"""Keys of a job's rendezvous: the only place that builds and parses them."""

from __future__ import annotations

from dataclasses import dataclass

ROOT = "/elasticjob/"
MOST_DIGITS = 18
"""Maximum number of digits of a number in a name; `int` refuses thousands of them."""


def is_number(part: str) -> bool:
    """Return True if a part of a key is a number; a stranger may write any text there."""
    return part.isascii() and part.isdigit() and len(part) <= MOST_DIGITS


def job_folder(namespace: str, uid: str) -> str:
    """Return the folder of all incarnations of one job."""
    return f"{ROOT}{namespace}/{uid}/"


def job_prefix(namespace: str, uid: str, incarnation: int) -> str:
    """Return the prefix of one incarnation of one job."""
    return f"{job_folder(namespace, uid)}{incarnation}/"


def cluster_key() -> str:
    """Return the key that names the Kubernetes cluster whose operator keeps this etcd.

    It lies below the folder of no job.
    """
    return f"{ROOT}cluster"


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys under one prefix, which ends in a slash."""

    prefix: str

    def __post_init__(self) -> None:
        if not self.prefix.endswith("/"):
            raise ValueError(f"the key prefix must end with '/': {self.prefix!r}")

    @property
    def state(self) -> str:
        """Folder that every member watches as one range: bounds, round and roster."""
        return self.prefix + "state/"

    @property
    def seats(self) -> str:
        """Copy of the current round's roster, which arrives together with the round's `final`."""
        return self.state + "roster"

    @property
    def bounds(self) -> str:
        return self.state + "bounds"

    @property
    def round(self) -> str:
        return self.state + "round"

    @property
    def job_key(self) -> str:
        """Random secret of the agents of a run for which etcd has no password."""
        return self.prefix + "job-key"

    @property
    def members(self) -> str:
        """Folder of all members' sessions."""
        return self.prefix + "members/"

    def sessions(self, member: str) -> str:
        """Return the folder of one member's sessions."""
        return f"{self.members}{member}/"

    def session(self, member: str, session: str) -> str:
        return self.sessions(member) + session

    def roster(self, number: int) -> str:
        return f"{self.prefix}roster/{number}"

    def history(self, number: int) -> str:
        return f"{self.prefix}history/{number}"

    def failures(self, number: int) -> str:
        """Return the folder of one round's failures."""
        return f"{self.prefix}failures/{number}/"

    def failure(self, number: int, member: str) -> str:
        return self.failures(number) + member

    def dones(self, number: int) -> str:
        """Return the folder of one round's successes."""
        return f"{self.prefix}done/{number}/"

    def done(self, number: int, member: str) -> str:
        return self.dones(number) + member

    def parts(self, key: str) -> tuple[str, ...]:
        """Return the path of a key below the prefix, as ("round",) or ("members", id, session).

        Empty for a key of another job.
        """
        if not key.startswith(self.prefix):
            return ()
        first, *rest = key[len(self.prefix) :].split("/")
        return tuple(rest) if first == "state" else (first, *rest)
