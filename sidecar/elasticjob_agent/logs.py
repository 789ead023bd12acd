"""Folder of the workers' logs: `round_<n>/<local_rank>/{stdout.log,stderr.log,error.json}`.

The worker runtime writes the streams and the workers write their error files. This module creates
the folders, removes old rounds, and stores the base rank of a round for a restarted agent. A full
or read-only disk never stops training: `prepare` raises, and the round runs without files.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from elasticjob_agent.errorfile import read_error_files
from elasticjob_agent.settings import LogSettings

_ROUND = re.compile(r"round_(\d+)")
_BASE_RANK = "base_rank"
_OPEN_TO_ALL = 0o1777


class RunLogs:
    """Log folder of one agent."""

    def __init__(self, settings: LogSettings) -> None:
        self._folder = settings.folder
        self._keep = settings.keep_rounds
        self._shared = settings.shared
        self._output = settings.output

    def memory_file(self) -> str:
        """Return the path where the launcher keeps the modules to preload; "" for none."""
        if self._folder is None or not self._output:
            return ""
        return str(self._folder / "preload.json")

    def worker(self, round_: int, local_rank: int) -> Path | None:
        """Return the folder of one worker's output; None if output is not kept."""
        return self._worker(round_, local_rank) if self._output else None

    def error_file(self, round_: int, local_rank: int) -> Path | None:
        folder = self._worker(round_, local_rank)
        return None if folder is None else folder / "error.json"

    def prepare(self, round_: int, slots: int, base_rank: int) -> None:
        """Create the folders of a round and remove the oldest rounds. Raises OSError."""
        if self._folder is None:
            return
        for local_rank in range(slots):
            folder = self._round(round_) / str(local_rank)
            folder.mkdir(parents=True, exist_ok=True)
            # An earlier run of the same name may have left one.
            (folder / "error.json").unlink(missing_ok=True)
            if self._shared:
                folder.chmod(_OPEN_TO_ALL)
        (self._round(round_) / _BASE_RANK).write_text(f"{base_rank}\n")
        self._prune(round_)

    def reports(self, round_: int, slots: int) -> Mapping[int, bytes]:
        """Return the contents of a round's error files, by local rank."""
        paths = {rank: self.error_file(round_, rank) for rank in range(slots)}
        return read_error_files({rank: path for rank, path in paths.items() if path is not None})

    def base_rank(self, round_: int) -> int | None:
        """Return the base rank that `prepare` stored for a round; None if there is none."""
        if self._folder is None:
            return None
        try:
            return int((self._round(round_) / _BASE_RANK).read_text())
        except (OSError, ValueError):
            return None

    def _worker(self, round_: int, local_rank: int) -> Path | None:
        return None if self._folder is None else self._round(round_) / str(local_rank)

    def _round(self, round_: int) -> Path:
        assert self._folder is not None
        return self._folder / f"round_{round_}"

    def _prune(self, current: int) -> None:
        assert self._folder is not None
        numbers = sorted(
            int(match[1])
            for entry in self._folder.iterdir()
            if (match := _ROUND.fullmatch(entry.name)) and not entry.is_symlink()
        )
        for number in numbers[: -self._keep]:
            if number != current:
                shutil.rmtree(self._round(number), ignore_errors=True)
