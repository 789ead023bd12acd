"""Script of the dashboard's pages in a real browser: changes, the reader's place, lost servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import pytest

from elasticjob_cli.dashboard.server import LOOPBACK_NAMES, Denied, Request, Server
from elasticjob_cli.dashboard.sources import Details, Jobs, Logs, Source, Unavailable
from elasticjob_cli.log_lines import LogOptions
from tests.integration.browser import Browser, browser

COUNT = "Number(document.querySelector('#live').dataset.count || 0)"
LIVE = "document.querySelector('#live').textContent"
FOCUSED = "document.activeElement.getAttribute('href')"
PAUSE = 5
"""Seconds in which the page would make at least two requests."""


class Changing:
    """Source with one job, which changes during the test."""

    title = "a test"

    def __init__(self) -> None:
        self.message = ""
        self.refusal: Exception | None = None
        self.requests = 0

    def open(self, request: Request) -> tuple[Source, str]:
        self.requests += 1
        if isinstance(self.refusal, Denied):
            raise self.refusal
        return self, request.path.removeprefix("/")

    def jobs(self, namespace: str | None) -> Jobs:
        return Jobs([])

    def details(self, namespace: str, name: str) -> Details:
        if self.refusal:
            raise self.refusal
        failure = {"class": "UserError", "message": self.message}
        status: dict[str, Any] = {"members": [{"pod": "demo-0"}, {"pod": "demo-1"}]}
        status |= {"firstFailure": failure} if self.message else {}
        return Details({"metadata": {"name": name}, "status": status}, [], ["It trains."])

    def logs(self, namespace: str, name: str, options: LogOptions, document: Any = None) -> Logs:
        return Logs([], [])


@contextmanager
def serving(source: Changing, port: int = 0) -> Iterator[Server]:
    with Server(("127.0.0.1", port), source.open, LOOPBACK_NAMES) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


def refreshed(tab: Browser, times: int = 2) -> None:
    """Wait for a number of refreshes."""
    tab.until(f"{COUNT} >= {tab.evaluate(COUNT) + times}")


def test_changes_keep_the_focus_the_selection_and_equal_parts(tab: Browser) -> None:
    source = Changing()
    with serving(source) as server:
        tab.open(f"http://127.0.0.1:{server.port}/jobs/team/demo/")
        tab.evaluate("document.querySelector('#members tr:last-child a').focus()")
        assert tab.evaluate(FOCUSED) == "logs/?pod=demo-1"
        source.message = "first message"
        tab.until("!!document.querySelector('#failures')")
        tab.evaluate("window.kept = document.querySelector('#members')")
        assert tab.evaluate(FOCUSED) == "logs/?pod=demo-1"
        refreshed(tab)
        assert tab.evaluate("window.kept === document.querySelector('#members')")

        tab.evaluate(
            "getSelection().setBaseAndExtent(document.querySelector('h1'), 0, "
            "document.querySelector('#logs h2'), 1)"
        )
        source.message = "second message"
        refreshed(tab)
        assert "first message" in tab.text()
        source.message = ""
        refreshed(tab)
        assert "first message" in tab.text()
        tab.evaluate("getSelection().removeAllRanges()")
        tab.until("!document.querySelector('#failures')")
        assert tab.said == []


def test_refusals_are_shown_and_followed_until_a_token_is_refused(tab: Browser) -> None:
    source = Changing()
    with serving(source) as server:
        tab.open(f"http://127.0.0.1:{server.port}/jobs/team/demo/")
        source.refusal = Unavailable(HTTPStatus.BAD_GATEWAY, "no cluster")
        tab.until(f"{LIVE} === '502 Bad Gateway; shown is an earlier state'")
        assert "It trains." in tab.text()
        source.refusal = None
        tab.until(f"{LIVE} === 'live'")
        source.refusal = Denied(HTTPStatus.UNAUTHORIZED, "a token is required")
        tab.until(f"{LIVE}.startsWith('401 Unauthorized; shown is an earlier state; reload')")
        asked = source.requests
        time.sleep(PAUSE)
        assert source.requests == asked
    tab.said.clear()  # the browser's own messages about the refusals


def test_port_of_an_ended_server_is_not_asked_again(tab: Browser) -> None:
    source = Changing()
    with serving(source) as server:
        port = server.port
        tab.open(f"http://127.0.0.1:{port}/jobs/team/demo/")
        refreshed(tab, 1)
    tab.until(f"{LIVE}.startsWith('no connection; shown is an earlier state; reload the page')")
    later = Changing()
    with serving(later, port):
        time.sleep(PAUSE)
    assert later.requests == 0
    tab.said.clear()
