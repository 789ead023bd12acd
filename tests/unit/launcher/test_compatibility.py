"""Launcher's compatibility: one file, any Python from 3.8 on, standard library alone.

The modules for training scripts follow the same rules.
"""

from __future__ import annotations

import ast
import marshal
import os
import re
import subprocess
import sys
import zipfile
from importlib.machinery import SourceFileLoader
from importlib.util import source_hash
from pathlib import Path
from types import CodeType

import pytest

import elasticjob
import elasticjob_launcher
from elasticjob_agent.zipapp_build import MAIN, build_zipapp
from tests.unit.full_disk import room

LAUNCHER = Path(elasticjob_launcher.__file__).parent
SOURCES = sorted(Path(elasticjob_launcher.__file__).parent.rglob("*.py"))
LIBRARY = sorted(Path(elasticjob.__file__).parent.rglob("*.py"))
FRAMEWORKS = [
    Path(elasticjob.__file__).parent / "train" / name
    for name in (
        "data.py",
        "initialization.py",
        "integrations.py",
        "snapshots/ranks/gang.py",
        "snapshots/ranks/torch_group.py",
        "snapshots/state/codec.py",
        "snapshots/state/held_state.py",
        "snapshots/state/overlap.py",
        "snapshots/state/sharding.py",
    )
]  # fmt: skip
"""Modules that import a framework in the functions that need it."""
# Attributes and names newer than 3.8, which must not be used.
NEWER_NAMES = {
    # os, signal, fcntl, subprocess
    "pidfd_open", "waitstatus_to_exitcode", "pidfd_send_signal", "F_SETPIPE_SZ", "F_GETPIPE_SZ",
    "EventFlags", "eventfd",
    # text, paths, collections
    "removeprefix", "removesuffix", "pairwise", "batched", "bit_count", "randbytes", "lcm",
    "is_relative_to", "readlink", "with_stem", "hardlink_to", "walk", "chdir", "file_digest",
    "StrEnum", "UTC", "cache", "zoneinfo", "graphlib", "tomllib",
    # control flow and asyncio
    "ExceptionGroup", "BaseExceptionGroup", "add_note", "aiter", "anext", "to_thread", "TaskGroup",
    "timeout_at", "Runner",
    # typing
    "TypeAlias", "ParamSpec", "TypeGuard", "Self", "LiteralString", "Never", "assert_never",
    "override", "Annotated", "NotRequired", "Required", "Unpack",
}  # fmt: skip
NEWER_KEYWORDS = {
    "slots", "kw_only", "match_args", "strict", "umask", "delete_on_close",
    "process_group", "pipesize",
}  # fmt: skip
NEWER_NAMES |= {f"{keyword}=" for keyword in NEWER_KEYWORDS}
GENERICS = ("list", "dict", "set", "tuple", "type", "frozenset", "deque", "Callable", "Popen")
NEWER_GENERICS = {f"{generic}[]" for generic in GENERICS}


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), feature_version=(3, 8))


def type_checking_only(tree: ast.Module) -> set[ast.AST]:
    """Return nodes below `if TYPE_CHECKING:`, which never run."""
    return {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }


def in_annotations(tree: ast.Module) -> set[ast.AST]:
    """Return nodes in annotations, left unevaluated by `from __future__ import annotations`."""
    roots: list[ast.AST | None] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.AnnAssign, ast.arg)):
            roots.append(node.annotation)
        elif isinstance(node, ast.FunctionDef):
            roots.append(node.returns)
    return {inner for root in roots if root is not None for inner in ast.walk(root)}


def named(node: ast.AST) -> list[str]:
    """Return the names that a node uses; a subscripted one carries brackets."""
    match node:
        case ast.Attribute(value=ast.Name(id="os"), attr="readlink" | "walk" | "chdir"):
            return []  # newer only elsewhere
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return [name]
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            return [alias.name for alias in aliases]
        case ast.keyword(arg=str(name)):
            return [f"{name}="]
        case ast.Subscript(value=ast.Name(id=name)):
            return [f"{name}[]"]
        case _:
            return []


@pytest.mark.parametrize("path", SOURCES + LIBRARY, ids=lambda path: path.name)
def test_no_name_newer_than_python_3_8_is_evaluated(path: Path) -> None:
    tree = parsed(path)
    skipped = type_checking_only(tree) | in_annotations(tree)
    found = []
    for node in ast.walk(tree):
        if node in skipped:
            continue
        found += [name for name in named(node) if name in NEWER_NAMES | NEWER_GENERICS]
    assert found == []
    assert isinstance(tree.body[0], ast.Expr)
    if len(tree.body) > 1:
        assert ast.unparse(tree.body[1]) == "from __future__ import annotations"


@pytest.mark.parametrize("path", SOURCES + LIBRARY, ids=lambda path: path.name)
def test_only_standard_library_is_imported(path: Path) -> None:
    tree = parsed(path)
    for node in tree.body if path in FRAMEWORKS else ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules = [node.module or ""]
        else:
            continue
        assert {module.split(".")[0] for module in modules} <= {
            "elasticjob" if path in LIBRARY else "elasticjob_launcher",
            *sys.stdlib_module_names,
        }


def test_zipapp_build_is_reproducible(tmp_path: Path) -> None:
    first = build_zipapp(tmp_path / "a" / "launcher.pyz")
    second = build_zipapp(tmp_path / "b.pyz")
    assert first.read_bytes() == second.read_bytes()
    assert first.stat().st_size < 1024 * 1024
    assert {path.name for path in tmp_path.rglob("*")} == {"a", "launcher.pyz", "b.pyz"}
    with zipfile.ZipFile(first) as archive:
        modules = {f"elasticjob_launcher/{path.relative_to(LAUNCHER)}" for path in SOURCES}
        assert set(archive.namelist()) == modules | {f"{name}c" for name in modules} | {
            "__main__.py"
        }


