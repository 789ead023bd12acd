"""Release files: their contents, and the wheel as its users install it, outside of the checkout."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from scripts import dist
from tests.cluster.places import KUBERNETES_VERSION
from tests.cluster.programs import programs
from tests.documentation import blocks_of
from tests.documented_session import Session
from tests.integration.helm_chart import CHART, NAMESPACE, RELEASE
from tests.integration.local_rig import LocalRig
from tests.paths import ROOT

MOMENT = 1_700_000_000
SECONDS = 120.0
SCRIPT = """\
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
from elasticjob import train
train.progress(1)
print("library", train.__file__, flush=True)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build the release files once; return their paths by suffix."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(dist.EPOCH, str(MOMENT))
        made = dist.build(tmp_path_factory.mktemp("release") / "dist")
    return {"".join(path.suffixes[-2:] if path.suffix == ".gz" else path.suffix): path
            for path in made}  # fmt: skip


def closure(requirements: Iterable[Requirement]) -> set[str]:
    """Return the installed distributions that these requirements need, with their extras."""
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    queue = [(one, "") for one in requirements]
    while queue:
        requirement, extra = queue.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        for wanted in ("", *requirement.extras):
            if (requirement.name, wanted) in seen:
                continue
            seen.add((requirement.name, wanted))
            found.add(requirement.name)
            needs = distribution(requirement.name).requires or []
            queue += [(Requirement(one), wanted) for one in needs]
    return found


def required(wheel: Path) -> list[Requirement]:
    """Return the wheel's requirements without an extra's name, as `pip install FILE` reads them."""
    with zipfile.ZipFile(wheel) as packed:
        [name] = [name for name in packed.namelist() if name.endswith(".dist-info/METADATA")]
        text = packed.read(name).decode()
    all_of_them = [Requirement(one) for one in re.findall(r"^Requires-Dist: (.+)$", text, re.M)]
    found, queue = [], [""]
    while queue:
        extra = queue.pop()
        for one in all_of_them:
            wanted = bool(extra) if one.marker else not extra
            if wanted and (one.marker is None or one.marker.evaluate({"extra": extra})):
                if one.name == "elasticjob":
                    queue += one.extras
                else:
                    found.append(Requirement(str(one).partition(";")[0]))
    return found


def link(names: Iterable[str], into: Path) -> None:
    """Make the files of these installed distributions importable from another folder."""
    for name in names:
        for file in distribution(name).files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (into / top).exists():
                (into / top).symlink_to(Path(str(distribution(name).locate_file(top))))


def environment(home: Path, wheel: Path, *packages: str) -> Path:
    """Install the wheel, its requirements and these packages; return the environment's bin."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    pip += ["--python", str(python), "install", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, wheel], check=True)
    [site] = home.glob("lib/python*/site-packages")
    link(closure([*required(wheel), *map(Requirement, packages)]), site)
    return home / "bin"


@pytest.fixture(scope="module")
def installed(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bin of an environment with what `pip install dist/*.whl` installs."""
    return environment(tmp_path_factory.mktemp("installed"), built[".whl"])


