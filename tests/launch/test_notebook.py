"""A notebook on host 0 of the fake cloud: the real launch/notebook_server.py, with stand-ins for JupyterLab and pip."""

import json
import re
import socket
import urllib.request

import pytest
from pods import notebook

from tests.launch.pod import RUN
from tests.support.dask_cluster import free_port

pytestmark = pytest.mark.standard

SEEN = """import json, os, pathlib, sys
variables = {name: value for name, value in os.environ.items() if name.startswith(("TPU_", "JUPYTER_"))}
file = pathlib.Path(os.environ["MLM_HOST_DIR"]) / f"{pathlib.Path(__file__).parent.name}.json"
file.write_text(json.dumps({"argv": sys.argv[1:], "variables": variables}))
"""
SERVES = """import http.server
server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
about = {"port": server.server_port, "token": os.environ["JUPYTER_TOKEN"]}
pathlib.Path(os.environ["JUPYTER_RUNTIME_DIR"], "jpserver-7.json").write_text(json.dumps(about))
server.serve_forever()
"""
ONE_HOST = {"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,2,1", "TPU_VISIBLE_CHIPS": "0,1,2,3"}
ONE_HOST |= {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}


def with_jupyter(pod, text: str) -> list:
    """Brings the pod up with a JupyterLab that is `text`; returns what tunnels are asked for: (worker, ssh's words)."""
    for name, content in {"jupyterlab": SEEN + text, "pip": SEEN}.items():
        (pod.repository / name).mkdir()
        (pod.repository / name / "__init__.py").touch()  # or an installed one of that name would be taken
        (pod.repository / name / "__main__.py").write_text(content)
    pod.commit()
    pod.ready()
    pod.cloud.settings(env={"PATH": f"{pod.bin}:/usr/bin:/bin", "PIP_NO_INDEX": "1"})
    connect, tunnels = pod.cloud.connect, []

    def tunnel(node: dict, worker: int, words: list[str]) -> int:
        if "-L" not in words:
            return connect(node, worker, words)
        tunnels.append((worker, words))
        return 255  # as of a connection that is lost

    pod.cloud.connect = tunnel
    return tunnels


def test_it_serves_on_host_0_behind_a_tunnel_until_it_is_stopped(pod):
    port = free_port()
    tunnels = with_jupyter(pod, SERVES)
    said = pod.tpu("notebook", f"--port={port}", "--every=0.1", code=1)
    folder = pod.host_folder(0, "notebook")
    seen = json.loads((folder / "jupyterlab.json").read_text())
    token = seen["variables"].pop("JUPYTER_TOKEN")
    assert f"http://127.0.0.1:{port}/lab?token={token}\n" in said and len(token) >= 32
    assert seen["variables"] == ONE_HOST | {"JUPYTER_RUNTIME_DIR": str(folder)}
    assert "--ip=127.0.0.1" in seen["argv"] and "the tunnel has ended" in said
    ((worker, words),) = tunnels
    remote = re.fullmatch(f"127.0.0.1:{port}:127.0.0.1:([0-9]+)", words[words.index("-L") + 1])[1]
    assert worker == 0 and urllib.request.urlopen(f"http://127.0.0.1:{remote}/").status == 200
    assert not pod.host_folder(1, "notebook").exists() and token not in (folder / "job.json").read_text()
    pip = json.loads((folder / "pip.json").read_text())["argv"]
    assert pip == ["install", "--constraint=requirements.txt", "jupyterlab"]
    (folder / "progress.json").write_text('{"step": 3, "phase": "step"}')  # a training run in a cell writes there
    assert token in pod.tpu("notebook", f"--port={port}", "--every=0.1", code=1) and pod.starts() == 1
    assert "run 'notebook' (attempt 1) is alive there: launch/tpu.py stop" in pod.tpu(*RUN, code=1)
    pod.tpu("stop", "notebook", "--grace=5")
    assert pod.processes("notebook") == []


def test_what_keeps_it_from_serving_is_said(pod):
    port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        for bad in (number, 70_000, 0):
            said = pod.tpu("notebook", f"--port={bad}", code=2)
            assert f"--port={bad}: this machine can't open it" in said and pod.cloud.calls() == []
    assert "my-pod is ABSENT, not ready: launch/tpu.py up" in pod.tpu("notebook", f"--port={port}", code=1)
    assert not with_jupyter(pod, "sys.exit(3)")
    said = pod.tpu("notebook", f"--port={port}", "--every=0.1", code=1)
    assert "exited, exit code 3" in said and "launch/tpu.py logs notebook" in said


def test_the_chips_of_a_host():
    """A slice on one host needs no variables; where a host has eight chips, they lie two by four."""
    assert notebook.environment(chips=8, hosts=1) == {} and notebook.environment(chips=8, hosts=2) == ONE_HOST
    assert notebook.environment(chips=16, hosts=2)["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "2,4,1"
