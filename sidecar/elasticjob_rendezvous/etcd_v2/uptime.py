"""How long etcd has had the leader that it has: who has just come knows of no outage before."""

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
    """For how long the server that answers has known this leader; infinity where it does not say.

    Small after every outage of etcd, as a cluster that was away elects its leader anew.
    """
    url = f"{client.base_uri}/v2/stats/self"  # python-etcd's own warns that it has no cluster id
    try:
        found = client.http.request("GET", url, timeout=client.read_timeout, retries=False)
        return duration_seconds(json.loads(found.data)["leaderInfo"]["uptime"])
    except (urllib3.exceptions.HTTPError, OSError, LookupError, TypeError, ValueError) as error:
        log.info("how long etcd has its leader is not known: %r", error)
        return math.inf


def duration_seconds(text: str) -> float:
    """A duration as Go prints it, such as 1m2.5s. Raises ValueError."""
    parts = _PART.findall(text)
    if "".join(number + unit for number, unit in parts) != text or not parts:
        raise ValueError(f"a duration must be like 1m2.5s, not {echoed(text)}")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)
