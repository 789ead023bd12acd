"""Execution of the code blocks of a documentation page, in its order, as a reader pastes them.

A block's mark begins with the place, `local` or `cluster`; these words may follow, separated by
commas:

    background until "TEXT"      goes on while the next blocks run; those wait for this output
    interrupt                    a command in the background is ended by Ctrl-C with the page
    repeat until "TEXT"          repeated until it prints this and the lines of the page
    exit N                       the exit code of the block's last command; 0 without it
    output varies                the printed lines of the page are an example

Without `output varies` each line of output on the page must be printed, in this order. Numbers,
spaces and paths below `/home/you` may differ, and a line `...` stands for any lines. A number that
is a word may be printed as `-`, the sign of an absent value: a round that ends early has no first
step.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.documentation import Block

PLACES = ("local", "cluster")
PROMPT = "$ "
SECONDS = 330.0
"""Timeout of a command, and of each wait for output: longer than the pages' own timeouts."""
POLL_SECONDS = 0.2
REPEAT_SECONDS, LONGEST_REPEAT_SECONDS = 1.0, 3.0
"""Pause between repetitions, which would otherwise take the processor from the awaited program: a
quarter of the wait so far, within these limits."""
_WORD = re.compile(
    r'(?P<verb>background until|repeat until) "(?P<text>[^"]+)"'
    r"|(?P<flag>interrupt|output varies)|exit (?P<code>\d+)"
)
_NUMBER = re.compile(
    r"(?P<word>(?<!\S)\d[\d.,:]*(?:ms|s|m|h)?(?!\S))|\d[\d.,:]*(?:(?:ms|s|m|h)\b)?"
)


@dataclass(frozen=True, slots=True)
class Mark:
    """Parsed mark of a block that a test executes."""

    place: str
    background: str = ""
    repeat: str = ""
    interrupt: bool = False
    varies: bool = False
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class Command:
    """Command as a shell takes it, and the lines that it prints according to the page."""

    text: str
    printed: tuple[str, ...] = ()


class BadMark(ValueError):
    """Mark that is not in the form of the module's docstring."""


def parsed(block: Block) -> Mark | None:
    """Return the mark of a block, None if it is not executed. Raise BadMark."""
    if block.mark.startswith("none: "):
        return None
    place, *words = re.split(r", (?=background|repeat|interrupt|output|exit)", block.mark)
    if place not in PLACES:
        raise BadMark(f"{block}: the mark must begin with local, cluster or none, not {place!r}")
    found: dict[str, str] = {}
    for word in words:
        if (match := _WORD.fullmatch(word)) is None:
            raise BadMark(f"{block}: unknown words in the mark: {word!r}")
        for name, value in match.groupdict().items():
            if value is not None and name not in ("verb", "text"):
                found[value if name == "flag" else name] = value
        if match["verb"]:
            found[match["verb"]] = match["text"]
    return Mark(
        place,
        found.get("background until", ""),
        found.get("repeat until", ""),
        "interrupt" in found,
        "output varies" in found,
        int(found.get("code", 0)),
    )


def commands_of(block: Block) -> Iterator[Command]:
    """Yield the commands of a block: each of a console's prompts, or the whole of `sh`."""
    if block.language != "console":
        yield Command(block.text)
        return
    for part in re.split(rf"^{re.escape(PROMPT)}", block.text, flags=re.M)[1:]:
        words = re.match(r"(?:.*\\\n)*.*\n?", part)
        assert words is not None
        yield Command(words[0].strip(), tuple(part[words.end() :].splitlines()))


def unprinted(printed: Sequence[str], output: str) -> str | None:
    """Return the first line of the page that is not in the output after those before it."""
    lines = iter(output.splitlines())
    for line in printed:
        if line.strip() in ("", "..."):
            continue
        pattern = _pattern(line)
        if not any(pattern.search(one) for one in lines):
            return line
    return None


def _pattern(line: str) -> re.Pattern[str]:
    """Return a pattern of an output line, in which numbers, spaces and paths may differ."""
    text = re.escape(re.sub(r"\s+", " ", line.strip()))
    text = re.sub(r"/home/you[\w./\\-]*", r"\\S+", text)
    text = _NUMBER.sub(_number_pattern, text.replace("\\.", ".").replace("\\ ", " "))
    return re.compile(text.replace(" ", r"\s+"))


