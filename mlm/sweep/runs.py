"""Runs of a command as subprocesses: skipped when done, resumed when killed. Nothing here imports jax."""

import contextlib
import functools
import json
import os
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired
from typing import NamedTuple

from mlm import logs
from mlm.cluster import watch
from mlm.engine.engine import Engine
from mlm.entry import STOCK, Program
from mlm.errors import InputError, PreemptedError
from mlm.paths import UPath, is_remote, make_folder, staging_folder, upload, write_text
from mlm.text import say

OUTPUT = "output.txt"  # in the folder of a run: what it printed
STATE = "run.json"  # there, written when it has ended: arguments, exit code, seconds of all its starts, last line
STOP = "stop"  # in the folder of all runs: a file that stops them
_alone = threading.Lock()  # a worker of several threads runs one run at a time: it may hold the accelerator


class Run(NamedTuple):
    """A run of a command."""

    name: str
    folder: str  # of OUTPUT and STATE: an absolute path, or gs://
    arguments: tuple[str, ...]  # after those of `program`
    program: Program = Program()


class Outcome(NamedTuple):
    """How a run has ended."""

    run: Run
    code: int  # exit code; 128 + N if signal N killed it
    seconds: float  # of all its starts
    last_line: str  # of its output: a sentence about what is wrong if there is one


def run_all(
    runs: Sequence[Run], *, root: UPath, engine: Engine | None, check: Callable[[Run], None] = lambda run: None
) -> list[Outcome]:
    """Runs what is not done, one by one here or on the workers of an engine; returns all outcomes, in order.

    A run that fails doesn't stop the others. On SIGTERM, Ctrl-C or a file `stop` in `root`, running ones save and exit,
    and PreemptedError is raised; the same call resumes them. So they do if `check` of the first run that is done raises
    an InputError, which is raised then.
    """
    outcomes = {run: outcome for run in runs if (outcome := _finished(run)) is not None}
    checked, refusal, todo = bool(outcomes), None, [run for run in runs if run not in outcomes]
    if checked:
        check(next(iter(outcomes)))
    stop = root / STOP
    stop.unlink(missing_ok=True)
    with watch.handling(functools.partial(_stop_on_signal, stop), signal.SIGINT, signal.SIGTERM):
        if engine is None:
            ended = (_execute(str(root), run, shared_cache=True) for run in todo)
        else:
            ended = (outcome for _, outcome in engine.each(functools.partial(_execute, str(root)), todo, label="runs"))
        for outcome in ended:
            outcomes[outcome.run] = outcome
            if outcome.last_line:
                end = f"exit code {outcome.code}" if outcome.code else "done"
                say(f"{len(outcomes)}/{len(runs)} {outcome.run.name}: {end}, {outcome.seconds:.0f} s")
            if outcome.code == 0 and not checked:
                checked = True
                try:
                    check(outcome.run)
                except InputError as error:
                    refusal = error
                    write_text(stop, "")
    if refusal:
        raise refusal
    done = sum(outcome.code == 0 for outcome in outcomes.values())
    if stop.is_file() and done < len(runs):
        raise PreemptedError(f"stopped, {done} of {len(runs)} runs are done; run the same command to continue.")
    return [outcomes[run] for run in runs]


def _finished(run: Run) -> Outcome | None:
    state = logs.read_object(UPath(run.folder) / STATE)
    if state.get("code") != 0 or state.get("arguments") != list(run.arguments):
        return None
    if (identity := state.get("class", "")) != run.program.identity:
        names = f"{identity or STOCK}, and this command has {run.program.identity or STOCK}"
        raise InputError(f"{run.folder}: was done by {names}; use another --workdir.")
    return Outcome(run, 0, state["seconds"], state["last_line"])


def _execute(root: str, run: Run, *, shared_cache: bool = False) -> Outcome:
    """Starts or resumes a run and waits for its end; with `shared_cache`, all runs share compiled programs."""
    with _alone:
        folder, stop, script = UPath(run.folder), UPath(root) / STOP, run.program.file
        if not is_remote(root) and not Path(root).is_dir():
            raise InputError(f"{root}: {socket.gethostname()} has no such folder; name one that all workers share.")
        if script and not Path(script).is_file():
            fix = "put it there, with what it imports, at the same path on every worker"
            raise InputError(f"{script}: {socket.gethostname()} has no such file; {fix}.")
        if stop.is_file():
            return Outcome(run, PreemptedError.code, 0.0, "")
        make_folder(folder)
        before, begin = logs.read_object(folder / STATE), time.monotonic()
        env = {"JAX_COMPILATION_CACHE_DIR": f"{root}/xla_cache"} if shared_cache else {}
        env |= run.program.environment()
        command, staging = [sys.executable, *run.program.command, *run.arguments], staging_folder(folder)
        with (staging / OUTPUT).open("ab+") as output:
            start = output.seek(0, os.SEEK_END)
            code = _wait(Popen(command, env=env, stdin=DEVNULL, stdout=output, stderr=STDOUT), stop)
            output.seek(start)
            lines = [line for line in output.read().decode(errors="replace").splitlines() if line.strip()]
        upload(staging, folder)
        resumed = before.get("arguments") == list(run.arguments)
        seconds = time.monotonic() - begin + (before["seconds"] if resumed else 0.0)
        last_line = ([line for line in lines if code and line.startswith("mlm ")] or lines or ["no output"])[-1]
        state = {"arguments": run.arguments, "class": run.program.identity, "code": code}
        state |= {"seconds": seconds, "last_line": last_line}
        write_text(folder / STATE, json.dumps(state) + "\n")
        return Outcome(run, code, seconds, last_line)


def _wait(process: Popen, stop: UPath) -> int:
    """Returns the exit code of a process, which gets SIGTERM when the stop file appears."""
    terminated = False
    try:
        while process.poll() is None:
            with contextlib.suppress(TimeoutExpired):
                process.wait(5.0 if is_remote(stop) else 0.5)
            if not terminated and stop.is_file():
                terminated = True
                process.terminate()  # nothing happens if it has ended
    except BaseException:
        process.terminate()
        raise
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _stop_on_signal(stop: UPath, number: int, frame: types.FrameType | None) -> None:
    """Writes the stop file when SIGTERM or Ctrl-C comes; a second Ctrl-C ends at once."""
    if number == signal.SIGINT and stop.is_file():
        raise KeyboardInterrupt
    watch.current.signaled(signal.Signals(number).name)
    write_text(stop, "")
