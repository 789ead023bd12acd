"""`elasticjob dashboard` of a real job in a real browser, beside another user of the machine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.debian import needs
from tests.integration.browser import NARROW, WIDE, Browser, browser
from tests.integration.local_rig import PATIENCE_SECONDS, LocalRig, rig, until

__all__ = ["rig"]

FAILING = """
import json, os, pathlib, time
print("rank", os.environ["RANK"], "<b>bold</b>", flush=True)
number = 0
draft = pathlib.Path(os.environ["ELASTICJOB_PROGRESS_FILE"] + ".draft")
while not pathlib.Path("finish").exists():
    time.sleep(0.02)
    number += 1
    draft.write_text(json.dumps({"step": number}))
    draft.replace(os.environ["ELASTICJOB_PROGRESS_FILE"])
    if number % 10 == 0 and os.environ["RANK"] == "0":
        print("line", number, flush=True)
    if pathlib.Path("fail").exists() and os.environ["RANK"] == "1":
        pathlib.Path("fail").unlink()
        raise RuntimeError("<script>document.title = 'owned'</script>")
"""
NOBODY = 65534
OTHER_USER = f"""
import encodings.idna, http.client, json, os, pathlib, sys
os.setgroups([]), os.setgid({NOBODY}), os.setuid({NOBODY})
port, pid = int(sys.argv[1]), sys.argv[2]
link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
link.request("GET", "/")
answer = link.getresponse()
found = [pathlib.Path("/proc", pid, "cmdline").read_bytes().decode()]
try:
    found.append(pathlib.Path("/proc", pid, "environ").read_bytes().decode())
except PermissionError:
    pass
