"""Every number that is reported: the same in float32 on one device and in bfloat16 on eight, with XLA's defaults.

`python -m tests.test_numbers` prints the numbers as JSON, computed with the flags of its environment: XLA reads them
once a process, and the tests' own make other programs than users run.

No rows: what report, plots and model card show, which they read from metrics.jsonl and evaluation.json (test_report,
test_model_card); intervals and means of scores (test_minimal_pairs, test_evaluation); the mean of checkpoints, of
numpy arrays in float32 (test_average), as parameters are here after steps in either dtype.
"""

import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from mlm.data import tokenizer_checks
from mlm.inference import minimal_pairs, pseudo_perplexity
from mlm.inference.classify_texts import TextClassifier
from mlm.inference.fill_mask import FillMask
from mlm.inference.forward import make_forward
from mlm.model import classifier
from mlm.model.families import ROBERTA, at_path, family_of
from mlm.monitor.loss_spikes import Detector
from mlm.pretrained.load import Pretrained
from mlm.tasks import classification, scores
from mlm.tasks.pretraining import Pretraining
from mlm.training import breakdown, evaluation, sharding
from mlm.training.sharding import shardings_of
from tests.support.tiny import INFO, random_batch, tiny_config
from tests.support.trained_model import random_params

ROWS = 64
BATCHES = 4
LABELS = 3
FREQUENT = 7
PAIRS = 16
TIES = 2
TAGS = ("O", "B-x", "I-x")
CASES = {
    "roberta": ("float32 on 1", "bfloat16 on 8"),
    "modernbert": ("float32 on 1", "bfloat16 on 1"),
}

# How far bfloat16 may be from float32. A logit has 8 bits: those here, of 10 to 20, are rounded by up to 0.06, so a
# prediction whose two largest logits are that close may change (1% of them do), and a loss moves by 0.06 at most, a
# mean of thousands by much less.
# Predictions, minimal pairs and proofs are computed in float32 in every run: there bfloat16 is as exact.
TOLERANCES = {
    "loss": 0.01,
    "perplexity": 0.01,
    "accuracy": 0.01,
    "predictions": 0,
    "bits_per_byte": 0.005,
    "loss_se_draws": 0.005,
    "loss_se_records": 0.005,
    "largest accuracy of a position": 0.03,
    "accuracy without a copy": 0.02,
    "pseudo_loss": 0.02,
    "pseudo_perplexity": 0.02,
    "pseudo_accuracy": 0.02,
    "train/loss": 0.01,
    "train/accuracy": 0.015,
    "train/grad_norm": 0.1,  # of 4
    "train/learning_rate": 0,
    # rounded to 8 bits, an average would stay at the start, or jump
    "ema/distance from the start": 0.05,
    "ema/loss": 0.02,
    "train/smallest item of the state": 0,
    "classes/loss": 0.01,
    "classes/accuracy": 0.04,
    "classes/f1": 0.04,
    "classes/f1_macro": 0.04,
    "classes/matthews": 0.06,
    "classes/f1_positive": 0.05,
    "number/mse": 0.01,
    "number/pearson": 0.01,
    "number/spearman": 0.02,
    # a value that is rounded to 8 bits ties with others, and a rank correlation counts ties
    "number/distinct": 0,
    "words/loss": 0.01,
    "words/accuracy": 0.02,
    "words/precision": 0.03,
    "words/recall": 0.03,
    "words/f1": 0.03,
    "pairs/log-likelihoods": 0.001,  # of about 50
    "pairs/original": 0,
    "pairs/within_word": 0,
    "pairs/ties": 0,
    "predict/order": 0,
    "predict/percentages": 1e-6,
    "predict/classes": 1e-6,
    "export/proof": 1e-5,
}
RELATIVE = {"perplexity", "pseudo_perplexity", "ema/distance from the start"}


