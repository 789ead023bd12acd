"""Builder of a release's files: `python -m scripts.dist [FOLDER]`, by default into `dist`.

These are the sdist, the wheel, the Helm chart and their SHA-256 sums. The wheel is built from the
unpacked sdist, so a file that the sdist lacks fails the build. The same commit gives the same
bytes: all times in the archives are SOURCE_DATE_EPOCH, by default the commit's time.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from scripts.environment import ROOT
from tests.cluster.programs import programs

CHART = ROOT / "charts" / "elasticjob"
EPOCH = "SOURCE_DATE_EPOCH"
SUMS = "SHA256SUMS"


class DistError(Exception):
    """Release file that cannot be built; the text names the reason."""


def version() -> str:
    """Return the product's version, which pyproject.toml alone defines."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(project["version"])


def epoch() -> int:
    """Return the time of all archived files. Raise DistError."""
    given = os.environ.get(EPOCH) or _commit_time()
    if not given.isdigit():
        raise DistError(f"{EPOCH} must be seconds since 1970, not {given!r}")
    return int(given)


def _commit_time() -> str:
    command = ["git", "log", "-1", "--format=%ct"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        raise DistError(f"no commit gives the time of the files: set {EPOCH}") from None
    return done.stdout.strip()


def _hatchling(source: Path, target: str, folder: Path, moment: int) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", folder],
        cwd=source,
        env={**os.environ, EPOCH: str(moment)},
        stdout=subprocess.DEVNULL,
        check=True,
    )


def unpack(archive: Path, folder: str | Path) -> None:
    """Unpack an archive, with the filter `data` from Python 3.11.4 on; earlier ones have none."""
    options: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(archive) as packed:
        packed.extractall(folder, **options)


def python_packages(folder: Path, moment: int) -> list[Path]:
    """Build the sdist from the checkout and the wheel from the sdist; return both."""
    _hatchling(ROOT, "sdist", folder, moment)
    sdist = folder / f"elasticjob-{version()}.tar.gz"
    with tempfile.TemporaryDirectory() as scratch:
        unpack(sdist, scratch)
        _hatchling(Path(scratch, sdist.name.removesuffix(".tar.gz")), "wheel", folder, moment)
    return [sdist, folder / f"elasticjob-{version()}-py3-none-any.whl"]


def chart(folder: Path, moment: int) -> Path:
    """Package the chart with helm and return the archive, which `helm push` uploads as OCI."""
    helm = programs("helm") / "helm"
    with tempfile.TemporaryDirectory() as scratch:
        command: list[str | Path] = [helm, "package", CHART, "--destination", scratch]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        [packed] = Path(scratch).iterdir()
        made = folder / packed.name
        made.write_bytes(normalized(packed.read_bytes(), moment))
    return made


def normalized(archive: bytes, moment: int) -> bytes:
    """Return a .tgz with the same files in the order of names, all of them at this time."""
    plain, packed = io.BytesIO(), io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(archive)) as source,
        tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as target,
    ):
        for member in sorted(source.getmembers(), key=lambda one: one.name):
            entry = tarfile.TarInfo(member.name)
            entry.size, entry.mode, entry.mtime = member.size, 0o644, moment
            target.addfile(entry, source.extractfile(member))
    # The level and the name in the head are fixed: gzip would write the file's name and the time.
    with gzip.GzipFile("", "wb", 9, packed, mtime=moment) as compressed:
        compressed.write(plain.getvalue())
    return packed.getvalue()


def build(folder: Path) -> list[Path]:
    """Build all files of a release into an emptied folder. Raise DistError."""
    moment = epoch()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    made = [*python_packages(folder, moment), chart(folder, moment)]
    sums = [f"{hashlib.sha256(one.read_bytes()).hexdigest()}  {one.name}\n" for one in made]
    (folder / SUMS).write_text("".join(sums))
    return [*made, folder / SUMS]


def main() -> int:
    """Build the files and print their paths."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist").resolve()
    try:
        made = build(folder)
    except DistError as error:
        print(f"cannot build a release: {error}", file=sys.stderr)
        return 1
    print(*made, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
