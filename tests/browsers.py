"""A real browser without a window: Chromium, driven by its own protocol over two pipes."""

from __future__ import annotations

import base64
import json
import os
import selectors
import shutil
import subprocess
from collections import deque
from pathlib import Path
from typing import Any

from waiting import LIMIT_S, wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One Chromium; it is killed at the end.

    Args:
        folder: for its profile and log.
    """

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        ours, self._out = os.pipe()
        self._in, theirs = os.pipe()
        self._log = (folder / "chromium.log").open("ab")
        command = [
            CHROMIUM,
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--disable-background-networking", "--disable-extensions", "--remote-debugging-pipe"),
            *(f"--user-data-dir={folder / 'profile'}", "about:blank"),
        ]
        out, fds = self._log, f"3</proc/self/fd/{ours} 4>/proc/self/fd/{theirs}"  # where Chromium expects them
        self._process = subprocess.Popen(
            ["sh", "-c", f'exec "$@" {fds}', "sh", *command], pass_fds=(ours, theirs), stdout=out, stderr=out
        )
        for each in (ours, theirs):
            os.close(each)
        self._buffer, self._number = b"", 0
        self._targets: list[str] = []
        self._inbox: deque[dict[str, Any]] = deque()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)
        self._log.close()

    def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == number:
                assert "error" not in told, (method, told)
                return told["result"]
            self._inbox.append(told)

    def events(self, session: str) -> list[dict[str, Any]]:
        found = [each for each in self._inbox if each.get("sessionId") == session]
        self._inbox.clear()
        return found

    def close_tabs(self) -> None:
        while self._targets:
            self.call("Target.closeTarget", targetId=self._targets.pop())

    def _next(self) -> dict[str, Any]:
        with selectors.DefaultSelector() as ready:
            ready.register(self._in, selectors.EVENT_READ)
            while b"\0" not in self._buffer:
                assert ready.select(LIMIT_S), f"Chromium has said nothing for {LIMIT_S:g} s"
                piece = os.read(self._in, 1 << 20)
                assert piece, "Chromium has ended"
                self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, url: str, width: int = 1280, height: int = 800, *, dark: bool = False) -> Tab:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._targets.append(target)
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        tab.call("Emulation.setEmulatedMedia", features=scheme)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 700}
        tab.call("Emulation.setDeviceMetricsOverride", **size)
        tab.call("Page.navigate", url=url)
        return tab


class Tab:
    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.problems: list[str] = []  # what the page's console and its policy complain about

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def value(self, code: str) -> Any:
        told = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        for event in self._browser.events(self._session):
            params = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                self.problems.append(str(params["exceptionDetails"].get("exception", params)))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
                self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        return told["result"].get("value")

    def until(self, code: str) -> Any:
        def told() -> str:
            return f"{self.problems}; {self.value('document.body && document.body.innerText.slice(0, 1000)')}"

        return wait_until(lambda: self.value(code), code, LIMIT_S, diagnostics=told)

    @property
    def text(self) -> str:
        return str(self.value("document.body.innerText"))

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