def measure(family: str, case: str) -> dict[str, float]:
    """Computes the numbers by the steps that the commands run."""
    dtype, _, devices = case.split()
    mesh = sharding.make_mesh(
        data=int(devices), fsdp=1, tensor=1, devices=jax.devices()[: int(devices)]
    )
    masks = (
        "masking.mask_share=0.4",
        "masking.rate=0.3",
        f"data.global_batch={ROWS}",
    )
    config = tiny_config(
        f"model.dtype={dtype}", "optimizer.ema_decay=0.9", *masks, f"model.family={family}"
    )
    task = Pretraining(config, INFO, mesh=mesh)
    params = jax.device_put(with_signal(task), shardings_of(task.abstract_state).params)
    eval_step = evaluation.make_eval_step(
        task.module, task.eval_masking, 0, mesh, shardings_of(params), with_breakdown=True
    )
    read = [rows_of(seed) | {"valid": np.ones(ROWS, np.float32)} for seed in range(BATCHES)]
    score = partial(
        evaluation.score, eval_step, batches=read, mesh=mesh, rows=ROWS, tokens_per_byte=0.25
    )
    numbers = score(params, draws=2)
    by_position, by_distance = (numbers.pop(table) for table in breakdown.TABLES)
    numbers["largest accuracy of a position"] = max(
        line["accuracy"] for line in by_position.values()
    )
    numbers["accuracy without a copy"] = by_distance["no copy"]["accuracy"]
    if family != "roberta":
        return numbers
    ids = {"mask_id": INFO.special_ids["mask"], "vocab_size": INFO.vocab_size}
    pseudo_step = pseudo_perplexity.make_step(
        module=task.module, mesh=mesh, param_shardings=shardings_of(params), **ids
    )
    rows = (read[0]["input_ids"][:16], read[0]["attention_mask"][:16])
    special = {"special_ids": INFO.all_special_ids, "mesh": mesh, "batch": ROWS}
    numbers |= pseudo_perplexity.score(pseudo_step, params, *rows, **special)
    numbers |= train(task, params, score)
    for labels, of_tokens in ((tuple("abc"), False), ((), False), (TAGS, True)):
        numbers |= classify(task, read[0], labels, of_tokens=of_tokens)
    return numbers | predict(task, jax.device_get(params))


def train(
    task: Pretraining, params: dict, evaluate: Callable[[dict], dict[str, float]]
) -> dict[str, float]:
    """Returns the metrics of a step, and scores of the averaged parameters after three."""
    batch = sharding.put_batch(rows_of(0), task.mesh, ROWS)
    copy = jax.jit(partial(jax.tree.map, jnp.copy))
    state, metrics = task.train_step(
        task.init().replace(params=copy(params), ema=copy(params)), batch
    )
    numbers = {f"train/{name}": float(value) for name, value in metrics.items() if value.ndim == 0}
    for _ in range(2):
        state, _ = task.train_step(state, batch)
    moved = jax.tree.map(
        lambda new, old: np.sum((np.asarray(new) - np.asarray(old)) ** 2), state.best_params, params
    )
    numbers["ema/distance from the start"] = float(sum(jax.tree.leaves(moved))) ** 0.5
    numbers["ema/loss"] = evaluate(state.best_params)["loss"]
    numbers["train/smallest item of the state"] = min(
        leaf.dtype.itemsize for leaf in jax.tree.leaves(state)
    )
    return numbers


def rows_of(seed: int) -> dict[str, np.ndarray]:
    """Rows in a third of whose places the same token stands, and which begin with different ones."""
    batch = random_batch(ROWS, seed)
    rng = np.random.default_rng(seed)
    ids = batch["input_ids"]
    ids = np.where(
        (rng.random(ids.shape) < 0.3) & (ids >= len(INFO.all_special_ids)), FREQUENT, ids
    )
    ids[:, 0] = rng.choice(np.arange(10, INFO.vocab_size), ROWS, replace=False)
    return batch | {"input_ids": ids.astype(np.int32)}


