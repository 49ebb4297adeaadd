"""A Hugging Face Hub on this machine, as far as an upload needs one: create, preupload, LFS batch, commit, settings.

It knows large files by their SHA-256, takes its token alone, and notes what was sent.
"""

import base64
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager

LARGE = (".safetensors", ".msgpack")


class Hub(http.server.ThreadingHTTPServer):
    """The server and its state.

    Attributes:
      repos: {name: {"private": bool, "files": {path: bytes}, "branches": {name: {path: bytes}}}}, what is committed;
        "files" are those of main.
      objects: {SHA-256: bytes}, large files that arrived whole.
      sent: names of requests, and of the objects put: what a test counts.
      stall: SHA-256 of an object of which half is read, and no answer given; `stalled` is set then.
      refuse: (regular expression of a path, code, words) answered to what matches.
    """

    daemon_threads = True

    def __init__(self, token: str):
        super().__init__(("127.0.0.1", 0), Handler)
        self.token = token
        self.repos: dict[str, dict] = {}
        self.objects: dict[str, bytes] = {}
        self.sent: list[str] = []
        self.stall, self.stalled = "", threading.Event()
        self.refuse: tuple[str, int, str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, code: int, content: dict, **headers: str) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def handle_any(self) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        if self.command == "PUT" and path.startswith("/lfs/"):
            self.put_object(path.removeprefix("/lfs/"))
            return
        hub.sent.append(f"{self.command} {path}")
        body = self.body()
        if hub.refuse and re.search(hub.refuse[0], path):
            self.answer(hub.refuse[1], {"error": hub.refuse[2]})
        elif self.headers.get("Authorization") != f"Bearer {hub.token}":
            self.answer(401, {"error": "Invalid username or password."})
        elif path == "/api/repos/create":
            self.create(json.loads(body))
        elif path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/.*)?", path):
            self.of_model(match[1], match[2] or "", body)
        elif match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            self.batch(json.loads(body)["objects"])
        else:
            self.answer(404, {"error": f"no such path: {path}"})

    do_GET = do_POST = do_PUT = handle_any

    def create(self, wish: dict) -> None:
        name = f"{wish['organization']}/{wish['name']}"
        there = name in self.server.repos
        if not there:
            self.server.repos[name] = {"private": wish["private"], "files": (main := {}), "branches": {"main": main}}
        self.answer(409 if there else 200, {"url": f"{self.server.url}/{name}"})

    def of_model(self, name: str, rest: str, body: bytes) -> None:
        repo = self.server.repos.get(name)
        if repo is None:
            self.answer(404, {"error": "Repository not found"}, **{"X-Error-Code": "RepoNotFound"})
            return
        what, _, branch = rest.removeprefix("/").partition("/")
        branch = urllib.parse.unquote(branch or "main")
        if what == "branch":
            there = branch in repo["branches"]
            if not there:
                repo["branches"][branch] = dict(repo["files"])  # a branch starts from main
            self.answer(409 if there else 200, {"error": "Reference already exists"} if there else {})
        elif branch not in repo["branches"]:
            self.answer(404, {"error": f"Invalid rev id: {branch}"}, **{"X-Error-Code": "RevisionNotFound"})
        elif what in ("", "revision"):
            self.answer(200, {"id": name, "private": repo["private"], "sha": "0" * 40})
        elif what == "preupload":
            modes, files = [], repo["branches"][branch]
            for file in json.loads(body)["files"]:
                mode = "lfs" if file["path"].endswith(LARGE) else "regular"
                oid = _oid(files[file["path"]], mode) if file["path"] in files else None
                modes.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
            self.answer(200, {"files": modes})
        elif what == "commit":
            self.commit(name, repo["branches"][branch], [json.loads(line) for line in body.splitlines()])
        elif what == "settings":
            repo["private"] = json.loads(body)["private"]
            self.answer(200, {"private": repo["private"]})

    def commit(self, name: str, branch: dict[str, bytes], lines: list[dict]) -> None:
        files = {}
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "lfsFile":
                if value["oid"] not in self.server.objects:
                    self.answer(400, {"error": f"{value['path']} was not uploaded"})
                    return
                files[value["path"]] = self.server.objects[value["oid"]]
            else:
                files[value["path"]] = base64.b64decode(value["content"])
        branch.update(files)
        self.answer(200, {"commitUrl": f"{self.server.url}/{name}/commit/{'0' * 40}", "commitOid": "0" * 40})

    def batch(self, objects: list[dict]) -> None:
        answers = []
        for wanted in objects:
            sha = wanted["oid"]
            answer = {"oid": sha, "size": wanted["size"]}
            if sha not in self.server.objects:
                answer["actions"] = {"upload": {"href": f"{self.server.url}/lfs/{sha}"}}
            answers.append(answer)
        self.answer(200, {"transfer": "basic", "objects": answers})

    def put_object(self, sha: str) -> None:
        """An address that was signed for one upload: whoever has it needs no token, and must send none."""
        if self.headers.get("Authorization"):
            self.answer(400, {"error": "a token was sent to the store"})
            return
        if sha == self.server.stall:
            self.rfile.read(int(self.headers["Content-Length"]) // 2)
            self.server.stalled.set()
            self.rfile.read()  # until the client is gone
            return
        data = self.body()
        if hashlib.sha256(data).hexdigest() != sha:
            self.answer(400, {"error": "not what was announced"})
            return
        self.server.sent.append(f"object {sha}")
        self.server.objects[sha] = data
        self.answer(200, {})


def _oid(data: bytes, mode: str) -> str:
    if mode == "lfs":
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def serving(token: str) -> Iterator[Hub]:
    with Hub(token) as hub:
        threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield hub
        hub.shutdown()
