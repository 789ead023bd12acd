"""Failure of a worker and signal to the agent, in the types of torch's API."""

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
    """A signal (`sigval`) asked the agent to end, and the agent has ended its workers."""

    def __init__(self, msg: str, sigval: signal.Signals) -> None:
        super().__init__(msg)
        self.sigval = sigval


@dataclass
class ProcessFailure:
    """Failure of a worker, with the content of its error file.

    Args:
        local_rank: local rank of the worker.
        pid: process id of the worker.
        exitcode: exit code; negative signal number if a signal killed the worker.
        error_file: path of the error file; "<N/A>" if there is no readable one.
        error_file_data: content of the error file.
        message: message of the error file; else a description of the exit code.
        timestamp: time of the failure in Unix seconds; the current time without an error file.
    """

    local_rank: int
    pid: int
    exitcode: int
    error_file: str
    error_file_data: dict[str, Any] = field(init=False)
    message: Any = field(init=False)
    timestamp: int = field(init=False)

    def __post_init__(self) -> None:
        """Read the error file. A malformed one counts as missing, since user code writes it."""
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
        """True if the worker left a valid error file."""
        return self.error_file != NOT_AVAILABLE

    def _from_exit_code(self) -> str:
        if self.exitcode < 0:
            return f"process {self.pid} was killed by {self.signal_name()}"
        return f"process {self.pid} ended with exit code {self.exitcode} and left no error file"

    def signal_name(self) -> str:
        """Return the name of the signal that killed the worker, or "<N/A>"."""
        return SIGNALS.get(-self.exitcode, NOT_AVAILABLE) if self.exitcode < 0 else NOT_AVAILABLE

    def timestamp_isoformat(self) -> str:
        """Return the local time of the failure, as YYYY-MM-DD_HH:MM:SS."""
        return datetime.fromtimestamp(self.timestamp).isoformat(sep="_")
