"""Log formats of the operator: one line per message, as text or JSON.

A message about a job is logged with `extra=of_job(key)`: text shows the job before the message,
JSON as a field. Messages quote users and the programs in their pods, and are therefore made
printable: no message starts a line, moves a cursor or reorders text.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from elasticjob_rendezvous.protocol.text import one_line, printable

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


def of_job(key: object) -> dict[str, str]:
    """Return the `extra` of a message about the job `<namespace>/<name>`."""
    return {"job": str(key)}


class TextFormatter(logging.Formatter):
    """Text format: `2026-01-31T12:00:00.123Z WARNING reconcile job ns/name: text`."""

    def format(self, record: logging.LogRecord) -> str:
        job = _job(record)
        message = one_line(f"job {job}: {record.getMessage()}" if job else record.getMessage())
        text = f"{_moment(record)} {record.levelname:7} {_source(record)} {message}"
        return f"{text}\n{_exception(self, record)}" if record.exc_info else text


class JsonFormatter(logging.Formatter):
    """JSON format: one object per line, with `job` as the first field of messages about a job."""

    def format(self, record: logging.LogRecord) -> str:
        job = _job(record)
        fields: dict[str, Any] = {"job": job} if job else {}
        fields |= {
            "time": _moment(record),
            "level": record.levelname.lower(),
            "source": _source(record),
            "message": printable(record.getMessage()),
        }
        if record.exc_info:
            fields["exception"] = _exception(self, record)
        return json.dumps(fields, ensure_ascii=False)


def _exception(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """Return the traceback, of which only the first line is not indented."""
    assert record.exc_info is not None
    text = printable(formatter.formatException(record.exc_info))
    return text.replace("\n", "\n  ")


def _job(record: logging.LogRecord) -> str:
    return str(getattr(record, "job", ""))


def _moment(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03}Z"


def _source(record: logging.LogRecord) -> str:
    return record.name.removeprefix("elasticjob_operator.")
