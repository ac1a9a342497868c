"""`hyperpod serve`: the view of a running job as a web page, read-only.

    GET /              a page that asks for the view every two seconds
    GET /status.json   the `JobView`
    GET /report        the report of the run so far, if its ledgers are known

There is nothing else, and no other method than GET and HEAD. Nothing that a browser sends has an effect on the job, and
a page of another site can read nothing: a request whose `Host` is not a name of this server is refused (DNS
rebinding), and no header permits other origins. Anyone who can reach the port can read everything, so the default is
loopback.
"""

import argparse
import contextlib
import ipaddress
import json
import socket
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, cast

from hyperpod_plugins.elastic.store.records import printable
from hyperpod_plugins.errors import ConfigError, HyperPodError
from hyperpod_plugins.report.top_command import add_watch_arguments, own_messages_only
from hyperpod_plugins.report.watch import JobWatch, WatchOptions

DEFAULT_PORT = 8265
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_PAGE = Path(__file__).with_name("live.html")
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
_REPORT_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_MAX_CONNECTIONS = 16
_SILENT_S = 5.0
"""Longest wait for a part of a request, or until a part of the answer is taken."""
_REQUEST_S = 60.0
"""Longest time of a connection, from its acceptance to its end."""
_REPORT_KEPT_S = 15.0
"""For how long a report is not made again."""
_HTML, _JSON, _TEXT = "text/html; charset=utf-8", "application/json", "text/plain; charset=utf-8"


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `hyperpod serve`."""
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; with another than the default, other machines can read the page",
    )
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="port to listen on; 0 for a free one")
    add_watch_arguments(parser)


def run_serve(arguments: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C.

    Raises:
        ConfigError: no job is found, or the port is not available.
    """
    watch = WatchOptions(run_id=arguments.run_id, events=arguments.events, interval_s=1.0).watch()
    server = open_server(watch, arguments.host, arguments.port)
    shown = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    _say(f"http://{shown}:{server.server_port}/")
    if arguments.host not in _LOOPBACK:
        _say(f"warning: anyone who can reach port {server.server_port} of this machine can read this page")
    watch.start()
    try:
        with own_messages_only():
            server.serve_forever(poll_interval=0.25)
    finally:
        watch.stop()
        server.server_close()
    return 0


def _say(line: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(printable(line) + "\n")
        sys.stdout.flush()


def open_server(watch: JobWatch, host: str, port: int) -> "ViewServer":
    """Listen on a port.

    Raises:
        ConfigError: the address or port is not available.
    """
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"--port={port} must be between 0 and 65535; 0 chooses a free one.")
    try:
        return ViewServer(watch, host, port)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on --host={host} --port={port}: {error.strerror or error}. Give an address of this machine "
            "and another port, or --port=0 for a free one."
        ) from error


class ViewServer(ThreadingHTTPServer):
    """Serves the view of a `JobWatch`, to a few connections at a time."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, watch: JobWatch, host: str, port: int) -> None:
        """Listen on the port.

        Raises:
            OSError: it cannot be had.
        """
        family, _, _, _, _ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = family
        self.watch = watch
        self.names = names_of(host)
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._report_lock = threading.Lock()
        self._report: tuple[float, str] | None = None
        super().__init__((host, port), ViewHandler)

    def server_bind(self) -> None:
        """Bind without the look-up of this machine's name that the base class makes, which may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = cast("tuple[str, int]", self.server_address[:2])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, unless there are too many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and close the connection when its time is over."""
        timer = threading.Timer(_REQUEST_S, _shut, (request,))
        timer.daemon = True
        timer.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            timer.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say in one line that an answer has failed; a connection that ends early is not an error."""
        error = sys.exception()
        if not isinstance(error, OSError):
            sys.stderr.write(f"hyperpod serve: {type(error).__name__}: {printable(str(error))}\n")

    def report(self) -> str | None:
        """The page of the run's report so far, made one at a time; None if no ledgers are known.

        Raises:
            ConfigError: there are no ledgers in that folder.
        """
        if not self.watch.events:
            return None
        from hyperpod_plugins.report.make_report import run_report
        from hyperpod_plugins.report.page import page_html

        with self._report_lock:
            if self._report is None or time.monotonic() > self._report[0] + _REPORT_KEPT_S:
                text = page_html(run_report(Path(self.watch.events)))
                self._report = time.monotonic(), text
            return self._report[1]


def names_of(host: str) -> frozenset[str]:
    """Names in a `Host` header that mean a server at this address."""
    names = {*_LOOPBACK, host.lower()}
    return frozenset(names if host in _LOOPBACK else names | {socket.gethostname().lower()})


def is_named(header: str | None, names: frozenset[str]) -> bool:
    """Whether a `Host` header, with or without a port, names this server.

    If it listens on more than loopback, any address is a name of it: only other names can be pointed to it.
    """
    if not header or len(header) > 300:
        return False
    if header.startswith("["):
        name, _, rest = header[1:].partition("]")
        is_whole = not rest or rest[1:].isdecimal()
    else:
        name, _, port = header.partition(":")
        is_whole = not port or port.isdecimal()
    if not is_whole:
        return False
    if name.lower() in names:
        return True
    return not names <= set(_LOOPBACK) and _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class ViewHandler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: ViewServer  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = _SILENT_S
    server_version, sys_version = "hyperpod", ""

    def do_GET(self) -> None:
        """Answer with a page or JSON."""
        if not is_named(self.headers.get("Host"), self.server.names):
            self._send(HTTPStatus.FORBIDDEN, _TEXT, "the Host of the request is not a name of this server\n")
            return
        match self.path.partition("?")[0]:
            case "/":
                self._send(HTTPStatus.OK, _HTML, _PAGE.read_text(encoding="utf-8"))
            case "/status.json":
                view = json.dumps(self.server.watch.view.to_dict(), allow_nan=False)
                self._send(HTTPStatus.OK, _JSON, view)
            case "/report":
                self._send_report()
            case _:
                self._send(
                    HTTPStatus.NOT_FOUND, _TEXT, "there is no such page; this server has /, /status.json and /report\n"
                )

    do_HEAD = do_GET  # `_send` leaves the body out

    def _send_report(self) -> None:
        try:
            page = self.server.report()
        except HyperPodError as error:
            self._send(HTTPStatus.NOT_FOUND, _TEXT, f"{printable(str(error))}\n")
            return
        if page is None:
            why = "no ledgers of this job are known: start it with HYPERPOD_EVENTS=FOLDER, or give --events=FOLDER\n"
            self._send(HTTPStatus.NOT_FOUND, _TEXT, why)
        else:
            self._send(HTTPStatus.OK, _HTML, page, policy=_REPORT_POLICY)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a request that is malformed or has another method."""
        is_method = code == HTTPStatus.NOT_IMPLEMENTED
        status = HTTPStatus.METHOD_NOT_ALLOWED if is_method else HTTPStatus(code)
        self.close_connection = True
        self._send(
            status, _TEXT, "this server is read-only; it answers GET and HEAD\n" if is_method else f"{status.phrase}\n"
        )

    def _send(self, status: HTTPStatus, kind: str, text: str, *, policy: str = _POLICY) -> None:
        data = text.encode(errors="replace")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Security-Policy", policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the page asks every two seconds."""
