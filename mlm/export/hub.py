"""Pushes a model to the Hugging Face Hub while it trains (config.hub): on the first host, from complete checkpoints.

A push is a process on the CPU, `export --step=N --to=DIR --push=NAME`: training does not wait for it, it can be killed
when the run ends, and it leaves the accelerator alone. There is one at a time; a checkpoint that is due in the meantime
waits, and a later one takes its place.
"""

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

from ml_collections import ConfigDict
from tqdm import tqdm

from mlm import cluster
from mlm.cluster import watch
from mlm.entry import Entry
from mlm.export import export
from mlm.pretrained import checkpoint_files, load
from mlm.training import train
from mlm.training.task import Task
from mlm.workdir import Workdir

START = 0  # in the place of a step: config.json and the tokenizer
LONGEST = 3600.0  # seconds of a push
LAST = 1800.0  # seconds to wait for the last one
ENDING = 10.0  # seconds for the end of one that is given up


def train_and_push(config: ConfigDict, workdir: Workdir, task: Task, entry: Entry) -> None:
    """Does as `train.train`, and pushes if the config says so."""
    pushes = config.hub.name and cluster.is_primary()
    with Pushes(config.hub, workdir, task, entry) if pushes else nullcontext() as on_complete:
        train.train(config, workdir, task, on_complete)
    cluster.barrier("pushed")


class Pushes(AbstractContextManager):
    """The pushes of a run; a context manager that waits for the last one, unless an error ends the run."""

    def __init__(self, settings: ConfigDict, workdir: Workdir, task: Task, entry: Entry):
        """Starts to push config.json and the tokenizer."""
        self._settings, self._workdir, self._task, self._program = settings, workdir, task, entry.program("hub.name")
        self._process, self._has_ended, self._worker = None, False, ThreadPoolExecutor(1)
        self._running = self._newest = START  # steps: of the push that runs, and of the one to come after it
        self._last = self._worker.submit(self._try, START)
        watch.current.at_end = self._give_up

    def __call__(self, step: int) -> tuple[int, int]:
        """Takes a complete checkpoint; returns the steps that are still needed."""
        every, folder = self._settings.every, self._workdir.checkpoints
        if step % int(every) == 0 if every != "evaluation" else checkpoint_files.score_of(folder, step) < float("inf"):
            self._submit(step)
        return self._newest, self._running  # in this order: `_try` sets one, then reads the other

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._give_up()

    def _give_up(self) -> None:
        """Ends the push that still runs, and waits until its files are removed."""
        self._has_ended = True
        if self._process is not None:
            self._process.kill()
        self._worker.shutdown(wait=False)
        wait([self._last], ENDING)

    def _finish(self) -> None:
        """Pushes the checkpoint that `export` chooses, and waits for it."""
        is_classifier = "labels" in self._task.metadata
        self._submit(checkpoint_files.choose(self._workdir.checkpoints, on_damage="stop", best=is_classifier))
        if not self._last.done():
            self._say(f"waits up to {LAST / 60:g} min for the last push; the run itself is saved")
            cluster.progress(watch.UNTIMED, watch.current.step)
            wait([self._last], LAST)
        if not self._last.done() or not self._last.result():
            command = f"python -m mlm export --workdir={self._workdir.root} --push={self._settings.name}"
            self._say(f"warning: lacks the last checkpoint; run the same command again, or {command}")

    def _submit(self, step: int) -> None:
        if step != self._newest:
            self._newest = step
            self._last = self._worker.submit(self._try, step)

    def _try(self, step: int) -> bool:
        """Pushes a step, unless a later one waits; returns whether nothing went wrong."""
        self._running, reason = step, ""
        try:
            if step in (START, self._newest) and not self._has_ended:
                reason = self._push(step)
        except Exception as error:  # of a disk, a bucket, the system: no reason to end a run
            reason = f"{type(error).__name__}: {error}"
        if reason and not self._has_ended:
            what = f"step {step}" if step else "config.json and the tokenizer"
            self._say(f"warning: lacks {what} ({reason}); the run goes on, and the next push tries again")
        return not reason

    def _push(self, step: int) -> str:
        """Runs the process that pushes a step; returns what it says is wrong, "" if nothing is."""
        name, root, env = self._settings.name, self._workdir.root, self._program.environment()
        env["JAX_PLATFORMS"] = "cpu"
        env.pop("MLM_HOST_DIR", None)  # where the run says how far it is
        with tempfile.TemporaryDirectory(prefix="mlm-hub-") as folder:
            arguments = ["export", f"--workdir={root}", f"--step={step}", f"--to={folder}/export", f"--push={name}"]
            command = ["nice", sys.executable, *self._program.command, *arguments, "--processes=1"]
            if step == START:
                meta, module = self._task.metadata, self._task.module
                config = load.config_of(meta["model"] | {"vocab_size": meta["vocab_size"]})
                model = load.Pretrained(config, {}, str(self._workdir.tokenizer), None, {}, "", module)
                export.write_model(model, Path(folder))
                export.write_tokenizer(model, Path(folder))
                command = [*command[:2], "-m", "mlm.export.push", folder, name, "Config and tokenizer of mlm"]
            # In a group of its own: Ctrl-C is for the run.
            self._process = Popen(command, env=env, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE, process_group=0)
            try:
                if self._has_ended:
                    return "the run has ended"
                errors = self._process.communicate(timeout=LONGEST)[1].decode(errors="replace").splitlines()
            finally:
                self._process.kill()
            return (errors or ["no output"])[-1] if self._process.returncode else ""

    def _say(self, message: str) -> None:
        tqdm.write(f"hub: {self._settings.name} {message}", file=sys.stderr)
