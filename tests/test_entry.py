"""A class of a researcher's own: in every command and every process, on the record, through mesh and resume."""

import functools
import hashlib
import importlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from mlm import config as configs
from mlm import entry
from mlm.__main__ import main
from mlm.errors import InputError
from mlm.pretrained import checkpoint_files
from mlm.tasks.pretraining import Pretraining
from mlm.training.train import train as train_task
from mlm.workdir import Workdir
from tests.support.processes import train_arguments
from tests.support.tiny import TINY, command, tiny_config

CONFIG = """
from configs.base import get_config as base
def get_config():
    c = base()
    c.mine.power = 0.5
    return c
"""
LIBRARY = """
from mlm.tasks.pretraining import Pretraining
class Scaled(Pretraining):
    def loss(self, logits, masked):
        return super().loss(logits, masked)
"""


class Attends(Pretraining):
    """A class that changes what a model computes."""

    def make_attention(self, module):
        attend = super().make_attention(module)
        return lambda *columns, **settings: 0.5 * attend(*columns, **settings)


class Deeper(Attends):
    """A class that has another network, too."""

    def make_model(self):
        return super().make_model()


class Measured(Pretraining):
    """A class with metrics of its own alone."""

    def metrics(self, logits_BxKxV, masked, intermediates):
        return super().metrics(logits_BxKxV, masked, intermediates)


class Weighted(Pretraining):
    """A class whose loss reads a key of its own, and its data."""

    def loss(self, logits_BxKxV, masked):
        weights_V = (
            np.linspace(1, 2, self.info.vocab_size, dtype=np.float32) ** self.config.mine.power
        )
        weights_BxK = masked.weights_BxK * jax.numpy.asarray(weights_V)[masked.labels_BxK]
        return super().loss(logits_BxKxV, masked._replace(weights_BxK=weights_BxK))


def test_a_record_names_the_class_its_file_and_its_commit(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))

    def describe(text: str) -> dict:
        (tmp_path / "lib_of_mine.py").write_text(text)
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, "lib_of_mine", raising=False)
        return entry.describe(importlib.import_module("lib_of_mine").Scaled)

    def git(*arguments: str) -> str:
        author = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.check_output(["git", "-C", tmp_path, *author, *arguments], text=True)

    record = describe(LIBRARY)
    assert record == {
        "name": "lib_of_mine.Scaled",
        "overrides": ["loss"],
        "file": "lib_of_mine.py",
        "code": hashlib.sha256(LIBRARY.encode()).hexdigest(),
        "commit": "",  # the folder is in no repository
    }
    assert entry.describe(Pretraining) == {} and not entry.changes_evaluation(record)
    assert entry.changes_evaluation(entry.describe(Attends))
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "HEAD")[:12]
    assert describe(LIBRARY)["commit"] == commit
    assert describe(LIBRARY + "# more\n")["commit"] == f"{commit}-dirty"


def test_another_class_is_refused_on_resume_and_other_code_is_said():
    saved = {"name": "a.Scaled", "overrides": [], "file": "a.py", "code": "1" * 64, "commit": "abc"}
    edited = saved | {"code": "2" * 64, "commit": ""}
    for now in (saved, edited):
        entry.check_resume(saved, now, "RUN/3", "RUN@3")
    (change,) = entry.changes(saved, edited)
    assert "code 111111111111, commit abc" in change and entry.changes(saved, saved) == []
    for now in (saved | {"name": "a.Other"}, {}):
        with pytest.raises(InputError, match=r"RUN/3 was made by a\.Scaled .*branch_from=RUN@3"):
            entry.check_resume(saved, now, "RUN/3", "RUN@3")


@pytest.mark.parametrize(
    ("saved", "now", "stock_network", "said"),
    [
        (Pretraining, Pretraining, True, ""),
        (Weighted, Pretraining, True, ""),
        (Weighted, Weighted, False, ""),
        (Measured, Pretraining, False, "test_entry.Measured, whose metrics evaluate leaves out."),
        (Measured, Pretraining, True, ""),
        (Measured, Measured, False, ""),
        (Attends, Attends, False, ""),
        (Deeper, Deeper, True, "overrides make_attention, which evaluate does without"),
    ],
)
def test_use_of_a_model_by_another_class(saved, now, stock_network, said):
    found = check_use(saved, now, stock_network=stock_network)
    assert said in "".join(found) and bool(said) == bool(found)


