"""How the operator writes its log: one line a message, as text or JSON, the job first.

Messages about a job begin with `job <namespace>/<name>: `; the JSON form has that as a field.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import Any

_JOB = re.compile(r"job ([^\s/]+/[^\s:]+): ")
# Their words are of the framework's own inner life, or repeat what is said here.
_QUIET = {"kopf": logging.WARNING, "asyncio": logging.WARNING, "kubernetes": logging.WARNING}


def configure(log_format: str, level: str) -> None:
    """Set up the process's log on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    for name, least in _QUIET.items():
        logging.getLogger(name).setLevel(max(least, logging.getLogger().level))


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z WARNING reconcile job ns/name: text`."""

    def format(self, record: logging.LogRecord) -> str:
        text = f"{_moment(record)} {record.levelname:7} {_source(record)} {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class JsonFormatter(logging.Formatter):
    """The same as one JSON object a line; `job` is its first field where there is one."""

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
