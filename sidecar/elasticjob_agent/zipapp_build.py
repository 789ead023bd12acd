"""Packs the launcher into one file that any Python from 3.8 on runs."""

from __future__ import annotations

import logging
import os
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "elasticjob_launcher"
MAIN = f"from {PACKAGE}.__main__ import main\n\nmain()\n"
# The least a zip file can say: the same sources give the same bytes.
TIMESTAMP = (1980, 1, 1, 0, 0, 0)
SHEBANG = b"#!/usr/bin/env python3\n"

logger = logging.getLogger(__name__)


def build_zipapp(target: Path) -> Path:
    """Write the launcher to `target`, in one step, and return it; logs its size."""
    source = Path(__file__).parent / "launcher"
    files = {f"{PACKAGE}/{path.name}": path.read_bytes() for path in source.glob("*.py")}
    files["__main__.py"] = MAIN.encode()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as unfinished:
        unfinished.write(SHEBANG)
        _write_zip(unfinished, files)
    Path(unfinished.name).chmod(0o755)
    os.replace(unfinished.name, target)  # noqa: PTH105
    logger.info("launcher written: path=%s bytes=%d", target, target.stat().st_size)
    return target


def _write_zip(file: tempfile._TemporaryFileWrapper[bytes], files: dict[str, bytes]) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, TIMESTAMP)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, files[name])