def test_use_of_a_model_by_a_class_that_computes_something_else():
    for saved, now in ((Attends, Pretraining), (Pretraining, Attends)):
        with pytest.raises(InputError, match=r"test_entry\.Attends"):
            check_use(saved, now, stock_network=saved is Attends)


def check_use(saved: type, now: type, *, stock_network: bool) -> list[str]:
    records = (entry.describe(saved), entry.describe(now))
    return entry.check_use(*records, "RUN", command="evaluate", stock_network=stock_network)


@pytest.mark.parametrize("given", [functools.partial(Weighted), dict, "Weighted"])
def test_what_is_no_class_for_pretraining(tmp_path, capsys, given):
    assert main(command("train", tmp_path / "w"), pretraining=given) == 2
    assert "Pretraining" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "line",
    [
        "classify --config=configs/base.py",
        "glue --model=x",
        "sweep classify --config=configs/base.py --vary train.seed=0",
        # these arguments are not the script's
        "sweep train --config=configs/base.py --vary train.seed=0",
    ],
)
def test_commands_that_can_not_use_the_class(tmp_path, capsys, line):
    assert main([*line.split(), f"--workdir={tmp_path}/w"], pretraining=Weighted) == 2
    assert "test_entry.Weighted" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_loss_that_reads_the_data_is_refused_where_there_is_none():
    class Counts(Pretraining):
        def loss(self, logits_BxKxV, masked):
            return super().loss(logits_BxKxV, masked) if self.manifest.splits else None

    with pytest.raises(InputError, match=r"Counts reads self\.manifest.*--workdir"):
        Counts.without_data(tiny_config())


class Typos(Pretraining):
    """Mistakes of a researcher, each in the method of its name."""

    def make_model(self):
        return self.no_such_thing()

    def loss(self, logits_BxKxV, masked):
        return logits_BxKxV.mean_of(masked)

    def make_optimizer(self):
        return self.config.mine.no_such_rate


@pytest.mark.parametrize("method", ["make_model", "loss", "make_optimizer"])
def test_a_mistake_in_a_class_is_a_traceback_that_shows_its_line(
    tmp_path, manifest, capsys, method
):
    names = {method: vars(Typos)[method], "__module__": __name__}
    mistaken = type("Mistaken", (Pretraining,), names)
    line = train_arguments(tmp_path / "run", manifest.folder)
    assert main(line, pretraining=mistaken) == 1
    said = capsys.readouterr().err
    assert f'{__file__}", line' in said and f"in {method}" in said
    # after notes, as jax adds them
    assert said.splitlines()[-1].startswith("mlm train: AttributeError: ")


@pytest.mark.standard
def test_a_subclass_is_on_record_and_in_the_report(
    one_device, tmp_path, manifest, monkeypatch, capsys
):
    """No other class and no other key goes on with it."""
    (tmp_path / "own_config.py").write_text(CONFIG)
    workdir = Workdir(str(tmp_path / "run"))

    def train(*overrides: str, pretraining=Weighted) -> None:
        data = (f"shards.dir={manifest.folder}", "data.lanes=4", "train.steps=2")
        config = configs.load(f"{tmp_path}/own_config.py", [*TINY, *data, *overrides])
        train_task(config, workdir, pretraining.open(config, workdir, manifest))

    train()
    saved = checkpoint_files.read_meta(workdir.checkpoints, 2)
    assert saved["class"]["name"] == "test_entry.Weighted" and saved["config"].mine.power == 0.5
    with pytest.raises(InputError, match=r"mine\.power: 0\.5 -> 1\.0"):
        train("mine.power=1.0")
    with pytest.raises(InputError, match=r"test_entry\.Weighted"):
        train(pretraining=Pretraining)
    edited = entry.describe(Weighted) | {"code": "0" * 64}
    monkeypatch.setattr(entry, "describe", lambda cls: edited)
    train()
    assert "resumes with other code" in capsys.readouterr().err
    assert main(["report", f"--workdir={workdir.root}"]) == 0
    page = workdir.report.read_text()
    assert "test_entry.Weighted" in page and "power" in page
