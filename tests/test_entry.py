"""A class of a researcher's own: in every command and every process, on the record, through mesh and resume."""

import functools
import importlib
import json
import operator
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from mlm import config as configs
from mlm import entry
from mlm.__main__ import main
from mlm.errors import InputError
from mlm.pretrained import checkpoint_files, load
from mlm.tasks import changed_model
from mlm.tasks.pretraining import Pretraining
from mlm.training.train import train as train_task
from mlm.workdir import Workdir
from tests import ROOT
from tests.support import processes
from tests.support.tiny import TINY, tiny_config

CONFIG = "from configs.base import get_config as base\n\n\ndef get_config():\n    c = base()\n    c.mine.power = 0.5\n"
CONFIG += "    return c\n\n\nRULES = {'mine.power': (lambda v: 0 <= v <= 1, 'a number in [0, 1]')}\n"
LIBRARY = '''"""A loss of one's own."""
from scale_of_mine import SCALE
from mlm.tasks.pretraining import Pretraining


class Scaled(Pretraining):
    def loss(self, logits, masked):  # with a weight
        scaled = masked.weights_BxK * SCALE ** self.config.mine.power
        return super().loss(logits, masked._replace(weights_BxK=scaled))
'''
SCRIPT = "from lib_of_mine import Scaled\nfrom mlm.__main__ import main\n\nraise SystemExit(main(pretraining=Scaled))\n"
SCALE = "SCALE = 2.0\n"


class Attends(Pretraining):
    """A class that changes what a model computes."""

    def make_attention(self, config, length, window):
        attend = super().make_attention(config, length, window)
        return lambda *columns: 0.5 * attend(*columns)


class Deeper(Attends):
    """A class that has another network, too."""

    def make_model(self):
        return super().make_model()


class Measured(Pretraining):
    def metrics(self, logits, masked, intermediates):
        return {}


class Weighted(Pretraining):
    """A class whose loss reads a key of its own, and its data."""

    def loss(self, logits_BxKxV, masked):
        weights_V = np.linspace(1, 2, self.info.vocab_size, dtype=np.float32) ** self.config.mine.power
        weights_BxK = masked.weights_BxK * jax.numpy.asarray(weights_V)[masked.labels_BxK]
        return super().loss(logits_BxKxV, masked._replace(weights_BxK=weights_BxK))


def write(folder, **changed: str):
    """Writes a researcher's files; returns the one to start."""
    files = {"main_of_mine": SCRIPT, "lib_of_mine": LIBRARY, "scale_of_mine": SCALE, "own_config": CONFIG} | changed
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder / "main_of_mine.py"


def describe(folder, **changed: str) -> dict:
    """Returns the record of the class in files like those of `write`."""
    write(folder, **changed)
    names = ("lib_of_mine", "scale_of_mine")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        for name in names:
            sys.modules.pop(name, None)
        try:
            return entry.describe(importlib.import_module("lib_of_mine").Scaled)
        finally:
            for name in names:
                sys.modules.pop(name, None)


def test_a_record_names_the_class_and_all_its_files(tmp_path):
    found = describe(tmp_path / "a")
    assert found["name"] == "lib_of_mine.Scaled" and found["overrides"] == ["loss"]
    assert [name for name, *_ in found["files"]] == ["lib_of_mine.py", "scale_of_mine.py"]
    assert not entry.changes_evaluation(found) and entry.describe(Pretraining) == {}
    assert entry.changes_evaluation(entry.describe(Attends))


