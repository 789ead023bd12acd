"""Log formats of the operator: one line per message, as text or JSON.

Messages about a job begin with `job <namespace>/<name>: `; JSON has the job as a field.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import Any

_JOB = re.compile(r"job ([^\s/]+/[^\s:]+): ")
# Their lower levels describe the framework's internals, or repeat the operator's own messages.
_QUIET = {"kopf": logging.WARNING, "asyncio": logging.WARNING, "kubernetes": logging.WARNING}


def configure(log_format: str, level: str) -> None:
    """Set up logging to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    for name, least in _QUIET.items():
        logging.getLogger(name).setLevel(max(least, logging.getLogger().level))


class TextFormatter(logging.Formatter):
    """Text format: `2026-01-31T12:00:00.123Z WARNING reconcile job ns/name: text`."""

    def format(self, record: logging.LogRecord) -> str:
        text = f"{_moment(record)} {record.levelname:7} {_source(record)} {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class JsonFormatter(logging.Formatter):
    """JSON format: one object per line, with `job` as the first field of messages about a job."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        fields: dict[str, Any] = {}
        if job := _JOB.match(message):
            fields["job"] = job[1]
            message = message[job.end() :]
        fields |= {
            "time": _moment(record),
            "level": record.levelname.lower(),
            "source": _source(record),
            "message": message,
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def _moment(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03}Z"


def _source(record: logging.LogRecord) -> str:
    return record.name.removeprefix("elasticjob_operator.")
