"""Deaths of agents, and new credentials for them, during an undisturbed training."""

from __future__ import annotations

import pytest

from elasticjob_operator.domain.manifests.names import ACCESS_PATH, ROTATE_ANNOTATION
from tests.e2e.console import CALL_POLL_SECONDS, Json, until
from tests.e2e.installation import Installation, is_ready
from tests.e2e.job_namespace import JobNamespace
from tests.e2e.nodes import Nodes
from tests.e2e.steady import NAME, recovers, restarts_of, survive

pytestmark = pytest.mark.timeout(600, func_only=True)


def kill_the_agent(steady_job: JobNamespace, nodes: Nodes, index: int) -> None:
    """Kill one agent: the workers do not notice, and the job can still recover afterwards."""

    def pod() -> Json:
        found = steady_job.find("pods", f"{NAME}-{index}")
        assert found is not None
        return found

    killed = restarts_of(pod(), "elasticjob-agent")
    survive(
        steady_job,
        lambda: nodes.kill_container(pod(), "elasticjob-agent"),
        lambda: steady_job.until(
            lambda: restarts_of(pod(), "elasticjob-agent") > killed and is_ready(pod()),
            "the agent to be back",
        ),
    )
    recovers(steady_job)


def test_killed_agent_does_not_disturb_training(steady_job: JobNamespace, nodes: Nodes) -> None:
    kill_the_agent(steady_job, nodes, 1)


def test_killed_coordinator_agent_does_not_disturb_training(
    steady_job: JobNamespace, nodes: Nodes
) -> None:
    kill_the_agent(steady_job, nodes, 0)


def test_running_agents_log_in_as_the_rotated_etcd_user(
    steady_job: JobNamespace, installation: Installation
) -> None:
    """The kubelet renews the mounted Secret; without the former user a new round is formed."""
    uid = steady_job.job(NAME)["metadata"]["uid"]
    (former,) = users_of(installation, uid)
    steady_job.kubectl("annotate", f"ej/{NAME}", f"{ROTATE_ANNOTATION}=1", "--overwrite")
    mounted = ("elasticjob-agent", f"cat {ACCESS_PATH}/user")

    def renewed() -> bool:
        # The kubelet reads the Secrets of a changed pod at once, otherwise within a minute or two.
        for index in range(2):
            steady_job.look_again(f"{NAME}-{index}")
        found = {steady_job.exec(f"{NAME}-{index}", *mounted).strip() for index in range(2)}
        return len(found) == 1 and former not in found

    survive(
        steady_job,
        lambda: until(renewed, "the kubelets to renew the Secret", 180, CALL_POLL_SECONDS),
        lambda: installation.etcdctl("user", "delete", former),
    )
    (user,) = users_of(installation, uid)
    assert user == f"{former}.1"
    recovers(steady_job)
    assert users_of(installation, uid) == [user]


def users_of(installation: Installation, uid: str) -> list[str]:
    return sorted(name for name in installation.etcdctl("user", "list").split() if uid in name)
