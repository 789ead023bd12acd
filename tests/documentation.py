"""Code blocks of the documentation, the commands in them, and the tests that execute them.

On the pages in EXECUTED an HTML comment above each block says how a test executes it:

    <!-- test: local -->                 on this machine, in the order of the page
    <!-- test: cluster -->               on the cluster of the tests
    <!-- test: file train.py -->         the text is written into this file
    <!-- test: none: REASON -->          not executed; the reason names the test that covers it

More words after a comma change the execution; `tests/documented_session.py` has them. On all other
pages no test executes a block as it stands there: NOT_RUN names for each command the reason, and
the tests of the same operation. `bash` blocks of the pages in SHELL are executed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.paths import ROOT

TUTORIALS = tuple(sorted((ROOT / "docs" / "tutorials").glob("*.md")))
EXECUTED = (ROOT / "README.md", *TUTORIALS)
"""Pages whose blocks are executed."""
PAGES = (
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *TUTORIALS,
    *(ROOT / place / "README.md" for place in ("bench", "charts/elasticjob", "examples/digits")),
)
_BLOCK = re.compile(
    r"(?:^ *<!-- test: (?P<mark>.*?) -->\n)?"
    r"^(?P<indent> *)```(?P<language>[a-z]+)\n(?P<text>.*?)^(?P=indent)```$",
    re.M | re.S,
)
_PROMPT = "$ "

SHELL = ("docs/training.md",)
"""Pages whose `bash` blocks are parts of a script, executed as such."""

NOT_RUN = {
    r"elasticjob (run examples|run elasticjob\.yaml|get|scale|fault|explain|describe)": (
        "a job of minutes: `make demo` trains it, tests/integration/cli runs the same verbs"
    ),
    r"elasticjob run (train\.py|-m|--nproc)": "tests/integration/cli/test_without_manifest.py",
    r"elasticjob logs digits": "tests/integration/cli/test_local_run.py: logs of rounds and ranks",
    r"elasticjob dashboard|ssh -L ": "serves until Ctrl-C: integration/cli/test_dashboard.py",
    r"elasticjob doctor": "tests/integration/cli/test_doctor.py",
    r"source <\(elasticjob completion|elasticjob completion": "integration/cli/test_completion.py",
    r"elasticjob (convert|validate) ": "tests/unit/cli/commands",
    r"make (demo|cluster images|dist)$": "builds or runs for minutes; has tests of its own",
    r"make cluster && ": "starts a cluster",
    r"make gpu-check": "needs a GPU; tests/integration/test_benchmarks.py runs it on the CPU",
    r"(kubectl|helm) ": "acts on a cluster: tests/e2e runs the workflows of kubectl and helm",
    r"docker |cosign |gh ": "needs a registry or the forge",
    r"(VERSION|MINE)=|for name in |done$": "copies images between registries",
    r"sha256sum --check": "needs a downloaded release: tests/integration/test_dist.py",
    r"elasticjob agent --nnodes": "a gang of machines: tests/integration/agent runs its parts",
    r"torchrun --nnodes": "a gang of machines: tests/integration/torch/test_mixed_gangs.py",
    r"torchrun --standalone|cat checkpoints": "torch's own launcher, for comparison",
    r"python -m elasticjob_operator certs": "synopsis: integration/operator/test_certificates.py",
    r"python -m bench\.": "benchmarks of minutes to hours: tests/integration/test_benchmarks.py",
}
"""Reason for each documented command, by a pattern of its beginning."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced code block: its page, the line of its fence, its language, its text and its mark.

    `mark` is the text of the comment above it, empty without one.
    """

    page: str
    line: int
    language: str
    text: str
    mark: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """Return the blocks of these languages on all pages."""
    return [one for path in PAGES for one in blocks_of(path) if one.language in languages]


def blocks_of(path: Path) -> list[Block]:
    """Return all blocks of a page, in its order."""
    text = path.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("indent")) + 1
        body = re.sub(rf"^{match['indent']}", "", match["text"], flags=re.M)
        mark = " ".join((match["mark"] or "").split())
        found.append(Block(str(path.relative_to(ROOT)), line, match["language"], body, mark))
    return found


def is_executed(page: str) -> bool:
    """Return True if the blocks of a page have marks instead of reasons in NOT_RUN."""
    return ROOT / page in EXECUTED


def commands() -> Iterator[tuple[Block, str]]:
    """Yield the commands of all blocks, each on one line, without prompt and comment."""
    for block in blocks("sh", "bash", "console"):
        if is_executed(block.page) or (block.language == "bash" and block.page in SHELL):
            continue
        for line in re.sub(r"\\\n\s*", "", block.text).splitlines():
            if block.language == "console" and not line.startswith(_PROMPT):
                continue
            command = re.sub(r"(^|\s+)# .*$", "", line.removeprefix(_PROMPT).strip())
            if command:
                yield block, command.removeprefix(".venv/bin/")


def reasons(command: str) -> list[str]:
    """Return the patterns of NOT_RUN that apply to a command."""
    return [pattern for pattern in NOT_RUN if re.match(pattern, command)]
