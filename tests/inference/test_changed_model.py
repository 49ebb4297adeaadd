"""A model of a researcher's own class is computed with the keys of its own run, whatever those of the command are."""

import dataclasses

import numpy as np

from mlm import config as configs
from mlm import entry
from mlm.data.manifest import DatasetInfo
from mlm.inference import evaluate
from mlm.model import families
from mlm.model.roberta import RobertaModule
from mlm.pretrained import load
from mlm.tasks.changed_model import with_class
from mlm.tasks.pretraining import Pretraining
from mlm.testing import write_shards
from mlm.training import sharding
from mlm.workdir import Workdir
from tests.support.tiny import tiny_config


class ScaledModule(RobertaModule):
    scale: float = 1.0


class Scaled(Pretraining):
    def make_model(self):
        module = families.make_module(self.config.model, self.info, module_class=ScaledModule)
        return module.clone(scale=self.config.mine.scale)

    def make_attention(self, module):
        return lambda q_BxLxH, *_, **settings: self.config.mine.scale * q_BxLxH


def test_a_changed_model_is_evaluated_with_its_own_keys(tmp_path):
    base = tiny_config().unlock()
    base.mine.scale = 1.0
    run_config = configs.replace(base.lock(), {"mine.scale": 0.25})
    manifest = write_shards(tmp_path, vocab_size=512, length=base.shards.length)
    info = DatasetInfo.from_manifest(manifest)
    program = entry.open_entry(Scaled, [])
    meta = {"class": program.record, "config": run_config, "dataset": dataclasses.asdict(info)}
    model = load.Pretrained(Scaled.model_alone(base, info).config, {}, "", 2, meta, "runs/a")
    found = with_class(model, program, command="evaluate", stock_network=False)
    mesh = sharding.mesh_of(base.mesh)
    module, task = evaluate.make_module(
        base, found, program, manifest, Workdir(tmp_path / "w"), mesh
    )
    assert module.scale == 0.25 and task.module.scale == 1.0
    assert str(module.dtype) == base.model.dtype
    assert (module.compute.attend(np.ones((1, base.shards.length, 2))) == 0.25).all()


def test_metrics_of_ones_own_are_shown_and_standard_numbers_once():
    scores = {
        "loss": 2.0,
        "perplexity": 7.4,
        "accuracy": 0.5,
        "predictions": 5000,
        "loss_se_records": 0.1,
    }
    pseudo = {
        f"pseudo_{name}": 3.5 for name in ("loss", "perplexity", "accuracy", "tokens", "rows")
    }
    result = {"split": "validation", "model": "runs/a", **scores, "rare_accuracy": 0.1251, **pseudo}
    result |= {f"web/{name}": value for name, value in scores.items()} | {
        "web/rare_accuracy": 0.0625
    }
    lines = [line for line in evaluate.summary(result) if isinstance(line, str)]
    shown = [line.partition("accuracy 50.00%, ")[2] for line in lines[1:3]]
    assert shown == [
        f"rare_accuracy {value}, on 5,000 masked tokens" for value in ("0.1251", "0.0625")
    ]
