"""Programs whose ranks may meet at another address than the job's."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticjob_launcher.zygote.analysis.program_imports import (
    Source,
    analyse_imports,
    may_choose_address,
)

URL = 'dist.init_process_group("gloo", init_method="tcp://localhost:23456", rank=rank)'


@pytest.mark.parametrize(
    ("source", "arguments", "chooses"),
    [
        ("dist.init_process_group('gloo')", [], False),
        ('print(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])', [], False),
        ('os.environ["RANK"] = rank', [], False),
        ('os.environ["MASTER_PORT"] = "29500"', [], True),
        ("def setup(rank):\n    os.environ['MASTER_ADDR'] = 'localhost'", [], True),
        ("os.environ.update(MASTER_PORT=str(port))", [], True),
        (URL, [], True),
        (URL, ["--lr", "0.1"], True),
        (URL, ["--dist-url", "env://"], False),
        ("main()", ["--dist-url", "tcp://10.0.0.1:23456"], True),
        ("main()", ["--dist-url=tcp://10.0.0.1:23456"], True),
    ],
)
def test_address_is_chosen_by_variables_or_a_url(
    tmp_path: Path, source: str, arguments: list[str], chooses: bool
) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"import os\n{source}\n")
    reading = analyse_imports([Source(str(path))], [str(tmp_path)], lambda _: True)
    assert may_choose_address(arguments, reading) is chooses


def test_files_of_the_program_count_and_removed_ones_do_not(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import setup_group\n")
    own = tmp_path / "setup_group.py"
    own.write_text(f"def begin(rank):\n    {URL}\n")
    entry = [Source(str(tmp_path / "train.py"))]
    reading = analyse_imports(
        entry, [str(tmp_path)], lambda spec: not (spec.origin or "").startswith(str(tmp_path))
    )
    assert may_choose_address((), reading)
    own.unlink()
    assert not may_choose_address((), reading)
