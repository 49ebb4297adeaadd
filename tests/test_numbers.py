"""Every number that is reported: the same in float32 and bfloat16, on one device and eight, with XLA's defaults too.

`python -m tests.test_numbers` prints the numbers as JSON, computed with the flags of its environment: XLA reads them
once a process, and the tests' own make other programs than users run.
"""

import dataclasses
import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from mlm.export import verify_export
from mlm.inference import pseudo_perplexity
from mlm.model import classifier
from mlm.model.network import at_path
from mlm.monitor.loss_spikes import Detector
from mlm.tasks import classification, scores
from mlm.tasks.pretraining import Pretraining
from mlm.training import breakdown, evaluation, sharding, step
from mlm.training.state import shardings_of
from tests import test_adviser
from tests.fixtures import INFO, random_batch, tiny_config

ROWS, BATCHES, LABELS, FREQUENT = 64, 4, 3, 7
CASES = ("float32 on 1", "float32 on 8", "bfloat16 on 8")
FAMILIES = {
    "roberta": (),
    "roberta_prelayernorm": ("model.family=roberta_prelayernorm",),
    "modernbert": ("model.family=modernbert",),
}

# How far bfloat16 may be from float32. A logit has 8 bits: those here, of 10 to 20, are rounded by up to 0.06, so a
# prediction whose two largest logits are that close may change (1% of them do), and a loss moves by 0.06 at most, a
# mean of thousands by much less. Float32 is held to 1e-4, relative, whatever the number of devices.
TOLERANCES = {
    "loss": 0.01,
    "accuracy": 0.01,
    "predictions": 0,
    "bits_per_byte": 0.005,
    "loss_se_draws": 0.005,
    "loss_se_records": 0.005,
    "largest accuracy of a position": 0.03,
    "accuracy without a copy": 0.02,
    "pseudo_loss": 0.02,
    "pseudo_accuracy": 0.02,
    "train/loss": 0.01,
    "train/accuracy": 0.015,
    "train/grad_norm": 0.1,  # of 4
    "train/learning_rate": 0,
    "classes/loss": 0.01,
    "classes/accuracy": 0.04,
    "classes/f1_macro": 0.04,
    "number/mse": 0.01,
    "number/pearson": 0.01,
    "number/spearman": 0.02,
    "number/distinct": 0,  # a value that is rounded to 8 bits ties with others, and a rank correlation counts ties
}


def measure(family: str, case: str) -> dict[str, float]:
    """Computes the numbers by the steps that the commands run."""
    dtype, _, devices = case.split()
    mesh = sharding.make_mesh(data=int(devices), fsdp=1, tensor=1, devices=jax.devices()[: int(devices)])
    masks = ("masking.mask_share=0.4", "masking.random_share=0.1", "masking.rate=0.3", f"data.global_batch={ROWS}")
    config = tiny_config(f"model.dtype={dtype}", *masks, *FAMILIES[family])
    task = Pretraining(config, INFO, mesh=mesh)
    params = jax.device_put(with_signal(task), shardings_of(task.shapes).params)
    eval_step = step.make_eval_step(task.network, task.eval_masking, 0, mesh, shardings_of(params), with_breakdown=True)
    read = [rows_of(seed) | {"valid": np.ones(ROWS, np.float32)} for seed in range(BATCHES)]
    numbers = evaluation.score(eval_step, params, read, mesh=mesh, rows=ROWS, tokens_per_byte=0.25, draws=2)
    by_position, by_distance = (numbers.pop(table) for table in breakdown.TABLES)
    numbers["largest accuracy of a position"] = max(line["accuracy"] for line in by_position.values())
    numbers["accuracy without a copy"] = by_distance["no copy"]["accuracy"]
    if family != "roberta":
        return numbers
    ids = {"mask_id": INFO.special_ids["mask"], "vocab_size": INFO.vocab_size}
    pseudo_step = pseudo_perplexity.make_step(
        network=task.network, mesh=mesh, param_shardings=shardings_of(params), **ids
    )
    rows = (read[0]["input_ids"][:16], read[0]["attention_mask"][:16])
    special = {"special_ids": INFO.all_special_ids, "mesh": mesh, "batch": ROWS}
    numbers |= pseudo_perplexity.score(pseudo_step, params, *rows, **special)
    batch = sharding.put_batch(rows_of(0), mesh, ROWS)
    _, metrics = task.train_step(task.init().replace(params=params), batch)
    numbers |= {f"train/{name}": float(value) for name, value in metrics.items()}
    return numbers | classify(task, read[0], labels=tuple("abc")) | classify(task, read[0], labels=())


def rows_of(seed: int) -> dict[str, np.ndarray]:
    """Rows in a third of whose places the same token stands, and which begin with different ones."""
    batch, rng = random_batch(ROWS, seed), np.random.default_rng(seed)
    ids = batch["input_ids"]
    ids = np.where((rng.random(ids.shape) < 0.3) & (ids >= len(INFO.all_special_ids)), FREQUENT, ids)
    ids[:, 0] = rng.choice(np.arange(10, INFO.vocab_size), ROWS, replace=False)
    return batch | {"input_ids": ids.astype(np.int32)}


