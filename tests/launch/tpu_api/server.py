"""The TPU API over HTTP on the loopback, for the real gcloud, and the environment that leads gcloud to it."""

import contextlib
import json
import os
import pathlib
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.launch.tpu_api.model import ApiError, Cloud


@contextlib.contextmanager
def serving(cloud: Cloud) -> Iterator[str]:
    """Answers requests meanwhile; gives the address."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            url = urllib.parse.urlsplit(self.path)
            length = int(self.headers.get("content-length") or 0)
            text = self.rfile.read(length)
            query = dict(urllib.parse.parse_qsl(url.query))
            try:
                body = json.loads(text) if text else None
                code = 200
                answer = cloud.request(self.command, urllib.parse.unquote(url.path), query, body)
            except ApiError as error:
                code = error.error["code"]
                answer = {"error": error.error}
            data = json.dumps(answer, indent=2).encode()
            self.send_response(code)
            self.send_header("content-type", "application/json; charset=UTF-8")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PATCH = do_DELETE = answer

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()


def environment(address: str, home: pathlib.Path) -> dict[str, str]:
    """Returns the variables with which gcloud takes this API for Google's, and keeps its files in a home of its own."""
    (home / "config").mkdir(parents=True, exist_ok=True)
    (home / "token").write_text("token")
    others = {name: value for name, value in os.environ.items() if not name.startswith("CLOUDSDK_")}
    return others | {
        "HOME": str(home),
        "CLOUDSDK_CONFIG": str(home / "config"),
        "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE": str(home / "token"),
        "CLOUDSDK_CORE_ACCOUNT": "me@example.com",
        "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
        "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "1",
        "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "1",
        "CLOUDSDK_SURVEY_DISABLE_PROMPTS": "1",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": address,
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": f"{address}compute/v1/",
    }
