"""Language rules of CONTRIBUTING.md that a program can check."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.paths import ROOT

FOLDERS = (
    *("operator", "sdk", "rendezvous", "sidecar", "cli"),
    *("scripts", "bench", "examples", "tests"),
)
CLAUSE = re.compile(r"(what|how|whether|why|who|whom|whose|for|where|when|that|so)\b", re.I)
"""First words of a docstring that announce a clause instead of a noun phrase or a verb."""
PRODUCT = ("operator", "sdk", "rendezvous", "sidecar", "cli", "bench", "scripts")
SPEECH = re.compile(
    r"(?<![\w.-])(tells?|told|telling|hears?|heard|says?|said|vouch\w*|remember\w*|forgets?|forgot\w*"
    r"|learns?|learned|learnt)\b(?! *[=(])",
    re.I,
)
"""Verbs of people: a program reports, records, receives or has."""
DATED = re.compile(r"\b(anew|hence|whence|thereby|likewise)\b", re.I)
"""Words with a plainer form: again, thus, by which, also."""
CLAUSE_AS_NOUN = re.compile(r"\b(reasons? why|(who|what|which|whom)(so)?ever)\b", re.I)
NEGATED_NOUN = re.compile(
    r"(?P<there>\b[Tt]here (?:\w+ )?)?\b(?:is|are|was|were|be) (?:no|none)\b"
    r"(?! (?:of|other|longer|more|less|later|earlier|older|newer|further|better)\b)"
)
"""Negation before a noun, as in "a file that is no script": plain English is "is not a script"."""
DETERMINER = re.compile(r"(an?|the|this|that|these|those|its?|they|their|we|our|there)\b", re.I)
"""First words before a noun, or in place of one."""
THIRD_PERSON = re.compile(r"(?!Pass|Process|Discard)[A-Z][a-z]*s\b")
"""First word of a function's docstring that is no imperative."""
QUOTED = re.compile(r"``?[^`]*``?|\"[^\"]*\"")
FILES_SAY = ("if its checkpoint says that all is done, remove that to begin again",)
"""Messages in which a file, and no program, says something."""
LONGEST_SUBJECT = 72


Scope = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def scopes(node: ast.AST) -> Iterator[Scope]:
    """Yield modules, classes and functions. They are in statements, not in expressions."""
    if isinstance(node, Scope):
        yield node
    for blocks in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, blocks, ()):
            yield from scopes(child)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each docstring: of modules, classes, functions and attributes."""
    for node in scopes(tree):
        for before, statement in zip([None, *node.body], node.body, strict=False):
            documents = before is None or isinstance(before, ast.Assign | ast.AnnAssign)
            if documents and (text := _text(statement)) is not None:
                yield statement.lineno, text


def _text(statement: ast.stmt) -> str | None:
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
        return None
    value = statement.value.value
    return value if isinstance(value, str) else None


def clauses(path: Path, tree: ast.Module) -> list[str]:
    """Return the docstrings of a file that open with a clause, each with its line."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {text.strip().splitlines()[0]}"
        for line, text in docstrings(tree)
        if CLAUSE.match(text.strip())
    ]


@dataclass(frozen=True, slots=True)
class Findings:
    """Violations of the rules in a file, of all rules for a file of the product."""

    clauses: list[str]
    openings: list[tuple[int, str]]
    words: list[tuple[int, str]]


@cache
def findings(path: Path) -> Findings:
    """Return the violations in a file, which is parsed once for all tests."""
    text = path.read_text()
    tree = ast.parse(text)
    if path.relative_to(ROOT).parts[0] not in PRODUCT:
        return Findings(clauses(path, tree), [], [])
    return Findings(clauses(path, tree), openings(tree), nonstandard(text, tree))


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_open_with_noun_phrase_or_verb(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    assert [found for path in paths for found in findings(path).clauses] == []


def openings(tree: ast.Module) -> list[tuple[int, str]]:
    """Return the docstrings that open with neither a noun nor, in functions, an imperative."""
    found = []
    for node in scopes(tree):
        documented = ast.get_docstring(node)
        if documented is None:
            continue
        calls = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_property(node)
        verb = THIRD_PERSON if calls else re.compile("Returns?")
        is_named = not isinstance(node, ast.Module | ast.ClassDef)
        if DETERMINER.match(documented) or (is_named and verb.match(documented)):
            found.append((getattr(node, "lineno", 1), documented.splitlines()[0]))
    return found


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(one).endswith("property") for one in node.decorator_list)


