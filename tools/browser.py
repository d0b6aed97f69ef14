"""A headless Chromium that is driven over a pipe, by its DevTools protocol: no library, no port."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
DEADLINE_S = 30.0


def found() -> str | None:
    """The path of a browser, where one is installed."""
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


class Tab:
    """One page. Every call ends within 30 s, or raises `TimeoutError`."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = to, back
        self._data = b""
        self._number = 0
        self._session = ""
        self.remarks: list[str] = []  # what the page wrote to its console, and what went wrong in it
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for name in ("Page", "Runtime", "Log"):
            self.call(f"{name}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its result. Raises `RuntimeError` for one that the browser refuses."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + DEADLINE_S
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self._note(answer)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page; of a promise what becomes of it."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def open(self, url: str, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        """Show an address in a window of that size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)

    def press(self, key: str) -> None:
        """A key, as a person presses it: "Tab", "ArrowRight", "Enter", "Escape"."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35}
        about = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **about, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def click(self, x: float, y: float) -> None:
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self) -> bytes:
        """A PNG of what is in the window."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def _note(self, answer: dict[str, Any]) -> None:
        if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
            self.remarks.append(json.dumps(answer["params"]))

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._data:
            if not select.select([self._back], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"the browser did not answer within {DEADLINE_S:g} s")
            part = os.read(self._back, 1 << 20)
            if not part:
                raise RuntimeError("the browser has ended")
            self._data += part
        message, _, self._data = self._data.partition(b"\0")
        return dict(json.loads(message))


@contextlib.contextmanager
def browser(path: str) -> Iterator[Tab]:
    """A browser with one page; it, its children and its files are gone at the end."""
    to_read, to = os.pipe()
    back, back_write = os.pipe()
    with tempfile.TemporaryDirectory(prefix="tq-browser-", ignore_cleanup_errors=True) as folder:
        moved = f'exec "$@" 3<&{to_read} 4>&{back_write}'
        process = subprocess.Popen(
            ["bash", "-c", moved, "browser", path, *QUIET, f"--user-data-dir={folder}", "about:blank"],
            pass_fds=(to_read, back_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, env={**os.environ, "HOME": folder},
        )  # fmt: skip
        os.close(to_read)
        os.close(back_write)
        try:
            tab = Tab(to, back)
            yield tab
            with contextlib.suppress(RuntimeError, TimeoutError):
                tab.call("Browser.close")
        finally:
            os.close(to)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(back)
