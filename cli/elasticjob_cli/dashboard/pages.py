"""Pages of the dashboard, made of documents. No I/O.

A document may be damaged, and every name, message and line in it is foreign text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode

from elasticjob_cli.commands.tables import NONE, Cells
from elasticjob_cli.dashboard.markup import Markup, joined, table, tag
from elasticjob_cli.dashboard.sources import MAX_LINES, Details, Jobs, Logs, object_list
from elasticjob_cli.log_lines import Line, LogOptions
from elasticjob_cli.output import plain_log_line
from elasticjob_cli.timeline_svg import PHASES, changes_of, end_of, seconds_text, svg
from elasticjob_operator.enums import ConditionStatus, ConditionType, Phase
from elasticjob_rendezvous.protocol.text import one_cell, shortened

TAIL = 200
"""Number of log lines of a page, unless its address has another."""
TAIL_OF_JOB = 40
"""Number of log lines on the page of a job."""
REFRESH_SECONDS = 2
RELOAD_SECONDS = 10
"""Interval of reloads by a browser without scripts."""
MAX_ROWS = 200
"""Maximum number of rounds and of members with a row of their own."""
LONGEST_CAUSE = 200
_TONES = {
    Phase.RUNNING: "good",
    Phase.SUCCEEDED: "done",
    Phase.FAILED: "bad",
    Phase.RESTARTING: "busy",
    Phase.SUSPENDING: "busy",
    Phase.DELETING: "busy",
    Phase.PENDING: "busy",
    Phase.INTERRUPTED: "bad",
}
"""Colour of a phase; that of others is neutral."""


def page(title: str, depth: int, place: str, *content: Markup | None, follows: bool = True) -> str:
    """Return a whole page.

    Args:
        title: title of the window.
        depth: number of folders between the page and the root, to which its links are relative.
        place: name of the place whose jobs it shows.
        content: sections, each of which is replaced alone when it changes.
        follows: True for a page that is refreshed.
    """
    root = "../" * depth
    reload = tag("meta", http_equiv="refresh", content=str(RELOAD_SECONDS))
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{one_cell(title)} · ElasticJob"),
        tag("link", rel="stylesheet", href=f"{root}style.css"),
        tag("link", rel="icon", href=f"{root}icon.svg"),
        tag("noscript", reload) if follows else None,
        tag("script", src=f"{root}page.js", defer=True) if follows else None,
    )
    live = tag("span", "live", id="live", role="status", data_seconds=str(REFRESH_SECONDS))
    header = tag(
        "header",
        tag("a", "ElasticJob", href=root or "./", class_="home"),
        tag("span", f"jobs of {one_cell(place)}", class_="soft"),
        live if follows else None,
    )
    body = tag("body", header, tag("main", *content))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def error_page(status: int, reason: str, message: str, depth: int, place: str) -> str:
    """Return the page of a request without an answer."""
    texts = [tag("p", line) for line in message.split("\n")]
    link = tag("p", tag("a", "all jobs", href="../" * depth or "./"))
    section = _section("error", f"{status} {reason}", *texts, link)
    return page(f"{status}", depth, place, section, follows=False)


def _section(name: str, title: str, *content: str | Markup | None) -> Markup:
    """Return a part of a page under a heading."""
    return tag("section", tag("h2", title), *content, id=name)


def _badge(phase: str) -> Markup:
    tone = next((tone for known, tone in _TONES.items() if phase == known), "plain")
    return tag("span", one_cell(phase), class_=f"badge {tone}")


# --- all jobs


def jobs_page(found: Jobs, place: str, namespace: str | None, now: datetime) -> str:
    """Return the page of all jobs, of one namespace or of all."""
    depth = 0 if namespace is None else 2
    documents = sorted(found.documents, key=_order)
    spaces = {Cells(document).text("metadata", "namespace") for document in documents}
    where = "" if namespace is None else f" in namespace {one_cell(namespace)}"
    titles = ["Name", "Namespace", "Phase", "Nodes", "Round", "Restarts", "Last recovery", "Age"]
    minor = {"Namespace", "Restarts", "Last recovery"} if len(spaces) < 2 else {"Last recovery"}
    rows = [_job_row(document, "../" * depth, now) for document in documents]
    errors = [tag("p", error, class_="note") for error in found.errors]
    content = table(titles, rows, minor) if rows else tag("p", f"No jobs{where}.", class_="soft")
    return page(f"Jobs{where}", depth, place, _section("jobs", f"Jobs{where}", content, *errors))


def forbidden_page(message: str, place: str) -> str:
    """Return the page of all jobs for a viewer who may list those of single namespaces only."""
    form = tag(
        "form",
        tag("label", "Namespace ", tag("input", name="namespace", required=True, autofocus=True)),
        tag("button", "Show"),
        action="./",
        method="get",
    )
    asked = tag("p", "Choose a namespace whose jobs you may list:")
    text = tag("p", message, class_="soft")
    return page("Jobs", 0, place, _section("jobs", "Jobs of a namespace", asked, form, text))


def _order(document: Any) -> tuple[int, str, str]:
    """Return the order of a job: unfinished ones first, then by namespace and name."""
    job = Cells(document)
    ended = job.text("status", "phase") in (Phase.SUCCEEDED, Phase.FAILED, Phase.INTERRUPTED)
    return int(ended), job.text("metadata", "namespace"), job.text("metadata", "name")


def _job_row(document: Any, root: str, now: datetime) -> list[str | Markup]:
    job = Cells(document)
    namespace, name = job.text("metadata", "namespace"), job.text("metadata", "name")
    address = f"{root}jobs/{quote(namespace, safe='')}/{quote(name, safe='')}/"
    last = job.get(int, "status", "rounds", -1, "recoveryMs")
    return [
        tag("a", one_cell(name), href=address),
        one_cell(namespace),
        _badge(job.text("status", "phase")),
        f"{job.number('status', 'nodes')} / {job.number('status', 'wantedNodes')}",
        job.number("status", "rendezvous", "round", absent="-"),
        job.number("status", "restarts"),
        seconds_text(last) if isinstance(last, int) else "-",
        job.age(now),
    ]


# --- one job


def job_page(found: Details, end_of_log: Logs, place: str, now: datetime) -> str:
    """Return the page of one job: explanation, timeline, rounds, failures, members, logs."""
    job = Cells(found.document)
    name = job.text("metadata", "name")
    head = tag(
        "section",
        tag("h1", one_cell(name), " ", _badge(job.text("status", "phase"))),
        tag("div", *(tag("p", sentence) for sentence in found.explanation), class_="explanation"),
        _facts(job, now),
        id="job",
    )
    return page(
        name,
        3,
        place,
        head,
        _trouble(job),
        _timeline(job, found.rounds, now),
        _rounds(found.rounds),
        _failures(job),
        _members(job),
        _log_section(end_of_log),
        _conditions(job),
    )


def _facts(job: Cells, now: datetime) -> Markup:
    """Return the numbers of a job."""
    most = job.number("spec", "maxNodes", absent=NONE)
    least = job.number("spec", "minNodes", absent=most)
    members = object_list(job.get(list, "status", "members"))
    steps = [step for member in members if isinstance(step := Cells(member).get(int, "step"), int)]
    facts = {
        "Namespace": one_cell(job.text("metadata", "namespace")),
        "Nodes": f"{job.number('status', 'nodes')} of {job.number('status', 'wantedNodes')}, "
        f"allowed {least} to {most}",
        "Workers": job.number("status", "rendezvous", "worldSize"),
        "Round": job.number("status", "rendezvous", "round", absent="-"),
        "Step": str(max(steps)) if steps else "-",
        "Restarts": f"{job.number('status', 'restarts')} of "
        f"{job.number('spec', 'maxRestarts', absent=NONE)}",
        "Age": job.age(now),
    }
    goodput = job.get(int, "status", "snapshots", "goodputPercent")
    if isinstance(goodput, int):
        facts["Goodput"] = f"{goodput} %"
    pairs = [tag("div", tag("dt", key), tag("dd", value)) for key, value in facts.items()]
    return tag("dl", *pairs, class_="facts")


def _trouble(job: Cells) -> Markup | None:
    """Return the note on a rendezvous store that cannot be used; None without one."""
    for one in object_list(job.get(list, "status", "conditions")):
        cells = Cells(one)
        is_true = cells.text("status") == ConditionStatus.TRUE
        if cells.text("type") == ConditionType.RENDEZVOUS_UNAVAILABLE and is_true:
            return tag("p", cells.text("message"), class_="note", id="trouble")
    return None


def _timeline(job: Cells, rounds: Sequence[Any], now: datetime) -> Markup:
    changes = changes_of(rounds)
    if not changes:
        empty = tag("p", "The job has had no round yet.", class_="soft")
        return _section("timeline", "Timeline", empty)
    end = end_of(job, now.timestamp())
    picture = svg(job.text("metadata", "name"), changes, end, embedded=True)
    return _section("timeline", "Timeline", tag("div", Markup(picture), class_="scroll picture"))


def _rounds(rounds: Sequence[Any]) -> Markup | None:
    """Return the rounds from the newest, with their causes and the phases of each recovery."""
    known = [one for one in rounds if isinstance(one, dict)]
    if not known:
        return None
    phases = {field: name for field, (name, _) in PHASES.items()}
    titles = ["Round", "Final", "Cause", "Nodes", "Recovery", *phases.values(), "Lost steps"]
    minor = {"Final", "Nodes", *phases.values()}
    rows: list[list[str | Markup]] = []
    for round_ in list(reversed(known))[:MAX_ROWS]:
        cells = Cells(round_)
        rows.append(
            [
                cells.number("round"),
                _clock(round_.get("finalTime")),
                _cause(round_),
                cells.number("nodes"),
                tag("strong", _time(cells, "recoveryMs")),
                *(_time(cells, field) for field in phases),
                cells.number("lostSteps", absent="-"),
            ]
        )
    return _section("rounds", "Rounds and causes", table(titles, rows, minor))


def _time(cells: Cells, field: str) -> str:
    """Format a duration of a document; `-` if it is unknown."""
    found = cells.get(int, field)
    return seconds_text(found) if isinstance(found, int) else cells.number(field, absent="-")


def _clock(stamp: object) -> str:
    try:
        return f"{datetime.fromisoformat(str(stamp)).astimezone(UTC):%H:%M:%S}"
    except (ValueError, OverflowError):
        return "-"


def _cause(one: Any) -> Markup:
    """Return the cause of a round with its pods, its reason and details."""
    cells = Cells(one)
    members = cells.get(list, "members")
    named = ", ".join(map(str, members)) if isinstance(members, list) else ""
    cause = ": ".join(part for part in (cells.text("cause"), named) if part)
    more = [str(text) for key in ("reason", "detail", "coldReason") if (text := one.get(key))]
    detail = shortened("; ".join(more), LONGEST_CAUSE)
    soft = tag("span", one_cell(detail), class_="soft detail") if detail else None
    return joined([one_cell(shortened(cause, LONGEST_CAUSE)), soft])


def _failures(job: Cells) -> Markup | None:
    """Return the first and the last failure with their tracebacks; None without a failure."""
    first = job.get(dict, "status", "firstFailure")
    last = job.get(dict, "status", "lastFailure")
    shown = [("First failure", first)] if isinstance(first, dict) else []
    shown += [("Last failure", last)] if isinstance(last, dict) and last != first else []
    parts = [_failure(title, one) for title, one in shown]
    return _section("failures", "Failures", *parts) if parts else None


def _failure(title: str, one: Any) -> Markup:
    cells = Cells(one)
    exit_code, signal = cells.get(int, "exitCode"), cells.get(int, "signal")
    how = [f"exit code {exit_code}"] if exit_code is not None else []
    how += [f"signal {signal}"] if signal is not None else []
    rank = cells.get(int, "rank")
    where = [] if rank is None else [f"rank {rank}"]
    where += [f"on {one_cell(cells.text('pod'))}, round {cells.number('round')}"]
    node = cells.get(str, "nodeName")
    where += [f"(node {one_cell(str(node))})"] if node else []
    kind = one_cell(cells.text("class"))
    message, traceback = cells.get(str, "message"), cells.get(str, "traceback")
    return tag(
        "article",
        tag("h3", f"{title}: {kind}"),
        tag("p", " ".join(where), ": ", ", ".join(how) or "no exit code", class_="soft"),
        tag("p", message, class_="message") if message else None,
        tag("pre", str(traceback).rstrip()) if traceback else None,
    )


def _members(job: Cells) -> Markup | None:
    members = object_list(job.get(list, "status", "members"))
    if not members:
        return None
    titles = ["Pod", "Rank", "State", "Round", "Step", "Checkpoint", "Start", "Node"]
    rows: list[list[str | Markup]] = []
    for member in members[:MAX_ROWS]:
        cells = Cells(member)
        pod = cells.text("pod")
        link = tag("a", one_cell(pod), href=f"logs/?{urlencode({'pod': pod})}")
        start = [part for key in ("start", "coldReason") if (part := cells.get(str, key))]
        rows.append(
            [
                link,
                cells.number("rank", absent="-"),
                one_cell(cells.text("state")),
                cells.number("round"),
                cells.number("step", absent="-"),
                cells.number("checkpointStep", absent="-"),
                one_cell(": ".join(start)) or "-",
                one_cell(cells.get(str, "nodeName") or "-"),
            ]
        )
    return _section("members", "Members", table(titles, rows, {"Round", "Start", "Node"}))


def _conditions(job: Cells) -> Markup | None:
    conditions = object_list(job.get(list, "status", "conditions"))
    if not conditions:
        return None
    rows = [
        [one_cell(cells.text(key)) for key in ("type", "status", "reason", "message")]
        for cells in map(Cells, conditions)
    ]
    inner = table(["Type", "Status", "Reason", "Message"], rows, set())
    return tag("section", tag("details", tag("summary", "Conditions"), inner, id="conditions"))


# --- logs


def logs_page(
    namespace: str, name: str, found: Logs, options: LogOptions, place: str, note: str = ""
) -> str:
    """Return the page of a job's logs."""
    pods = [tag("option", "all pods", value="", selected=options.pod is None)]
    pods += [
        tag("option", one_cell(pod), value=pod, selected=options.pod == pod) for pod in found.pods
    ]
    title = tag("h1", tag("a", one_cell(name), href="../"), ": logs")
    rank = "" if options.rank is None else str(options.rank)
    tail = str(options.tail or TAIL)
    form = tag(
        "form",
        tag("label", "Pod ", tag("select", *pods, name="pod")),
        tag("label", "Rank ", tag("input", name="rank", value=rank, type="number", min="0")),
        tag(
            "label",
            "Lines ",
            tag("input", name="tail", value=tail, type="number", min="1", max=str(MAX_LINES)),
        ),
        tag("button", "Show"),
        method="get",
    )
    return page(
        f"Logs of {name}",
        4,
        place,
        tag("section", title, form, id="choice"),
        tag("section", _lines(found.lines, note or found.note), id="logs", class_="whole"),
    )


def _log_section(found: Logs) -> Markup:
    more = tag("p", tag("a", "more lines, one pod or one rank", href="logs/"))
    return _section("logs", "Logs", _lines(found.lines, found.note), more)


def _lines(lines: Iterable[Line], note: str) -> Markup:
    """Return lines of logs with the names of their pods; a mark has none."""
    shown: list[str | Markup] = []
    for line in lines:
        text = plain_log_line(line.text)
        if line.pod:
            shown += [tag("span", f"{one_cell(line.pod)} ", class_="pod"), f"{text}\n"]
        else:
            shown += [tag("span", f"{text}\n", class_="mark")]
    intro = tag("p", note, class_="soft") if note else None
    if not shown:
        return joined([intro, tag("p", "No output yet.", class_="soft")])
    return joined([intro, tag("pre", *shown, class_="log", tabindex="0")])