def _number_pattern(found: re.Match[str]) -> str:
    number = r"\d[\d.,:]*(?:ms|s|m|h)?(?:[\d.]+s)?"
    return rf"(?:{number}|(?<!\S)-(?!\S))" if found["word"] else number


@dataclass(slots=True)
class Running:
    """Command in the background, with the file of its output."""

    block: Block
    mark: Mark
    command: Command
    process: subprocess.Popen[bytes]
    log: Path


@dataclass(slots=True)
class Session:
    """Reader's terminals: a working folder, an environment, and the commands in the background."""

    folder: Path
    env: Mapping[str, str]
    running: list[Running] = field(default_factory=list)

    def execute(self, page: Sequence[Block], place: str) -> int:
        """Execute the blocks of a place in order; return the number of commands."""
        count = 0
        try:
            for block in page:
                if block.mark.startswith("file "):
                    path = self.folder / block.mark.removeprefix("file ")
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(block.text)
                elif block.mark and (mark := parsed(block)) and mark.place == place:
                    count += self._execute(block, mark)
            self._end()
        finally:
            for one in self.running:
                if one.process.poll() is None:
                    os.killpg(one.process.pid, signal.SIGKILL)
                    one.process.wait()
        return count

    def _execute(self, block: Block, mark: Mark) -> int:
        found = list(commands_of(block))
        for number, command in enumerate(found, 1):
            code = mark.exit_code if number == len(found) else 0
            if mark.background and number == len(found):
                self._start(block, mark, command)
            else:
                self._call(block, mark, command, code)
        return len(found)

    def _call(self, block: Block, mark: Mark, command: Command, code: int) -> None:
        began = time.monotonic()
        while True:
            done = subprocess.run(
                _shell(command),
                cwd=self.folder,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=SECONDS,
                check=False,
            )
            whole = mark.varies or unprinted(command.printed, done.stdout) is None
            if not mark.repeat or (whole and mark.repeat in done.stdout):
                break
            waited = time.monotonic() - began
            if waited > SECONDS:
                break
            time.sleep(min(LONGEST_REPEAT_SECONDS, max(REPEAT_SECONDS, waited / 4)))
        shown = f"{block}: {command.text}\n{done.stdout}"
        assert mark.repeat in done.stdout, f"{mark.repeat!r} was never printed by {shown}"
        assert done.returncode == code, f"exit code {done.returncode} of {shown}"
        self._compare(mark, command, done.stdout, shown)

    def _start(self, block: Block, mark: Mark, command: Command) -> None:
        log = self.folder / f".output-{len(self.running)}"
        with log.open("wb") as output:
            process = subprocess.Popen(
                _shell(command),
                cwd=self.folder,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for all processes of a terminal
            )
        self.running.append(Running(block, mark, command, process, log))
        deadline = time.monotonic() + SECONDS
        while mark.background not in (text := log.read_text(errors="replace")):
            shown = f"{block}: {command.text}\n{text}"
            assert process.poll() is None, f"{mark.background!r} was never printed by {shown}"
            assert time.monotonic() < deadline, f"{mark.background!r} not printed yet by {shown}"
            time.sleep(POLL_SECONDS)

    def _end(self) -> None:
        """Wait for the commands in the background, and compare their output."""
        for one in self.running:
            if one.mark.interrupt:
                os.killpg(one.process.pid, signal.SIGINT)
            code = one.process.wait(SECONDS)
            text = one.log.read_text(errors="replace")
            shown = f"{one.block}: {one.command.text}\n{text}"
            if not one.mark.interrupt:
                assert code == one.mark.exit_code, f"exit code {code} of {shown}"
            self._compare(one.mark, one.command, text, shown)

    def _compare(self, mark: Mark, command: Command, output: str, shown: str) -> None:
        if not mark.varies and (line := unprinted(command.printed, output)) is not None:
            raise AssertionError(f"the page has the line {line!r}, which is not printed: {shown}")


def _shell(command: Command) -> list[str]:
    """Return the shell of a command; `exec` in it would be wrong for several commands."""
    return ["bash", "-euo", "pipefail", "-c", command.text]