def call(installed: Path, folder: Path, *command: str) -> str:
    """Run a program of the environment to its successful end; return what it printed."""
    home = {name: str(folder / "state") for name in ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME")}
    kept = {"PATH": f"{installed}:{os.environ['PATH']}", "LANG": "C.UTF-8", "TMPDIR": "/tmp"}
    done = subprocess.run(
        [installed / command[0], *command[1:]],
        cwd=folder,
        env={**kept, **home},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_same_commit_gives_the_same_bytes(
    built: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(dist.EPOCH, str(MOMENT))
    again = {path.name: path.read_bytes() for path in dist.build(tmp_path / "again")}
    assert again == {path.name: path.read_bytes() for path in built.values()}


def test_sums_are_of_every_file(built: dict[str, Path]) -> None:
    [sums] = [path for path in built.values() if path.name == dist.SUMS]
    said = {name: digest for digest, name in map(str.split, sums.read_text().splitlines())}
    files = {path for path in built.values() if path != sums}
    assert said == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_wheel_has_every_module_and_no_other_top_level_name(built: dict[str, Path]) -> None:
    names = set(zipfile.ZipFile(built[".whl"]).namelist())
    packages = [path.parent for path in ROOT.glob("*/elasticjob*/__init__.py")]
    tops = {path.name for path in packages}
    assert {name.partition("/")[0] for name in names} == {
        *tops, f"elasticjob-{dist.version()}.dist-info"
    }  # fmt: skip
    modules = {
        str(path.relative_to(package.parent))
        for package in packages
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert modules <= names


def test_chart_archive_is_a_chart_of_this_version(built: dict[str, Path], tmp_path: Path) -> None:
    dist.unpack(built[".tgz"], tmp_path)
    about = yaml.safe_load((tmp_path / "elasticjob" / "Chart.yaml").read_text())
    assert (about["version"], about["appVersion"]) == (dist.version(), dist.version())
    command: list[str | Path] = [
        programs("helm") / "helm",
        "template",
        RELEASE,
        "--kube-version",
        KUBERNETES_VERSION,
    ]
    rendered = [
        subprocess.run(
            [*command, "--namespace", NAMESPACE, chart], check=True, capture_output=True, text=True
        ).stdout
        for chart in (built[".tgz"], CHART)
    ]
    kinds = [re.findall(r"^(?:kind|  name): .+$", text, re.M) for text in rendered]
    assert kinds[0] == kinds[1] != []


def test_installed_command_prints_its_version(installed: Path, tmp_path: Path) -> None:
    said = call(installed, tmp_path, "elasticjob", "--version")
    assert said == f"elasticjob {dist.version()}\n"


def test_nothing_is_imported_from_the_checkout(installed: Path, tmp_path: Path) -> None:
    names = ["elasticjob", "elasticjob_agent.main", "elasticjob_cli.main", "elasticjob_launcher"]
    names += ["elasticjob_operator.model", "elasticjob_rendezvous.api", "elasticjob_cli.client"]
    code = (
        "import importlib, json, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print(json.dumps([sys.path, *[getattr(m, '__file__', None) or ''"
        " for m in sys.modules.values()]]))"
    )
    path, *files = json.loads(call(installed, tmp_path, "python", "-I", "-c", code))
    own = [file for file in files if re.search(r"/elasticjob(_\w+)?/", file)]
    assert len(own) > len(names)
    assert [file for file in own if not file.startswith(str(installed.parent))] == []
    assert [part for part in path if str(ROOT) in part] == []


def test_default_installation_leaves_out_packages_of_the_operator(installed: Path) -> None:
    [site] = installed.parent.glob("lib/python*/site-packages")
    for name in ("kopf", "kubernetes", "prometheus_client", "torch"):
        distribution(name.replace("_", "-"))  # else the check below would prove nothing
        assert not (site / name).exists()


def test_installed_command_trains_a_job_of_two_nodes(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    manifest = tmp_path / "job.yaml"
    call(installed, tmp_path, "elasticjob", "init", "--nodes=2", "--output=job.yaml", "train.py")
    assert "valid" in call(installed, tmp_path, "elasticjob", "validate", str(manifest))
    said = call(installed, tmp_path, "elasticjob", "run", str(manifest), "--plain")
    assert "Succeeded" in said
    logs = call(installed, tmp_path, "elasticjob", "logs", "train")
    assert {"rank 0 of 2", "rank 1 of 2"} <= set(re.findall(r"rank \d of \d", logs))
    libraries = set(re.findall(r"library (\S+)", logs))
    assert len(libraries) == 1
    assert not any(name.startswith(str(ROOT)) for name in libraries)


@pytest.mark.timeout(400)
def test_first_run_of_the_readme_with_the_installed_wheel(
    built: dict[str, Path], tmp_path: Path
) -> None:
    bin_folder = environment(tmp_path / "env", built[".whl"], "torch", "scikit-learn")
    (tmp_path / "rig").mkdir()
    rig = LocalRig(tmp_path / "rig")
    shutil.copytree(ROOT / "examples", rig.job / "examples")
    path = os.pathsep.join([str(bin_folder), os.environ["PATH"]])
    env = {**rig.env, "PATH": path, "OMP_NUM_THREADS": "1"}
    del env["PYTHONPATH"]  # the checkout
    try:
        assert Session(rig.job, env).execute(blocks_of(ROOT / "README.md"), "local") == 3
    finally:
        rig.close()
    assert "checkpoint-300.pt" in {path.name for path in (rig.job / "checkpoints").iterdir()}


def test_installation_without_dependencies_names_the_remedy(
    built: dict[str, Path], tmp_path: Path
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    [site] = (tmp_path / "env").glob("lib/python*/site-packages")
    with zipfile.ZipFile(built[".whl"]) as packed:
        packed.extractall(site)
    command = [str(tmp_path / "env" / "bin" / "python"), "-m", "elasticjob_cli.main", "get"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == (
        "elasticjob: the package of the module 'typer' is missing: the installation left out "
        "dependencies (`--no-deps`); pip install elasticjob\n"
    )
