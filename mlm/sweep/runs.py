"""A loop of runs: each is a process, skipped when it is done, resumed when it was killed.

Nothing here imports jax.
"""

import json
import os
import signal
import sys
import time
import types
from collections.abc import Sequence
from subprocess import DEVNULL, STDOUT, Popen
from typing import Any, NamedTuple

from tqdm import tqdm

from mlm import logs
from mlm.cluster import watch
from mlm.entry import Entry
from mlm.errors import PreemptedError
from mlm.paths import UPath, make_folder, staging_folder, upload, write_text
from mlm.text import can_draw

OUTPUT = "output.txt"  # in the folder of a run: what it printed
# There, written when it has ended: arguments, exit code, seconds of all its starts, last line
STATE = "run.json"


class Trial(NamedTuple):
    """A run of a command with some of the values."""

    name: str
    folder: str  # of OUTPUT and STATE: an absolute path, or gs://
    arguments: tuple[str, ...]  # after those of `entry`
    values: dict[str, Any]  # of the varied keys
    # How this command was started: a researcher's script starts itself again
    entry: Entry = Entry()


class Outcome(NamedTuple):
    """How a run has ended."""

    trial: Trial
    code: int | None  # exit code; 128 + N if signal N killed it; None if it has not ended
    seconds: float  # of all its starts
    last_line: str  # of its output: a sentence about what is wrong if there is one


def run_all(trials: Sequence[Trial], root: UPath, label: str = "runs") -> list[Outcome]:
    """Runs what is not done, one after another; returns how each one ended, in order. One that fails stops no other.

    On SIGTERM or Ctrl-C the running one saves and ends, and PreemptedError is raised; the same call goes on from there.
    """
    outcomes: list[Outcome] = []
    processes: list[Popen] = []  # the last one may be running
    signals: list[int] = []  # that asked for an end

    def stop(number: int, frame: types.FrameType | None) -> None:
        watch.current.signaled(number)
        signals.append(number)
        for process in processes:
            process.terminate()  # nothing happens to those that have ended

    bar = tqdm(total=len(trials), desc=label, unit="run", disable=not can_draw(sys.stderr))
    with bar, watch.handling(stop, signal.SIGINT, *watch.STOP_SIGNALS):
        for trial in trials:
            bar.set_postfix_str(trial.name)
            outcome = _earlier(trial)
            if outcome.code != 0:
                outcome = _run(trial, root, outcome.seconds, processes)
                number = f"{len(outcomes) + 1}/{len(trials)} {trial.name}"
                end = f"exit code {outcome.code}" if outcome.code else "done"
                tqdm.write(f"{number}: {end}, {outcome.seconds:.0f} s", file=sys.stderr)
            outcomes.append(outcome)
            bar.update()
            done = sum(outcome.code == 0 for outcome in outcomes)
            if signals and done < len(trials):
                text = f"stopped, {done} of {len(trials)} runs are done; run the same command to continue."
                raise PreemptedError(text)
    return outcomes


def _earlier(trial: Trial) -> Outcome:
    """Returns how a run has ended before, with the code None if it has not, or has with other arguments or class."""
    state = logs.read_object(UPath(trial.folder) / STATE)
    before = state.get("class", "")
    now = trial.entry.identity
    # a class is followed by its file
    same_class = before.partition(" (")[0] == now.partition(" (")[0]
    if not same_class or state.get("arguments") != list(trial.arguments):
        return Outcome(trial, None, 0.0, "")
    if before != now:  # its file was edited
        tqdm.write(f"{trial.name}: was done by {before}", file=sys.stderr)
    return Outcome(trial, state["code"], state["seconds"], state["last_line"])


def _run(trial: Trial, root: UPath, before: float, processes: list[Popen]) -> Outcome:
    """Starts or resumes a run that took some seconds before, and waits for its end.

    Adds its process.
    """
    folder = UPath(trial.folder)
    make_folder(folder)
    staging = staging_folder(folder)  # of a bucket, whose files can't be appended to
    begin = time.monotonic()
    # All share the programs that they compile
    environment = {"JAX_COMPILATION_CACHE_DIR": f"{root}/xla_cache"}
    environment |= trial.entry.environment()
    command = [sys.executable, *trial.entry.command, *trial.arguments]
    with (staging / OUTPUT).open("ab+") as output:
        start = output.seek(0, os.SEEK_END)
        processes.append(
            Popen(command, env=environment, stdin=DEVNULL, stdout=output, stderr=STDOUT)
        )
        code = processes[-1].wait()
        output.seek(start)
        printed = output.read().decode(errors="replace").splitlines()
    upload(staging, folder)
    lines = [line for line in printed if line.strip()] or ["no output"]
    errors = [line for line in lines if code and line.startswith("mlm ")]
    state = {
        "arguments": trial.arguments,
        "class": trial.entry.identity,
        "code": code if code >= 0 else 128 - code,
        "seconds": before + time.monotonic() - begin,
        "last_line": (errors or lines)[-1],
    }
    write_text(folder / STATE, json.dumps(state) + "\n")
    return Outcome(trial, state["code"], state["seconds"], state["last_line"])
