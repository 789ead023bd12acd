"""Rules of the repository."""

from __future__ import annotations

import ast
import os
import re
import stat
import tomllib
from pathlib import Path

import pytest

from tests.paths import ROOT

PACKAGES = (
    "operator/elasticjob_operator",
    "rendezvous/elasticjob_rendezvous",
    "sdk/elasticjob",
    "sdk/elasticjob_torchrun",
    "sidecar/elasticjob_agent",
    "sidecar/elasticjob_launcher",
    "cli/elasticjob_cli",
)
CORES = sorted(
    module
    for pattern in (
        "operator/elasticjob_operator/domain/**/*.py",
        "operator/elasticjob_operator/etcd_tls/certificate_rotation.py",
        "operator/elasticjob_operator/replica/lease.py",
        "rendezvous/elasticjob_rendezvous/protocol/**/*.py",
        "rendezvous/elasticjob_rendezvous/dynamic/core/*.py",
        "rendezvous/elasticjob_rendezvous/etcd_v2/core/*.py",
        "sidecar/elasticjob_agent/core/*.py",
        "sidecar/elasticjob_launcher/command_line/*.py",
    )
    for module in ROOT.glob(pattern)
)
PROTOCOL_PARTS = ("coordinator", "liveness", "records")
# In two parts: this file may not name them either.
REGISTRIES = [
    f"{name}.{domain}"
    for name, domain in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("proxy.golang", "org"),
        ("sum.golang", "org"),
        ("registry.npmjs", "org"),
        ("deb.debian", "org"),
        ("archive.ubuntu", "com"),
        ("download.pytorch", "org"),
    )
]
# Reads of a clock, randomness or the environment that need no forbidden import.
IMPURE_CALLS = {"now", "utcnow", "today", "uuid1", "uuid4", "getenv", "open", "print", "input"}


def pyproject() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def our_files() -> list[Path]:
    """Return the repository's files that git does not ignore; in a linked worktree .git is one."""
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}
    found = []
    for folder, subfolders, names in os.walk(ROOT):
        subfolders[:] = [name for name in subfolders if name not in ignored | {".git"}]
        ours = (name for name in names if not name.endswith(".pyc") and name != ".git")
        found += [Path(folder, name) for name in ours]
    return found


def test_operator_folder_does_not_hide_standard_operator_module() -> None:
    assert not (ROOT / "operator" / "__init__.py").exists()


def test_no_file_names_a_package_registry_or_a_home_folder() -> None:
    forbidden = re.compile("|".join(map(re.escape, [*REGISTRIES, "/wo" + "rk/", "/ro" + "ot/"])))
    named = {
        str(path.relative_to(ROOT)): found[0]
        for path in our_files()
        if (found := forbidden.search(path.read_text(encoding="utf-8", errors="replace")))
    }
    assert named == {}


def test_license_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


@pytest.mark.parametrize("package", PACKAGES)
def test_package_is_typed_and_in_wheel(package: str) -> None:
    assert (ROOT / package / "__init__.py").exists()
    assert (ROOT / package / "py.typed").exists()
    wheel = pyproject()["tool"]["hatch"]["build"]["targets"]["wheel"]  # type: ignore[index]
    assert package in wheel["packages"]


def test_ci_runs_only_make_test() -> None:
    script = ROOT / ".ci" / "run"
    commands = [line for line in script.read_text().splitlines() if not line.startswith("#")]
    assert commands == ['cd "$(dirname "$0")/.." && exec make test']
    assert script.stat().st_mode & stat.S_IXUSR


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = [*ROOT.glob(".github/workflows/*.yaml"), ROOT / ".ci" / "run"]
"""Files in which a command stands at the beginning of a line, or after `run:`."""


def targets_in(text: str) -> set[str]:
    """Return all targets of the calls of make in a document or workflow."""
    calls = re.findall(r"`make ((?:[a-z0-9-]+ ?)+)", text)
    code = "\n".join(re.findall(r"^ *```(?:sh|bash|console)\n(.*?)^ *```$", text, re.M | re.S))
    calls += re.findall(r"(?:^|&& |\$ )make ((?:[a-z0-9-]+ ?)+)", code, re.M)
    return {word for call in calls for word in call.split()}


def test_make_targets_named_in_documents_exist() -> None:
    named = {page: targets_in(page.read_text()) for page in PAGES}
    assert {page: found - make_targets() for page, found in named.items() if found} == {
        page: set() for page, found in named.items() if found
    }
    assert {"demo", "cluster", "images", "check"} <= named[ROOT / "README.md"]
    assert {"install", "release-check"} <= named[ROOT / "CONTRIBUTING.md"]


def test_make_targets_called_by_workflows_exist() -> None:
    pattern = re.compile(r"(?:^\s*|run: |&& |exec )make ((?:[a-z0-9-]+ ?)+)", re.M)
    called = {path: set(" ".join(pattern.findall(path.read_text())).split()) for path in COMMANDS}
    assert set().union(*called.values()) >= {"check", "test", "dist", "docs", "release-check"}
    for path, words in called.items():
        assert words <= make_targets(), path


