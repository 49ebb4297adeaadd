"""A fake cloud, and gcloud in it: `fake`, and `fake_pod` with a TPU of four workers."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.fake_gcloud import cloud as clouds

GCLOUD = pathlib.Path(__file__).parent / "fake_gcloud" / "gcloud"
PLACE = ["--project=p", "--zone=us-central2-b"]


class Fake:
    """A cloud of its own, and gcloud in it."""

    def __init__(self, state):
        self.state = state
        self.cloud = clouds.Cloud(state)
        # Our own interpreter first: on some machines python3 is a slow script that looks for one.
        path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = os.environ | {"FAKE_GCLOUD_STATE": str(state), "CANARY": "secret", "PATH": path}

    def __call__(self, *argv, code=0, stdin=None, group="tpu-vm"):
        command = [str(GCLOUD), "compute", "tpus", group, *argv, *PLACE]
        done = subprocess.run(command, env=self.environment, input=stdin, capture_output=True, text=True, timeout=60)
        assert done.returncode == code, done.stderr
        return done

    def start(self, *argv):
        command = [str(GCLOUD), "compute", "tpus", "tpu-vm", *argv, *PLACE]
        return subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def queued(self, *argv, **more):
        return self(*argv, group="queued-resources", **more)

    def ssh(self, command, worker=0, **more):
        return self("ssh", "pod", f"--worker={worker}", f"--command={command}", **more)

    def describe(self, name="pod"):
        return json.loads(self("describe", name, "--format=json").stdout)

    def state_of_queued(self):
        return json.loads(self.queued("describe", "q", "--format=json").stdout)["state"]["state"]

    def home(self, worker=0):
        return self.cloud.home("pod", worker)


@pytest.fixture
def fake(tmp_path):
    fake = Fake(tmp_path / "cloud")
    clouds.settings(fake.state, retry_seconds=0)
    yield fake
    for name in fake.cloud.names("nodes"):
        fake.cloud.kill(name)


@pytest.fixture
def fake_pod(fake):
    """A fake cloud with a TPU of four workers in it."""
    clouds.settings(fake.state, creating_describes=0)
    fake("create", "pod", "--accelerator-type=v4-32", "--version=tpu-ubuntu2204-base", "--spot")
    assert fake.describe()["state"] == "READY"
    return fake
