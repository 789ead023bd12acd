"""Snapshots in a folder in storage that all nodes share. Each file holds one part.

The format of a file is that of `part_files`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from elasticjob.train.snapshots.core.agreement import (
    SHARED,
    Part,
    Version,
    complete_versions,
    expired,
)
from elasticjob.train.snapshots.memory.part_files import (
    Body,
    CorruptSnapshot,
    NewerFormat,
    committed,
    fill_in_slices,
    no_report,
    opened,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = logging.getLogger("elasticjob.train")

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO)
"""Errors of a path that names no file with a part."""
_VERSION = re.compile(r"step-(\d{12,})-([0-9a-f]{16})")
OWNER = ".elasticjob-owner"
"""Name of the file with the job to which the folder belongs."""
_OWNER_FORMAT = "elasticjob-owner 1"
"""First line of that file; namespace and name of the job are the second one."""
_OWNER_BYTES = 1000
_OWNER_MODE = 0o644
"""Each user who can list the folder can see to which job it belongs."""
_PART = re.compile(r"shared|rank-\d+")
"""Names of the files with a part. A file gets its name once its content and record are on disk."""


class Stored(NamedTuple):
    """Content of a storage folder.

    Args:
        parts: all committed parts that can be read.
        unreadable: error of each version with a file that cannot be read.
        damaged: for each version the errors of files without a valid record, of parts that were
            committed, and are damaged or of a newer format.
        owner: job to which the folder belongs; empty if it is unknown.
        at: time of the newest complete version in seconds since 1970; 0 without one.
    """

    parts: dict[Part, Path]
    unreadable: dict[Version, OSError]
    damaged: dict[Version, list[CorruptSnapshot]]
    owner: str
    at: float = 0.0


class _Files(NamedTuple):
    """Files of one version: committed parts, errors of files without one, error of a read."""

    parts: dict[Part, Path]
    damaged: list[CorruptSnapshot]
    error: OSError | None


class OtherOwner(OSError):
    """Storage of another job."""

    def __init__(self, owner: str, job: str) -> None:
        super().__init__(errno.EPERM, other_owner(owner, job))


class StorageFolder:
    """Snapshots in a folder that all nodes share: one folder for each version, one file a part.

    `moved` of a method is called whenever one of its calls to the file system has returned.

    Args:
        job: job that writes to the folder, which then belongs to it; empty if it is unknown.

    Attributes:
        folder: absolute path of the folder; a change of the working directory does not matter.
        place: the same, without symbolic links once it has been read.
    """

    _has_warned = False

    def __init__(self, folder: Path, job: str = "") -> None:
        self.folder = Path(os.getcwd(), folder)  # noqa: PTH109
        self.place = os.path.abspath(self.folder)  # noqa: PTH100
        self.job = job

    def scan(self, moved: Callable[[], None] = no_report) -> Stored:
        """Return the content. Raises OSError if the folder exists and cannot be read.

        The owner is unknown if its file cannot be read: `claim` raises that error.
        """
        self.place = os.path.realpath(self.folder)
        found: dict[Part, Path] = {}
        unreadable: dict[Version, OSError] = {}
        damaged: dict[Version, list[CorruptSnapshot]] = {}
        for version in self._versions():
            files = self._files_of(version, moved)
            found.update(files.parts)
            if files.damaged:
                damaged[version] = files.damaged
            if files.error is not None:
                unreadable[version] = files.error
        newest = complete_versions(found)[-1:]
        paths = [path for part, path in found.items() if part.version in newest]
        at = max(map(_changed_at, paths), default=0.0)
        owner = None
        with contextlib.suppress(OSError):
            owner = self._owner()
        return Stored(found, unreadable, damaged, owner or "", at)

    def claim(self, is_first: bool) -> None:
        """Check that the folder belongs to this job, or to none.

        Args:
            is_first: let it belong to this job if it belongs to none. One rank does so.

        Raises:
            OtherOwner: it belongs to another job.
            OSError: the file with the owner cannot be read or written.
        """
        if not self.job:
            return
        owner = self._owner()
        if owner is None and is_first:
            self.folder.mkdir(parents=True, exist_ok=True)
            owner = self._claimed()
        if owner == "" and is_first and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s is not a file of ElasticJob, and is not overwritten: move it, so that the "
                "snapshots belong to this job. Until then another job can remove them",
                self.folder / OWNER,
            )
        if owner and owner != self.job:
            raise OtherOwner(owner, self.job)

    def _claimed(self) -> str | None:
        """Write the file with the owner, unless there is one; return the owner.

        Of two jobs that begin together the first one gets the folder; the later one on a file
        system without hard links.
        """
        path = self.folder / OWNER
        draft = path.with_name(f"{OWNER}.{os.urandom(4).hex()}")
        try:
            with opened(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, _OWNER_MODE) as fd:
                os.pwrite(fd, f"{_OWNER_FORMAT}\n{self.job}\n".encode(), 0)
                os.fsync(fd)
            try:
                os.link(draft, path)
            except FileExistsError:
                pass
            except OSError:
                if self._owner() is None:
                    os.replace(draft, path)  # noqa: PTH105
        finally:
            with contextlib.suppress(OSError):
                os.unlink(draft)  # noqa: PTH108
        return self._owner()

    def _owner(self) -> str | None:
        """Return the job to which the folder belongs; None without the file that names it.

        Empty if something else has the name of that file.
        """
        try:
            with opened(self.folder / OWNER, os.O_RDONLY | os.O_NONBLOCK) as fd:
                text = os.pread(fd, _OWNER_BYTES, 0).decode(errors="replace")
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return None
            if error.errno in (*_ABSENT, errno.ESPIPE):
                return ""
            raise
        first, _, job = text.partition("\n")
        return job.strip() if first == _OWNER_FORMAT else ""

    def parts(self) -> dict[Part, Path]:
        """Return all committed parts that can be read. Raises OSError as `scan` does."""
        return self.scan().parts

    def is_complete(self, version: Version) -> bool:
        """Return True if all parts of a version are committed and can be read."""
        return bool(complete_versions(self._files_of(version).parts))

    def shared_part(self, version: Version) -> Part | None:
        """Return the committed shared part of a version, which is looked up by its name.

        None if there is none. Raises OSError if it cannot be read. A network file system may have
        an older list of the folder.
        """
        try:
            return committed(self._folder(version) / "shared")
        except CorruptSnapshot:
            return None
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            return None

    def _files_of(self, version: Version, moved: Callable[[], None] = no_report) -> _Files:
        """Return the files of a version.

        A part that no rank has ended, or another node has removed, is not an error.
        """
        found: dict[Part, Path] = {}
        damaged: list[CorruptSnapshot] = []
        errors: list[OSError] = []
        paths: list[Path] = []
        try:
            folder = self._folder(version)
            paths = sorted(path for path in folder.iterdir() if path.name[:1] != ".")
        except OSError as error:
            errors.append(error)
        for path in paths:
            try:
                part = committed(path)
                if part.version != version:
                    raise CorruptSnapshot(f"{path} holds a part of step {part.version.step}")
                found[part] = path
            except OSError as error:
                errors.append(error)
            except CorruptSnapshot as error:
                if isinstance(error, NewerFormat) or _PART.fullmatch(path.name):
                    damaged.append(error)
            finally:
                moved()
        unreadable = next((each for each in errors if each.errno not in _ABSENT), None)
        return _Files(found, damaged, unreadable)

    def store(self, part: Part, body: Body, moved: Callable[[], None] = no_report) -> None:
        """Write a part to a new file and rename it, once its content is on disk."""
        folder = self._folder(part.version)
        self.folder.mkdir(parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True)
        path = folder / ("shared" if part.rank == SHARED else f"rank-{part.rank}")
        draft = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
        try:
            with opened(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
                fill_in_slices(fd, part, body, moved)
                os.fsync(fd)
            moved()
            os.replace(draft, path)  # noqa: PTH105
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(draft)  # noqa: PTH108
            raise
        # The names of the file and of its folder. The folder of the job may be a symbolic link.
        for each in (folder, self.folder.resolve()):
            with opened(each, os.O_RDONLY | os.O_DIRECTORY) as fd:
                os.fsync(fd)
            moved()

    def remove_expired(
        self, keep: int, writing: Version, moved: Callable[[], None] = no_report
    ) -> None:
        """Remove the versions that `expired` names, if they can be read and are of this format."""
        versions = list(self._versions())
        found = self.scan(moved)
        kept = set(found.unreadable)
        for version, errors in found.damaged.items():
            if any(isinstance(error, NewerFormat) for error in errors):
                kept.add(version)
        for version in expired(found.parts, keep, writing, versions, found.damaged):
            if version not in kept:
                shutil.rmtree(self._folder(version), ignore_errors=True)
                moved()

    def _folder(self, version: Version) -> Path:
        return self.folder / f"step-{version.step:012d}-{version.gang:016x}"

    def _versions(self) -> Iterator[Version]:
        try:
            paths = sorted(self.folder.iterdir())
        except FileNotFoundError:
            return
        for path in paths:
            match = _VERSION.fullmatch(path.name)
            if match is not None:
                yield Version(int(match[1]), int(match[2], 16))


def other_owner(owner: str, job: str) -> str:
    """Return the error of a folder that belongs to another job."""
    return (
        f"the snapshots are those of job {owner}, and this is job {job}: give Snapshots another "
        f'folder, or remove the file "{OWNER}" from this one to let this job continue from it'
    )


def _changed_at(path: Path) -> float:
    """Return the time of the last change of a file; 0 if there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
