"""Uptime of etcd's leader, by which a new member detects an outage before its start."""

from __future__ import annotations

import json
import logging
import math
import re
from typing import Any

import urllib3

from elasticjob_rendezvous.core.typed import echoed

log = logging.getLogger(__name__)

_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "µs": 1e-6, "us": 1e-6, "ns": 1e-9}
_PART = re.compile(r"(\d+(?:\.\d+)?)(h|ms|µs|us|ns|m|s)")


def leader_seconds(client: Any) -> float:
    """Return the seconds since the server learned of its leader; infinity if unknown.

    Small after every outage of etcd, since the cluster then elects a new leader.
    """
    url = f"{client.base_uri}/v2/stats/self"  # python-etcd's method logs a warning: no cluster id
    try:
        found = client.http.request("GET", url, timeout=client.read_timeout, retries=False)
        return duration_seconds(json.loads(found.data)["leaderInfo"]["uptime"])
    except (urllib3.exceptions.HTTPError, OSError, LookupError, TypeError, ValueError) as error:
        log.info("cannot read the uptime of etcd's leader: %r", error)
        return math.inf


def duration_seconds(text: str) -> float:
    """Parse a duration in Go's format, such as 1m2.5s. Raises ValueError."""
    parts = _PART.findall(text)
    if "".join(number + unit for number, unit in parts) != text or not parts:
        raise ValueError(f"a duration must be like 1m2.5s, not {echoed(text)}")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)
