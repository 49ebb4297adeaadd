"""Pushes a model to the Hugging Face Hub while it trains (config.hub): process 0, in a thread, after evaluations.

A push exports a complete checkpoint, on a CPU where jax has one, and sends it. There is one at a
time: an evaluation that comes meanwhile is not pushed. The last checkpoint is, before the command
ends.
"""

import sys
import tempfile
import threading
import time
from contextlib import AbstractContextManager

import jax
from huggingface_hub.utils import disable_progress_bars
from tqdm import tqdm

from mlm import cluster
from mlm.cluster import watch
from mlm.entry import Entry
from mlm.errors import StopError
from mlm.export import export, push
from mlm.paths import UPath
from mlm.pretrained import checkpoint_files, locate
from mlm.workdir import Workdir

LAST = 1800.0  # seconds to try to send the last checkpoint
ENDING = 10.0  # seconds for the end of a push that is given up


class Pushes(AbstractContextManager):
    """The pushes of a run; a context manager that waits for the last one, unless an error ends the run."""

    def __init__(self, name: str, workdir: Workdir, entry: Entry):
        self._name = name
        self._workdir = workdir
        self._entry = entry
        self._folder = tempfile.TemporaryDirectory(prefix="mlm-hub-", ignore_cleanup_errors=True)
        self._thread = threading.Thread()  # of the newest push; a daemon: a silent Hub may hold it
        self._step = -1  # that it pushes
        self._pushed = -1  # the newest step that arrived
        self._stopped = threading.Event()  # a push of an earlier step is not tried again
        disable_progress_bars()  # those of the uploads would run into that of the training
        watch.current.at_end = self._folder.cleanup

    def __call__(self, step: int) -> list[int]:
        """Takes a complete checkpoint; returns the steps that are still needed."""
        was_evaluated = checkpoint_files.score_of(self._workdir.checkpoints, step) < float("inf")
        if was_evaluated and not self._thread.is_alive():
            self._start(step, push.PATIENCE)
        return [self._step] if self._thread.is_alive() else []

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        try:
            if kind is None:
                self._push_last()
            elif self._thread.is_alive():
                self._stopped.set()
                self._thread.join(ENDING)
        finally:
            self._stopped.set()
            self._folder.cleanup()

    def _push_last(self) -> None:
        """Pushes the checkpoint that `export` chooses, and waits for it."""
        best = locate.is_classifier(self._workdir)
        step = checkpoint_files.choose(self._workdir.checkpoints, on_damage="stop", best=best)
        if self._pushed == step and not self._thread.is_alive():
            return
        _say(
            f"hub: sends the last checkpoint, for {LAST / 60:g} min at most; the run itself is saved"
        )
        cluster.progress(watch.UNTIMED, watch.current.step)
        deadline = time.monotonic() + LAST
        is_last = self._step == step
        if not is_last:
            self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(LAST if is_last else LAST / 2)
        if self._pushed != step:
            self._stopped = threading.Event()
            self._start(step, deadline - time.monotonic())
            self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._pushed != step:
            _say(
                f"hub: warning: {self._name} lacks the last checkpoint; run the same command again, or "
                f"python -m mlm export --workdir={self._workdir.root} --push={self._name}"
            )

    def _start(self, step: int, patience: float) -> None:
        self._step = step
        arguments = (step, patience, self._stopped)
        self._thread = threading.Thread(target=self._push, args=arguments, daemon=True)
        self._thread.start()

    def _push(self, step: int, patience: float, stopped: threading.Event) -> None:
        """Exports a step and sends it; what fails is a warning."""
        try:
            with tempfile.TemporaryDirectory(dir=self._folder.name) as parent:
                folder = UPath(parent) / "export"
                with jax.default_device(_cpu()):
                    model = export.load_checkpoint(self._workdir, self._entry, step=step)
                    export.export_checkpoint(model, self._workdir, folder)
                address = push.push(
                    folder,
                    self._name,
                    public=False,
                    message=f"Export of mlm, step {step}",
                    patience=patience,
                    stopped=stopped,
                    report=_say,
                )
            self._pushed = step
            _say(f"hub: step {step} is at {address}")
        except Exception as error:  # of the Hub, a disk, a bucket: no reason to end a run
            if not stopped.is_set():  # else the run has ended, and takes the last checkpoint if any
                kind = "" if isinstance(error, StopError) else f"{type(error).__name__}: "
                reason = f"{kind}{error}".rstrip(".")
                _say(f"hub: warning: {self._name} lacks step {step}: {reason}; the run goes on")


def _say(message: str) -> None:
    tqdm.write(message, file=sys.stderr)  # above the bar of the training


def _cpu() -> jax.Device | None:
    """Returns a device that training leaves alone; None, which is the default one, where jax has no CPU."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None
