"""Chromium without a window, spoken to over two pipes in the DevTools protocol: no port, no further library."""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import time
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """A browser with one page, which notes the page's requests, messages of its console and exceptions."""

    def __init__(self, profile: Path):
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        arguments = [
            CHROMIUM,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={profile}",
            "--remote-debugging-pipe",
            "about:blank",
        ]
        # Chromium reads from 3 and writes to 4; the pipes' own numbers may be those, so they are moved away first.
        high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10) for descriptor in (commands, answers)]
        with open(profile / "log", "wb") as log:
            self._pid = os.posix_spawn(
                CHROMIUM,
                arguments,
                {**os.environ, "HOME": str(profile)},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, log.fileno(), 1),
                    (os.POSIX_SPAWN_DUP2, log.fileno(), 2),
                    (os.POSIX_SPAWN_DUP2, high[0], 3),
                    (os.POSIX_SPAWN_DUP2, high[1], 4),
                ],
                setpgroup=0,  # Its children are in a group of their own, which `close` ends.
            )
        for descriptor in (commands, answers, *high):
            os.close(descriptor)
        self._buffer = b""
        self._last_id = 0
        self._session = None
        self._events = []
        self.requests: list[str] = []
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, timeout_s=30.0, **parameters):
        """Return the result of a DevTools command."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + timeout_s
        while True:
            answer = self._read(deadline, method)
            if answer.get("id") == self._last_id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def evaluate(self, expression, timeout_s=30.0):
        """Return the value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", timeout_s, expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def open(self, path, *, width=1280, height=900, dark=False, timeout_s=60.0):
        """Load the file and wait until it says that it has drawn all."""
        self.requests.clear()
        self.errors.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="", features=[scheme])
        self.call("Page.navigate", url=Path(path).as_uri())
        self.wait_for("document.documentElement?.dataset.ready === 'true'", timeout_s)
        self.settle()

    def settle(self):
        """Wait until what is due has been drawn."""
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def wait_for(self, expression, timeout_s=30.0):
        deadline = time.monotonic() + timeout_s
        while not self.evaluate(expression):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{expression} is not true after {timeout_s} s; errors: {self.errors}")
            time.sleep(0.05)

    def screenshot(self, path=None, *, whole=False):
        """Return a picture of the page as PNG."""
        picture = base64.b64decode(
            self.call("Page.captureScreenshot", 60.0, format="png", captureBeyondViewport=whole)["data"]
        )
        if path:
            Path(path).write_bytes(picture)
        return picture

    def pdf(self, path=None):
        content = base64.b64decode(
            self.call("Page.printToPDF", 60.0, printBackground=True, preferCSSPageSize=True)["data"]
        )
        if path:
            Path(path).write_bytes(content)
        return content

    def mouse(self, kind, x, y, **more):
        buttons = {} if kind == "mouseMoved" and not more else {"button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **{**buttons, **more})

    def close(self):
        """End the browser with all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._commands)
        os.close(self._answers)

    def _read(self, deadline, waiting_for):
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"Chromium does not answer {waiting_for}")
            read = os.read(self._answers, 1 << 20)
            if not read:
                raise RuntimeError(f"Chromium ended before it answered {waiting_for}")
            self._buffer += read
        line, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(line)
        self._note(message)
        return message

    def _note(self, message):
        parameters = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(str(parameters["exceptionDetails"]))
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                self.errors.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.errors.append(str(parameters["args"]))
