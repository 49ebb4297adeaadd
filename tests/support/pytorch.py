"""The interpreters with PyTorch, the reference: it never shares a process with TensorFlow or jax."""

import fcntl
import functools
import os
import pathlib
import subprocess
import venv

import jax
import numpy as np

from mlm.tasks.pretraining import Pretraining
from tests import ROOT

# PyTorch and what does not depend on transformers is installed once, beside transformers 4.
PACKAGES = {
    4: "torch==2.13.0 accelerate==1.15.0 transformers==4.57.6 tokenizers==0.22.2 numpy==2.4.6 scikit-learn==1.9.1 "
    "seqeval==1.2.2",
    5: "transformers==5.23.0 numpy==2.4.6",
}


@functools.cache
def torch_python(generation: int) -> str:
    """Returns the interpreter with transformers 4 or 5, which is made by the first test that asks for it."""
    folder = ROOT / f".venv-torch{generation}"
    base = torch_python(4) if generation == 5 else ""
    with open(ROOT / ".venv" / "torch.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other workers' tests wait
        stamp = folder / ".requirements"
        if not (stamp.is_file() and stamp.read_text().strip() == PACKAGES[generation]):
            venv.create(folder, with_pip=True)
            pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
            subprocess.run([*pip, *PACKAGES[generation].split()], check=True)
            if base:
                (packages,) = folder.glob("lib/python*/site-packages")
                shared = pathlib.Path(base).parents[1] / packages.relative_to(folder)
                (packages / "torch.pth").write_text(str(shared))
            stamp.write_text(PACKAGES[generation])
    return str(folder / "bin" / "python")


def run_torch(generation: int, script: str, *arguments: object) -> str:
    """Runs a script of this repository there; returns what it printed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # tiny models: threads would wait
    for name in ("USE_TORCH", "USE_TF", "PYTHONPATH"):
        environment.pop(name, None)
    command = [torch_python(generation), str(ROOT / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, (
        f"{script}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    )
    return done.stdout


def draw(run: Pretraining, batches: list[dict]) -> dict[str, np.ndarray]:
    """Returns what PyTorch reads: masked ids, attention, and labels that are -100 where nothing is predicted."""
    masking = jax.jit(lambda batch: run.inputs(batch, 0))
    masked = [masking(batch) for batch in batches]
    labels = np.full((len(masked), *masked[0].ids_BxL.shape), -100)
    for labels_BxL, batch in zip(labels, masked, strict=True):
        rows, slots = np.nonzero(batch.weights_BxK)
        positions = np.asarray(batch.positions_BxK)[rows, slots]
        labels_BxL[rows, positions] = np.asarray(batch.labels_BxK)[rows, slots]
    return {
        "ids": np.stack([batch.ids_BxL for batch in masked]).astype(np.int64),
        "attention": np.stack([batch["attention_mask"] for batch in batches]).astype(np.int64),
        "labels": labels.astype(np.int64),
    }
