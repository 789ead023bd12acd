"""Every key of a job's rendezvous, built and read here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass

ROOT = "/elasticjob/"


def job_folder(namespace: str, uid: str) -> str:
    """The folder of all incarnations of one job."""
    return f"{ROOT}{namespace}/{uid}/"


def job_prefix(namespace: str, uid: str, incarnation: int) -> str:
    """The prefix of one incarnation of one job."""
    return f"{job_folder(namespace, uid)}{incarnation}/"


def cluster_key() -> str:
    """Which Kubernetes cluster's operator keeps this etcd: below the folder of no job."""
    return f"{ROOT}cluster"


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys under one prefix, which ends in a slash."""

    prefix: str

    def __post_init__(self) -> None:
        if not self.prefix.endswith("/"):
            raise ValueError(f"the key prefix must end with '/': {self.prefix!r}")

    @property
    def state(self) -> str:
        """The folder of what every member watches, as one range: bounds, round and seats."""
        return self.prefix + "state/"

    @property
    def seats(self) -> str:
        """A copy of the current round's roster, so that it comes with the round's `final`."""
        return self.state + "roster"

    @property
    def bounds(self) -> str:
        return self.state + "bounds"

    @property
    def round(self) -> str:
        return self.state + "round"

    @property
    def members(self) -> str:
        """The folder of all members' sessions."""
        return self.prefix + "members/"

    def sessions(self, member: str) -> str:
        """The folder of one member's sessions."""
        return f"{self.members}{member}/"

    def session(self, member: str, session: str) -> str:
        return self.sessions(member) + session

    def roster(self, number: int) -> str:
        return f"{self.prefix}roster/{number}"

    def history(self, number: int) -> str:
        return f"{self.prefix}history/{number}"

    def failures(self, number: int) -> str:
        """The folder of one round's failures."""
        return f"{self.prefix}failures/{number}/"

    def failure(self, number: int, member: str) -> str:
        return self.failures(number) + member

    def dones(self, number: int) -> str:
        """The folder of one round's successes."""
        return f"{self.prefix}done/{number}/"

    def done(self, number: int, member: str) -> str:
        return self.dones(number) + member

    def parts(self, key: str) -> tuple[str, ...]:
        """The path of a key below the prefix, as ("round",) or ("members", id, session).

        Empty for a key of another job.
        """
        if not key.startswith(self.prefix):
            return ()
        first, *rest = key[len(self.prefix) :].split("/")
        return tuple(rest) if first == "state" else (first, *rest)
