"""Read-only server of `opforge view`, for a run or a folder of runs.

Names in a URL are looked up among the runs that were found, and never joined to a path. On a
loopback address, a request must have that address as its host, so that no website can reach the
server under a name of its own. On any other address, a request must bring the token.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
import socket
import socketserver
import threading
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from opforge import __version__
from opforge.errors import OpforgeError, RunDirectoryError
from opforge.reports.page.case_data import strict_json
from opforge.reports.page.live import LiveRun, list_page_data, runs_by_name
from opforge.reports.page.render import render_page
from opforge.runs.store import MANIFEST

PORT = 8484
_MAX_CACHED_RUNS = 16
"""Maximum number of runs kept in memory."""
_RESPONSE_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class ViewServer(ThreadingHTTPServer):
    """Serves one folder until it is closed."""

    daemon_threads = True

    def __init__(self, folder: Path, host: str = "127.0.0.1", port: int | None = None) -> None:
        if not folder.is_dir():
            raise RunDirectoryError(
                f"there is no folder {str(folder)!r}; give the folder of a run, or one with runs in it"
            )
        self.folder = folder
        self.is_single_run = (folder / MANIFEST).is_file()
        if not self.is_single_run and not any(runs_by_name(folder)):
            raise RunDirectoryError(f"{str(folder)!r} holds no run; make one with `opforge run --out {folder}/NAME`")
        self.token = "" if _is_loopback(host) else secrets.token_urlsafe(24)
        self._host = host
        self._runs: dict[Path, LiveRun] = {}
        self._guard = threading.Lock()
        if ":" in host:
            self.address_family = socket.AF_INET6
        self._bind(host, port)

    def _bind(self, host: str, port: int | None) -> None:
        """Bind the port; if the default port is in use, bind any."""
        for number in (port,) if port is not None else (PORT, 0):
            try:
                super().__init__((host, number), _Handler)
            except (OSError, OverflowError) as error:
                failure = error
            else:
                return
        raise OpforgeError(
            f"cannot listen on {host} port {port}: {failure}; give another --host or --port (0 for any free port)"
        )

    def server_bind(self) -> None:
        """Bind without looking up this machine's host name, which may take long."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors: a client that disconnects is no fault, and others have their answer."""

    @property
    def url(self) -> str:
        """URL to open, with the token if one is needed."""
        host = socket.gethostname() if self._host in ("0.0.0.0", "::") else self._host  # noqa: S104  # not bound here
        url_host = f"[{host}]" if ":" in host else host
        return f"http://{url_host}:{self.server_port}/" + (f"?token={self.token}" if self.token else "")

    @property
    def cookie(self) -> str:
        return f"opforge-{self.server_port}"

    def accepts_host(self, host: str) -> bool:
        """Whether a request's host is a name of this server."""
        names = {self._host, "localhost", "127.0.0.1", "[::1]", f"[{self._host}]"}
        return bool(self.token) or host in {f"{name}:{self.server_port}" for name in names}

    def live_run(self, path: Path) -> LiveRun:
        """Return a run, reusing it if it was read before."""
        with self._guard:
            if path not in self._runs:
                if len(self._runs) >= _MAX_CACHED_RUNS:
                    del self._runs[next(iter(self._runs))]
                self._runs[path] = LiveRun(path)
            return self._runs[path]


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer
    protocol_version = "HTTP/1.1"
    server_version = f"opforge/{__version__}"
    sys_version = ""
    timeout = 30

    def do_GET(self) -> None:  # the base class requires this name
        try:
            self._answer()
        except RunDirectoryError as error:
            self._send(HTTPStatus.NOT_FOUND, str(error))

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class names it so
        """Print nothing."""

    def _answer(self) -> None:
        if not self.server.accepts_host(self.headers.get("Host", "")):
            self._send(HTTPStatus.FORBIDDEN, "this server answers only to its own address")
            return
        address = urlsplit(self.path)
        query = parse_qs(address.query)
        if self.server.token and not self._has_token(address.path, query):
            return
        parts = [unquote(part) for part in address.path.split("/")[1:]]
        since = query.get("since", [""])[0]
        if self.server.is_single_run:
            self._answer_run(self.server.folder, parts, since)
        elif parts in ([""], ["data"]):
            self._answer_list(parts, since)
        else:
            self._answer_listed_run(address.path, parts, since)

    def _has_token(self, path: str, query: dict[str, list[str]]) -> bool:
        """Whether a request has the token in its cookie.

        A request with the token in its URL gets the cookie and a redirect.
        """
        if _same(query.get("token", [""])[0], self.server.token):
            cookie = f"{self.server.cookie}={self.server.token}; Path=/; HttpOnly; SameSite=Lax"
            self._send(HTTPStatus.SEE_OTHER, "", {"Location": "/" + quote(path.lstrip("/")), "Set-Cookie": cookie})
            return False
        try:
            sent_cookie = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
        except CookieError:
            sent_cookie = None
        if sent_cookie is not None and _same(sent_cookie.value, self.server.token):
            return True
        self._send(HTTPStatus.FORBIDDEN, "a token is needed: open the address that `opforge view` printed")
        return False

    def _answer_list(self, parts: list[str], since: str) -> None:
        data = list_page_data(self.server.folder)
        if parts == ["data"]:
            self._send_data(data, since)
        else:
            self._send(HTTPStatus.OK, render_page(data), {"Content-Type": "text/html; charset=utf-8"})

    def _answer_listed_run(self, path: str, parts: list[str], since: str) -> None:
        run_path = runs_by_name(self.server.folder).get(parts[1]) if parts[0] == "run" and len(parts) > 1 else None
        if run_path is None:
            self._send(HTTPStatus.NOT_FOUND, "there is no such page")
        elif len(parts) == 2:
            self._send(HTTPStatus.SEE_OTHER, "", {"Location": "/" + quote(unquote(path).strip("/")) + "/"})
        else:
            self._answer_run(run_path, parts[2:], since)

    def _answer_run(self, path: Path, parts: list[str], since: str) -> None:
        if parts == [""]:
            text = render_page(self.server.live_run(path).data())
            self._send(HTTPStatus.OK, text, {"Content-Type": "text/html; charset=utf-8"})
        elif parts == ["data"]:
            self._send_data(self.server.live_run(path).data(), since)
        elif parts[0] == "blob" and len(parts) == 2 and (blob := self.server.live_run(path).blob(parts[1])) is not None:
            self._send(HTTPStatus.OK, json.dumps(blob), {"Content-Type": "application/json"})
        else:
            self._send(HTTPStatus.NOT_FOUND, "there is no such page")

    def _send_data(self, data: dict[str, Any], since: str) -> None:
        if since == data["version"]:
            self._send(HTTPStatus.NO_CONTENT, "")
        else:
            self._send(HTTPStatus.OK, strict_json(data), {"Content-Type": "application/json"})

    def _send(self, status: HTTPStatus, text: str, headers: dict[str, str] | None = None) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": "text/plain; charset=utf-8",
            **_RESPONSE_HEADERS,
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        if status is not HTTPStatus.NO_CONTENT:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD" and status is not HTTPStatus.NO_CONTENT:
            self.wfile.write(body)


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())
