"""Check of recovery on accelerators: `python -m bench.gpu`, or `make gpu-check`.

Runs NCCL gangs under `elasticjob run`, one rank on each device, through the kill of a worker and of
a node, drain, join, CUDA out-of-memory and an aborted process group, warm and cold; also with
`torch.compile`, with snapshots in memory, and the kill of a worker under torchrun. Writes
build/gpu/report.md and report.json, and the logs of each case.

The exit status is 0 if every case recovered and the status reported its cause, 1 if not, and 2 if
there is no device or the options leave no case. `--device cpu` tries the check itself over gloo,
without a device.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.gpu.checks import Fault, Result, System, cases, gangs, report
from bench.gpu.gang import gang
from bench.machine import hardware
from bench.results import keep
from bench.settings import REPOSITORY
from elasticjob_cli.output import replace_file

_FACTS = """
import json, torch
found = {"torch": torch.__version__, "devices": 0}
if torch.cuda.is_available():
    found["devices"] = torch.cuda.device_count()
    found["device"] = torch.cuda.get_device_name(0)
    found["cuda"] = torch.version.cuda
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
print(json.dumps(found))
"""


class NoDevice(Exception):
    """Machine that cannot run the check; the text has the reason and the remedy."""


def facts_of(interpreter: str) -> dict[str, Any]:
    """Return the versions and devices that torch reports. Raises NoDevice."""
    try:
        done = subprocess.run([interpreter, "-c", _FACTS], capture_output=True, text=True)
    except OSError as error:
        raise NoDevice(f"{interpreter} cannot be run: {error.strerror}") from error
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise NoDevice(
            f"{interpreter} cannot import torch ({last[0]}): give an interpreter that has it with "
            "--python, or GPU_PYTHON= of make"
        )
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def main() -> int:
    options = _parser().parse_args()
    try:
        facts = facts_of(options.python)
        if options.device == "cuda" and not facts["devices"]:
            raise NoDevice(
                f"torch {facts['torch']} of {options.python} finds no CUDA device: run this on a "
                "machine with one, with a torch built for CUDA (--python, or GPU_PYTHON= of make)"
            )
    except NoDevice as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 2
    facts = {"date": datetime.now(UTC).date().isoformat(), **facts, **hardware()}
    devices = facts["devices"] if options.device == "cuda" else 0
    chosen = cases(gangs(devices, options.backend), [Fault(each) for each in options.faults])
    if options.warm_only:
        chosen = [case for case in chosen if case.warm]
    chosen = [case for case in chosen if (case.model or "plain") in options.variants]
    if options.without_peers:
        chosen = [case for case in chosen if case.system is System.OURS]
    if not chosen:
        print(
            f"gpu-check: the options leave no case for {devices} devices: name more --faults and "
            "--variants, or omit --warm-only, --without-peers and --backend",
            file=sys.stderr,
        )
        return 2
    logs = options.output / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    for case in chosen:
        with (
            tempfile.TemporaryDirectory(prefix="elasticjob-gpu-") as folder,
            gang(case, Path(folder), options.python, options.device) as running,
        ):
            result = running.recovery(options.limit_seconds)
            running.keep_log(logs / f"{str(case).replace(' ', '-')}.log")
        results.append(result)
        taken = "" if result.seconds is None else f"{result.seconds:.2f} s"
        print(f"{case}: {taken or 'failed'} {result.error}".rstrip(), flush=True)
        _keep(options.output, results, facts)
    failed = [result for result in results if result.error]
    print(f"{len(results) - len(failed)} of {len(results)} passed: {options.output}/report.md")
    return 1 if failed else 0


def _keep(folder: Path, results: list[Result], facts: dict[str, Any]) -> None:
    keep(folder / "report.json", {"facts": facts, "results": [r.to_json() for r in results]})
    replace_file(folder / "report.md", report(results, facts).encode())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__.partition("\n")[0])
    parser.add_argument("--python", default=sys.executable, help="interpreter that has torch")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="", help="default: both")
    parser.add_argument("--faults", nargs="+", choices=list(Fault), default=list(Fault))
    variants = ["plain", "snapshots", "compiled"]
    parser.add_argument("--variants", nargs="+", choices=variants, default=variants)
    parser.add_argument("--warm-only", action="store_true", help="no cold starts")
    parser.add_argument("--without-peers", action="store_true", help="no torchrun")
    parser.add_argument("--limit-seconds", type=float, default=180.0, help="for each recovery")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "build" / "gpu")
    return parser


if __name__ == "__main__":
    sys.exit(main())
