"""A notebook on one host: reached through a tunnel, closed to whoever hasn't the token, gone when we are."""

import json
import os
import pathlib
import signal
import stat
import threading

from tests.fixtures_pods import wait_for
from tests.test_host import alive

JUPYTER = """import json, os, pathlib, sys, time
if __name__ == "__main__":
    names = ("JUPYTER_TOKEN", "TPU_PROCESS_BOUNDS")
    found = {"pid": os.getpid(), "argv": sys.argv[1:], **{name: os.environ.get(name) for name in names}}
    print("http://127.0.0.1:9999/lab?token=" + os.environ["JUPYTER_TOKEN"], flush=True)
    new = pathlib.Path.home() / "new.json"
    new.write_text(json.dumps(found))
    new.rename(new.with_name("jupyter.json"))
    time.sleep(60)
"""


def test_notebook(pod):
    (pod.repository / "jupyterlab.py").write_text(JUPYTER)
    pod.git("add", "-A")
    pod.ready()
    file, seen = pod.home / "1" / "home" / "jupyter.json", {}

    def interrupt() -> None:
        wait_for(file.exists)
        token = pathlib.Path("runs/pods/notebook-token")
        seen.update(token=token.read_text().strip(), mode=stat.S_IMODE(token.stat().st_mode))
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    said = pod.tpu("notebook", "--worker=1", "--local-port=9999")
    found = json.loads(file.read_text())
    assert found["JUPYTER_TOKEN"] == seen["token"] and len(seen["token"]) >= 32 and seen["mode"] == 0o600
    assert found["argv"] == ["--no-browser", "--ip=127.0.0.1", "--port=9999", "--port-retries=0"]
    assert found["TPU_PROCESS_BOUNDS"] == "1,1,1"  # of a slice: or jax waits for the other hosts
    wait_for(lambda: not alive(found["pid"]))
    assert "http://localhost:9999/lab" in said and seen["token"] not in said
    call = next(call for call in pod.calls() if any("host.py notebook" in word for word in call))
    assert "--ssh-flag=-L9999:localhost:9999" in call and "--worker=1" in call
    assert seen["token"] not in json.dumps(pod.calls()) and not pathlib.Path("runs/pods/notebook-token").exists()


def test_without_jupyter_or_such_a_host(pod):
    pod.ready()
    said = pod.tpu("notebook", code=1)
    assert "jupyterlab is not installed here: launch/tpu.py sync --extra jupyterlab" in said
    assert "there is no host 2: my-pod has 2" in pod.tpu("notebook", "--worker=2", code=1)
