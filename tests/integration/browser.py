"""Headless browser of the distribution, driven through its DevTools pipe.

`browser` installs it if it is missing. It has an empty profile, talks only to the addresses that a
test opens, and ends with the test process in every case.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.environment import locked
from tests.cluster.debian import needs
from tests.cluster.places import CACHE

NAME = "chromium"
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
ANSWER_SECONDS = 60.0
WIDE, NARROW = (1200, 900), (390, 844)
"""Sizes of a desktop's and of a phone's window."""


class Browser:
    """One tab of a browser; `said` has the messages of its console."""

    def __init__(self, requests: int, answers: int) -> None:
        self._requests = requests
        self._answers = answers
        self._rest = b""
        self._number = 0
        self._session = ""
        self.said: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._requests, json.dumps(message).encode() + b"\0")
        due = time.monotonic() + ANSWER_SECONDS
        while True:
            answer = self._next(due)
            self._note(answer)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self, due: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, due - time.monotonic()))
            assert ready, "the browser does not answer"
            chunk = os.read(self._answers, 1 << 16)
            assert chunk, "the browser has ended"
            self._rest += chunk
        first, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(first)
        return found

    def _note(self, answer: dict[str, Any]) -> None:
        """Keep what the page reports: errors, refused loads, and the dialogs of a script."""
        params = answer.get("params", {})
        match answer.get("method"):
            case "Runtime.exceptionThrown":
                self.said.append(str(params["exceptionDetails"]))
            case "Log.entryAdded":
                self.said.append(params["entry"]["text"])
            case "Page.javascriptDialogOpening":
                self.said.append(f"dialog: {params['message']}")

    def look(self, size: tuple[int, int] = WIDE, dark: bool = False) -> None:
        """Set the window's size and the preference for light or dark."""
        width, height = size
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        """Open an address and wait until the page and all that it loads have arrived."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression in the page; a promise is awaited."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script: str, seconds: float = 60.0) -> None:
        """Wait until an expression is true in the page."""
        due = time.monotonic() + seconds
        while not self.evaluate(script):
            assert time.monotonic() < due, f"never true: {script}"
            time.sleep(0.05)

    def text(self) -> str:
        return str(self.evaluate("document.body.innerText"))

    def picture(self, path: Path, whole: bool = True) -> None:
        """Write a picture of the page, of its whole length or of the window."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            found = self.call(
                "Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip
            )
        path.write_bytes(base64.b64decode(found["data"]))


def installed() -> str:
    """Return the browser's program; install it, once on this machine, if it is missing."""
    with locked(CACHE / "browser.lock"):
        needs(NAME)
    found = shutil.which(NAME)
    assert found is not None
    return found


@contextmanager
def browser() -> Iterator[Browser]:
    """Yield a new browser, and end it with all of its processes."""
    program = installed()
    ours_in, its_out = os.pipe()
    its_in, ours_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        words = [program, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        # The protocol's file descriptors are 3 and 4.
        shell = f'exec setpriv --pdeathsig KILL "$@" 3<&{its_in} 4>&{its_out}'
        process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *words],
            pass_fds=(its_in, its_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": profile},
            start_new_session=True,
        )
        os.close(its_in)
        os.close(its_out)
        try:
            yield Browser(ours_out, ours_in)
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(60)
            os.close(ours_in)
            os.close(ours_out)
