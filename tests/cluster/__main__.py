"""`python -m tests.cluster up|down|images|status`: the cluster of the end-to-end tests."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time

from tests.cluster import borrowing, images, lifecycle
from tests.cluster.cluster import Cluster


def _instructions(cluster: Cluster) -> str:
    """Return the shell lines that point kubectl and helm at this cluster."""
    lines = []
    programs = (cluster.kubectl_program, cluster.helm_program)
    if any(shutil.which(program.name) != str(program) for program in programs):
        lines.append(f'export PATH="{cluster.kubectl_program.parent}:$PATH"')
    lines.append(f'export KUBECONFIG="{cluster.kubeconfig}"')
    return "\n".join(lines)


def _up() -> int:
    begin = time.monotonic()
    cluster = lifecycle.up()
    borrowing.keep()
    print(f"the cluster is up: {', '.join(cluster.nodes)} ({time.monotonic() - begin:.0f} s)")
    print(_instructions(cluster))
    return 0


def _down() -> int:
    lifecycle.down()
    print("the cluster is gone")
    return 0


def _images() -> int:
    cluster = lifecycle.found()
    begin = time.monotonic()
    images.build(lifecycle.builder_engine(cluster))
    built = time.monotonic()
    made = images.names() if cluster is None else images.load(cluster)
    print("\n".join((made.operator, made.sidecar, made.trainer)))
    where = "no cluster is running" if cluster is None else "in every node of the cluster"
    loaded = time.monotonic()
    print(f"{where} (built in {built - begin:.0f} s, loaded in {loaded - built:.0f} s)")
    return 0


def _status() -> int:
    cluster = lifecycle.found()
    if cluster is None:
        print("no cluster is running: make cluster")
        return 1
    print(cluster.kubectl("get", "nodes"), end="")
    print(_instructions(cluster))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    actions = {"up": _up, "down": _down, "images": _images, "status": _status}
    parser.add_argument("action", choices=actions)
    action = actions[parser.parse_args().action]
    os.environ.pop("KUBECONFIG", None)  # the kubeconfig has a file of its own
    try:
        return action()
    except subprocess.CalledProcessError as error:
        print(f"{error.cmd[0]} failed with {error.returncode}: its message is above")
    except (RuntimeError, OSError) as error:
        print(error)
    return 1


if __name__ == "__main__":
    sys.exit(main())
