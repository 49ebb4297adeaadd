"""Runs of a sweep as subprocesses: in turn and on a Dask cluster, skipped when done, stopped and resumed."""

import contextlib
import json
import os
import pathlib
import signal
import threading
import time

import pytest

from mlm.cluster import dask_engine
from mlm.errors import InputError, PreemptedError
from mlm.paths import UPath
from mlm.sweep import runs
from mlm.sweep.runs import Run
from tests.support import processes
from tests.support.dask_cluster import Cluster

pytestmark = pytest.mark.standard


def helps(root: pathlib.Path, *commands: str) -> list[Run]:
    """Runs that end at once: each prints its help, or refuses its config."""
    lines = {command: (command, "--help") for command in commands}
    lines["bad"] = ("train", "--config=configs/none.py", "--workdir=/nowhere")
    return [Run(command, str(root / command), lines[command]) for command in commands]


def test_a_failing_run_ends_no_other_and_what_is_done_is_skipped(tmp_path, capsys):
    planned = helps(tmp_path, "train", "bad", "evaluate")
    first = runs.run_all(planned, root=UPath(tmp_path), engine=None)
    assert [outcome.code for outcome in first] == [0, 2, 0] and [outcome.run for outcome in first] == planned
    assert first[1].last_line == "mlm train: --config=configs/none.py: there is no such file."
    assert "usage: python -m mlm evaluate" in (tmp_path / "evaluate" / "output.txt").read_text()
    lines = [line.partition(",")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["1/3 train: done", "2/3 bad: exit code 2", "3/3 evaluate: done"]
    when = (tmp_path / "train" / "run.json").stat().st_mtime_ns
    again = runs.run_all(planned, root=UPath(tmp_path), engine=None)
    assert (tmp_path / "train" / "run.json").stat().st_mtime_ns == when
    assert again[0] == first[0] and again[1].seconds > first[1].seconds, "the seconds of all starts"
    assert (tmp_path / "bad" / "output.txt").read_text().count("no such file") == 2
    other = [planned[0]._replace(arguments=("train", "-h"))]
    runs.run_all(other, root=UPath(tmp_path), engine=None)
    assert (tmp_path / "train" / "run.json").stat().st_mtime_ns > when, "done with other arguments"


def test_in_a_bucket(bucket):
    root = UPath(bucket) / "sweep"
    planned = [Run(run.name, f"{root}/{run.name}", run.arguments) for run in helps(pathlib.Path(), "train", "bad")]
    outcomes = runs.run_all(planned, root=root, engine=None)
    assert [outcome.code for outcome in outcomes] == [0, 2]
    assert "usage: python -m mlm train" in (root / "train" / "output.txt").read_text()
    assert runs.run_all(planned[:1], root=root, engine=None) == outcomes[:1]


def test_what_a_kill_leaves_is_not_done(tmp_path):
    planned = helps(tmp_path, "train")
    for content in ({"code": 143, "arguments": ["train", "--help"], "seconds": 100.0, "last_line": ""}, {}):
        (tmp_path / "train").mkdir(exist_ok=True)
        (tmp_path / "train" / "run.json").write_text(json.dumps(content))
        (outcome,) = runs.run_all(planned, root=UPath(tmp_path), engine=None)
        assert outcome.code == 0 and (outcome.seconds > 100) == bool(content)


@pytest.mark.slow
def test_workers_of_a_cluster_run_them(tmp_path):
    root = tmp_path / "sweep"
    root.mkdir()
    planned = helps(root, "train", "bad", "evaluate")
    with Cluster(tmp_path) as cluster:
        cluster.add(workers=2)
        with dask_engine.connect(cluster.address, certificates=str(cluster.certificates), timeout=250) as dask:
            outcomes = runs.run_all(planned, root=UPath(root), engine=dask)
            assert [outcome.code for outcome in outcomes] == [0, 2, 0]
            with pytest.raises(InputError, match=r"/nowhere/root: .* has no such folder; name one that all workers"):
                runs._execute("/nowhere/root", planned[0])
    again = runs.run_all(planned[:1], root=UPath(root), engine=dask)
    assert again == outcomes[:1], "what is done needs no cluster"


def long_run(root: pathlib.Path, shards: str) -> Run:
    """Takes minutes unless it is stopped."""
    settings = ("train.steps=100000", "checkpoint.every=0", "evaluate.every=0", "log.every=1")
    return Run("long", str(root / "long"), tuple(processes.train_arguments(root / "long", shards, *settings)))


@pytest.mark.slow
@pytest.mark.parametrize("place", ["here", "cluster"])
def test_sigterm_lets_the_running_one_save_and_begins_no_other(manifest, tmp_path_factory, tmp_path, place):
    planned = [long_run(tmp_path, manifest.folder), *helps(tmp_path, "train")]
    stack = contextlib.ExitStack()
    dask = None
    if place == "cluster":
        cluster = stack.enter_context(Cluster(tmp_path_factory.mktemp("cluster")))
        cluster.add(workers=1)
        flags = {"certificates": str(cluster.certificates), "timeout": 250}
        dask = stack.enter_context(dask_engine.connect(cluster.address, **flags))

    def stop():
        deadline = time.monotonic() + 200
        while processes.logged_step(tmp_path / "long") < 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    old = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=stop)
    thread.start()
    stopped = r"^stopped, 0 of 2 runs are done; run the same command to continue\.$"
    with stack, pytest.raises(PreemptedError, match=stopped):
        runs.run_all(planned, root=UPath(tmp_path), engine=dask)
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == old
    state = json.loads((tmp_path / "long" / "run.json").read_text())
    assert state["code"] == 75 and "and saved; run the same command to continue" in state["last_line"]
    assert len(list((tmp_path / "long" / "checkpoints").glob("[0-9]*"))) == 1
    assert not (tmp_path / "train").exists()
