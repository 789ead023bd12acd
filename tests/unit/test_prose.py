"""Check that no product module selects by the product's own English sentences.

Literals of several words in comparisons, dict keys, match patterns and string searches must be
texts of other programs; so must words in a table by which a loop selects, and regular expressions
of words alone. Four words in other regular expressions must occur in no text of another module.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paths import ROOT

PRODUCT = ("operator", "sdk", "rendezvous", "sidecar", "cli", "bench")
WORDS = re.compile(r"[a-z]+ [a-z]+")
PLAIN = re.compile(r"[\w ,:;]+")
"""Regular expression without operators."""
RUN = re.compile(r"(?<!\\)\b[A-Za-z]+(?: [A-Za-z]+){3,}\b")
"""Literal words in a regular expression; fewer, such as `out of memory`, stand in many texts."""
SEARCHES = frozenset(
    [
        "startswith",
        "endswith",
        "removeprefix",
        "removesuffix",
        "partition",
        "rpartition",
        "split",
        "rsplit",
        "find",
        "rfind",
        "index",
        "rindex",
        "count",
        "replace",
        "get",
        "pop",
    ]
)
FOREIGN = {
    "Python": {
        "Traceback (most recent call last):",
        "The above exception was the direct cause of the following exception:",
        "During handling of the above exception, another exception occurred:",
        "Fatal Python error: ",
        "Current thread",
    },
    "this product, names and no sentences": {
        "Stack (most recent call last):",  # after Python's header of a traceback
        "first step",  # phase of a round
    },
    "kopf, names of tasks": {"watcher for "},
    "PyYAML and libyaml": {"<stream end>", "end of stream"},
    "C++": {"terminate called without an active exception"},
    "Linux": {"model name", "permission denied"},
    "kube-scheduler": {"nodes are available: "},
    "kubelet": {"The node was low on resource", "The node had condition"},
    "kube-apiserver": {
        "Operation cannot be fulfilled on resourcequotas",
        "exceeded quota:",
        "scheduling gates",
        "status unknown for quota:",
        "value of PreemptionPolicy",
    },
    "kubectl": {
        "was refused",
        "no such host",
        "the server doesn't have a resource type",
        "is forbidden",
        "provide credentials",
        "getting credentials",
        "looking for beginning of value",
        "unexpected end of JSON input",
        "an error on the server",
        "currently unable to handle",
        "connection reset",
        "deadline exceeded",
        "i/o timeout",
        "TLS handshake timeout",
        "connection lost",
    },
    "gRPC": {
        "failed to connect to all addresses",
        "errors resolving",
        "DNS resolution failed",
        "Failed parsing HTTP/2",
        "Received http2 header with status",
    },
    "etcd": {
        "Not a file",
        "permission denied",
        "invalid auth token",
        "revision of auth store is old",
        "user name is empty",
        "etcdserver: authentication is not enabled",
        "authentication is not enabled",
        "etcdserver: no leader",
        "etcdserver: too many requests",
        "etcdserver: mvcc: database space exceeded",
        "etcdserver: invalid auth token",
        "etcdserver: user name is empty",
        "etcdserver: revision of auth store is old",
        "etcdserver: authentication failed",
        "database space exceeded",
        "authentication failed",
        "no leader",
    },
}
ALL_FOREIGN = frozenset().union(*FOREIGN.values())


def _texts(node: ast.AST | None) -> list[str]:
    """Return the texts of a literal, or of a tuple, list or set of literals."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.Constant(value=bytes(raw)):
            return [raw.decode("latin-1")]
        case ast.JoinedStr(values=parts) | ast.Tuple(elts=parts) | ast.List(elts=parts):
            return [text for part in parts for text in _texts(part)]
        case ast.Set(elts=parts):
            return [text for part in parts for text in _texts(part)]
        case ast.Call(args=[argument], func=ast.Name(id="frozenset")):
            return _texts(argument)
    return []


def _values(tree: ast.Module) -> dict[str, ast.AST | None]:
    found: dict[str, ast.AST | None] = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found[name] = value
            case ast.AnnAssign(target=ast.Name(id=name), value=value):
                found[name] = value
    return found


def _constants(tree: ast.Module) -> dict[str, list[str]]:
    return {name: _texts(value) for name, value in _values(tree).items()}


def _variables(node: ast.AST, tables: dict[str, ast.AST | None]) -> dict[str, list[str]]:
    """Return the texts of the variables of a loop over module constants."""
    loops = [node] if isinstance(node, ast.For) else getattr(node, "generators", [])
    found: dict[str, list[str]] = {}
    for loop in loops:
        if not isinstance(loop.iter, ast.Name):
            continue
        for row in getattr(tables.get(loop.iter.id), "elts", []):
            match loop.target, row:
                case ast.Name(id=variable), _:
                    found.setdefault(variable, []).extend(_texts(row))
                case ast.Tuple(elts=variables), ast.Tuple(elts=cells):
                    for each, cell in zip(variables, cells, strict=False):
                        if isinstance(each, ast.Name):
                            found.setdefault(each.id, []).extend(_texts(cell))
    return found


