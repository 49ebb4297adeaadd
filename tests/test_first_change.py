"""README's four first changes of a researcher, each as printed, in a file of its own."""

import json
import math
import os
import re
import subprocess
import sys

import pytest

from tests.fixtures import TINY
from tests.processes import ROOT

BLOCKS = dict(re.findall(r"```python\n# ([a-z_]+\.py)\S*[^\n]*\n(.*?)```", (ROOT / "README.md").read_text(), re.S))


MODERNBERT = ("model.family=modernbert", "model.layers=2", "model.local_attention=8", "data.isolate_documents=true")


def write(folder, name: str):
    assert len(BLOCKS[name].strip().splitlines()) <= 20, "README promises little files"
    (folder / name).write_text(BLOCKS[name])
    return folder / name


def run(*command: object) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("XLA_FLAGS", None)  # the test of the step asks for its own devices
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_all_are_there():
    assert set(BLOCKS) == {"test_step.py", "rare_config.py", "rare.py", "kernel.py", "nadam.py"}


@pytest.mark.slow
def test_a_unit_test_of_a_step(tmp_path):
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", write(tmp_path, "test_step.py"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "family"), [("rare.py", ()), ("kernel.py", ()), ("kernel.py", MODERNBERT), ("nadam.py", ())]
)
def test_a_change_trains(name, family, manifest, tmp_path):
    def losses(program: list, workdir) -> list[float]:
        keys = (*TINY, *family, "data.lanes=4", "train.steps=30", "log.every=1", f"shards.dir={manifest.folder}")
        settings = [f"--config.{key}" for key in keys]
        run(*program, "train", f"--config={config}", f"--workdir={workdir}", *settings)
        lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        return [line["loss"] for line in lines if line["kind"] == "train"]

    config = "configs/base.py"
    if name == "rare.py":  # whose key is in a config of its own
        config, family = write(tmp_path, "rare_config.py"), (*MODERNBERT, "model.init=stock", "optimizer.name=adamw")
    changed = losses([write(tmp_path, name)], tmp_path / "changed")
    usual = losses(["-m", "mlm"], tmp_path / "usual")
    assert len(changed) == len(usual) == 30 and all(map(math.isfinite, changed))
    assert sum(changed[-10:]) / 10 < changed[0] - 0.1, "it learns; single batches differ by 0.3"
    if name == "kernel.py":
        assert changed == pytest.approx(usual, rel=1e-4), "another kernel computes the same attention"
    elif name == "rare.py":
        assert abs(changed[0] - usual[0]) > 1e-3, "the loss is another one from the first step on"
    else:
        assert changed[0] == pytest.approx(usual[0], rel=1e-5) and changed[9] != pytest.approx(usual[9], rel=1e-4)
