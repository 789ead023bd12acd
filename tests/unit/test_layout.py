"""Layout of the product: sizes of modules and folders, and the share of import lines.

docs/decisions/0081-sizes-of-modules.md has the reasons.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from tests.paths import ROOT

PRODUCT = ("cli", "operator", "rendezvous", "sidecar", "sdk")
USERS = (*PRODUCT, "bench", "scripts")
"""Folders whose modules count as users of a module. Tests do not."""
SMALL_LINES = 80
LONGEST_LINES = 500
MOST_MODULES = 25
"""Maximum number of modules in a folder."""
MOST_IMPORT_LINES = 0.081
"""Maximum share of the product's lines that are imports."""
_BY_NAME = "a group of commands, which the command line loads by name"
_ALONE = "a process loads it without the modules beside it"
SMALL = {
    "cli/elasticjob_cli/client/functions.py": "function jobs, apart from the places of all jobs",
    "cli/elasticjob_cli/commands/completion.py": _BY_NAME,
    "cli/elasticjob_cli/commands/doctor.py": _BY_NAME,
    "cli/elasticjob_cli/commands/version.py": _BY_NAME,
    "cli/elasticjob_cli/completion/names.py": _ALONE,
    "cli/elasticjob_cli/dashboard/markup.py": "escaped HTML, without the pages that use it",
    "operator/elasticjob_operator/domain/plan/surplus.py": "the choice of pods, without the plan",
    "operator/elasticjob_operator/replica/main.py": _ALONE,
    "rendezvous/elasticjob_rendezvous/etcd_v2/probe.py": "one of several probes",
    "rendezvous/elasticjob_rendezvous/protocol/coordinator/bootstrap.py": "one state of a round",
    "rendezvous/elasticjob_rendezvous/protocol/lease.py": "the lease as a value of its own",
    "rendezvous/elasticjob_rendezvous/torchrun/launch.py": "the part that needs torch",
    "rendezvous/elasticjob_rendezvous/torchrun/workers.py": "the part that kills processes",
}
"""Small modules with one user at most, and the reason of each to stay on its own."""
LONG = {
    "sdk/elasticjob/train/snapshots/api.py",
}
"""Modules that are to be split."""


@cache
def sources(*folders: str) -> dict[str, str]:
    """Return the texts of all modules by path."""
    return {
        str(path.relative_to(ROOT)): path.read_text()
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


parsed = cache(ast.parse)
"""Syntax tree of a text; each module is parsed once for all tests."""


def module_name(path: str) -> str:
    """Return the dotted name of a module; the first folder of a path belongs to no name."""
    return ".".join(Path(path).with_suffix("").parts[1:]).removesuffix(".__init__")


def imported(text: str) -> set[str]:
    """Return the dotted names that a module imports, of modules and of their contents."""
    found = set()
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def small_modules(product: Mapping[str, str], others: Mapping[str, str]) -> set[str]:
    """Return the small modules of the product that one module at most imports."""
    imports = {path: imported(text) for path, text in {**product, **others}.items()}
    users = Counter(name for names in imports.values() for name in names)
    return {
        path
        for path, text in product.items()
        if text.count("\n") < SMALL_LINES
        and Path(path).stem not in ("__init__", "__main__")
        and users[module_name(path)] < 2
    }


def long_modules(product: Mapping[str, str]) -> set[str]:
    """Return the modules that are longer than allowed."""
    return {path for path, text in product.items() if text.count("\n") > LONGEST_LINES}


def import_share(product: Mapping[str, str]) -> float:
    """Return the share of lines that are imports."""
    lines = sum(text.count("\n") for text in product.values())
    statements = (
        node
        for text in product.values()
        for node in ast.walk(parsed(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
    )
    return sum((node.end_lineno or 0) - node.lineno + 1 for node in statements) / lines


def test_small_module_with_one_user_has_a_reason() -> None:
    product = sources(*PRODUCT)
    others = {path: text for path, text in sources(*USERS).items() if path not in product}
    assert small_modules(product, others) == set(SMALL), "move it into its user, or name a reason"


def test_long_modules_are_split() -> None:
    assert long_modules(sources(*PRODUCT)) <= LONG


def test_folder_has_at_most_25_modules() -> None:
    found = Counter(
        str(Path(path).parent) for path in sources(*PRODUCT) if Path(path).stem != "__init__"
    )
    assert {folder for folder, count in found.items() if count > MOST_MODULES} == set()


def test_share_of_import_lines_is_limited() -> None:
    assert import_share(sources(*PRODUCT)) <= MOST_IMPORT_LINES


def test_planted_small_module_is_found_until_it_has_two_users() -> None:
    planted = {
        "cli/p/small.py": "X = 1\n",
        "cli/p/large.py": "X = 1\n" * SMALL_LINES,
        "cli/p/__init__.py": "",
        "cli/p/user.py": "from p.small import X\nfrom p import large\n" + "x = 1\n" * SMALL_LINES,
    }
    assert small_modules(planted, {}) == {"cli/p/small.py"}
    assert small_modules(planted, {"scripts/tool.py": "import p.small\n"}) == set()


def test_planted_long_module_and_imports_of_several_lines_are_found() -> None:
    text = "from a import (\n    b,\n    c,\n)\n" + "x = 1\n" * (LONGEST_LINES - 4)
    assert long_modules({"cli/p/long.py": text}) == set()
    assert long_modules({"cli/p/long.py": text + "x = 1\n"}) == {"cli/p/long.py"}
    assert import_share({"cli/p/long.py": text}) == 4 / LONGEST_LINES
