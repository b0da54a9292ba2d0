"""Drives a headless Chromium over the DevTools protocol."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

websocket = pytest.importorskip("websocket", reason="needs the package websocket-client")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
START_SECONDS = 60.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-extensions",
)


class Browser:
    """One page of a browser without a network; what its console says of errors is kept in `errors`."""

    def __init__(self, width: int = 1500, height: int = 950) -> None:
        assert CHROMIUM is not None
        self._folder = tempfile.TemporaryDirectory(prefix="chromium-")
        profile = Path(self._folder.name)
        size = f"--window-size={width},{height}"
        command = [CHROMIUM, *FLAGS, size, f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.errors: list[str] = []
        self._number = 0
        port, path = self._wait_for(profile / "DevToolsActivePort")
        self._socket = websocket.create_connection(f"ws://127.0.0.1:{port}{path}", timeout=60, suppress_origin=True)
        self._session = ""
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)

    def _wait_for(self, file: Path) -> list[str]:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self._process.poll() is None:
            if file.exists() and len(lines := file.read_text().split()) == 2:
                return lines
            time.sleep(0.05)
        raise RuntimeError(f"{CHROMIUM} does not start")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command; what the browser tells meanwhile is looked through for errors."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        self._socket.send(json.dumps(message | ({"sessionId": self._session} if self._session else {})))
        while True:
            told = json.loads(self._socket.recv())
            if told.get("id") == self._number:
                if "error" in told:
                    raise RuntimeError(f"{method}: {told['error']}")
                return dict(told["result"])
            self._note(told.get("method", ""), told.get("params", {}))

    def _note(self, method: str, told: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(each.get("value", each.get("description"))) for each in told["args"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.errors.append(told["entry"]["text"])

    def open(self, file: Path) -> float:
        """Opens a report, and returns the seconds until its first screen is painted."""
        self.call("Page.navigate", url=file.resolve().as_uri())
        self.wait("document.body && document.body.dataset.ready === 'true'")
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return float(self.run("performance.now()")) / 1e3

    def run(self, script: str) -> Any:
        """The value of an expression, awaited."""
        told = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in told:
            raise RuntimeError(told["exceptionDetails"].get("exception", {}).get("description", str(told)))
        return told["result"].get("value")

    def wait(self, condition: str, seconds: float = 60) -> None:
        """Until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            if time.monotonic() > end:
                raise TimeoutError(f"not within {seconds} s: {condition}; {self.errors}")
            time.sleep(0.05)

    def key(self, text: str) -> None:
        """Presses and releases a key of one letter, or a named one."""
        code = {"Enter": 13, "Escape": 27}.get(text, 0)
        letter = {"text": text} if len(text) == 1 else {"text": "\r"} if text == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=text, windowsVirtualKeyCode=code, **letter)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=text, windowsVirtualKeyCode=code)

    def click(self, x: float, y: float) -> None:
        """Clicks at a place on the screen."""
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, file: Path) -> bytes:
        """What is seen, as a PNG file."""
        data = base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        file.write_bytes(data)
        return data

    def close(self) -> None:
        with suppress(Exception):
            self._socket.close()
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()
