"""Manifest, verdicts on packages, and the page that shows them."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest

from scripts.environment import LOCKS
from tests.corpus.__main__ import OTHERS, PAGE, document, measured, version
from tests.corpus.compare import Difference
from tests.corpus.manifest import (
    LISTS,
    Package,
    Program,
    Subject,
    packages,
    pins,
    programs,
)
from tests.corpus.results import page, result, trouble_of
from tests.paths import ROOT

MOST_SMALL = 40
NAMED = {
    "wandb", "mlflow", "tensorboard", "clearml", "comet_ml", "transformers", "datasets",
    "tokenizers", "accelerate", "lightning", "deepspeed", "torchvision", "torchaudio", "timm",
    "pandas", "pyarrow", "polars", "scikit-learn", "scipy", "xgboost", "lightgbm", "numba",
    "matplotlib", "pillow", "opencv-python-headless", "hydra-core", "omegaconf", "ray", "dask",
    "boto3", "fsspec", "s3fs", "zarr", "h5py", "einops", "sentencepiece", "peft", "trl",
    "bitsandbytes", "psutil", "grpcio", "protobuf",
}  # fmt: skip


def run(**changed: Any) -> dict[str, Any]:
    empty = {"trouble": "", "exits": [0, 0], "seconds": 2.04, "warm": 0, "cold": [], "refused": []}
    empty["folder"] = "/tmp/corpus-a"
    return {**empty, **changed}


def test_corpus_has_sixty_packages_and_ten_in_the_suite() -> None:
    names = [one.name for one in packages()]
    assert len(names) == len(set(names))
    assert len(names) >= 60
    assert not NAMED - set(names)
    suite = {one.name for one in packages() if one.suite}
    assert len(suite) >= 10
    assert {"wandb", "torch"} <= suite


@pytest.mark.parametrize("package", packages(), ids=lambda one: one.name)
def test_every_package_is_pinned_and_its_script_compiles(package: Package) -> None:
    assert version(package)
    if package.suite:
        assert package.pip in pins(LOCKS / "dev.txt", LISTS / "small.txt")
    ast.parse(package.script())
    assert package.imports.strip() in package.script()


@pytest.mark.parametrize("program", programs(), ids=lambda one: one.name)
def test_every_program_is_pinned_and_calls_the_probe(program: Program) -> None:
    assert all(f"{pip} " in version(program) for pip in program.pips)
    calls = [
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(program.script()))
        if isinstance(node, ast.Call)
    ]
    assert {"corpus_probe.imported", "corpus_probe.run"} <= set(calls)


def test_lists_have_no_cuda_and_one_version_per_package() -> None:
    for file in LISTS.glob("*.txt"):
        lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
        assert lines == sorted(set(lines))
        assert all(re.fullmatch(r"[a-z0-9-]+==\S+", line) for line in lines), lines
        cuda = r"(cuda|triton|torch=|nvidia-(?!ml-py|resiliency-ext))"
        assert not any(re.match(cuda, line) for line in lines)
    assert len(pins(LISTS / "small.txt")) <= MOST_SMALL
    small, large = pins(LISTS / "small.txt"), pins(LISTS / "large.txt")
    assert {name: large.get(name, "") for name in small} == small


def test_documented_differences_do_not_fail_a_package() -> None:
    found = [
        Difference("unseeded", "", "hash of a text", "differs", "1 value", "hash seed"),
        Difference("threads", "used", "pool", "1", "0"),
    ]
    warm = run(warm=3, cold=["cold: it hung"], refused=["a: it starts threads"])
    one = result("1.2", [run()], warm, found)
    assert one.differences == ["threads (used): pool: cold 1, warm 0"]
    assert (one.documented, one.cold_seconds) == (["hash seed"], 2.0)
    package = Package("a", "a", "import a", "", False)
    row = (
        "| a | 1.2 | 3 of 4 (cold: it hung) | a: it starts threads | threads (used): pool: cold 1,"
    )
    assert row in page([package], [], {"a": one})
    assert "1 packages were run; 0 started warm and show no" in page([package], [], {"a": one})


def test_failed_cold_run_gives_no_comparison() -> None:
    assert trouble_of(run()) == ""
    assert trouble_of(run(exits=[0, 1])) == "agents exit with [0, 1]"
    failed = run(trouble="waited in vain\nlog")
    assert trouble_of(failed) == "waited in vain"
    one = result("1.2", [failed], run(), [])
    package = Package("a", "a", "import a", "", False)
    assert "| a | 1.2 | | | its cold run fails: waited in vain |" in page([package], [], {"a": one})


def test_packages_not_run_are_listed() -> None:
    assert "Not run yet: a.\n" in page([Package("a", "a", "import a", "", False)], [], {})


def test_programs_have_a_table_of_their_own() -> None:
    program = Program("both", ("a", "b"))
    text = page([], [program], {"both": result("a 1, b 2", [run()], run(warm=4), [])})
    _, found, table = text.partition("## Programs that combine packages")
    assert found
    assert "1 programs were run; 1 started warm and show no undocumented difference." in table
    assert "| both | a 1, b 2 | 4 of 4 | nothing | none |" in table
    assert "## Programs" not in page([], [program], {})


def test_packages_outside_the_corpus_follow_its_results() -> None:
    text = page([Package("a", "a", "import a", "", False)], [], {}, "## Others\n")
    assert text.endswith("\nNot run yet: a.\n\n## Others\n")
    assert document({}).endswith(OTHERS.read_text())


def test_page_is_generated_from_results() -> None:
    """Command that updates the page: python -m tests.corpus --page."""
    assert PAGE.read_text() == document(measured())


def test_results_have_the_pinned_versions() -> None:
    subjects: list[Subject] = [*packages(), *programs()]
    known = {one.name: version(one) for one in subjects}
    assert {name: one.version for name, one in measured().items()} == {
        name: known[name] for name in measured()
    }


def test_lists_match_makefile_names() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "tests.corpus.environments small" in makefile
    assert re.search(r"^corpus: .*etcd", makefile, re.MULTILINE)
