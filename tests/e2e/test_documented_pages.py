"""README and tutorials on the cluster: every block marked `cluster` is executed as it stands.

The README's commands install the chart with its defaults, on nodes that other tests remove. So its
test is the last one.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.documentation import blocks_of
from tests.documented_session import Session
from tests.e2e.conftest import MakeNamespace
from tests.e2e.console import Console
from tests.e2e.installation import SYSTEM, Installation
from tests.e2e.nodes import Nodes
from tests.paths import ROOT

pytestmark = pytest.mark.timeout(900, func_only=True)

TUTORIALS = ROOT / "docs" / "tutorials"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a copy of the files of a checkout that the pages name."""
    for name in ("charts", "examples"):
        shutil.copytree(ROOT / name, tmp_path / "checkout" / name)
    return tmp_path / "checkout"


@pytest.fixture
def session(
    console: Console, make_namespace: MakeNamespace, cluster: Cluster, checkout: Path,
    request: pytest.FixtureRequest,
) -> Session:  # fmt: skip
    """Return the terminals of a reader: kubectl's current context and namespace are the test's."""
    namespace = make_namespace(request.node.name.replace("_", "-").replace("test-", "e2e-"))
    own = checkout.parent / "kubeconfig"
    shutil.copy(cluster.kubeconfig, own)
    here = ("--kubeconfig", own, "config")
    console.kubectl(*here, "use-context", cluster.context)
    console.kubectl(*here, "set-context", "--current", f"--namespace={namespace.namespace}")
    return Session(checkout, {**console.env, "KUBECONFIG": str(own)})


@pytest.fixture
def uninstalled(installation: Installation, console: Console) -> None:
    """Remove ElasticJob and etcd's data for the test; the end of the run removes the test's own."""
    if installation.installed:
        installation.uninstall()
    console.kubectl("delete", "namespace", "--ignore-not-found", SYSTEM, seconds=180)


@pytest.mark.usefixtures("installation")
def test_tutorial_of_the_cluster(session: Session) -> None:
    assert session.execute(blocks_of(TUTORIALS / "cluster.md"), "cluster") > 10


@pytest.mark.usefixtures("installation")
def test_tutorial_of_spot_nodes(session: Session, nodes: Nodes) -> None:
    try:
        assert session.execute(blocks_of(TUTORIALS / "spot-nodes.md"), "cluster") > 5
    finally:
        for node in nodes.workers:
            nodes.uncordon(node)


@pytest.mark.usefixtures("uninstalled")
def test_readme_installs_and_runs_a_job(session: Session) -> None:
    assert session.execute(blocks_of(ROOT / "README.md"), "cluster") > 0
