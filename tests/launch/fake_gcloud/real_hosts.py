"""The TPU API at an address, with hosts that are reached by the real ssh."""

import getpass
import json
import os
import pathlib
import subprocess
import urllib.error
import urllib.parse
import urllib.request

from tests.launch.tpu_api.errors import ApiError


class Cloud:
    """What cloud.Cloud is to a folder."""

    user, user_home = getpass.getuser(), os.environ["HOME"]

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")

    def connect(self, node: dict, worker: int, words: list[str]) -> int:
        """Runs an ssh command with a key that is made here and given to the node; returns its exit code."""
        key, user = pathlib.Path(words[3]), words[-3].partition("@")[0]
        if not key.exists():
            key.parent.mkdir(mode=0o700, exist_ok=True)
            subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-N", "", "-f", key], check=True)
        entry = f"{user}:{' '.join(pathlib.Path(f'{key}.pub').read_text().split()[:2])} {user}"
        metadata = node.get("metadata", {})
        if entry not in metadata.get("ssh-keys", ""):
            metadata["ssh-keys"] = f"{metadata.get('ssh-keys', '')}\n{entry}"
            self.request("PATCH", f"/v2/{node['name']}", {"updateMask": "metadata"}, {"metadata": metadata})
        argv = [part for word in words[:-1] for part in word.split(" ", 1)] + words[-1:]
        return subprocess.run(argv).returncode

    def request(self, method: str, path: str, query: dict[str, str] | None = None, body: dict | None = None) -> dict:
        """Returns the answer to a request. Raises ApiError."""
        data = None if body is None else json.dumps(body).encode()
        address = f"{self.address}{path}?{urllib.parse.urlencode(query or {})}"
        try:
            with urllib.request.urlopen(urllib.request.Request(address, data, method=method)) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise ApiError(json.load(error)["error"]) from error
