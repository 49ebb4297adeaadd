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
from tests.support.tiny import TINY, tiny_config

CONFIG = "from configs.base import get_config as base\n\n\ndef get_config():\n    c = base()\n    c.mine.power = 0.5\n"
CONFIG += (
    "    return c\n\n\nRULES = {'mine.power': (lambda v: 0 <= v <= 1, 'a number in [0, 1]')}\n"
)
LIBRARY = '''"""A loss of one's own."""
from mlm.tasks.pretraining import Pretraining


class Scaled(Pretraining):
    def loss(self, logits, masked):  # with a weight
        scaled = masked.weights_BxK * 2.0 ** self.config.mine.power
        return super().loss(logits, masked._replace(weights_BxK=scaled))
'''


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


def write(folder, **changed: str):
    """Writes a researcher's files."""
    files = {"lib_of_mine": LIBRARY, "own_config": CONFIG} | changed
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)


@pytest.fixture
def describe(tmp_path, monkeypatch):
    """What a record says of `Scaled` in files like those of `write`."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def of(**changed: str) -> dict:
        write(tmp_path, **changed)
        importlib.invalidate_caches()
        sys.modules.pop("lib_of_mine", None)
        return entry.describe(importlib.import_module("lib_of_mine").Scaled)

    yield of
    sys.modules.pop("lib_of_mine", None)


def test_a_record_names_the_class_its_file_and_its_commit(describe, tmp_path):
    record = describe()
    code = hashlib.sha256(LIBRARY.encode()).hexdigest()
    expected = {
        "name": "lib_of_mine.Scaled",
        "overrides": ["loss"],
        "file": "lib_of_mine.py",
        "code": code,
    }
    assert record == expected | {"commit": ""}, "the folder is in no repository"
    assert entry.describe(Pretraining) == {}
    assert not entry.changes_evaluation(record) and entry.changes_evaluation(
        entry.describe(Attends)
    )
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    assert describe()["commit"] == head[:12]
    assert describe(lib_of_mine=LIBRARY + "# more\n")["commit"] == f"{head[:12]}-dirty"


def test_another_class_is_refused_on_resume_and_other_code_is_said():
    saved = {
        "name": "a.Scaled",
        "overrides": ["loss"],
        "file": "a.py",
        "code": "1" * 64,
        "commit": "abc",
    }
    edited = saved | {"code": "2" * 64, "commit": ""}
    for now, lines in ((saved, 0), (edited, 1)):
        entry.check_resume(saved, now, "RUN/3", "RUN@3")
        assert len(entry.changes(saved, now)) == lines
    assert "code 111111111111, commit abc" in entry.changes(saved, edited)[0]
    for now in (saved | {"name": "a.Other"}, {}):
        with pytest.raises(InputError, match=r"RUN/3 was made by a\.Scaled .*branch_from=RUN@3"):
            entry.check_resume(saved, now, "RUN/3", "RUN@3")


@pytest.mark.parametrize(
    ("saved", "now", "stock_network", "refused", "said"),
    [
        (Pretraining, Pretraining, True, False, ""),
        (Weighted, Pretraining, True, False, ""),
        (Weighted, Weighted, False, False, ""),
        (
            Measured,
            Pretraining,
            False,
            False,
            "RUN was trained by test_entry.Measured, whose metrics evaluate leaves out.",
        ),
        (Measured, Pretraining, True, False, ""),
        (Measured, Measured, False, False, ""),
        (Attends, Pretraining, True, True, "test_entry.Attends"),
        (Pretraining, Attends, False, True, "test_entry.Attends"),
        (Attends, Attends, False, False, ""),
        (Deeper, Deeper, True, False, "overrides make_attention, which evaluate does without"),
    ],
)
def test_use_of_a_model_by_another_class(saved, now, stock_network, refused, said):
    check = functools.partial(entry.check_use, command="evaluate", stock_network=stock_network)
    records = entry.describe(saved), entry.describe(now)
    if refused:
        with pytest.raises(InputError, match=said):
            check(*records, "RUN")
    else:
        found = check(*records, "RUN")
        assert said in "".join(found) and bool(said) == bool(found)


@pytest.mark.parametrize("given", [functools.partial(Weighted), dict, "Weighted"])
def test_what_is_no_class_for_pretraining(tmp_path, capsys, given):
    assert (
        main(["train", "--config=configs/base.py", f"--workdir={tmp_path}/w"], pretraining=given)
        == 2
    )
    assert "Pretraining" in capsys.readouterr().err and not list(tmp_path.iterdir())


COMMANDS = [
    ["classify", "--config=configs/base.py"],
    ["glue", "--model=x"],
    ["sweep", "classify", "--config=configs/base.py", "--vary", "train.seed=0"],
    # these arguments are not the script's
    ["sweep", "train", "--config=configs/base.py", "--vary", "train.seed=0"],
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_commands_that_can_not_use_the_class(tmp_path, capsys, arguments):
    assert main([*arguments, f"--workdir={tmp_path}/w"], pretraining=Weighted) == 2
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
    mistaken = type(
        "Mistaken", (Pretraining,), {method: vars(Typos)[method], "__module__": __name__}
    )
    keys = [f"--config.{key}" for key in (*TINY, "data.lanes=4", f"shards.dir={manifest.folder}")]
    command = ["train", "--config=configs/base.py", f"--workdir={tmp_path}/run", *keys]
    assert main(command, pretraining=mistaken) == 1
    said = capsys.readouterr().err
    assert f'{__file__}", line' in said and f"in {method}" in said
    assert said.splitlines()[-1].startswith("mlm train: AttributeError: "), (
        "after notes, as jax adds them"
    )


@pytest.fixture(scope="module")
def own_config(tmp_path_factory) -> str:
    write(folder := tmp_path_factory.mktemp("own"))
    return str(folder / "own_config.py")


def train(workdir, manifest, own_config, *overrides: str, pretraining=Weighted) -> None:
    """Trains two steps in this process."""
    keys = (
        *TINY,
        f"shards.dir={manifest.folder}",
        "data.lanes=4",
        "train.steps=2",
        "log.every=1",
        *overrides,
    )
    config = configs.load(own_config, keys)
    train_task(
        config, Workdir(str(workdir)), pretraining.open(config, Workdir(str(workdir)), manifest)
    )


@pytest.mark.standard
def test_a_subclass_is_on_record_and_in_the_report(
    one_device, tmp_path, manifest, own_config, monkeypatch, capsys
):
    """No other class and no other key goes on with it."""
    train(tmp_path / "run", manifest, own_config)
    saved = checkpoint_files.read_meta(Workdir(str(tmp_path / "run")).checkpoints, 2)
    assert saved["class"]["name"] == "test_entry.Weighted" and saved["config"].mine.power == 0.5
    refusals = (
        (("mine.power=1.0",), Weighted, r"mine\.power: 0\.5 -> 1\.0"),
        ((), Pretraining, "test_entry.Weighted"),
    )
    for keys, cls, words in refusals:
        with pytest.raises(InputError, match=words):
            train(tmp_path / "run", manifest, own_config, *keys, pretraining=cls)
    edited = entry.describe(Weighted) | {"code": "0" * 64}
    monkeypatch.setattr(entry, "describe", lambda cls: edited)
    train(tmp_path / "run", manifest, own_config)
    assert "resumes with other code" in capsys.readouterr().err
    assert main(["report", f"--workdir={tmp_path}/run"]) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert "test_entry.Weighted" in page and "power" in page
