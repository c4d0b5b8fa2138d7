"""A headless Chromium, driven over a pipe by its DevTools protocol: no driver and no package is needed."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--remote-debugging-pipe", "--disable-gpu", "--no-first-run"),
    *(
        "--disable-dev-shm-usage",
        "--disable-extensions",
        "--disable-component-update",
        "--no-default-browser-check",
    ),
    *(
        "--disable-background-networking",
        "--disable-sync",
        "--hide-scrollbars",
        "--disable-features=Translate",
    ),
)
TIMEOUT_S = 120.0


def find_chromium() -> str | None:
    """Return the path of a Chromium, if one is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab.

    errors: what the console and uncaught exceptions have told.
    """

    def __init__(self, orders: int, reports: int) -> None:
        self._orders = orders
        self._reports = reports
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session: str | None = None
        self.errors: list[str] = []
        self._num_loads = 0
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        number = next(self._numbers)
        order: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            order["sessionId"] = self._session
        os.write(self._orders, json.dumps(order).encode() + b"\0")
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            message = self._read(deadline)
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                return message["result"]

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._reports], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "Chromium does not answer"
            data = os.read(self._reports, 2**16)
            assert data, "Chromium has ended"
            self._rest += data
        first, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(first)
        params = message.get("params", {})
        self._num_loads += message.get("method") == "Page.loadEventFired"
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif message.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(json.dumps(params["args"]))
        return message

    def open(self, url: str) -> None:
        """Go to an address."""
        self.call("Page.navigate", url=url)

    def reload(self) -> None:
        """Load the page again. Until it is there, expressions would be those of the old one."""
        num_loads = self._num_loads
        self.call("Page.reload")
        deadline = time.monotonic() + TIMEOUT_S
        while self._num_loads == num_loads:
            self._read(deadline)

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = TIMEOUT_S) -> Any:
        """Return the value of an expression once it is true."""
        deadline = time.monotonic() + seconds
        while not (value := self.run(expression)):
            assert time.monotonic() < deadline, f"never true: {expression}; {self.errors}"
            time.sleep(0.05)
        return value

    def resize(self, width: int, height: int) -> None:
        """Let the page have this size in pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def screenshot(self) -> bytes:
        """Return a picture of the page, a PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


@contextmanager
def chromium_page(program: str) -> Iterator[Page]:
    """Yield a tab of a new Chromium, which ends with the context."""
    order_end, orders = os.pipe()
    reports, report_end = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        # It reads orders from descriptor 3 and writes reports to 4, wherever this process has them.
        script = 'exec 3<&"$0" 4>&"$1"; shift; exec "$@"'
        process = subprocess.Popen(
            ["bash", "-c", script, str(order_end), str(report_end), *command],
            pass_fds=[order_end, report_end],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(order_end)
        os.close(report_end)
        try:
            yield Page(orders, reports)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(orders)
            os.close(reports)
