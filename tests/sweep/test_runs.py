"""Runs as subprocesses, one after another: skipped when done, stopped and resumed."""

import json
import os
import pathlib
import signal
import threading

import pytest

from mlm.entry import Entry
from mlm.errors import PreemptedError
from mlm.paths import UPath
from mlm.sweep import runs
from mlm.sweep.runs import Trial
from tests.support.dask_cluster import until

pytestmark = pytest.mark.standard

SHORT = "import sys; print('hello', *sys.argv[1:])"
BAD = "import sys; print('mlm train: why'); print('more'); sys.exit(2)"
LONG = """
import pathlib, signal, sys
signal.signal(signal.SIGTERM, lambda *_: (print("mlm train: saved"), sys.exit(75)))
pathlib.Path("{}").touch()
signal.pause()
"""


def trials(root: pathlib.Path | str, *codes: str) -> list[Trial]:
    entries = [Entry(command=("-c", code)) for code in codes]
    return [
        Trial(f"run{n}", f"{root}/run{n}", (str(n),), {}, entry) for n, entry in enumerate(entries)
    ]


def test_a_failing_run_ends_no_other_and_what_is_done_is_skipped(tmp_path, capsys):
    root = UPath(tmp_path)
    planned = trials(tmp_path, SHORT, BAD, SHORT)
    first = runs.run_all(planned, root)
    found = [(outcome.trial.name, outcome.code, outcome.last_line) for outcome in first]
    assert found == [("run0", 0, "hello 0"), ("run1", 2, "mlm train: why"), ("run2", 0, "hello 2")]
    lines = [line.partition(",")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["1/3 run0: done", "2/3 run1: exit code 2", "3/3 run2: done"]
    again = runs.run_all(planned, root)
    assert again[0] == first[0] and again[1].seconds > first[1].seconds, "the seconds of all starts"
    outputs = [(tmp_path / f"run{n}" / "output.txt").read_text() for n in range(3)]
    assert [len(output.splitlines()) for output in outputs] == [1, 4, 1]
    (other,) = runs.run_all([planned[0]._replace(arguments=("3",))], root)
    assert other.last_line == "hello 3", "done with other arguments"
    capsys.readouterr()
    record = {"name": "mine.Own", "file": "mine.py", "commit": ""}
    for code, said in (("0" * 64, "run2: done"), ("1" * 64, "run2: was done by mine.Own")):
        entry = Entry(None, record | {"code": code}, ("-c", SHORT))
        runs.run_all([planned[2]._replace(entry=entry)], root)
        assert said in capsys.readouterr().err
        # by another class once more, and not because its file was edited
        assert (tmp_path / "run2" / "output.txt").read_text() == "hello 2\n" * 2


def test_in_a_bucket(bucket):
    planned = trials(f"{bucket}/sweep", SHORT, BAD)
    outcomes = runs.run_all(planned, UPath(bucket) / "sweep")
    assert [outcome.code for outcome in outcomes] == [0, 2]
    assert (UPath(planned[0].folder) / "output.txt").read_text() == "hello 0\n"
    assert runs.run_all(planned[:1], UPath(bucket) / "sweep") == outcomes[:1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_running_one_save_and_begins_no_other(tmp_path, number):
    """The processes are told by the loop, whoever else was."""
    planned = trials(tmp_path, LONG.format(tmp_path / "begun"), SHORT)

    def stop():
        until((tmp_path / "begun").exists)
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(PreemptedError, match="0 of 2 runs"):
        runs.run_all(planned, UPath(tmp_path))
    thread.join()
    assert signal.getsignal(number) == before
    state = json.loads((tmp_path / "run0" / "run.json").read_text())
    assert (state["code"], state["last_line"]) == (75, "mlm train: saved")
    assert not (tmp_path / "run1").exists()
