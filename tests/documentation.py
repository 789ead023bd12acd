"""Code blocks of the documentation, and the commands in them.

No test executes a command of a block `sh` or `console` as it stands there; NOT_RUN names for each
the reason, and the tests of the same operation. `bash` blocks of the pages in SHELL are executed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.paths import ROOT

PAGES = (
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / place / "README.md" for place in ("bench", "charts/elasticjob", "examples/digits")),
)
_BLOCK = re.compile(r"^( *)```([a-z]+)\n(.*?)^\1```$", re.M | re.S)
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
    """A fenced code block: its page, the line of its fence, its language and its text."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """Return the blocks of these languages on all pages."""
    found = []
    for path in PAGES:
        text = path.read_text()
        for match in _BLOCK.finditer(text):
            if match[2] in languages:
                line = text.count("\n", 0, match.start()) + 1
                body = re.sub(rf"^{match[1]}", "", match[3], flags=re.M)
                found.append(Block(str(path.relative_to(ROOT)), line, match[2], body))
    return found


def commands() -> Iterator[tuple[Block, str]]:
    """Yield the commands of all blocks, each on one line, without prompt and comment."""
    for block in blocks("sh", "bash", "console"):
        if block.language == "bash" and block.page in SHELL:
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
