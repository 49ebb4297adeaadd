"""The jobs of configs/continue_wikitext103.py and classify_bert_banking77.py, from a BERT that PyTorch has written.

Small, without the Hub, by flags alone.
"""

import itertools
import json
import pathlib
import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from mlm import config as configs
from mlm import logs
from mlm.__main__ import main
from mlm.commands import common
from mlm.tasks.pretraining import Pretraining
from mlm.workdir import Workdir
from tests.support import corpora, labelled_texts
from tests.support.pytorch import draw, run_torch
from tests.support.tokenizers import make_bert_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_device")]

# What Trainer does unless it is told otherwise, and what the published run told it; written out, not read from ours.
TRAINER = {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "clip_norm": 1.0, "warmup_steps": 0}
SIZES = {"hidden_size": 64, "layers": 4, "heads": 2, "intermediate_size": 64, "positions": 34, "layer_norm_eps": 1e-5}
SMALL = ("data.global_batch=16", "evaluate.batch=16", "log.tensorboard=false")
RATE = 2e-3  # that of the config would hardly move so small a model in so few steps


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> pathlib.Path:
    """A folder with the weights of a BertForPreTraining and an uncased WordPiece tokenizer."""
    folder = tmp_path_factory.mktemp("torch")
    (folder / "ids.json").write_text("[[5, 6]]")
    run_torch(4, "tests/pytorch/write.py", folder, "bert")
    shutil.copytree(make_bert_tokenizer(folder / "tokenizer"), folder / "bert" / "pretrained", dirs_exist_ok=True)
    return folder / "bert" / "pretrained"


@pytest.fixture(scope="module")
def continued(bert, one_device, tmp_path_factory) -> Workdir:
    folder = tmp_path_factory.mktemp("continued")
    texts = [text for text in corpora.real_texts() if len(text) > 500][:20]
    source = corpora.write_jsonl(folder / "texts.jsonl", texts)
    settings = [f"model.{key}={value}" for key, value in SIZES.items()]
    settings += [f"corpus.sources={source}", "corpus.validation_fraction=0.1", "shards.length=32", "shards.count=2"]
    settings += [f"train.init_from={bert}", f"tokenizer.path={bert}", f"optimizer.learning_rate={RATE}"]
    settings += ["shards.validation_count=1", "shards.workers=1", "data.lanes=2", "train.accumulate=1", *SMALL]
    settings += ["model.hidden_dropout=0", "model.attention_dropout=0", "model.dtype=float32", "log.every=1"]
    flags = [f"--config.{setting}" for setting in settings]
    assert main(["run", "--config=configs/continue_wikitext103.py", f"--workdir={folder / 'run'}", *flags]) == 0
    return Workdir(str(folder / "run"), create=False)


def test_losses_of_a_continued_run_are_those_of_a_loop_in_pytorch(continued, bert, tmp_path):
    """On the same rows and masks, in three epochs; the rate falls to 0 from the first step on."""
    config = configs.read(continued.config)
    task = Pretraining.open(config, continued, common.open_data(config, continued))
    steps = task.stages.steps
    assert steps >= 20 and config.train.epochs == 3
    recipe = TRAINER | {"learning_rate": RATE, "steps": steps}
    (tmp_path / "settings.json").write_text(json.dumps({"head": "MaskedLM", "start": str(bert), "recipe": recipe}))
    save_file(draw(task, list(itertools.islice(task.batches(0), steps))), tmp_path / "batches.safetensors")
    run_torch(4, "tests/pytorch/reference.py", tmp_path)
    theirs, lines = json.loads((tmp_path / "losses.json").read_text()), logs.read(continued.metrics, "train")
    losses = [line["loss"] for line in lines]
    np.testing.assert_allclose(losses, theirs["losses"], rtol=5e-6)
    np.testing.assert_allclose([line["grad_norm"] for line in lines], theirs["norms"], rtol=2e-4)
    assert max(losses) - losses[-1] > 0.1, "nothing was learnt: the comparison is empty"
    rates = [line["learning_rate"] for line in lines]
    np.testing.assert_allclose(rates, RATE * (1 - np.arange(steps) / steps), rtol=1e-5)


def test_both_exports_are_what_pytorch_loads(continued, bert, tmp_path, capsys):
    """Logits, ids and the pipeline's answers; of the classifier, the weighted F1 of each of its three epochs."""
    settings = [f"train.init_from={bert}", "classify.length=32", "schedule.warmup=5", *SMALL]
    for split, count in (("train", 83), ("validation", 29)):
        rows = [{"text": row["text"], "category": row["label"]} for row in labelled_texts.rows(count, seed=count)]
        settings.append(f"classify.{split}={labelled_texts.write_csv(tmp_path / f'{split}.csv', rows)}")
    flags = [f"--config.{setting}" for setting in settings]
    run = tmp_path / "run"
    assert main(["classify", "--config=configs/classify_bert_banking77.py", f"--workdir={run}", *flags]) == 0
    workdir = Workdir(str(run), create=False)
    assert len([line["f1"] for line in logs.read(workdir.metrics, "eval")]) == 3
    assert len(re.findall(r"f1 [\d.]+%", capsys.readouterr().err)) == 3
    for printed in run_torch(4, "tests/pytorch/verify.py", continued.export, workdir.export).splitlines():
        result = json.loads(printed)
        assert result["code"] == 0, result["printed"]
        assert float(re.search(r"largest logit ([\d.]+)", result["printed"])[1]) > 0.1, "nothing to compare"
