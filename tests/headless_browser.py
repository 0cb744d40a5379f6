"""A real browser without a window, driven over a pipe by the DevTools protocol; it needs only Chromium."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
)
_ANSWER_LIMIT_S = 60.0
# The protocol's pipe is descriptors 3 and 4 of the browser. Both ends first go out of the way of these.
_LAUNCHER = """
import os, sys
from fcntl import F_DUPFD, fcntl
ends = [fcntl(int(number), F_DUPFD, 10) for number in sys.argv[1:3]]
for number, end in enumerate(ends, start=3):
    os.dup2(end, number)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_browser() -> str | None:
    """The path of a Chromium or Chrome; None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One open page. Its errors are collected in `errors`."""

    def __init__(self, read: int, write: int) -> None:
        self.errors: list[str] = []
        self._read, self._write = read, write
        self._received = b""
        self._sent = 0
        self._tab: str | None = None
        self._session: str | None = None

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol and waits for its answer."""
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next_message()
            self._note(answer)
            if answer.get("id") == self._sent:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])

    def open(self, path: Path, width: int = 1200, height: int = 800, dark: bool = False) -> None:
        """Loads a file in a fresh tab and waits until its script has run."""
        self._session = None
        if self._tab:
            self.send("Target.closeTarget", targetId=self._tab)
        self.errors.clear()
        self._tab = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=self._tab, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.resize(width, height)
        theme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=theme)
        self.send("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("document.readyState === 'complete'")
        self.settle()

    def resize(self, width: int, height: int) -> None:
        """Gives the page a size, in its pixels."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{expression}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Waits until the condition holds."""
        look = f"const look = () => ({condition}) ? done() : setTimeout(look, 10)"
        self.evaluate(f"new Promise((done) => {{ {look}; look(); }})")

    def settle(self) -> None:
        """Waits until the page has drawn twice: observers of sizes have run by then."""
        frame = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        self.evaluate(frame)

    def place_of(self, selector: str) -> tuple[float, float, float, float]:
        """Scrolls an element into view; its left, top, width and height in the window."""
        box = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{box}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        self.settle()
        sides = "(({left, top, width, height}) => [left, top, width, height])"
        left, top, width, height = self.evaluate(f"{sides}({box}.getBoundingClientRect())")
        return left, top, width, height

    def text(self, selector: str) -> str:
        """What a reader sees in an element; nothing if it is hidden."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str) -> None:
        """A real click into the middle of an element."""
        left, top, width, height = self.place_of(selector)
        where = {"x": left + width / 2, "y": top + height / 2, "button": "left", "clickCount": 1}
        self.mouse("mousePressed", **where)
        self.mouse("mouseReleased", **where)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """A real pointer event at a place of the window: mouseMoved, mousePressed, mouseReleased or mouseWheel."""
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.settle()

    def key(self, name: str, text: str = "", modifiers: int = 0) -> None:
        """A key pressed and released."""
        pressed = {"key": name, "modifiers": modifiers}
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **pressed)
        self.send("Input.dispatchKeyEvent", type="keyUp", **pressed)
        self.settle()

    def _next_message(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._read], [], [], _ANSWER_LIMIT_S)
            assert ready, f"the browser has not answered for {_ANSWER_LIMIT_S:g} s"
            received = os.read(self._read, 1 << 16)
            assert received, "the browser has ended"
            self._received += received
        message, _, self._received = self._received.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, message: dict[str, Any]) -> None:
        """Errors of the script, complaints in the console, and every request that leaves the page."""
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"].get("exception", parameters)))
        elif method == "Log.entryAdded":
            self.errors.append(str(parameters["entry"].get("text")))
        elif method == "Network.requestWillBeSent":
            address = parameters["request"]["url"]
            if not address.startswith(("file:", "data:", "about:")):
                self.errors.append(f"a request to {address}")


@contextmanager
def browser_page(browser: str, profile: Path) -> Iterator[Page]:
    """A browser with one page to open; it ends with the block."""
    command_read, command_write = os.pipe()
    answer_read, answer_write = os.pipe()
    flags = [
        "--headless",
        "--remote-debugging-pipe",
        f"--user-data-dir={profile}",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
    ]
    if os.geteuid() == 0:
        flags.append("--no-sandbox")
    process = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, str(command_read), str(answer_write), browser, *flags],
        pass_fds=(command_read, answer_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(command_read)
    os.close(answer_write)
    try:
        yield Page(answer_read, command_write)
    finally:
        os.close(command_write)  # the browser ends by itself when its pipe does, and its children with it
        try:
            process.wait(_ANSWER_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(answer_read)
