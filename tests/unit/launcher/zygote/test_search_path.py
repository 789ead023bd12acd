"""Folders that a program puts in front of `sys.path`, read from its source."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from elasticjob_launcher.zygote.search_path import added_folders

HERE = Path("/code/app/train.py")


def first(source: str) -> tuple[list[str], int]:
    found = added_folders(ast.parse(f"import os, sys\n{source}\n"), str(HERE))
    return list(found.folders), found.unread


@pytest.mark.parametrize(
    ("source", "folders"),
    [
        ("sys.path.insert(0, '/vendor')", ["/vendor"]),
        ("sys.path.insert(1, os.path.join(os.path.dirname(__file__), 'lib'))", ["/code/app/lib"]),
        ("sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)) + '/..')", ["/code"]),
        ("ROOT = Path(__file__).parent\nsys.path.insert(0, str(ROOT / 'lib'))", ["/code/app/lib"]),
        ("sys.path.insert(0, str(pathlib.Path(__file__).parents[1].absolute()))", ["/code"]),
        ("sys.path.insert(0, f'{os.path.dirname(__file__)}/lib')", ["/code/app/lib"]),
        ("sys.path.insert(0, os.environ['HOME_OF_CODE'])", ["/home/code"]),
        ("sys.path[:0] = ['/a', '/b']", ["/a", "/b"]),
        ("sys.path = ['/a', '/b'] + sys.path", ["/a", "/b"]),
        ("sys.path = ['/a', *sys.path]", ["/a"]),
        ("sys.path[0] = '/a'", ["/a"]),
        ("for each in ['/a', '/b']:\n    sys.path.insert(0, each)", ["/b", "/a"]),
        ("if '/a' not in sys.path:\n    sys.path.insert(0, '/a')", ["/a"]),
        ("try:\n    import x\nexcept ImportError:\n    sys.path.insert(0, '/a')", ["/a"]),
        ("sys.path.append('/a')\nsys.path += ['/b']\nsys.path = sys.path + ['/c']", []),
        ("def later():\n    sys.path.insert(0, unknown())", []),
        ("other.insert(0, '/a')", []),
    ],
)
def test_prepended_search_folders(
    monkeypatch: pytest.MonkeyPatch, source: str, folders: list[str]
) -> None:
    monkeypatch.setitem(os.environ, "HOME_OF_CODE", "/home/code")
    assert first(source) == (folders, 0)


@pytest.mark.parametrize(
    ("source", "folders"),
    [
        ("sys.path.append('/a')", ["/a"]),
        ("sys.path.extend(['/a', '/b'])", ["/a", "/b"]),
        ("sys.path += ['/a']\nsys.path = sys.path + ['/b']", ["/a", "/b"]),
        ("sys.path = [*sys.path, '/a']", ["/a"]),
        ("sys.path.insert(0, '/a')", []),
    ],
)
def test_appended_search_folders(source: str, folders: list[str]) -> None:
    found = added_folders(ast.parse(f"import os, sys\n{source}\n"), str(HERE))
    assert (list(found.last), found.unread, found.unread_last) == (folders, 0, 0)


def test_appended_folder_computed_at_run_time_is_counted_as_unread() -> None:
    assert added_folders(ast.parse("sys.path.append(args.code)\n"), str(HERE)).unread_last == 1


@pytest.mark.parametrize(
    "source",
    [
        "sys.path.insert(0, args.code)",
        "sys.path.insert(0, subprocess.check_output(['pwd']))",
        "sys.path.insert(0, os.environ['NO_SUCH_VARIABLE_HERE'])",
        "for each in glob('*'): sys.path.insert(0, each)",
        "sys.path = made_elsewhere()",
        "sys.path.insert(0, 3)",
    ],
)
def test_folder_computed_at_run_time_is_counted_as_unread(source: str) -> None:
    assert first(source) == ([], 2)