def _compared(node: ast.AST) -> list[ast.AST]:
    """Return the parts of a node that select by their text."""
    match node:
        case ast.Compare(left=left, comparators=others):
            return [left, *others]
        case ast.Call(func=ast.Attribute(attr=name), args=arguments) if name in SEARCHES:
            return list(arguments[:1])
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="re")), args=[ast.Constant(value=str(pattern)), *_]
        ) if PLAIN.fullmatch(pattern):
            return [node.args[0]]
        case ast.Dict(keys=keys):
            return [key for key in keys if key is not None]
        case ast.Subscript(slice=key):
            return [key]
        case ast.MatchValue(value=value):
            return [value]
    return []


def prose(files: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each literal of words by which modules select."""
    trees = {path: ast.parse(text) for path, text in files.items()}
    constants: dict[str, dict[str, list[str]]] = {Path(path).stem: {} for path in files}
    for path, tree in trees.items():
        constants[Path(path).stem] |= _constants(tree)
    for path, tree in trees.items():
        known = _constants(tree)
        nodes = list(ast.walk(tree))
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                theirs = constants.get((node.module or "").rpartition(".")[2], {})
                for alias in node.names:
                    known[alias.asname or alias.name] = theirs.get(alias.name, [])
        tables = _values(tree)
        for scope, names in [(tree, known), *((n, _variables(n, tables)) for n in nodes)]:
            within = nodes if scope is tree else ast.walk(scope) if names else ()
            for node in within:
                for part in _compared(node):
                    if isinstance(part, ast.Name):
                        texts = names.get(part.id, [])
                    else:
                        texts = _texts(part) if scope is tree else []
                    for text in texts:
                        if WORDS.search(text):
                            yield f"{path}:{getattr(part, 'lineno', 0)}", text


def test_product_reads_no_prose_of_its_own() -> None:
    files = {
        str(path.relative_to(ROOT)): path.read_text()
        for top in PRODUCT
        for path in sorted((ROOT / top).rglob("*.py"))
    }
    found = list(prose(files))
    assert [place for place in found if place[1] not in ALL_FOREIGN] == []
    assert {text for _, text in found} >= ALL_FOREIGN, "remove the texts that nobody reads any more"


def _pattern(node: ast.AST) -> str | None:
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="re")), args=[ast.Constant(value=str(pattern)), *_]
        ):
            return pattern
    return None


def matched_texts(files: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield module and words of each pattern that a text of another module has, and that module.

    Docstrings are no texts.
    """
    texts: dict[str, list[str]] = {}
    patterns: list[tuple[str, str]] = []
    for path, content in files.items():
        tree = ast.parse(content)
        nodes = list(ast.walk(tree))
        found = [node for node in nodes if isinstance(node, ast.Constant)]
        documents = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        texts[path] = [
            node.value
            for node in found
            if isinstance(node.value, str) and id(node) not in documents
        ]
        patterns += [(path, one) for node in nodes if (one := _pattern(node)) is not None]
    for path, pattern in patterns:
        for words in RUN.findall(pattern):
            for other, own in texts.items():
                if other != path and any(words in text for text in own):
                    yield path, words, other


def test_no_pattern_matches_a_text_of_another_module() -> None:
    files = {
        str(path.relative_to(ROOT)): path.read_text()
        for top in PRODUCT
        for path in sorted((ROOT / top).rglob("*.py"))
    }
    assert list(matched_texts(files)) == []


def test_planted_pattern_for_a_text_of_another_module_is_found() -> None:
    files = {
        "a.py": 'log.info(f"the job ended after {n} s")',
        "b.py": '"""The job ended."""\nENDED = re.compile(r"^the job ended after (\\d+) s")',
        "c.py": 'OTHER = re.compile(r"socket has failed to (listen|bind)")',
    }
    assert list(matched_texts(files)) == [("b.py", "the job ended after", "a.py")]


@pytest.mark.parametrize(
    "line",
    [
        'said.startswith("the job ended")',
        'said == "the job ended"',
        '"the job ended" in said',
        'PHRASES = {"the job ended": 1}',
        'PHRASE = "; the job ended: "\nsaid.partition(PHRASE)[2]',
        'TABLE = (("the job ended", 1),)\n[n for phrase, n in TABLE if phrase in said]',
        'TABLE = ("the job ended",)\nfor phrase in TABLE:\n    said.startswith(phrase)',
        're.search("the job ended", said)',
        'ENDED = re.compile("the job ended")',
        'said.endswith(("x", b"the job ended"))',
        'said.removeprefix(f"the job ended {code}")',
    ],
)
def test_planted_prose_is_found(line: str) -> None:
    assert list(prose({"planted.py": line}))


def test_prose_of_another_module_is_found() -> None:
    files = {"a.py": 'ENDED = "the job ended"', "b.py": "from a import ENDED\nsaid == ENDED"}
    assert [place for place, _ in prose(files)] == ["b.py:2"]


def test_words_codes_and_separators_are_no_prose() -> None:
    text = 'said.split("; ") == "NodeLost" or said.partition(" at ") or "SIGTERM" in said'
    assert not list(prose({"planted.py": text}))
