"""Framework examples: few elastic lines, and manifests that start the script beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from elasticjob_operator.model import ElasticJob
from tests.paths import ROOT

MOST_ELASTIC_LINES = 10
EXAMPLES = sorted(
    path.parent
    for path in (ROOT / "examples").glob("*/train.py")
    if path.parent.name != "digits"  # which shows more, and has its own tests
)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example_has_at_most_ten_elastic_lines(example: Path) -> None:
    lines = (example / "train.py").read_text().splitlines()
    elastic = [line for line in lines if "# elastic" in line]
    assert 0 < len(elastic) <= MOST_ELASTIC_LINES
    imports = [line for line in lines if line.startswith(("import elasticjob", "from elasticjob"))]
    assert set(imports) <= set(elastic)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_manifest_starts_the_script_with_existing_options(example: Path) -> None:
    job = yaml.safe_load((example / "elasticjob.yaml").read_text())
    assert ElasticJob.model_validate(job).metadata.name == example.name
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"][-1] == "train.py"
    source = (example / "train.py").read_text()
    options = [word for word in container["args"] if word.startswith("--")]
    assert options
    assert [option for option in options if f'"{option}"' not in source] == []