def with_signal(task: Pretraining) -> dict:
    """Returns parameters that predict a token which they see, and FREQUENT behind a mask: most of both by far."""
    family = family_of(task.module.config)
    mask_id = INFO.special_ids["mask"]
    like = task.abstract_state.params
    params = (
        jax.device_get(task.init().params)
        if family is ROBERTA
        else random_params(like, stddev=0.02)
    )
    bias = at_path(params, family.decoder_bias[:-1])
    words = at_path(params, family.embedding[:-1])
    head = at_path(params, (family.lm_head[0], "dense"))
    words["embedding"] = 30 * words["embedding"]
    words["embedding"][mask_id] = words["embedding"][FREQUENT]
    # adding 0 would round nothing
    drawn = np.random.default_rng(0).normal(0, 0.3, bias["bias"].shape)
    bias["bias"] = drawn.astype(np.float32)
    bias["bias"][mask_id] = -30
    head["kernel"] = 2 * np.eye(task.config.model.hidden_size, dtype=np.float32) + head["kernel"]
    return params


def classify(
    task: Pretraining, batch: dict, labels: tuple[str, ...], *, of_tokens: bool
) -> dict[str, float]:
    """Scores a classifier of rows or tokens, or a regression if there are no labels, on labels that are random."""
    config = classifier.make_config(task.module.config, labels, of_tokens=of_tokens)
    rng = np.random.default_rng(0)
    params = jax.device_get(classifier.make_module(config).init_params(jax.random.key(0)))
    head = params["classifier"] if of_tokens else params["classifier"]["out_proj"]
    head["kernel"] = (3 if of_tokens else 30) * head["kernel"]
    attention = batch["attention_mask"]
    targets = (
        rng.integers(0, LABELS, attention.shape if of_tokens else ROWS)
        if labels
        else rng.normal(0, 0.5, ROWS)
    )
    targets = np.where(attention > 0, targets, -1) if of_tokens else targets
    module = classifier.make_module(config, task.config.model.dtype)
    shardings = sharding.tree_shardings(params, task.mesh, params, module.partition_rules())
    eval_step = classification.make_eval_step(module, task.mesh, shardings, longest=INFO.length)
    read = {"input_ids": batch["input_ids"], "attention_mask": attention}
    read["label"] = targets.astype(np.int32 if labels else np.float32)
    placed = sharding.put_tree(params, shardings)
    loss_N, predicted_N = evaluation.per_row(eval_step, placed, [read], mesh=task.mesh, rows=ROWS)
    if of_tokens:
        row_W, place_W = np.nonzero(attention)
        words = scores.score_words(
            targets[row_W, place_W], predicted_N[row_W, place_W], row_W, labels
        )
        return named("words", {"loss": loss_N.sum() / len(row_W)} | words)
    if not labels:
        numbers = scores.score_numbers(targets, predicted_N) | {
            "distinct": len(np.unique(predicted_N))
        }
        return named("number", numbers)
    second = scores.score_classes(targets == 1, predicted_N == 1, 2)["f1_positive"]
    classes = scores.score_classes(targets, predicted_N, LABELS) | {
        "loss": loss_N.mean(),
        "f1_positive": second,
    }
    model = Pretrained(config, params, "", 1, {"config": task.config}, "a classifier")
    answers = TextClassifier(model, make_tokenizer(), LABELS).answer(
        batch["input_ids"][:8].tolist()
    )
    probabilities = [answer["probabilities"][label] for answer in answers for label in labels]
    return named("classes", classes) | {"predict/classes": probabilities}