@pytest.mark.parametrize("folder", PRODUCT)
def test_docstrings_open_with_noun_and_functions_with_imperative(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    found = [(path, *one) for path in paths for one in findings(path).openings]
    assert [f"{path.relative_to(ROOT)}:{line}: {text}" for path, line, text in found] == []


@pytest.mark.parametrize(
    "text",
    [
        '"""The queue of jobs."""',
        'class Queue:\n    """A queue of jobs."""',
        'class NoAnswer(Exception):\n    """It did not answer."""',
        'def size():\n    """Returns the size."""',
        'def size():\n    """The size."""',
        'class Queue:\n    @property\n    def size(self):\n        """Return the size."""',
    ],
)
def test_planted_openings_are_found(text: str) -> None:
    assert len(openings(ast.parse(text))) == 1


def test_nouns_in_classes_and_imperatives_that_end_in_s_are_no_finding() -> None:
    text = (
        '"""Rows of a table."""\nclass Rows:\n    """Rows."""\n    @cached_property\n'
        '    def names(self):\n        """Names."""\n    def go(self):\n        """Pass on."""\n'
    )
    assert not openings(ast.parse(text))


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each comment, without those that steer tools."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not re.match("# (noqa|type:|fmt:)", token.string):
            yield token.start[0], token.string.lstrip("# ")


def messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each literal of three words or more that is no docstring."""
    documented = {line for line, _ in docstrings(tree)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        if (
            node.value.count(" ") >= 2
            and node.lineno not in documented
            and node.value not in FILES_SAY
        ):
            yield node.lineno, node.value


def nonstandard(text: str, tree: ast.Module) -> list[tuple[int, str]]:
    """Return prose with a verb of people, a dated word, a negated noun or a clause as a noun."""
    prose = [*docstrings(tree), *comments(text), *messages(tree)]
    words = ((line, found, QUOTED.sub("", found)) for line, found in prose)
    return [
        (line, found.strip().splitlines()[0])
        for line, found, plain in words
        if any(rule.search(plain) for rule in (SPEECH, CLAUSE_AS_NOUN, DATED))
        or _negates_noun(plain)
    ]


def _negates_noun(text: str) -> bool:
    words = " ".join(text.split())
    return any(not found["there"] for found in NEGATED_NOUN.finditer(words))


@pytest.mark.parametrize("folder", PRODUCT)
def test_docstrings_comments_and_messages_use_verbs_for_programs(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    found = [(path, *one) for path in paths for one in findings(path).words]
    assert [f"{path.relative_to(ROOT)}:{line}: {text}" for path, line, text in found] == []


@pytest.mark.parametrize(
    "text",
    [
        '"""Reports of agents.\n\nThe agent tells the others.\n"""',
        '"""Lease that etcd has forgotten."""',
        '"""Return the reason why a node waits."""',
        'SIZE = 1\n"""Maximum size, whatever the number."""',
        "x = 1  # the launcher said hello",
        "x = 1  # the count begins anew",
        'log.warning("the agent told %s of the end", name)',
        'raise ValueError(f"{name} is set anew in every round")',
        '"""Return the path of a file that is no\nscript."""',
        "x = 0  # 0 is none",
        'raise ValueError(f"{name} must be no pipe")',
    ],
)
def test_planted_verbs_of_people_are_found(text: str) -> None:
    assert nonstandard(text, ast.parse(text))


def test_names_quotations_and_directives_are_no_prose() -> None:
    text = (
        '"""Message `heard`, error "nobody told us" and scikit-learn; `forget` drops it."""\n'
        "import os  # noqa: learned\n"
    )
    assert not nonstandard(text, ast.parse(text))


def test_absence_and_comparisons_are_no_negated_nouns() -> None:
    text = (
        '"""Value; None if there is none. `x` is None if it is no longer used."""\n'
        "x = 1  # there would be no snapshot, and it is none of ours\n"
    )
    assert not nonstandard(text, ast.parse(text))


def test_scopes_in_blocks_are_found() -> None:
    one = '"""How it works."""'
    tree = ast.parse(
        f"if x:\n  def f():\n    {one}\nelse:\n  class C:\n    {one}\n"
        f"for x in y:\n  def f():\n    {one}\nelse:\n  def f():\n    {one}\n"
        f"try:\n  def f():\n    {one}\nexcept E:\n  def f():\n    {one}\n"
        f"else:\n  def f():\n    {one}\nfinally:\n  def f():\n    {one}\n"
        f"with x:\n  async def f():\n    {one}\n    def g():\n      {one}\n"
        f"match x:\n  case 1:\n    def f():\n      {one}\n"
    )
    assert [text for _, text in docstrings(tree)] == ["How it works."] * 11


def test_docstrings_of_all_kinds_are_read() -> None:
    tree = ast.parse(
        '"""How it works."""\nLIMIT = 1\n"""What is allowed."""\n'
        'class Queue:\n    """Whether it is."""\n    size: int\n    """Who waits."""\n'
        'async def run():\n    """For later."""\n    x = 1\n    "plain text"\n'
    )
    assert [text for _, text in docstrings(tree)] == [
        "How it works.",
        "What is allowed.",
        "Whether it is.",
        "Who waits.",
        "For later.",
        "plain text",
    ]


def test_contributing_documents_language_glossary_and_commit_subjects() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    sections = {part.partition("\n")[0]: part for part in text.split("\n## ")[1:]}
    assert f"{LONGEST_SUBJECT} characters" in sections["Language"]
    rows = re.findall(r"^\| \**`?([a-z][^|`*]*)`?\** +\|", sections["Glossary"], re.M)
    terms = {row.strip() for row in rows}
    assert {"worker group", "zygote", "failure detector", "self-fencing", "work queue"} <= terms
    assert len(terms) >= 30
