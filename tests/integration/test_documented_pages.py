"""README and tutorials on this machine: every block marked `local` is executed as it stands.

Their blocks marked `cluster` are executed by tests/e2e/test_documented_pages.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.corpus.environments import cache, environment
from tests.documentation import EXECUTED, blocks_of
from tests.documented_session import Session, parsed
from tests.integration.local_rig import LocalRig
from tests.paths import ROOT

pytestmark = pytest.mark.timeout(600)

FRAMEWORKS = ("hugging-face.md",)
"""Pages whose scripts need the packages of the frameworks' environment."""
LOCAL = [
    path
    for path in EXECUTED
    if any(each.mark.startswith("local") for each in blocks_of(path))
    and path != ROOT / "README.md"  # tests/integration/test_dist.py has it, with the wheel
]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[LocalRig]:
    corner = LocalRig(tmp_path)
    yield corner
    corner.close()


@pytest.mark.parametrize("page", LOCAL, ids=lambda path: path.stem)
def test_blocks_of_page_run_as_it_says(rig: LocalRig, page: Path) -> None:
    places = [str(Path(sys.executable).parent), os.environ["PATH"]]
    if page.name in FRAMEWORKS:  # as if ElasticJob were installed there
        python = environment(cache(), "frameworks") / "bin" / "python"
        program = rig.tmp.parent / "bin" / "elasticjob"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {python} -m elasticjob_cli.main "$@"\n')
        program.chmod(0o755)
        places.insert(0, str(program.parent))
    env = {**rig.env, "PATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"}
    (rig.job / "work.py").unlink()
    wanted = sum(1 for each in blocks_of(page) if (mark := each.mark) and mark.startswith("local"))
    assert Session(rig.job, env).execute(blocks_of(page), "local") >= wanted
    rig.note_run_dirs()


def test_every_page_is_executed_somewhere() -> None:
    for path in EXECUTED:
        marks = [parsed(each) for each in blocks_of(path) if not each.mark.startswith("file ")
                 and each.language in ("sh", "console")]  # fmt: skip
        assert any(marks), path
