"""Pictures of the rounds of a job."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from elasticjob_cli.timeline_svg import MAX_ROWS, WIDTH, changes_of, page, seconds_text, svg

SVG = "{http://www.w3.org/2000/svg}"


def entry(number: int, second: int, **more: Any) -> dict[str, Any]:
    """Return a round of a status that became final at this second."""
    stamp = f"2026-11-24T05:{second // 60:02}:{second % 60:02}Z"
    return {"round": number, "cause": "start", "nodes": 2, "finalTime": stamp} | more


LOSS = entry(
    2,
    20,
    cause="loss",
    members=["train-1"],
    nodes=1,
    detectMs=62,
    stopMs=100,
    joinMs=13,
    confirmMs=5,
    startMs=220,
    recoveryMs=400,
    firstStepMs=1500,
    coldNodes=1,
)


def drawn(rounds: list[Any], seconds: float = 40) -> ElementTree.Element:
    changes = changes_of(rounds)
    return ElementTree.fromstring(svg("train: Running", changes, changes[0].at + seconds))


def texts(picture: ElementTree.Element) -> list[str]:
    return [one.text or "" for one in picture.iter(f"{SVG}text")]


def rectangles(picture: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    return [one for one in picture.iter(f"{SVG}rect") if one.get("class") == kind]


def test_recovery_has_a_mark_its_duration_and_a_row_of_its_phases() -> None:
    picture = drawn([entry(1, 0, recoveryMs=45), LOSS])
    assert "0.4 s" in texts(picture)
    assert "0.4 s, 1 cold" in texts(picture)
    assert "2  loss: train-1" in texts(picture)
    (loss,) = rectangles(picture, "loss")
    said = loss.find(f"{SVG}title")
    assert said is not None
    assert said.text == "round 2 (loss: train-1), 1 node, final at 05:00:20, recovered in 0.4 s"
    phases = [one.text for one in picture.iter(f"{SVG}title") if ": " in (one.text or "")]
    assert {"detect: 62 ms", "stop: 0.1 s", "join: 13 ms", "start: 0.2 s"} <= set(phases)


def test_widths_are_in_proportion_to_time_and_heights_to_nodes() -> None:
    first, second = rectangles(drawn([entry(1, 0), LOSS], 80), "node")
    widths = [float(one.get("width", "")) for one in (first, second)]
    heights = [float(one.get("height", "")) for one in (first, second)]
    assert widths[1] / widths[0] == pytest.approx(3, rel=0.01)
    assert heights[0] / heights[1] == pytest.approx(2, rel=0.01)


def test_start_interrupts_nothing() -> None:
    assert rectangles(drawn([entry(1, 0, recoveryMs=45)]), "loss") == []


def test_damaged_entries_are_left_out() -> None:
    good = entry(3, 30)
    damaged = [
        None,
        "text",
        {},
        entry(1, 0, finalTime="yesterday"),
        entry(1, 0, nodes="two"),
        entry(-1, 0),
        entry(True, 0),
    ]
    assert [one.number for one in changes_of([*damaged, good])] == [3]
    strange = entry(4, 31, members="text", recoveryMs="long", detectMs=-1, cause=None)
    (_, change) = changes_of([good, strange])
    assert (change.cause, change.recovery_ms, dict(change.phases)) == ("unknown", None, {})


def test_names_cannot_add_elements_or_control_characters() -> None:
    hostile = "<script>alert(1)</script>\x1b[31m&"
    picture = svg(hostile, changes_of([entry(1, 0, members=[hostile])]), 0)
    tree = ElementTree.fromstring(picture)
    assert list(tree.iter(f"{SVG}script")) == []
    assert "\x1b" not in picture
    assert "<script" not in page(hostile, "", [hostile])


def test_only_the_newest_of_many_rounds_have_rows() -> None:
    count = MAX_ROWS + 5
    picture = drawn([entry(n, n) for n in range(1, count + 1)], 100)
    said = texts(picture)
    assert f"the newest {MAX_ROWS} of {count} rounds; bars: 1 ms at full width" in said
    assert "5  start" not in said
    assert "6  start" in said
    assert len(rectangles(picture, "node")) == count


def test_labels_of_close_recoveries_do_not_overlap() -> None:
    close = [LOSS | {"round": n, "finalTime": f"2026-11-24T05:00:2{n}Z"} for n in range(2, 8)]
    picture = drawn([entry(1, 0), *close], 3000)
    places = [
        float(one.get("x", ""))
        for one in picture.iter(f"{SVG}text")
        if one.text == "0.4 s" and float(one.get("y", "")) < 60
    ]
    assert len(places) == 1
    assert all(0 <= place <= WIDTH for place in places)


def test_the_longer_of_two_close_recoveries_is_labelled() -> None:
    pair = [LOSS, LOSS | {"round": 3, "finalTime": "2026-11-24T05:00:21Z", "recoveryMs": 900}]
    shown = texts(drawn([entry(1, 0), *pair, entry(4, 600)], 600))
    assert ("0.9 s" in shown, "0.4 s" in shown) == (True, False)


def test_lost_steps_are_in_the_row_and_the_tooltip() -> None:
    picture = drawn([entry(1, 0), LOSS | {"lostSteps": 12}])
    assert "0.4 s, 12 steps lost, 1 cold" in texts(picture)
    (loss,) = rectangles(picture, "loss")
    said = loss.find(f"{SVG}title")
    assert said is not None
    assert (said.text or "").endswith("recovered in 0.4 s, 12 steps lost")
    assert not any("lost" in text for text in texts(drawn([LOSS | {"lostSteps": 0}])))


def test_short_change_is_magnified_beside_a_long_one_and_says_so() -> None:
    long = LOSS | {"round": 3, "finalTime": "2026-11-24T05:00:30Z", "joinMs": 60_000}
    said = texts(drawn([entry(1, 0), LOSS, long]))
    assert "0.4 s, 1 cold (x10)" in said
    assert "bars: 62 s at full width; x: magnified" in said
    assert "60 s" in said  # in the phase itself, which has room
    assert not any("(x" in text for text in texts(drawn([entry(1, 0), LOSS])))


def test_part_of_a_page_has_neither_style_nor_title_of_its_own() -> None:
    changes = changes_of([entry(1, 0), LOSS])
    embedded = ElementTree.fromstring(svg("train", changes, 0, embedded=True))
    assert list(embedded.iter(f"{SVG}style")) == []
    assert not [one for one in embedded.iter(f"{SVG}text") if one.get("class") == "title"]


@pytest.mark.parametrize("nodes", [9, 2**31 - 1, 10**15])
def test_number_of_lines_does_not_depend_on_the_number_of_nodes(nodes: int) -> None:
    picture = drawn([entry(1, 0, nodes=nodes)])
    lines = [one for one in picture.iter(f"{SVG}path") if one.get("class") == "line"]
    assert len(lines) == 3
    assert {str(nodes), str((nodes + 1) // 2)} <= set(texts(picture))


def test_numbers_and_times_out_of_range_are_damaged() -> None:
    huge = 10**400
    assert changes_of([entry(1, 0, nodes=huge), entry(huge, 0)]) == []
    assert changes_of([entry(1, 0, finalTime="0001-01-01T00:00:00+23:59")]) == []
    (kept,) = changes_of([entry(1, 0, recoveryMs=huge, startMs=huge, lostSteps=huge)])
    assert (kept.recovery_ms, kept.phases, kept.lost_steps) == (None, {}, None)
    assert seconds_text(huge).endswith(" ms")
