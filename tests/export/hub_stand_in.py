"""A Hugging Face Hub on this machine, as far as an upload needs one. It knows large files by their SHA-256."""

import base64
import http.server
import json
import re
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LARGE = (".safetensors", ".msgpack")


class Hub(http.server.ThreadingHTTPServer):
    """The server and its state.

    Attributes:
      repos: {name: {"private": bool, "branches": {name: {path: bytes}}}}, what is committed.
      objects: {SHA-256: bytes}, large files that arrived.
      sent: names of requests: what a test counts.
      commits: messages of the commits, in their order.
      refuse: (regular expression of a path, code, words) answered to what matches.
      bad_minutes: the same for one request each, in turn, with the seconds of Retry-After ("" for none) for words; the
        code 0 drops the connection.
      on_commit: called with the message before a commit is answered, in a thread of its own.
    """

    daemon_threads = True

    def __init__(self, token: str):
        super().__init__(("127.0.0.1", 0), Handler)
        self.token = token
        self.repos: dict[str, dict] = {}
        self.objects: dict[str, bytes] = {}
        self.sent: list[str] = []
        self.commits: list[str] = []
        self.refuse: tuple[str, int, str] | None = None
        self.bad_minutes: list[tuple[str, int, str]] = []
        self.on_commit: Callable[[str], object] = lambda message: None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, code: int, content: dict, retry_after: str = "") -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        if retry_after:
            self.send_header("Retry-After", retry_after)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def handle_any(self) -> None:
        hub = self.server
        path = self.path.partition("?")[0]
        hub.sent.append(f"{self.command} {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if hub.bad_minutes and re.search(hub.bad_minutes[0][0], path):
            _, code, retry_after = hub.bad_minutes.pop(0)
            if code:
                self.answer(code, {"error": "a bad minute"}, retry_after)
            else:
                self.connection.shutdown(socket.SHUT_RDWR)
        elif hub.refuse and re.search(hub.refuse[0], path):
            self.answer(hub.refuse[1], {"error": hub.refuse[2]})
        elif path.startswith("/lfs/"):
            hub.objects[path.removeprefix("/lfs/")] = body
            self.answer(200, {})
        elif self.headers.get("Authorization") != f"Bearer {hub.token}":
            self.answer(401, {"error": "Invalid username or password."})
        elif path == "/api/repos/create":
            wish = json.loads(body)
            name = f"{wish['organization']}/{wish['name']}"
            hub.repos.setdefault(name, {"private": wish["private"], "branches": {"main": {}}})
            self.answer(200, {"url": f"{hub.url}/{name}"})
        elif path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/([^/]+))?(?:/(.*))?", path):
            name, what, branch = match.groups()
            if name not in hub.repos:
                self.answer(404, {"error": "Repository not found"})
                return
            repo = hub.repos[name]
            content = self.of_model(repo, what, urllib.parse.unquote(branch or ""), body)
            self.answer(200, {"id": name, "private": repo["private"], "sha": "0" * 40} | content)
        else:
            self.answer(200, {"transfer": "basic", "objects": self.missing(json.loads(body))})

    do_GET = do_POST = do_PUT = handle_any

    def of_model(self, repo: dict, what: str | None, branch: str, body: bytes) -> dict:
        if what == "settings":
            repo["private"] = json.loads(body)["private"]
        elif what == "branch":
            repo["branches"].setdefault(branch, dict(repo["branches"]["main"]))
        elif what == "preupload":
            answer = {"shouldIgnore": False, "oid": None}
            paths = [file["path"] for file in json.loads(body)["files"]]
            modes = {path: "lfs" if path.endswith(LARGE) else "regular" for path in paths}
            return {"files": [answer | {"path": p, "uploadMode": m} for p, m in modes.items()]}
        elif what == "commit":
            header, *lines = map(json.loads, body.splitlines())
            self.server.commits.append(header["value"]["summary"])
            self.server.on_commit(header["value"]["summary"])
            for line in lines:
                value = line["value"]
                is_large = line["key"] == "lfsFile"
                repo["branches"][branch][value["path"]] = (
                    self.server.objects[value["oid"]]
                    if is_large
                    else base64.b64decode(value["content"])
                )
            return {"commitUrl": f"{self.server.url}/a/b/commit/{'0' * 40}", "commitOid": "0" * 40}
        return {}

    def missing(self, batch: dict) -> list[dict]:
        answers = []
        for wanted in batch["objects"]:
            answer = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.server.objects:
                answer["actions"] = {"upload": {"href": f"{self.server.url}/lfs/{wanted['oid']}"}}
            answers.append(answer)
        return answers


@contextmanager
def serving(token: str) -> Iterator[Hub]:
    with Hub(token) as hub:
        threading.Thread(
            target=hub.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()
        yield hub
        hub.shutdown()
