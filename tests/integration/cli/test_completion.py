"""Completion of `elasticjob` in a real bash, and of `kubectl elasticjob` by a real kubectl."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.programs import programs
from tests.integration.apiserver import ApiServer
from tests.integration.kube_helpers import ELASTICJOBS_PATH, elasticjob

BIN = Path(sys.executable).parent
UNREACHABLE = """
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://127.0.0.1:1"}}]
contexts: [{name: gone, context: {cluster: c, user: u}}]
current-context: gone
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Return an environment with two local jobs and a cluster that does not answer."""
    for name in ("digits", "digits-2"):
        folder = tmp_path / "elasticjob" / "default" / name
        folder.mkdir(parents=True)
        (folder / "status.json").write_text("{}")
    (tmp_path / "kubeconfig").write_text(UNREACHABLE)
    path = f"{BIN}{os.pathsep}{programs('kubernetes')}{os.pathsep}{os.environ['PATH']}"
    changed = {"PATH": path, "XDG_STATE_HOME": str(tmp_path), "TERM": "dumb"}
    changed |= {"KUBECONFIG": str(tmp_path / "kubeconfig"), "HOME": str(tmp_path)}
    removed = ("ELASTICJOB_PLACE", "PYTHONPATH")
    return {name: text for name, text in os.environ.items() if name not in removed} | changed


def in_bash(env: dict[str, str], *words: str) -> list[str]:
    """Return the candidates that the script gives bash for the last of the words."""
    script = (
        "source <(elasticjob completion bash) && [[ $(complete -p elasticjob) == *_elasticjob* ]]\n"
        'COMP_WORDS=(elasticjob "$@"); COMP_CWORD=$#; _elasticjob_complete\n'
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script, "bash", *words],
        env=env, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_gets_commands_options_and_jobs(env: dict[str, str]) -> None:
    assert in_bash(env, "expl") == ["explain"]
    assert in_bash(env, "get", "--out") == ["--output"]
    assert in_bash(env, "get", "dig") == ["digits", "digits-2"]
    assert in_bash(env, "get", "--context", "") == ["gone"]


def test_unreachable_cluster_has_no_candidates(env: dict[str, str]) -> None:
    assert in_bash(env, "get", "--cluster", "") == []
    without = {**env, "PATH": f"{BIN}{os.pathsep}/usr/bin{os.pathsep}/bin", "KUBECONFIG": "/none"}
    assert in_bash(without, "get", "--cluster", "") == []


@pytest.fixture
def terminal(env: dict[str, str]) -> Iterator[int]:
    """Yield the pseudo-terminal of an interactive bash with completion."""
    pid, fd = pty.fork()
    if pid == 0:
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], env)
    yield fd
    os.close(fd)  # bash ends with its terminal
    os.waitpid(pid, 0)


def read_until(fd: int, text: str) -> str:
    """Return the terminal's output up to `text`."""
    said, deadline = "", time.monotonic() + 30
    while text not in said:
        readable, _, _ = select.select([fd], [], [], max(0, deadline - time.monotonic()))
        assert readable, said
        said += os.read(fd, 65536).decode(errors="replace")
    return said


def test_tab_completes_a_word_in_an_interactive_bash(terminal: int) -> None:
    os.write(terminal, b"source <(elasticjob completion bash); echo rea''dy\n")
    read_until(terminal, "\nready")
    os.write(terminal, b"elasticjob descr\t")
    read_until(terminal, "elasticjob describe ")
    os.write(terminal, b"digits-\t")
    read_until(terminal, "digits-2 ")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_accept_their_script(env: dict[str, str], shell: str) -> None:
    script = subprocess.run(
        ["elasticjob", "completion", shell], env=env, capture_output=True, text=True, check=True
    ).stdout
    assert "elasticjob" in script
    if shutil.which(shell):
        done = subprocess.run([shell, "-n"], input=script, text=True, capture_output=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_kubectl_runs_and_completes_the_plugin(
    api_server: ApiServer, namespace: str, env: dict[str, str]
) -> None:
    jobs = ELASTICJOBS_PATH.format(namespace)
    for name in ("done", "digits"):
        api_server.request("POST", jobs, elasticjob(name))
    env["KUBECONFIG"] = str(api_server.kubeconfig())

    def said(*words: str) -> list[str]:
        done = subprocess.run(
            ["kubectl", *words], env=env, capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout.splitlines()

    where = ("-n", namespace, "--context", "test")
    header, *rows = said("elasticjob", "get", *where)
    assert header.split()[0] == "NAME"
    assert sorted(row.split()[0] for row in rows) == ["digits", "done"]
    completed = said("__complete", "elasticjob", "describe", *where, "di")
    assert completed[0] == "digits"
    assert completed[-1].startswith(":4")
    assert "get" in {line.partition("\t")[0] for line in said("__complete", "elasticjob", "g")}