def with_signal(task: Pretraining) -> dict:
    """Returns parameters that predict a token which they see, and FREQUENT behind a mask: most of both by far."""
    params, mask_id = jax.device_get(task.init().params), INFO.special_ids["mask"]
    bias = at_path(params, task.network.decoder_bias[:-1])
    words, head = at_path(params, task.network.embedding[:-1]), at_path(params, (task.network.lm_head[0], "dense"))
    words["embedding"] = 30 * words["embedding"]
    words["embedding"][mask_id] = words["embedding"][FREQUENT]
    bias["bias"] = (
        np.random.default_rng(0).normal(0, 0.3, bias["bias"].shape).astype(np.float32)
    )  # adding 0 rounds nothing
    bias["bias"][mask_id] = -30
    head["kernel"] = 2 * np.eye(task.config.model.hidden_size, dtype=np.float32) + head["kernel"]
    return params


def classify(task: Pretraining, batch: dict, labels: tuple[str, ...]) -> dict[str, float]:
    """Scores a classifier, or a regression, on labels that are partly random."""
    config, rng = classifier.make_config(task.network.config, labels), np.random.default_rng(0)
    params = jax.device_get(classifier.init_params(config, jax.random.key(0)))
    params["classifier"]["out_proj"]["kernel"] = 30 * params["classifier"]["out_proj"]["kernel"]
    targets = {True: rng.integers(0, LABELS, ROWS), False: rng.normal(0, 0.5, ROWS)}[bool(labels)]
    shardings = sharding.tree_shardings(params, task.mesh, params)
    network = type(task.network)(config, task.config.model.dtype)
    eval_step = classification.make_eval_step(network, task.mesh, shardings, longest=INFO.length)
    read = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    read["label"] = targets.astype(np.int32 if labels else np.float32)
    placed = sharding.put_tree(params, shardings)
    loss_N, predicted_N = evaluation.per_row(eval_step, placed, [read], mesh=task.mesh, rows=ROWS)
    if labels:
        found = {"loss": loss_N.mean(), **scores.score_classes(targets, predicted_N, LABELS)}
        return {f"classes/{name}": float(value) for name, value in found.items()}
    found = scores.score_numbers(targets, predicted_N) | {"distinct": len(np.unique(predicted_N))}
    return {f"number/{name}": float(value) for name, value in found.items()}


def table(*families: str, cases: tuple[str, ...] = CASES) -> dict[str, dict[str, dict[str, float]]]:
    """Returns {family: {case: numbers}}; of the other families on one device alone."""
    found = {"roberta": {case: measure("roberta", case) for case in cases}}
    for family in families:
        found[family] = {case: measure(family, case) for case in ("float32 on 1", "bfloat16 on 1")}
    return found


@pytest.mark.parametrize("flags", ["the tests'", "XLA's defaults"])
def test_every_number_is_that_of_float32_on_one_device(flags):
    if flags == "the tests'":
        found = table("modernbert", "roberta_prelayernorm")
    else:  # tests/conftest.py leaves the number of devices alone in XLA_FLAGS
        command = [sys.executable, "-m", "tests.test_numbers"]
        found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    wrong, checked = [], set()
    for family, cases in found.items():
        right = cases.pop("float32 on 1")
        assert 0.3 < right["accuracy"] < 0.7, "no signal: nothing is tested"
        for case, numbers in cases.items():
            for name in TOLERANCES.keys() & numbers.keys():
                checked.add(name)
                allowed = TOLERANCES[name] if "bfloat16" in case else 1e-4 * abs(right[name])
                if not abs(numbers[name] - right[name]) <= allowed + 1e-6:
                    wrong.append(f"{family}, {case}: {name} {numbers[name]:.4f}, not {right[name]:.4f}")
    assert not wrong, "\n".join(wrong)
    assert checked == TOLERANCES.keys()


def test_predictions_exports_and_minimal_pairs_are_of_float32_whatever_the_run_s_dtype(model):
    run = model.meta["config"] | {"model.dtype": "bfloat16"}
    assert dataclasses.replace(model, meta=model.meta | {"config": run}).network.dtype == "float32"


@pytest.mark.parametrize("kind", ["stuck", "diverging", "dead", "drift", "spike"])
def test_advice_is_the_same_from_the_logs_of_either_dtype(kind):
    losses = test_adviser.falling()
    losses = {"stuck": np.full(200, 5.5), "dead": np.full(200, 3.0)}.get(kind, losses)
    losses[100:] += 2 * (kind == "diverging")
    losses[150] += 2 * (kind == "spike")
    norm = np.where(np.arange(200) < 100, 1, 0) if kind == "dead" else 1.0
    evals = {step: abs(step - 3000) / 10_000 for step in range(1000, 10_001, 1000)} if kind == "drift" else {}
    advice = []
    for apart in (0, TOLERANCES["train/loss"]):
        moved = losses + apart * np.random.default_rng(0).uniform(-1, 1, 200)
        lines, detector = test_adviser.lines(moved.tolist(), norm=norm, evals=evals), Detector(50)
        spikes = [spike.first for line in lines if line["kind"] == "train" and (spike := detector.add(line))]
        advice.append([*((each.kind, each.step) for each in test_adviser.advise(lines)), *spikes])
    assert advice[0] == advice[1]
    assert advice[0] == [7501] if kind == "spike" else kind in dict(advice[0][:1])


@pytest.mark.parametrize(("difference", "ties"), [(0.5, True), (2, False)])
def test_in_the_proof_of_an_export_labels_that_tie_may_change_places(difference, ties):
    ours = {"texts": ["a"], "scores": [{"label": "B-x", "probability": 0.4}]}
    theirs = {"entity": "I-x", "index": 0, "score": 0.4 + difference * verify_export.SCORES}
    assert verify_export._same_labels(lambda text: [theirs], [ours]) == ties


if __name__ == "__main__":
    print(json.dumps(table("modernbert", cases=("float32 on 1", "bfloat16 on 8"))))