print(json.dumps([answer.status, answer.read().decode(), *found]))
"""


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


def serve(rig: LocalRig, *options: str) -> tuple[subprocess.Popen[str], str]:
    """Start the dashboard and return it with its address."""
    server = rig.start_other("dashboard", *options)
    assert server.stdout is not None
    title, _, address = server.stdout.readline().strip().partition(": ")
    assert title == "Dashboard of this machine"
    return server, address


def _rounds(rig: LocalRig) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(rig.call("rounds", "job", "-o", "json").stdout)
    return found


def test_dashboard_of_a_job_with_failures_in_a_browser(
    rig: LocalRig, tab: Browser, tmp_path: Path
) -> None:
    (rig.job / "failing.py").write_text(FAILING)
    runner = rig.start(rig.manifest(command=["python3", "failing.py"]))
    server, address = serve(rig)
    before = rig.running(2)["rendezvous"]["round"]
    until(lambda: "line 30" in rig.call("logs", "job").stdout, "steps of the first round")
    (rig.job / "fail").touch()
    rig.running(2, after=before)
    lost = until(lambda: _rounds(rig)[-1].get("lostSteps"), "the first step of round 2")
    assert lost > 20  # the script begins anew

    tab.look(WIDE)
    tab.open(address)
    assert "job" in tab.text()
    tab.evaluate("document.querySelector('td a').click()")
    tab.until("!!document.querySelector('#failures')")
    said = tab.text()
    assert "First failure: UserError" in said
    assert "Traceback (most recent call last)" in said
    assert "<script>document.title = 'owned'</script>" in said
    assert tab.evaluate("document.title") == "job · ElasticJob"
    assert "failure: job-1" in said
    assert "[elasticjob] round 2 begins: 2 nodes" in said
    assert f"{lost} steps lost" in said
    assert tab.evaluate("document.querySelectorAll('#logs b').length") == 0
    assert tab.evaluate("document.querySelectorAll('#timeline svg rect.loss').length") == 1

    # Parts that have not changed stay the same elements; new lines arrive without a reload.
    tab.evaluate("window.kept = document.querySelector('#failures article')")
    tab.evaluate("document.querySelector('details').open = true")
    count = "Number(document.querySelector('#live').dataset.count || 0)"
    last = "Number(document.querySelector('#logs pre').innerText.match(/line (\\d+)\\s*$/)[1])"
    begun, line = tab.evaluate(count), tab.evaluate(last)
    tab.until(f"{count} >= {begun} + 2 && {last} > {line}")
    assert tab.evaluate("window.kept === document.querySelector('#failures article')")
    assert tab.evaluate("document.querySelector('details').open")
    assert tab.evaluate("getComputedStyle(document.querySelector('.minor')).display") != "none"

    paper = "getComputedStyle(document.body).backgroundColor"
    light = tab.evaluate(paper)
    tab.look(NARROW, dark=True)
    assert tab.evaluate(paper) != light
    node = "getComputedStyle(document.querySelector('svg rect.node')).fill"
    dark = tab.evaluate(node)
    tab.look(NARROW)
    assert tab.evaluate(node) != dark
    for page in ("", "jobs/default/job/", "jobs/default/job/logs/?rank=1&tail=5"):
        tab.open(address + page)
        assert tab.evaluate("document.documentElement.scrollWidth") == NARROW[0], page
    assert "job-1 [1] rank 1 <b>bold</b>" in tab.text()
    assert "job-0" not in tab.evaluate("document.querySelector('#logs').innerText")
    assert tab.evaluate("getComputedStyle(document.querySelector('input')).fontSize") == "14px"
    assert tab.said == []

    rig.finish()
    assert runner.wait(PATIENCE_SECONDS) == 0
    needs("rsvg-convert")
    pictures = [tmp_path / f"timeline.{kind}" for kind in ("svg", "html", "png")]
    for path in pictures:
        called = rig.call("timeline", "job", "-o", path.suffix[1:], "-f", str(path))
        assert called.stdout == f"wrote {path}\n", called.stderr
    assert f"{lost} steps lost" in pictures[0].read_text()
    assert pictures[2].read_bytes().startswith(b"\x89PNG")
    tab.open(pictures[1].as_uri())
    assert f"{lost} steps lost" in tab.text()
    tab.open(f"{address}jobs/default/job/")
    assert "Succeeded" in tab.text()
    server.terminate()
    server.wait(PATIENCE_SECONDS)
    tab.until("document.querySelector('#live').className === 'lost'")
    assert "Succeeded" in tab.text()
    server, address = serve(rig)
    assert rig.call("delete", "job").returncode == 0
    tab.open(address)
    assert "No jobs." in tab.text()


def test_other_user_and_other_addresses_are_not_admitted(rig: LocalRig) -> None:
    server, address = serve(rig, "-n", "team")
    token = address.split("/")[3]
    assert address.endswith(f"/{token}/namespaces/team/")
    port = address.split("/")[2].partition(":")[2]
    assert len(token) >= 40
    done = subprocess.run(
        [sys.executable, "-c", OTHER_USER, port, str(server.pid)],
        capture_output=True,
        text=True,
        check=True,
    )
    status, *texts = json.loads(done.stdout)
    assert status == 404
    assert not [text for text in texts if token in text]
    owned = {str(fd.readlink()) for fd in Path("/proc", str(server.pid), "fd").iterdir()}
    rows = Path("/proc/net/tcp").read_text().splitlines()[1:]
    rows += Path("/proc/net/tcp6").read_text().splitlines()[1:]
    listening = [row.split()[1] for row in rows if f"socket:[{row.split()[9]}]" in owned]
    assert listening == [f"0100007F:{int(port):04X}"]

    busy = rig.call("dashboard", "--port", port)
    assert (busy.returncode, "choose another --port" in busy.stderr) == (1, True)


def test_ctrl_c_ends_the_dashboard(rig: LocalRig) -> None:
    server, _ = serve(rig)
    server.send_signal(signal.SIGINT)
    assert server.wait(PATIENCE_SECONDS) == 130
    until(lambda: not rig.processes(), "the end of the dashboard")
