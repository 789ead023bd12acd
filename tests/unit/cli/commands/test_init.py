"""`elasticjob init`: the launch of the manifest that it writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from elasticjob_cli.main import application

TORCHRUN = "import subprocess\nsubprocess.run(['torchrun', 'train.py'])\n"
DEEPSPEED = "import subprocess\nsubprocess.run(['deepspeed', 'train.py'])\n"
NOTEBOOK = "from accelerate import notebook_launcher\nnotebook_launcher(main, (), 2)\n"
TRAINS_FIRST = "import torch\nimport subprocess; subprocess.run(['torchrun', 'test.py'])\n"
LINE = "  launch: PerNode                  # once for each pod: run_all.py, line 2 starts "


@pytest.mark.parametrize(
    ("source", "nodes", "line"),
    [
        (TORCHRUN, "1:4", f"{LINE}torchrun\n"),
        (DEEPSPEED, "1", f"{LINE}deepspeed\n"),
        (DEEPSPEED, "2", ""),
        ("import torch\n", "1:4", ""),
        (TRAINS_FIRST, "1:4", ""),
        (TRAINS_FIRST, "1", ""),
        (NOTEBOOK, "1", f"{LINE}notebook_launcher\n"),
        (NOTEBOOK, "2", ""),
    ],
    ids=[
        *("joins", "one node", "several nodes", "trains", "trains besides"),
        *("trains besides on one node", "its function", "its function on several nodes"),
    ],
)
def test_script_that_starts_a_launcher_itself_runs_once_for_each_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, nodes: str, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run_all.py").write_text(source)
    runner = CliRunner()
    written = runner.invoke(application("init"), ["init", "run_all.py", "--nodes", nodes])
    assert written.exit_code == 0, written.output
    text = (tmp_path / "run-all.yaml").read_text()
    assert [one for one in text.splitlines(True) if "launch:" in one] == ([line] if line else [])
    if line:
        checked = runner.invoke(application("validate"), ["validate", "--strict", "run-all.yaml"])
        assert "ProgramStartsLauncher" not in checked.output
        assert "launch PerNode (Requested)" in checked.output