BUILD = """
import sys
from pathlib import Path
sys.path[:0] = {folders!r}
from elasticjob_agent.zipapp_build import build_zipapp
build_zipapp(Path({target!r}))
"""


@pytest.mark.parametrize("options", [("-X", "pycache_prefix={cache}"), ("-OO",)], ids=str)
def test_zipapp_is_independent_of_the_process_that_builds_it(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Another seed of hashes, folder of the installation, and optimization; no cached bytecode."""
    installed, built = tmp_path / "installed", tmp_path / "built.pyz"
    installed.mkdir()
    (installed / LAUNCHER.name).symlink_to(LAUNCHER)
    source = BUILD.format(folders=[str(installed), *sys.path], target=str(built))
    given = [option.format(cache=tmp_path / "cache") for option in options]
    subprocess.run(
        [sys.executable, *given, "-c", source],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        timeout=240,
        check=True,
    )
    assert built.read_bytes() == build_zipapp(tmp_path / "here.pyz").read_bytes()


def test_bytecode_in_zipapp_names_its_source(tmp_path: Path) -> None:
    def file_names(code: CodeType) -> set[str]:
        inner = (each for each in code.co_consts if isinstance(each, CodeType))
        return {code.co_filename}.union(*map(file_names, inner))

    with zipfile.ZipFile(build_zipapp(tmp_path / "launcher.pyz")) as archive:
        names = [name for name in archive.namelist() if name.endswith(".pyc")]
        assert len(names) == len(SOURCES)
        for name in names:
            source, compiled = archive.read(name[:-1]), archive.read(name)
            assert compiled[8:16] == source_hash(source)
            assert file_names(marshal.loads(compiled[16:])) == {f"launcher.pyz/{name[:-1]}"}


SOURCE_READ = re.compile(r"^# trying \S+/elasticjob_launcher/\S*(?<!/__init__)\.py$", re.M)
"""Search for a module's source in the zip file, which comes after that for its bytecode."""


def start(launcher: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a launcher without a command; its errors name each file that Python reads."""
    command = [sys.executable, "-vv", *options, str(launcher)]
    return subprocess.run(command, capture_output=True, text=True, env={}, check=False)


OPENING = {"open": 3, "read_text": 0, "write_text": 1}
"""Functions that open a file as text, each with the position of its encoding."""


@pytest.mark.parametrize("path", [*SOURCES, *LIBRARY], ids=lambda path: path.name)
def test_text_files_are_opened_with_an_encoding(path: Path) -> None:
    """Else Python warns in the program's log, or raises an error, if its options say so."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    without = []
    for call in calls:
        name = getattr(call.func, "id", "") or getattr(call.func, "attr", "")
        if name not in OPENING or ast.unparse(call.func) == "os.open":
            continue
        words = [ast.unparse(each) for each in call.args]
        named = {each.arg for each in call.keywords}
        is_binary = name == "open" and any(re.fullmatch(r"'[rwxa+]*b\+?'", word) for word in words)
        if not (is_binary or "encoding" in named or len(words) > OPENING[name]):
            without.append(ast.unparse(call))
    assert without == []


@pytest.mark.parametrize("options", [(), ("-O",), ("--check-hash-based-pycs", "always")], ids=str)
def test_zipapp_is_run_from_bytecode_of_its_python(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    ran = start(build_zipapp(tmp_path / "launcher.pyz"), *options)
    assert (ran.returncode, "the command must follow `--`" in ran.stderr) == (2, True)
    assert SOURCE_READ.findall(ran.stderr) == []


def test_zipapp_is_run_from_source_by_another_python(tmp_path: Path) -> None:
    """Another version's bytecode has another magic number."""
    launcher, foreign = build_zipapp(tmp_path / "launcher.pyz"), tmp_path / "foreign.pyz"
    with zipfile.ZipFile(launcher) as source, zipfile.ZipFile(foreign, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            target.writestr(name, b"old!" + content[4:] if name.endswith(".pyc") else content)
    ran = start(foreign)
    assert (ran.returncode, "the command must follow `--`" in ran.stderr) == (2, True)
    assert SOURCE_READ.findall(ran.stderr) != []


def test_full_disk_leaves_no_partial_zipapp(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="File too large"), room(1000):
        build_zipapp(tmp_path / "launcher.pyz")
    assert list(tmp_path.iterdir()) == []


def test_simulated_full_disk_leaves_no_partial_bytecode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such bytecode would break each later start of a launcher from the checkout."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    module = tmp_path / "module.py"
    module.write_text("value = 1\n")
    with room(10):
        SourceFileLoader("module", str(module)).get_code("module")
    assert list(tmp_path.iterdir()) == [module]


def test_unsupported_python_version_is_reported() -> None:
    """Older Pythons do not even parse the launcher's syntax; a newer one plays the older here."""
    ast.parse(MAIN, feature_version=(3, 4))
    older = f"import sys; sys.version_info = (3, 7, 16)\n{MAIN}"
    ran = subprocess.run([sys.executable, "-c", older], capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert ran.stderr == (
        "elasticjob launcher: the container's Python must be 3.8 or later, but "
        f"{sys.executable} is 3.7: name another in its command\n"
    )