def predict(task: Pretraining, params: dict) -> dict[str, Any]:
    """Returns what `predict`, `evaluate --pairs` and `export` compute of a run's model."""
    tok = make_tokenizer()
    rng = np.random.default_rng(0)
    tokens = tok.convert_ids_to_tokens(range(INFO.vocab_size))
    devices = task.mesh.devices.flatten()
    good = rng.integers(len(INFO.all_special_ids), INFO.vocab_size, (PAIRS, 8))
    bad = good.copy()
    bad[TIES:, 4] = rng.integers(len(INFO.all_special_ids), INFO.vocab_size, PAIRS - TIES)
    texts = [
        [" ".join(tokens[i] for i in ids).replace(" ##", "") for ids in side]
        for side in (good, bad)
    ]
    pairs = [minimal_pairs.Pair(both, "", "a pair") for both in zip(*texts, strict=True)]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        tok.save_pretrained(folder)
        meta = {"config": task.config}
        model = Pretrained(task.module.config, params, folder, 1, meta, "a model").with_vocabulary(
            INFO.vocab_size
        )
        patch.setattr(sharding, "make_mesh", partial(sharding.make_mesh, devices=list(devices)))
        sums = minimal_pairs.pseudo_log_likelihoods(
            task.config, model, minimal_pairs.encode(pairs, model)
        )
    scored = minimal_pairs.accuracies(
        pairs, {method: sum_N[::2] - sum_N[1::2] for method, sum_N in sums.items()}
    )
    fillings = FillMask(model, tok, 20)([f"{text} {tok.mask_token}" for text in texts[0][:8]])
    fillings = [filling for masks in fillings for mask in masks for filling in mask]
    logits = make_forward(model)([[0, *ids, 2] for ids in good.tolist()], [[3, 5]] * PAIRS)
    return {
        "pairs/log-likelihoods": sums["original"].tolist(),
        "pairs/original": scored["original"]["accuracy"],
        "pairs/within_word": scored["within_word"]["accuracy"],
        "pairs/ties": scored["original"]["ties"],
        "predict/order": [filling["token"] for filling in fillings],
        "predict/percentages": [filling["score"] for filling in fillings],
        "export/proof": np.max(logits, axis=-1).ravel().tolist(),
    }


@functools.cache
def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with the ids of INFO: every third token continues a word."""
    names = [tokenizer_checks.ROLES[role] for role in INFO.special_ids]
    names += [f"{'##' if i % 3 == 0 else ''}t{i:03}" for i in range(len(names), INFO.vocab_size)]
    fast = Tokenizer(models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", "<s> $A </s> $B </s>", [("<s>", 0), ("</s>", 2)]
    )
    special = {f"{role}_token": token for role, token in tokenizer_checks.ROLES.items()}
    return PreTrainedTokenizerFast(tokenizer_object=fast, **special)


def named(group: str, numbers: dict[str, float]) -> dict[str, float]:
    return {f"{group}/{name}": float(value) for name, value in numbers.items()}


@pytest.mark.standard
def test_every_number_is_that_of_float32_on_one_device():
    # tests/conftest.py leaves only the devices in XLA_FLAGS
    command = [sys.executable, "-m", "tests.test_numbers"]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    wrong = []
    checked = set()
    for family, cases in found.items():
        right = cases.pop("float32 on 1")
        assert 0.3 < right["accuracy"] < 0.7, "no signal: nothing is tested"
        assert right.get("pairs/ties", TIES) == TIES, "equal sentences tie, and no others"
        for case, numbers in cases.items():
            for name in TOLERANCES.keys() & numbers.keys():
                checked.add(name)
                size = np.abs(right[name])
                difference = np.abs(np.subtract(numbers[name], right[name]))
                allowed = TOLERANCES[name] * (size if name in RELATIVE else 1)
                if not np.all(difference <= allowed + 1e-6):
                    value, other = (
                        np.ravel(each[name])[difference.argmax()] for each in (numbers, right)
                    )
                    wrong.append(f"{family}, {case}: {name} {value:.4f}, not {other:.4f}")
    assert not wrong, "\n".join(wrong)
    assert checked == TOLERANCES.keys()


def test_spikes_are_the_same_from_the_logs_of_either_dtype():
    losses = 3 + 6 * np.exp(-np.arange(1, 201) / 15) + np.random.default_rng(0).normal(0, 0.02, 200)
    losses[150] += 2
    spikes = []
    for apart in (0, TOLERANCES["train/loss"]):
        moved = losses + apart * np.random.default_rng(0).uniform(-1, 1, 200)
        detector = Detector()
        spikes.append(
            [
                spike.first
                for step, loss in enumerate(moved, 1)
                if (spike := detector.add(step, loss))
            ]
        )
    assert spikes[0] == spikes[1] == [151]


if __name__ == "__main__":
    print(
        json.dumps(
            {
                family: {case: measure(family, case) for case in cases}
                for family, cases in CASES.items()
            }
        )
    )
