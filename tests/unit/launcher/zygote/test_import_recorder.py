"""Records of the modules that a worker imports."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from elasticjob_launcher.zygote.import_recorder import ImportPage, ImportRecorder


def test_imported_modules_are_recorded_and_those_only_searched_for_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers and torch._dynamo search for packages that they never import."""
    for name in ("found_only", "imported_one", "imported_later"):
        (tmp_path / f"{name}.py").touch()
    package = tmp_path / "a_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "part.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    page = ImportPage()
    recorder = ImportRecorder(page, sys.path)
    recorder.expect({})
    monkeypatch.setattr(sys, "meta_path", [recorder, *sys.meta_path])
    assert importlib.util.find_spec("found_only") is not None
    assert importlib.util.find_spec("a_package.part") is not None  # imports the package
    __import__("imported_one")
    importlib.import_module("imported_later")
    page_names = page.names()
    page.close()
    for name in ("imported_one", "imported_later", "a_package"):
        del sys.modules[name]
    assert page_names == ["a_package", "imported_one", "imported_later"]
