"""Headless Chromium for tests of pages, driven by its own protocol over a pipe: no driver, no port, no download.

https://chromedevtools.github.io/devtools-protocol/ has the commands; messages are JSON, each ended by a zero byte.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Browser", "colours_of_png", "find_chromium", "started"]

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--hide-scrollbars",
)
_JOIN_PIPES = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)


def find_chromium() -> str | None:
    """The path of Chromium or Chrome, where there is one."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


class Browser:
    """One page of a running browser, and all events that it sent."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._number, self._session, self._rest = 0, "", b""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Log", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; events that come before it are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            found = self._receive()
            if found.get("id") == self._number:
                assert "error" not in found, f"{method}: {found['error']}"
                result: dict[str, Any] = found["result"]
                return result
            self.events.append(found)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = os.read(self._from, 2**16)
            assert read, "the browser ended"
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def open(self, page: Path) -> None:
        """Load a file and wait until it is shown."""
        self.call("Page.navigate", url=page.as_uri())
        deadline = time.monotonic() + 60
        while self.evaluate("document.readyState") != "complete":
            assert time.monotonic() < deadline, "the page does not load"

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def show(self, *, width: int, dark: bool = False, media: str = "screen") -> None:
        """Emulate a screen, or paper."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def screenshot(self, selector: str = "html", scale: float = 1.0) -> bytes:
        """An element of the page, or all of it, as PNG."""
        box = self.evaluate(f"document.querySelector({selector!r}).getBoundingClientRect().toJSON()")
        clip = {"x": box["x"], "y": box["y"], "width": box["width"], "height": box["height"], "scale": scale}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(shot["data"])

    def requests(self) -> list[str]:
        """Everything that the page asked for."""
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def complaints(self) -> list[str]:
        """Console messages, and errors of the page."""
        kinds = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        return [json.dumps(event["params"]) for event in self.events if event.get("method") in kinds]


@contextmanager
def started(chromium: str, folder: Path) -> Iterator[Browser]:
    """Run the browser with a profile of its own in ``folder``."""
    ours, theirs = os.pipe(), os.pipe()  # (read, write) from the browser, and to it
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs[0], ours[1])]  # clear of 3 and 4
    flags = [*_FLAGS, f"--user-data-dir={folder}", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    command = [sys.executable, "-c", _JOIN_PIPES, *map(str, ends), chromium, *flags, "about:blank"]
    process = subprocess.Popen(command, pass_fds=ends, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for end in (*ends, theirs[0], ours[1]):
        os.close(end)
    try:
        yield Browser(theirs[1], ours[0])
    finally:
        process.terminate()
        process.wait(timeout=30)
        os.close(theirs[1])
        os.close(ours[0])


def colours_of_png(data: bytes) -> set[bytes]:
    """The different pixels of a PNG with 8 bits a channel; the filters are those of the specification, section 9."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    position, packed = 8, b""
    width = channels = 0
    while position < len(data):
        length, kind = int.from_bytes(data[position : position + 4]), data[position + 4 : position + 8]
        content = data[position + 8 : position + 8 + length]
        if kind == b"IHDR":
            width, channels = int.from_bytes(content[:4]), {2: 3, 6: 4}[content[9]]
            assert content[8] == 8 and content[12] == 0
        elif kind == b"IDAT":
            packed += content
        position += 12 + length
    raw, stride = zlib.decompress(packed), width * channels
    found: set[bytes] = set()
    before = bytearray(stride)
    for start in range(0, len(raw), stride + 1):
        line = bytearray(raw[start + 1 : start + 1 + stride])
        _unfilter(raw[start], line, before, channels)
        found.update(bytes(line[place : place + 3]) for place in range(0, stride, channels))
        before = line
    return found


def _unfilter(kind: int, line: bytearray, above: bytearray, step: int) -> None:
    for place in range(len(line)):
        left = line[place - step] if place >= step else 0
        over = above[place]
        corner = above[place - step] if place >= step else 0
        match kind:
            case 0:
                return
            case 1:
                guess = left
            case 2:
                guess = over
            case 3:
                guess = (left + over) // 2
            case _:
                estimate = left + over - corner
                guess = min((left, over, corner), key=lambda value: abs(estimate - value))
        line[place] = (line[place] + guess) & 0xFF
