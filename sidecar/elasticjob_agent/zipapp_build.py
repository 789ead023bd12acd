"""Builder and installer of the files for the training container.

Packs the launcher into one file that Python 3.8 or later runs, and copies the package that training
scripts may import beside it.
"""

from __future__ import annotations

import io
import logging
import marshal
import sys
import tempfile
import zipfile
from importlib.machinery import SourceFileLoader
from importlib.util import MAGIC_NUMBER, source_hash
from pathlib import Path
from types import CodeType

import elasticjob
from elasticjob_launcher import settings

PACKAGE = "elasticjob_launcher"
FILE = "launcher.pyz"
"""Name of the launcher in tracebacks; its folder is unknown when it is built."""
MAIN = f"""\
import sys

if sys.version_info < (3, 8):  # even Python 2 understands this much
    sys.stderr.write(
        "elasticjob launcher: the container's Python must be 3.8 or later, "
        "but %s is %d.%d: name another in its command\\n"
        % ((sys.executable,) + sys.version_info[:2])
    )
    sys.exit(2)

from {PACKAGE}.__main__ import main

main()
"""
# The earliest time that a zip file can store: the same sources give the same bytes.
TIMESTAMP = (1980, 1, 1, 0, 0, 0)
SHEBANG = b"#!/usr/bin/env python3\n"

PACKAGES = ("elasticjob", "elasticjob_torchrun")
"""Packages for the training container; installed side by side."""
_ABOUT = "elasticjob_torchrun-1.dist-info"
DIST_INFO = {
    "METADATA": "Metadata-Version: 2.1\nName: elasticjob-torchrun\nVersion: 1\n",
    "entry_points.txt": "[torchrun.handlers]\nelasticjob-node = elasticjob_torchrun:plugin\n",
}
"""Package metadata by which torch finds the plug-in: an installed package has the same."""
_MARSHAL_VERSION = 2 if sys.version_info < (3, 14) else marshal.version
"""Format that is the same for equal code: later ones depend on reference counts. Bytecode of Python
3.14 contains slices, which only its own format can hold."""
_UNCHECKED = (1).to_bytes(4, "little")
"""Flags of bytecode that has its source's hash, and is not compared with it by default."""

logger = logging.getLogger(__name__)


def install(launcher: Path) -> None:
    """Write the launcher, and the library and torchrun's plug-in to the folder that the launcher
    puts on the workers' path. Raises OSError.
    """
    build_zipapp(launcher)
    folder = launcher.parent / settings.LIBRARY
    packages = Path(elasticjob.__file__).parents[1]
    files = {f"{_ABOUT}/{name}": text.encode() for name, text in DIST_INFO.items()}
    for package in PACKAGES:
        for path in (packages / package).rglob("*.py"):
            files[path.relative_to(packages).as_posix()] = path.read_bytes()
    # Only packages in a record are preloaded for warm starts.
    record = f"{_ABOUT}/RECORD"
    files[record] = "".join(f"{name},,\n" for name in sorted([*files, record])).encode()
    for name, content in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        _write_file(target, content)


def build_zipapp(target: Path) -> Path:
    """Write the launcher to `target` atomically, log its size, and return `target`.

    It contains the modules as source and as bytecode of this Python. Another Python ignores the
    bytecode, and compiles the source at each start.
    """
    source = Path(settings.__file__).parent
    files = {"__main__.py": MAIN.encode()}
    for path in source.rglob("*.py"):
        name = f"{PACKAGE}/{path.relative_to(source)}"
        files[name] = path.read_bytes()
        files[f"{name}c"] = _bytecode(path, files[name], f"{FILE}/{name}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with io.BytesIO(SHEBANG) as packed:
        packed.seek(0, io.SEEK_END)
        _write_zip(packed, files)
        _write_file(target, packed.getvalue(), 0o755)
    logger.info("launcher written: path=%s bytes=%d", target, target.stat().st_size)
    return target


def _bytecode(path: Path, source: bytes, shown: str) -> bytes:
    """Return a module's bytecode, in which the file name is `shown`.

    It depends neither on this Python's level of optimization nor on the folder of the installation.
    """
    code: CodeType | None
    if sys.flags.optimize:
        code = compile(source, shown, "exec", dont_inherit=True, optimize=0)
    else:
        code = SourceFileLoader(path.stem, str(path)).get_code(path.stem)  # cached, if installed so
    assert code is not None  # a loader of source always has some
    content = marshal.dumps(_renamed(code, shown), _MARSHAL_VERSION)
    return MAGIC_NUMBER + _UNCHECKED + source_hash(source) + content


def _renamed(code: CodeType, shown: str) -> CodeType:
    """Return the code, and that of its functions and classes, with another file name."""
    constants = (
        _renamed(constant, shown) if isinstance(constant, CodeType) else constant
        for constant in code.co_consts
    )
    return code.replace(co_filename=shown, co_consts=tuple(constants))


def _write_file(target: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file atomically: readers see the old or the new content, never a part."""
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as unfinished:
        draft = Path(unfinished.name)
    try:
        draft.write_bytes(content)
        draft.chmod(mode)
        draft.replace(target)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def _write_zip(file: io.BytesIO, files: dict[str, bytes]) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, TIMESTAMP)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, files[name])
