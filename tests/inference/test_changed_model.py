"""A model of a researcher's own class is computed with the keys of its own run, whatever those of the command are."""

import dataclasses
import io

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
from mlm.text import show
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
    scores = {"loss": 2.0, "perplexity": 7.4, "accuracy": 0.5, "predictions": 5000}
    result = {"split": "validation", "model": "runs/a", **scores, "rare_accuracy": 0.1251}
    result |= {
        f"pseudo_{name}": 3.5 for name in ("loss", "perplexity", "accuracy", "tokens", "rows")
    }
    result |= {f"web/{name}": value for name, value in scores.items()} | {
        "web/rare_accuracy": 0.0625
    }
    out = io.StringIO()
    show(*evaluate.summary(result), out=out)
    names = [line.split("  ")[1] for line in out.getvalue().splitlines()[2:] if line.strip()]
    assert names.count("rare_accuracy") == 1 and len(names) == len(set(names))
    assert "0.1251  0.0625" in out.getvalue()
