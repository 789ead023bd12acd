"""Pages of the dashboard: escaping of foreign text, damaged documents, contents."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from html.parser import HTMLParser
from typing import Any

import pytest

from elasticjob_cli.dashboard import assets
from elasticjob_cli.dashboard.markup import Markup, tag
from elasticjob_cli.dashboard.pages import (
    error_page,
    forbidden_page,
    job_page,
    jobs_page,
    logs_page,
)
from elasticjob_cli.dashboard.sources import Details, Jobs, Logs
from elasticjob_cli.log_lines import Line, LogOptions

NOW = datetime(2026, 11, 24, 5, 1, tzinfo=UTC)
HOSTILE = "\"'><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\x1b[31m\u202e"
NO_LOGS = Logs((), ())


class Reader(HTMLParser):
    """Elements and attributes of a page as a browser reads them, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()
        self.attributes: list[tuple[str, str | None]] = []
        self.words = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.words += data


def document(text: str = "demo", **status: Any) -> dict[str, Any]:
    """Return a job with one text in each of its foreign fields."""
    failure = {"round": 1, "pod": text, "rank": 1, "exitCode": 1, "class": text}
    failure |= {"nodeName": text, "message": text, "traceback": f"Traceback\n  {text}"}
    rounds = [
        {"round": 1, "cause": "start", "nodes": 2, "finalTime": "2026-11-24T05:00:00Z"},
        {
            "round": 2,
            "cause": text,
            "members": [text],
            "reason": text,
            "detail": text,
            "coldReason": text,
            "nodes": 1,
            "finalTime": "2026-11-24T05:00:30Z",
            "recoveryMs": 400,
            "detectMs": 62,
            "startMs": 338,
            "lostSteps": 12,
        },
    ]
    members = [{"pod": text, "state": text, "round": 2, "rank": 0, "step": 41, "nodeName": text}]
    members += [{"pod": "demo-1", "start": text, "coldReason": text, "state": "waiting"}]
    condition = {"type": "RendezvousUnavailable", "status": "True", "reason": text}
    return {
        "metadata": {"name": text, "namespace": text, "creationTimestamp": "2026-11-24T05:00:00Z"},
        "spec": {"minNodes": 1, "maxNodes": 4, "maxRestarts": 3},
        "status": {
            "phase": text,
            "rounds": rounds,
            "members": members,
            "firstFailure": failure,
            "conditions": [{**condition, "message": text}],
        }
        | status,
    }


def shown(text: str, **status: Any) -> str:
    found = document(text, **status)
    lines = [Line("2026-11-24T05:00:00.0Z", text, text), Line("", "", text)]
    details = Details(found, found["status"]["rounds"], [text])
    return job_page(details, Logs([text], lines, text), text, NOW)


def pages(text: str) -> dict[str, str]:
    """Return each page with a text in every place of foreign text."""
    lines = [Line("2026-11-24T05:00:00.0Z", text, text), Line("", "", text)]
    options = LogOptions(pod=text, tail=5)
    return {
        "job": shown(text),
        "jobs": jobs_page(Jobs([document(text)], [text]), text, None, NOW),
        "jobs of a namespace": jobs_page(Jobs([]), text, text, NOW),
        "logs": logs_page(text, text, Logs([text], lines, text), options, text),
        "forbidden": forbidden_page(text, text),
        "error": error_page(404, "Not Found", text, 2, text),
    }


@pytest.mark.parametrize("name", list(pages("")))
def test_foreign_text_adds_no_element_no_attribute_and_no_control_character(name: str) -> None:
    hostile, plain = pages(HOSTILE)[name], pages("plain")[name]
    assert Reader(hostile).elements == Reader(plain).elements
    names = sorted(key for key, _ in Reader(hostile).attributes)
    assert names == sorted(key for key, _ in Reader(plain).attributes)
    assert not any(key.startswith("on") or key == "style" for key in names)
    assert "\x1b" not in hostile
    assert "\u202e" not in hostile
    assert "alert(1)" in Reader(hostile).words


@pytest.mark.parametrize("name", list(pages("")))
def test_pages_load_nothing_from_elsewhere_and_have_no_inline_script(name: str) -> None:
    found = pages("demo")[name]
    addresses = [text for key, text in Reader(found).attributes if key in ("src", "href", "action")]
    assert all(text is not None and "//" not in text and ":" not in text for text in addresses)
    assert Reader(found).elements["script"] == (name != "error")
    assert Reader(found).elements["style"] == 0
    assert "://" not in assets.STYLE + assets.SCRIPT
    assert "innerHTML =" not in assets.SCRIPT


def test_job_page_has_the_goodput_of_a_job_with_snapshots() -> None:
    assert "Goodput" not in shown("demo")
    assert "Goodput97 %" in Reader(shown("demo", snapshots={"goodputPercent": 97})).words


def test_text_is_escaped_and_markup_is_not() -> None:
    assert tag("p", "a<b", tag("b", "c"), None, title='"x"') == (
        '<p title="&quot;x&quot;">a&lt;b<b>c</b></p>'
    )
    assert tag("input", required=True, value=None) == "<input required>"
    assert isinstance(tag("p"), Markup)


def test_page_of_a_job_has_causes_costs_failures_members_and_logs() -> None:
    words = Reader(shown("demo", phase="Running")).words
    for text in ("demo: demo", "0.4 s", "62 ms", "12", "First failure: demo", "exit code 1"):
        assert text in words
    assert "Traceback\n  demo" in words
    assert "12 steps lost" in words
    assert '<a href="logs/?pod=demo-1">demo-1</a>' in shown("demo")


def test_same_first_and_last_failure_is_shown_once() -> None:
    failure = document()["status"]["firstFailure"]
    assert "Last failure" not in shown("demo", lastFailure=failure)
    assert "Last failure" in shown("demo", lastFailure={**failure, "round": 7})


@pytest.mark.parametrize("damage", [None, 7, "text", [], [None, 3, "x", []], {"a": []}])
def test_damaged_documents_have_pages(damage: Any) -> None:
    fields = ("rounds", "members", "firstFailure", "conditions", "phase", "rendezvous", "nodes")
    for field in fields:
        found = document(**{field: damage})
        details = Details(found, [damage], [])
        assert "<!doctype html>" in job_page(details, NO_LOGS, "here", NOW)
        assert "<!doctype html>" in jobs_page(Jobs([found, damage]), "here", None, NOW)
    for part in ("metadata", "spec", "status"):
        found = {**document(), part: damage}
        assert "<!doctype html>" in job_page(Details(found, [], []), NO_LOGS, "here", NOW)


def test_unfinished_jobs_come_first() -> None:
    jobs = [document(phase=phase) for phase in ("Succeeded", "Running")]
    jobs[0]["metadata"]["name"], jobs[1]["metadata"]["name"] = "a-done", "b-runs"
    words = Reader(jobs_page(Jobs(jobs), "here", None, NOW)).words
    assert words.index("b-runs") < words.index("a-done")


def test_colours_of_output_are_left_out() -> None:
    lines = [Line("", "demo-0", "\x1b[32mok\x1b[0m 50%\r100% \x1b[2J")]
    found = logs_page("a", "demo", Logs(["demo-0"], lines), LogOptions(), "here")
    assert "100% \\x1b[2J" in found
    assert "32m" not in found
