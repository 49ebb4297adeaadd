"""Runs of a sweep as subprocesses: in turn and on a Dask cluster, skipped when done, stopped and resumed."""

import json
import os
import pathlib
import signal
import threading

import pytest

from mlm.engine import dask_engine
from mlm.entry import Program
from mlm.errors import InputError, PreemptedError
from mlm.paths import UPath
from mlm.sweep import runs
from mlm.sweep.runs import Run
from tests.support.dask_cluster import Cluster, until

pytestmark = pytest.mark.standard

UNTIL_STOPPED = """
import pathlib, signal, sys
signal.signal(signal.SIGTERM, lambda *_: (print("mlm train: saved"), sys.exit(75)))
pathlib.Path("{}").touch()
signal.pause()
"""


def helps(root: pathlib.Path, *commands: str) -> list[Run]:
    """Runs that end at once: each prints its help, or refuses its config."""
    lines = {command: (command, "--help") for command in commands}
    lines["bad"] = ("train", "--config=configs/none.py", "--workdir=/nowhere")
    return [Run(command, str(root / command), lines[command]) for command in commands]


def test_a_failing_run_ends_no_other_and_what_is_done_is_skipped(tmp_path, capsys):
    planned = helps(tmp_path, "train", "bad", "evaluate")
    first = runs.run_all(planned, root=UPath(tmp_path), engine=None)
    assert [outcome.code for outcome in first] == [0, 2, 0] and [outcome.run for outcome in first] == planned
    assert first[1].last_line.startswith("mlm train: --config=configs/none.py:")
    assert "usage: python -m mlm evaluate" in (tmp_path / "evaluate" / "output.txt").read_text()
    lines = [line.partition(",")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["1/3 train: done", "2/3 bad: exit code 2", "3/3 evaluate: done"]
    when = (tmp_path / "train" / "run.json").stat().st_mtime_ns
    again = runs.run_all(planned, root=UPath(tmp_path), engine=None)
    assert (tmp_path / "train" / "run.json").stat().st_mtime_ns == when
    assert again[0] == first[0] and again[1].seconds > first[1].seconds, "the seconds of all starts"
    assert (tmp_path / "bad" / "output.txt").read_text().count("configs/none.py") == 2
    other = [planned[0]._replace(arguments=("train", "-h"))]
    runs.run_all(other, root=UPath(tmp_path), engine=None)
    assert (tmp_path / "train" / "run.json").stat().st_mtime_ns > when, "done with other arguments"


def test_what_the_check_of_the_first_one_done_refuses_stops_the_others(tmp_path):
    def check(run: Run) -> None:
        assert run.name == "train", "the first one failed"
        raise InputError("no such score")

    planned = helps(tmp_path, "bad", "train", "evaluate")
    for _ in range(2):
        with pytest.raises(InputError, match="no such score"):
            runs.run_all(planned, root=UPath(tmp_path), engine=None, check=check)
        assert not (tmp_path / "evaluate").exists()


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


def assert_sigterm_stops(root: pathlib.Path, engine: dask_engine.DaskEngine | None) -> None:
    """The running one saves, and no other begins."""
    begun = root / "begun"
    program = Program(command=("-c", UNTIL_STOPPED.format(begun)))
    planned = [Run("long", str(root / "long"), (), program), *helps(root, "export")]

    def stop():
        until(begun.exists)
        os.kill(os.getpid(), signal.SIGTERM)

    old = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(PreemptedError, match="0 of 2 runs"):
        runs.run_all(planned, root=UPath(root), engine=engine)
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == old
    state = json.loads((root / "long" / "run.json").read_text())
    assert (state["code"], state["last_line"]) == (75, "mlm train: saved")
    assert not (root / "export").exists()


def test_sigterm_lets_the_running_one_save_and_begins_no_other(tmp_path):
    assert_sigterm_stops(tmp_path, None)


@pytest.mark.slow
def test_workers_of_a_cluster_run_them(tmp_path):
    root = tmp_path / "sweep"
    root.mkdir()
    planned = helps(root, "train", "bad", "evaluate")
    with Cluster(tmp_path) as cluster:
        cluster.add()
        with dask_engine.connect(cluster.address, certificates=str(cluster.certificates), timeout=250) as dask:
            outcomes = runs.run_all(planned, root=UPath(root), engine=dask)
            assert [outcome.code for outcome in outcomes] == [0, 2, 0]
            assert_sigterm_stops(root, dask)
        with pytest.raises(InputError, match="/nowhere/root"):
            runs._execute("/nowhere/root", planned[0])
    again = runs.run_all(planned[:1], root=UPath(root), engine=dask)
    assert again == outcomes[:1], "what is done needs no cluster"