def test_readme_has_at_most_800_words() -> None:
    shown = re.sub(r"<!--.*?-->", "", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(shown.split()) < 800


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    broken = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_have_no_empty_code_span(page: Path) -> None:
    assert re.findall(r"[ (]``[\s,.;:)].*", page.read_text()) == []


def test_index_of_the_documentation_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "tutorials").glob("*.md")]
    names = {str(page.relative_to(ROOT / "docs")) for page in pages} - {"README.md"}
    assert {name for name in names if f"]({name})" not in index} == set()


def test_every_make_target_is_phony_and_has_a_recipe() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = {
        name for line in re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE) for name in line.split()
    }
    assert make_targets() == phony
    for target in phony:
        recipe = re.search(rf"^{target}:([^#\n]*)(?:##.*)?\n(\t.*)?", text, re.MULTILINE)
        assert recipe is not None, target
        assert recipe[1].strip() or recipe[2], f"{target} does nothing"


@pytest.mark.parametrize(
    "pins", sorted((ROOT / "scripts" / "etcd").glob("*")), ids=lambda p: p.name
)
def test_etcd_build_is_pinned_to_its_version(pins: Path) -> None:
    modules = (pins / "go.mod").read_text()
    for module in ("server", "etcdctl"):
        assert f"go.etcd.io/etcd/{module}/v3 v{pins.name} // indirect\n" in modules
        assert f"go.etcd.io/etcd/{module}/v3 v{pins.name} h1:" in (pins / "go.sum").read_text()


@pytest.mark.parametrize("module", CORES, ids=lambda path: str(path.relative_to(ROOT)))
def test_core_module_makes_no_impure_call(module: Path) -> None:
    """The part of the rule that import-linter cannot check: it sees imports alone."""
    found = []
    for node in ast.walk(ast.parse(module.read_text(), str(module))):
        match node:
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
                if name in IMPURE_CALLS:
                    found.append(f"{module.name}:{node.lineno}: {name}()")
            case ast.AsyncFunctionDef() | ast.Await() | ast.Global():
                found.append(f"{module.name}:{node.lineno}: {type(node).__name__}")
            case ast.Name(id="environ" | "__import__"):
                found.append(f"{module.name}:{node.lineno}: {node.id}")
    assert found == []


def test_core_modules_are_found() -> None:
    assert {path.relative_to(ROOT).parts[1] for path in CORES} == {
        "elasticjob_agent",
        "elasticjob_launcher",
        "elasticjob_operator",
        "elasticjob_rendezvous",
    }


def test_architecture_page_maps_every_package_and_protocol_module() -> None:
    """Packages as paths in the map; those of the rendezvous and its modules in tables of theirs."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    first_cells = re.findall(r"^\| ((?:`[^`]+`[,; ]*)+) \|.+\|$", text, re.M)
    mapped = {name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)}
    named = {name for name in mapped if "/" in name and not (ROOT / name).exists()}
    rendezvous = ROOT / "rendezvous" / "elasticjob_rendezvous"
    assert {name for name in named if not (rendezvous / name).exists()} == set()
    found = set()
    for package in PACKAGES:
        for folder in [ROOT / package, *(ROOT / package).rglob("*")]:
            if folder.is_dir() and any(folder.glob("*.py")):
                found.add(str(folder.relative_to(ROOT)))
    prefix = "rendezvous/elasticjob_rendezvous/"
    inner = ("dynamic/core", "etcd_v2/core", *(f"protocol/{name}" for name in PROTOCOL_PARTS))
    nested = {f"{prefix}{name}" for name in inner}  # named in their parents' lines
    assert {name for name in found - nested if name.removeprefix(prefix) not in mapped} == set()
    for name in nested:
        assert f"`{name.removeprefix(prefix)}`" in text
    modules = {path.stem for path in (rendezvous / "protocol").rglob("*.py")} - {"__init__"}
    section = text.partition("## Modules of the protocol")[2].partition("\n## ")[0]
    assert modules - set(re.findall(r"`([^`]+)`", section)) == set()


def test_architecture_page_names_existing_modules_by_subject() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.partition("## Modules by subject")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([^`]+\.py)`", section))
    modules = [f"/{path}" for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert len(named) >= 25
    assert {
        name for name in named if sum(path.endswith(f"/{name}") for path in modules) != 1
    } == set()


def test_reference_page_names_existing_modules_and_functions() -> None:
    text = (ROOT / "docs" / "reference.md").read_text()
    named = set(re.findall(r"`((?:etcd_v2|dynamic|c10d)(?:\.\w+)+)`", text))
    assert len(named) > 10
    assert {name for name in named if not _exists(name)} == set()


def _exists(name: str) -> bool:
    """Return True if a module of the rendezvous, or a name in one of its modules, exists."""
    *folders, last = name.split(".")
    parent = (ROOT / "rendezvous" / "elasticjob_rendezvous").joinpath(*folders)
    module = parent.with_suffix(".py")
    text = (module if module.exists() else parent / "__init__.py").read_text()
    return (parent / f"{last}.py").exists() or re.search(rf"\b{last}\b", text) is not None
