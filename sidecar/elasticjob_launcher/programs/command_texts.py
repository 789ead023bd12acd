"""Texts of a command: its words, and the shell scripts that it runs, without comments and quotes.

Scripts are found by their names in the text; the shell is not run. The number and total size of
files that are read, and the number of look-ups in the file system, have a bound, since the command
waits for the result. Each file is read once, unless it changes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from elasticjob_launcher.command_line.interpreters import SHELLS

MAX_FILES = 20
MAX_FILE_BYTES = 256 * 1024
MAX_TOTAL_BYTES = 512 * 1024
"""Maximum size of all scripts together: one that exceeds it is left out, with all after it."""
MAX_LOOKUPS = 300
MAX_HERE_DOCUMENTS = 200
_SUFFIXES = (".sh", ".bash", ".zsh", ".ksh", ".env")
_RUNNING = SHELLS | {"source", "."}
"""Programs and builtins that run a script file."""
_LEXEME = re.compile(
    r"(?P<escaped>\\.)|(?P<quoted>\$'(?:\\.|[^'\\])*'|'[^']*')|(?P<double>\")"
    r"|(?P<comment>(?<![^\s;&|()])#[^\n]*)"
    r"|(?P<here><<-?[ \t]*(?P<literal>['\"\\]?)(?P<word>[A-Za-z_]\w*)['\"]?[^\n]*)",
    re.DOTALL,
)
_IN_DOUBLE = re.compile(r"(?P<escaped>\\.)|(?P<double>\")", re.DOTALL)
_SHELL_WORD = re.compile(rf"\b(?:{'|'.join(sorted(SHELLS))})\b")
_FOR_A_SHELL = re.compile(rf"(?:{_SHELL_WORD.pattern}[^\n;|&]*\s-\w*c|\beval)\s+$")
_LITERAL = str.maketrans({"$": "", "(": " ", "#": " ", ";": " ", "\n": " "})
"""Characters without a meaning in single quotes."""
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}\s$]{0,100}))?[^}\s]{0,100}\}|\$(\w+)")
_OUTPUT = re.compile(r"\$\([^()\n]{0,200}\)(?=/)|`[^`\n]{0,200}`(?=/)")
_VALUE = re.compile(r"(?<![\w$])([A-Za-z_]\w*)=([^\s;&|$`()]+)")
_UNKNOWN = "\0"
"""Value that only the running shell knows."""
_FILE = re.compile(r"[^\s;&|()<>`$=]+")
_FOLDER = re.compile(r"\b(?:cd|pushd)\s+(?:-\w*\s+)?([^\s;&|()<>`$]+)")


def command_texts(argv: Sequence[str], given: Mapping[str, str], folder: Path) -> Iterator[str]:
    """Yield the words of a command, and the text of each shell script that they or it names.

    Args:
        given: variables of the command.
        folder: working folder.
    """
    yield from map(_code, argv)
    waiting = [_named(" ".join(argv), given, [folder])]
    looked: set[tuple[Path, bool]] = set()
    read: set[Path] = set()
    size = 0
    while waiting:
        for path, runs in waiting.pop():
            if len(looked) >= MAX_LOOKUPS or len(read) == MAX_FILES:
                return
            if path in read or (path, runs) in looked:
                continue
            looked.add((path, runs))
            found = _script(path, runs)
            if found is not None:
                text, bytes_ = found
                size += bytes_
                if size > MAX_TOTAL_BYTES:
                    return
                read.add(path)
                yield text
                waiting.insert(0, _named(text, given, [folder, path.parent]))


def _code(text: str) -> str:
    """Return a shell text without comments and without `$` that the shell does not expand."""
    parts: list[str] = []
    at, here, is_double, is_inner = 0, 0, False, False
    while True:
        match = (_IN_DOUBLE if is_double else _LEXEME).search(text, at)
        if match is None:
            return "".join([*parts, text[at:]])
        parts.append(text[at : match.start()])
        at, kind, found = match.end(), match.lastgroup, match[0]
        before = text[max(0, match.start() - 80) : match.start()]
        if found.startswith("<<"):
            here += 1
            parts.append(found)
            ending = None
            if here <= MAX_HERE_DOCUMENTS:
                ending = re.compile(rf"^\t*{match['word']}$", re.MULTILINE).search(text, at)
            if ending is not None:
                body, at = text[at : ending.start()], ending.end()
                kept = not match["literal"] or _SHELL_WORD.search(before)
                parts += [body.replace("\\$", " ") if kept else "\n", ending[0]]
        elif kind == "escaped":
            parts.append(found[1:] if is_inner else " " if found[1] in "$\n" else found)
        elif kind == "quoted":
            inner = _FOR_A_SHELL.search(before) is not None
            parts.append(found if inner else found.translate(_LITERAL))
        elif kind == "double":
            is_double = not is_double
            is_inner = is_double and _FOR_A_SHELL.search(before) is not None
            parts.append(found)


def _named(text: str, given: Mapping[str, str], folders: list[Path]) -> Iterator[tuple[Path, bool]]:
    """Yield the paths that a text may mean by its words, in its folders and those it enters, and
    True for those that a shell runs."""
    text = _expanded(text, given, folders[0])
    entered = [folder / _tail(name) for name in _FOLDER.findall(text) for folder in folders]
    places = list(dict.fromkeys([*folders, *entered[:MAX_LOOKUPS]]))
    likely: dict[tuple[str, bool], None] = {}
    others: dict[tuple[str, bool], None] = {}
    is_after_shell = skips = False
    for word in _FILE.findall(text):
        if is_after_shell and (skips or word[0] in "-+"):
            skips = not skips and word[-1] in "oO" and not word.startswith("--")
            is_after_shell = not (word[0] == "-" and word[1:2] != "-" and word.endswith("c"))
            continue
        name = _tail(word)
        if name and (is_after_shell or name.endswith(_SUFFIXES)):
            likely[name, is_after_shell] = None
        elif name and word.startswith(("./", "/", _UNKNOWN)):
            others[name, False] = None
        is_after_shell, skips = word.rpartition("/")[2] in _RUNNING, False
    for names in (likely, others):
        for name, runs in names:
            for place in places:
                yield place / name, runs


def _expanded(text: str, given: Mapping[str, str], folder: Path) -> str:
    """Return a text with the values of its variables as far as they are known, without quotes."""
    text = text.replace('"', "").replace("'", "")
    known = {"PWD": str(folder), **given, **dict(_VALUE.findall(text))}

    def value(match: re.Match[str]) -> str:
        return known.get(match[1] or match[3]) or match[2] or _UNKNOWN

    return _VARIABLE.sub(value, _OUTPUT.sub(_UNKNOWN, text))


def _tail(word: str) -> str:
    """Return the part of a word behind the last unknown value."""
    return word.rpartition(_UNKNOWN)[2].lstrip("/") if _UNKNOWN in word else word


def _script(path: Path, runs: bool) -> tuple[str, int] | None:
    """Return the code of a shell script and the size of its file; None for any other file."""
    try:
        if not path.is_file():
            return None
        status = path.stat()
        if status.st_size > MAX_FILE_BYTES:
            return None
        text = _file_code(path, runs, (status.st_dev, status.st_ino, status.st_mtime_ns))
    except (OSError, ValueError):
        return None
    return (text, status.st_size) if text else None


@lru_cache(maxsize=MAX_FILES)
def _file_code(path: Path, runs: bool, version: tuple[int, int, int]) -> str:
    """Return the code of this version of a file; empty for a file that is not a shell script."""
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES)
    text = content.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")
    if "\0" in text:
        return ""
    if runs or path.name.endswith(_SUFFIXES):
        return _code(text)
    first = text.partition("\n")[0]
    try:
        words = shlex.split(first[2:]) if first.startswith("#!") else []
    except ValueError:
        return ""
    return _code(text) if any(word.rpartition("/")[2] in _RUNNING for word in words) else ""
