"""Every number that is reported: the same in float32 on one device and in bfloat16 on eight, with XLA's defaults.

`python -m tests.test_numbers` prints the numbers as JSON, computed with the flags of its environment: XLA reads them
once a process, and the tests' own make other programs than users run.

No rows: what report, plots and model card show, which they read from metrics.jsonl and evaluation.json (test_report,
test_model_card); intervals and means of scores (test_minimal_pairs, test_evaluation); predictions, minimal pairs and
proofs, which are computed in float32 in every run; the mean of checkpoints, of numpy arrays in float32 (test_average).
"""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlm.inference import pseudo_perplexity
from mlm.model import classifier
from mlm.model.families import ROBERTA, at_path, family_of
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
TAGS = ("O", "B-x", "I-x")
CASES = {
    "roberta": ("float32 on 1", "bfloat16 on 8"),
    "modernbert": ("float32 on 1", "bfloat16 on 1"),
}

# How far bfloat16 may be from float32. A logit has 8 bits: those here, of 10 to 20, are rounded by up to 0.06, so a
# prediction whose two largest logits are that close may change (1% of them do), and a loss moves by 0.06 at most, a
# mean of thousands by much less.
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
        task.module, task.eval_masking, mesh, shardings_of(params), with_breakdown=True
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
    model = Pretrained(task.module.config, {}, "", None, {}, "").with_vocabulary(INFO.vocab_size)
    columns = (read[0][name][:16] for name in ("input_ids", "attention_mask"))
    rows = [ids_L[attention_L > 0].tolist() for ids_L, attention_L in zip(*columns, strict=True)]
    numbers |= pseudo_perplexity.score(task.module, params, mesh, model, rows, INFO, batch=ROWS)
    numbers |= train(task, params, score)
    for labels, of_tokens in ((tuple("abc"), False), ((), False), (TAGS, True)):
        numbers |= classify(task, read[0], labels, of_tokens=of_tokens)
    return numbers


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
    return named("classes", classes)


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
        for case, numbers in cases.items():
            for name in TOLERANCES.keys() & numbers.keys():
                checked.add(name)
                allowed = TOLERANCES[name] * (abs(right[name]) if name in RELATIVE else 1)
                if not abs(numbers[name] - right[name]) <= allowed + 1e-6:
                    pair = f"{numbers[name]:.4f}, not {right[name]:.4f}"
                    wrong.append(f"{family}, {case}: {name} {pair}")
    assert not wrong, "\n".join(wrong)
    assert checked == TOLERANCES.keys()


if __name__ == "__main__":
    print(
        json.dumps(
            {
                family: {case: measure(family, case) for case in cases}
                for family, cases in CASES.items()
            }
        )
    )
