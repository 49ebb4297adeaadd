"""Tasks on a Dask cluster of real processes, over real TLS."""

import collections
import functools
import os
import pathlib
import pickle
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator

import cloudpickle
import pytest

from mlm.cluster.fingerprints import worker_fingerprint
from mlm.engine import certificates, dask_engine, engine
from mlm.errors import InputError, PreemptedError
from tests import ROOT
from tests.support.dask_cluster import Cluster, greeted, until
from tests.support.engine_tasks import run_slowly, square


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as found:
        found.add(workers=2)
        yield found


def opened(found: Cluster):
    return dask_engine.connect(found.address, certificates=str(found.certificates), timeout=250)


def begun(folder: pathlib.Path) -> list[list[int]]:
    lines = (folder / "begun").read_text().splitlines()
    return [[int(word) for word in line.split()] for line in lines]


@pytest.mark.standard
def test_a_killed_worker_costs_its_own_tasks_alone(cluster, tmp_path):
    with opened(cluster) as dask:
        until(lambda: dask.workers == 2)
        tasks = dask.each(functools.partial(run_slowly, tmp_path), range(16), label="slow")
        next(tasks)
        *_, (_, killed) = begun(tmp_path)
        os.kill(killed, signal.SIGKILL)
        assert len(list(tasks)) == 15
    starts = collections.Counter(number for number, _ in begun(tmp_path))
    assert set(starts) == set(range(16))
    again = [number for number, count in starts.items() if count > 1]
    assert 1 <= len(again) <= engine.AHEAD
    first = dict(reversed(begun(tmp_path)))
    assert all(first[number] == killed for number in again)


@pytest.mark.standard
def test_a_lost_scheduler_is_a_reason_to_start_again(tmp_path):
    with Cluster(tmp_path) as found, opened(found) as dask:
        found.add()
        tasks = dask.each(functools.partial(run_slowly, tmp_path), range(40), label="slow")
        next(tasks)
        found.scheduler.kill()
        begin = time.monotonic()
        with pytest.raises(PreemptedError, match=r"scheduler at tls://.* is lost") as error:
            list(tasks)
        assert time.monotonic() - begin < 20 and error.value.code == 75


# On a machine whose Python is not one of launch/environment.sh, which names the repository in mlm.pth.
WITHOUT_CODE = """
import os, pickle, sys
sys.path = [folder for folder in sys.path if not os.path.isdir(os.path.join(folder, "mlm"))]
entry, arguments = pickle.load(sys.stdin.buffer)
try:
    entry(*arguments)
except ImportError as error:
    pickle.dump(error, sys.stdout.buffer)
"""


@pytest.mark.standard
def test_a_worker_without_the_code_is_told_how_it_is_started(tmp_path):
    """As by the command `dask worker`, which has no folder on its path."""
    task = cloudpickle.dumps((dask_engine._entry(), (worker_fingerprint(), pickle.dumps((str, 7)))))
    line = [sys.executable, "-I", "-c", WITHOUT_CODE]
    error = pickle.loads(subprocess.check_output(line, input=task, cwd=ROOT))
    known = dask_engine.DaskEngine("tls://h:1", None, 1.0)._known(error, "square")
    assert isinstance(known, InputError)
    for word in (socket.gethostname(), "PYTHONPATH=DIR dask worker", str(ROOT)):
        assert word in str(known)


def test_a_worker_with_other_code_is_refused_by_name():
    expected = worker_fingerprint() | {"code mlm/text.py": "another"}
    with pytest.raises(InputError, match=rf"{socket.gethostname()}.* code mlm/text.py"):
        dask_engine.run_task(expected, b"")


@pytest.mark.standard
def test_strangers_are_refused_by_scheduler_and_worker(cluster, tmp_path):
    certificates.make(tmp_path)  # of another authority
    stranger = cluster.add(tls=[*cluster.tls_flags(tmp_path), "--death-timeout=5", "--no-nanny"])
    without, other, proven = (
        ssl.create_default_context(cafile=str(cluster.certificates / "ca.pem")) for _ in range(3)
    )
    for context in (without, other, proven):
        context.check_hostname = False
    for context, folder in ((other, tmp_path), (proven, cluster.certificates)):
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    with opened(cluster) as dask:
        until(lambda: dask.workers == 2)
        for address in (cluster.address, *dask._client.scheduler_info()["workers"]):
            port = int(address.rpartition(":")[2])
            assert greeted(port, proven), "the test must be able to see a greeting"
            assert not greeted(port, without) and not greeted(port, other)
            assert not greeted(port, None, 1.0)
        assert stranger.wait(60) != 0
        until(lambda: dask.workers == 2)
    refused = dask_engine.connect(cluster.address, certificates=str(tmp_path), timeout=3)
    with pytest.raises(InputError, match="TLS certificate does not match"), refused as dask:
        list(dask.each(square, [1], label="square"))


def test_plain_tcp_is_for_the_loopback():
    for address in ("", "tls://host", "http://host:1", "tls://host:x", "tls://a@host:1"):
        with pytest.raises(InputError, match=r"must be tls://HOST:PORT"):
            dask_engine.check_address(address)
    for address in ("tcp://127.0.0.1:8786", "tcp://localhost:8786", "tcp://[::1]:8786"):
        assert dask_engine.check_address(address) is False
    for address in ("tcp://10.0.0.1:8786", "tcp://0.0.0.0:8786", "tcp://localhost.org:8786"):
        with pytest.raises(InputError, match="without TLS"), dask_engine.connect(address):
            pass
    assert dask_engine.check_address("tls://10.0.0.1:8786") is True
