"""Keys of rounds in a store, and the rounds that are no longer read."""

from __future__ import annotations

from elasticjob_rendezvous.dynamic.stores import of_former_rounds, round_prefix


def keys(run_id: str, *rounds: int, name: str = "role_info/0") -> list[bytes]:
    return [f"/{round_prefix(run_id, number)}/{name}".encode() for number in rounds]


def test_last_two_rounds_of_each_run_are_kept() -> None:
    outdated = keys("a", 7, 8) + keys("a.1", 0)
    kept = keys("a", 9, 10) + keys("a.1", 1, 2) + keys("b", 0)
    assert of_former_rounds(kept + outdated) == outdated


def test_keys_of_the_state_and_of_others_are_kept() -> None:
    others = [
        b"/torch.rendezvous.run",
        b"/torch.rendezvous.run.1",
        b"/elasticjob/probe",
        b"/0/x.1/y",
    ]
    assert of_former_rounds([*others, *keys("run", 5)]) == []
    inner = [key + b"/x.9/y" for key in keys("run", 1, 2)]
    assert of_former_rounds([*others, *inner]) == []


def test_addresses_of_workers_are_kept() -> None:
    """torch's agents publish them in their first round only."""
    addresses = keys("a", 0, name="MASTER_ADDR") + keys("a", 0, name="MASTER_PORT")
    assert of_former_rounds(addresses + keys("a", 0, 9)) == keys("a", 0)