def test_a_record_is_of_the_code_that_was_imported_whatever_the_file_has_become(tmp_path, monkeypatch):
    """As while the shards are written, or between two commands of a notebook."""
    write(tmp_path / "a")
    monkeypatch.syspath_prepend(str(tmp_path / "a"))
    for name in ("lib_of_mine", "scale_of_mine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    library = importlib.import_module("lib_of_mine")
    before = entry.describe(library.Scaled)
    write(tmp_path / "a", scale_of_mine="SCALE = 3.125\n")
    assert entry.describe(library.Scaled) == before
    importlib.reload(sys.modules["scale_of_mine"])
    assert entry.describe(importlib.reload(library).Scaled) != before
    for name in ("lib_of_mine", "scale_of_mine"):
        del sys.modules[name]


RESUMES = [
    ({"lib_of_mine": LIBRARY.replace("with a weight", "weighted").replace("A loss", "The loss")}, ""),
    ({"lib_of_mine": LIBRARY.replace("weights_BxK *", "weights_BxK /")}, "lib_of_mine.py branch_from=RUN@3"),
    ({"scale_of_mine": "SCALE = 3.0\n"}, "scale_of_mine.py branch_from=RUN@3"),
]


@pytest.mark.parametrize(("changed", "refusal"), RESUMES, ids=["comment", "code", "imported"])
def test_resume_by_the_same_class_of_another_source(tmp_path, changed, refusal):
    saved, now = describe(tmp_path / "a"), describe(tmp_path / "b", **changed)
    saved = json.loads(json.dumps(saved))
    check = functools.partial(entry.check_resume, saved, now, "RUN/3", "RUN@3")
    if refusal:
        with pytest.raises(InputError) as caught:
            check()
        assert all(word in str(caught.value) for word in refusal.split()), caught.value
        assert len(entry.changes(saved, now)) == 1
    else:
        check()
        assert not entry.changes(saved, now)


@pytest.mark.parametrize(
    ("saved", "now", "stock_network", "refused", "said"),
    [
        (Pretraining, Pretraining, True, False, ""),
        (Weighted, Pretraining, True, False, "test_entry.Weighted"),
        (Weighted, Weighted, False, False, ""),
        (Measured, Pretraining, False, False, "test_entry.Measured, whose metrics evaluate leaves out"),
        (Measured, Pretraining, True, False, "test_entry.Measured, which changes nothing here"),
        (Attends, Pretraining, True, True, "test_entry.Attends"),
        (Pretraining, Attends, False, True, "test_entry.Attends"),
        (Attends, Attends, False, False, ""),
        (Attends, Attends, True, False, "make_attention, which evaluate does without; it computes mlm's own"),
        (Deeper, Deeper, True, False, "make_attention, which evaluate does without; it computes the network of its"),
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
        assert said in found and bool(said) == bool(found)


@pytest.mark.standard
def test_a_model_of_mlms_own_class_is_computed_by_it_whatever_the_command_was_started_with(trained_workdir):
    """As one of several that are compared; the class's module would give other numbers, or not fit the parameters."""

    class Changed(Pretraining):
        def make_model(self):
            raise AssertionError("another network")

    model = load.load(trained_workdir, head=load.LM_HEAD)
    found = changed_model.with_class(model, entry.open_entry(Changed, []), command="predict")
    assert found.changed_module is None


@pytest.mark.parametrize("given", [functools.partial(Weighted), dict, "Weighted"])
def test_what_is_no_class_for_pretraining(tmp_path, capsys, given):
    assert main(["train", "--config=configs/base.py", f"--workdir={tmp_path}/w"], pretraining=given) == 2
    assert "Pretraining" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_class_without_a_file_is_refused_since_no_checkpoint_could_record_its_code(tmp_path, capsys):
    class Piped(Weighted):  # as on standard input, by `python -c`, or in a notebook
        __module__ = "of_no_file"

    assert main(["train", "--config=configs/base.py", f"--workdir={tmp_path}/w"], pretraining=Piped) == 2
    said = capsys.readouterr().err
    assert "Piped stands in no file" in said and not list(tmp_path.iterdir())


COMMANDS = [
    ["classify", "--config=configs/base.py"],
    ["glue", "--model=x"],
    ["sweep", "classify", "--config=configs/base.py", "--vary", "train.seed=0"],
    ["sweep", "train", "--config=configs/base.py", "--vary", "train.seed=0"],  # these arguments are not the script's
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_commands_that_can_not_use_the_class(tmp_path, capsys, arguments):
    assert main([*arguments, f"--workdir={tmp_path}/w"], pretraining=Weighted) == 2
    assert "test_entry.Weighted" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_run_of_a_sweep_has_the_class_of_the_sweep(tmp_path, capsys, monkeypatch):
    identity = entry.open_entry(Weighted, []).identity
    monkeypatch.setenv(entry.EXPECTED, identity)
    entry.check_expected(entry.open_entry(Weighted, []), "here")
    assert main(["train", "--config=configs/base.py", f"--workdir={tmp_path}/w"]) == 2
    said = capsys.readouterr().err
    assert identity in said and socket.gethostname() in said and not list(tmp_path.iterdir())


def test_a_loss_that_reads_the_data_is_refused_where_there_is_none():
    class Counts(Pretraining):
        def loss(self, logits_BxKxV, masked):
            return super().loss(logits_BxKxV, masked) if self.manifest.splits else None

    with pytest.raises(InputError, match=r"Counts reads self\.manifest.*--workdir"):
        Counts.without_data(tiny_config())


def test_a_key_that_the_config_lacks_is_named(tmp_path, manifest, capsys, monkeypatch):
    """Of the group mine; any other attribute that is missing is a mistake in code, with its traceback."""
    for name, code in (("mine.power", 2), ("model.power", 1), ("mine.power.x", 1)):

        class Reads(Pretraining):
            def __init__(self, config, *arguments, **more):
                operator.attrgetter(name)(config)  # noqa: B023

        keys = [f"--config.{key}" for key in (*TINY, "data.lanes=4", f"shards.dir={manifest.folder}")]
        path = str(configs.BASE)
        if code == 1 and name.startswith("mine"):
            write(tmp_path / "own")
            path = str(tmp_path / "own" / "own_config.py")
        assert main(["train", f"--config={path}", f"--workdir={tmp_path}/{name}", *keys], pretraining=Reads) == code
        said = capsys.readouterr().err
        assert (f"config.{name}" in said.splitlines()[-1]) == (code == 2) != ("Traceback" in said)
        assert ("mlm train: AttributeError: " in said.splitlines()[-1]) == (code == 1), "after notes, as jax adds them"


@pytest.fixture(scope="module")
def own_config(tmp_path_factory) -> str:
    write(folder := tmp_path_factory.mktemp("own"))
    return str(folder / "own_config.py")


def train(workdir, manifest, own_config, *overrides: str, pretraining=Weighted) -> None:
    """Trains two steps in this process."""
    keys = (*TINY, f"shards.dir={manifest.folder}", "data.lanes=4", "train.steps=2", "log.every=1", *overrides)
    config = configs.load(own_config, keys)
    train_task(config, Workdir(str(workdir)), pretraining.open(config, Workdir(str(workdir)), manifest))


@pytest.mark.standard
def test_a_subclass_is_on_record_and_in_the_report(one_device, tmp_path, manifest, own_config):
    """No other class and no other key goes on with it; mlm.testing's own tests take one through mesh and resume."""
    train(tmp_path / "run", manifest, own_config)
    saved = checkpoint_files.read_meta(Workdir(str(tmp_path / "run")).checkpoints, 2)
    assert saved["class"]["name"] == "test_entry.Weighted" and saved["config"].mine.power == 0.5
    refusals = ((("mine.power=1.0",), Weighted, r"mine\.power: 0\.5 -> 1\.0"), ((), Pretraining, "test_entry.Weighted"))
    for keys, cls, words in refusals:
        with pytest.raises(InputError, match=words):
            train(tmp_path / "run", manifest, own_config, *keys, pretraining=cls)
    assert main(["report", f"--workdir={tmp_path}/run"]) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert "test_entry.Weighted" in page and "power" in page


def start(program: list[str], *arguments: str, code: int = 0, cwd=ROOT) -> str:
    """Runs a researcher's file; returns what it printed."""
    line, env = [sys.executable, *program, *arguments], processes.environment(1)
    done = subprocess.run(line, env=env, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_every_run_of_a_sweep_trains_the_class(tmp_path, manifest):
    script = [str(write(tmp_path / "a"))]
    _, _, *line = processes.train_arguments(tmp_path / "a" / "runs", manifest.folder, "train.steps=2")
    command = ["sweep", "train", f"--config={tmp_path}/a/own_config.py", *line, "--vary"]
    start(["-m", "main_of_mine"], *command, "mine.power=0.3,0.5", cwd=tmp_path / "a")
    runs = tmp_path / "a" / "runs"
    content = json.loads((runs / "sweep.json").read_text())
    assert [run["values"]["mine.power"] for run in content["runs"]] == [0.3, 0.5] and "Scaled" in content["trained_by"]
    for power in (0.3, 0.5):
        meta = checkpoint_files.read_meta(Workdir(str(runs / f"power={power}")).checkpoints, 2)
        assert meta["class"]["name"] == "lib_of_mine.Scaled" and meta["config"].mine.power == power
    said = start(["-m", "mlm"], *command, "mine.power=0.3,0.5", code=2)
    assert "lib_of_mine.Scaled" in said and "power=0.3" in said
    assert json.loads((runs / "sweep.json").read_text()) == content
    assert "[0, 1]" in start(script, *command, "mine.power=0,2", code=2)
