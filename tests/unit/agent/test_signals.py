"""Signals at which an agent ends its workers and leaves."""

from __future__ import annotations

import logging
from signal import SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, Signals

import pytest

from elasticjob_agent.settings import signals_to_handle
from elasticjob_agent.signals import handleable_signals

VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"


@pytest.mark.parametrize(
    ("names", "expected", "warned"),
    [
        (None, [SIGTERM, SIGINT, SIGHUP, SIGQUIT], 0),
        ("SIGUSR1", [SIGUSR1], 0),
        (" SIGUSR1 ,SIGUSR2", [SIGUSR1, SIGUSR2], 0),
        ("SIGTERM,SIGNO,SIGKILL,SIG_IGN,sigint", [SIGTERM], 4),
        ("SIGUSR1,SIGTERM,SIGUSR1", [SIGUSR1, SIGTERM], 0),
        ("", [], 1),
    ],
)
def test_handled_signals_come_from_environment_variable(
    names: str | None,
    expected: list[Signals],
    warned: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if names is not None:
        monkeypatch.setenv(VARIABLE, names)
    with caplog.at_level(logging.WARNING, "elasticjob.agent"):
        logging.getLogger("elasticjob").propagate = True
        assert handleable_signals(signals_to_handle()) == expected
    assert len(caplog.records) == warned
