"""torchrun's options, found in the call stack that requests a handler."""

from __future__ import annotations

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.launcher.api import LaunchConfig

from elasticjob_rendezvous.torchrun import plugin
from elasticjob_rendezvous.torchrun.launch import Launch, launch_of


def launch(config: LaunchConfig, run_id: str) -> Launch | None:
    """Look up the launch with `config` on the stack, as in torch's `launch_agent`."""
    return (lambda: launch_of(run_id))()


def config(**options: str) -> LaunchConfig:
    return LaunchConfig(
        1, 2, nproc_per_node=3, run_id="r", role="reader", max_restarts=5, **options
    )


def test_workers_role_and_budget_come_from_the_launch() -> None:
    found = launch(config(), "r")
    assert found == Launch(3, "reader", 5)
    assert found.settings() == {"slots": 3, "role": "reader", "max_restarts": 5}


def test_launch_of_another_run_is_ignored() -> None:
    assert launch(config(), "another") is None
    assert launch_of("r") is None


def test_forked_workers_are_refused() -> None:
    def launch_agent(config: LaunchConfig) -> None:
        plugin()(RendezvousParameters("elasticjob", "127.0.0.1:1", "r", 1, 2))

    with pytest.raises(ValueError, match="use spawn or forkserver"):
        launch_agent(config(start_method="fork"))
