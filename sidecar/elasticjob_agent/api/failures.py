"""How a worker's failure and a signal to the agent look to users of the API."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from elasticjob_agent.core.classify import SIGNALS
from elasticjob_agent.core.evidence import from_error_file
from elasticjob_agent.errorfile import read_error_file

NOT_AVAILABLE = "<N/A>"
_NO_ERROR_FILE: Mapping[str, Any] = {"message": "<NONE>"}


class SignalException(Exception):
    """The agent was told to end by a signal, and has ended its workers."""

    def __init__(self, msg: str, sigval: signal.Signals) -> None:
        super().__init__(msg)
        self.sigval = sigval


@dataclass
class ProcessFailure:
    """A worker's failure, with what it left in its error file.

    Args:
        exitcode: as Python has it: a signal is negative.
        error_file: its path; "<N/A>" when there is none that can be read.
        error_file_data: its content.
        message: what it says; else what the exit code says.
        timestamp: Unix seconds of the failure; without an error file, of now.
    """

    local_rank: int
    pid: int
    exitcode: int
    error_file: str
    error_file_data: dict[str, Any] = field(init=False)
    message: Any = field(init=False)
    timestamp: int = field(init=False)

    def __post_init__(self) -> None:
        """A file that cannot be read as a report counts as none: user code wrote it."""
        raw = read_error_file(Path(self.error_file)) if self.error_file else None
        account = None if raw is None else from_error_file(raw)
        if raw is None or account is None:
            self.error_file = NOT_AVAILABLE
            self.error_file_data = dict(_NO_ERROR_FILE)
            self.timestamp = int(time.time())
            self.message = self._from_exit_code()
            return
        self.error_file_data = json.loads(raw.decode(errors="replace"))
        self.message = self.error_file_data["message"]
        at_ms = account.at_ms
        self.timestamp = int(time.time()) if at_ms is None else at_ms // 1000

    @property
    def has_report(self) -> bool:
        """Whether the worker left an error file."""
        return self.error_file != NOT_AVAILABLE

    def _from_exit_code(self) -> str:
        if self.exitcode < 0:
            return f"process {self.pid} was killed by {self.signal_name()}"
        return f"process {self.pid} ended with exit code {self.exitcode} and left no error file"

    def signal_name(self) -> str:
        """The signal that killed it, or "<N/A>"."""
        return SIGNALS.get(-self.exitcode, NOT_AVAILABLE) if self.exitcode < 0 else NOT_AVAILABLE

    def timestamp_isoformat(self) -> str:
        """The local time of the failure, as YYYY-MM-DD_HH:MM:SS."""
        return datetime.fromtimestamp(self.timestamp).isoformat(sep="_")
