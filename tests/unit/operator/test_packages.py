"""Operator's folder, which must not shadow Python's own `operator` module."""

from __future__ import annotations

from tests.paths import ROOT


def test_operator_folder_is_no_package() -> None:
    assert (ROOT / "operator" / "elasticjob_operator" / "__init__.py").exists()
    assert not (ROOT / "operator" / "__init__.py").exists()


def test_standard_library_operator_is_imported() -> None:
    import operator

    assert operator.add(1, 2) == 3
    assert not str(getattr(operator, "__file__", "")).startswith(str(ROOT))
