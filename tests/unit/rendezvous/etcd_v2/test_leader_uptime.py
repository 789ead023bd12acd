"""Age of etcd's current leader term."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from elasticjob_rendezvous.etcd_v2.steps import duration_seconds, leader_seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2.600157938s", 2.600157938),
        ("1m2.5s", 62.5),
        ("3h0m1.25s", 10801.25),
        ("250.5ms", 0.2505),
        ("17µs", 17e-6),
        ("0s", 0.0),
    ],
)
def test_duration_in_go_format(text: str, seconds: float) -> None:
    assert duration_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "5", "1m 2s", "-1s", "1x2s"])
def test_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"like 1m2\.5s"):
        duration_seconds(text)


@pytest.mark.parametrize("answer", [b"{}", b'{"leaderInfo": {}}', b"404 page not found", b"[]"])
def test_server_without_uptime_has_had_no_outage(answer: bytes) -> None:
    http = SimpleNamespace(request=lambda *_, **__: SimpleNamespace(data=answer))
    client = SimpleNamespace(base_uri="http://etcd:2379", http=http, read_timeout=1)
    assert leader_seconds(client) == math.inf
