"""verify: what it says of devices that are right, and that a fault is found and named by the right check."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlm import __main__
from mlm.bench import steps
from mlm.commands import verify as command
from mlm.errors import InputError
from mlm.model import fused_attention
from mlm.plan import topology
from mlm.tasks.pretraining import Pretraining
from mlm.training import sharding
from mlm.verify import kernels, numbers, speed
from mlm.verify.compare import Result, compare
from mlm.verify.session import Session
from tests.support.refusals import refuse
from tests.support.tiny import TINY, tiny_config

SMALL = (
    "tokenizer.vocab_size=500",
    "data.lanes=4",
    "model.hidden_dropout=0.1",
    "masking.kind=word",
)


def session(*overrides: str, pretraining=Pretraining) -> Session:
    return Session(tiny_config(*SMALL, *overrides), pretraining)


def verdicts(results) -> dict[str, bool | None]:
    """{the beginning of what was checked: whether it is right}."""
    return {result.what.partition(",")[0]: result.is_right for result in results}


@pytest.mark.standard
def test_the_screen(tmp_path, capsys):
    """On eight devices with the parameters split, one microbatch a step, in the run's dtype."""
    sizes = ("model.dtype=bfloat16", "train.accumulate=2", "mesh.fsdp=2")
    config = [f"--config.{text}" for text in (*TINY, *SMALL, *sizes)]
    arguments = ["verify", "--config=configs/base.py", f"--workdir={tmp_path}", *config]
    assert __main__.main(arguments) == 0
    out = capsys.readouterr().out
    lines = [line.split(maxsplit=2) for line in out.splitlines()]
    assert len(lines) <= 24 and {line[0] for line in lines} == {"verify:"}
    right = [rest for _, status, rest in lines if status == "ok"]
    computed = [
        f"{what} in {d}" for what in ("logits", "gradients") for d in ("float32", "bfloat16")
    ]
    for what in ("rows of a batch", "masks", "dropout's bits", *computed, "kernel xla"):
        assert any(line.startswith(what) for line in right), (what, out)
    (timed,) = (
        rest for _, status, rest in lines if status == "-" and rest.startswith("30 steps of 8 rows")
    )
    assert "tokens/s, MFU unknown" in timed and " ms (" in timed
    assert "memory of a device" in out and "FAIL" not in out


def test_right_kernels_are_right_in_float32():
    run = session("shards.length=128", "model.positions=128", "model.attention_dropout=0.1")
    right = {"kernel xla": True, "kernel fused": True, "kernel cudnn": None}
    assert verdicts(kernels.check_kernels(run)) == right


def test_a_wrong_kernel_is_named(monkeypatch):
    """In the forward pass, and in one of the gradients alone; the others pass."""
    sizes = ("shards.length=128", "model.positions=128", "model.dtype=bfloat16")
    run = session(*sizes, "model.attention_dropout=0.1")
    expected = {"kernel xla": True, "kernel fused": True, "kernel cudnn": None}
    assert verdicts(kernels.check_kernels(run)) == expected
    right = fused_attention.attend

    def wrong_keys(q, k, *rest, **settings):
        return right(q, jnp.roll(k, 1, 1), *rest, **settings)

    def wrong_gradient(q, k, v, *rest, **settings):
        return right(q, k, 1.1 * v - jax.lax.stop_gradient(0.1 * v), *rest, **settings)

    for wrong in (wrong_keys, wrong_gradient):
        monkeypatch.setattr(fused_attention, "attend", wrong)
        results = list(kernels.check_kernels(run))
        assert verdicts(results) == expected | {"kernel fused": False}
    assert "gradient of v" in results[1].measured


class MasksByDevice(Pretraining):
    """Masks that depend on the number of devices."""

    def inputs(self, batch, position):
        epochs = batch["epoch"] + np.uint32(self.mesh.size > 1)
        return super().inputs(batch | {"epoch": epochs}, position)


class LossByDevice(Pretraining):
    """A loss that does."""

    def loss(self, logits_BxKxV, masked):
        return super().loss(logits_BxKxV * (1 + 1e-3 * (self.mesh.size > 1)), masked)


ROWS = {"rows of a batch": True, "masks": False, "dropout's bits": True}
STEP = {"logits in float32": True, "gradients in float32": False}


@pytest.mark.standard
@pytest.mark.parametrize(
    ("wrong", "check", "expected"),
    [(MasksByDevice, numbers.check_rows, ROWS), (LossByDevice, numbers.check_step, STEP)],
)
def test_what_is_wrong_is_named(wrong, check, expected):
    results = list(check(session(pretraining=wrong)))
    assert verdicts(results) == expected
    assert all("host 0" in result.measured for result in results if result.is_right is False)


@pytest.mark.standard
def test_the_dropout_of_transformers_own_class_is_not_taken_for_a_fault():
    """It depends on the mesh."""
    run = session("model.implementation=transformers", "masking.kind=token", "mesh.tensor=4")
    results = list(numbers.check_step(run))
    assert all(result.is_right and "without dropout" in result.what for result in results)
    assert verdicts(kernels.check_kernels(run)) == {"attention": None}


def test_a_wrong_order_of_rows_is_named(monkeypatch):
    right = sharding.put_batch

    def swapped(batch, mesh, rows):
        rolled = {name: np.roll(column, mesh.size > 1, 0) for name, column in batch.items()}
        return right(rolled, mesh, rows)

    monkeypatch.setattr(sharding, "put_batch", swapped)
    assert verdicts(numbers.check_rows(session("masking.kind=token")))["rows of a batch"] is False


@pytest.mark.parametrize(
    ("values", "expected", "limit", "is_right"),
    [
        ([[1, 2]], [[1, 2]], 0.0, True),
        ([[1, 2]], [[1, 3]], 0.0, False),
        ([[1.0, 2.02]], [[1.0, 2.0]], 0.02, True),
        ([[1.0, 2.1]], [[1.0, 2.0]], 0.02, False),
        ([[1.0, float("nan")]], [[1.0, 2.0]], 0.02, False),
        # of two arrays; what should be 0 is noise beside the rest
        ([[1.0], [1e-9]], [[1.0], [0.0]], 1e-5, True),
        ([[1.0], [1e-7]], [[1.0], [0.0]], 1e-5, False),
    ],
)
def test_errors_are_beside_the_largest_value(values, expected, limit, is_right):
    arrays, others = ([jnp.asarray(array) for array in each] for each in (values, expected))
    found = compare("it", arrays, others, limit)
    assert found.is_right is is_right
    assert str(found).startswith(f"verify: {'ok  ' if is_right else 'FAIL'} it: ")


def test_plan_s_estimate_stands_beside_the_time_where_it_knows_the_device(monkeypatch):
    v5e = topology.Topology("v5e:2x4", topology.FAMILIES["v5e"], (2, 4), jax.devices())
    monkeypatch.setattr(topology, "attached", lambda devices: v5e)
    monkeypatch.setattr(speed, "_time", lambda step: [0.2, 0.3, 0.4])
    monkeypatch.setattr(steps, "our_step", lambda task, batch: (None, None))
    monkeypatch.setattr(steps, "memory", lambda program: {"memory_bytes": 3e9})

    def measured(config, job, place):
        assert (place, config.data.global_batch, config.train.accumulate) == (v5e, 8, 1)
        return {"milliseconds": 200.0, "bytes_per_chip": {"needs": 1e9}}

    monkeypatch.setattr(speed.plan, "measure", measured)
    timed, memory, beside = speed.check_speed(session("train.accumulate=2"))
    assert "300.00 ms (200.00 to 400.00), 853 tokens/s" in timed.measured
    assert "3.00 GB" in memory.measured
    expected = "200.00 ms, 1.00 GB a device: took 1.50 times as long"
    assert beside == Result("plan for v5e:2x4", expected)


def test_a_step_that_does_not_fit_fails_and_says_what_to_do(monkeypatch):
    def too_large(task, batch):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(steps, "our_step", too_large)
    (result,) = speed.check_speed(session())
    assert result.is_right is False and "train.accumulate" in result.measured


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--workdir={}", "--config.mesh.fsdp=3"], ["config.mesh", "8 devices"]),
        (["--workdir={}", "--config.classify.train=csv:mine.csv"], ["config.classify.train"]),
    ],
)
def test_bad_input(flags, words, tmp_path, capsys):
    config = [f"--config.{text}" for text in TINY]
    flags = [flag.format(tmp_path) for flag in flags]
    refuse(["verify", "--config=configs/base.py", *config, *flags], 2, *words, capsys=capsys)


def test_the_host_s_cpu_must_be_there(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    with pytest.raises(InputError, match="JAX_PLATFORMS=tpu,cpu"):
        command.main(None, [])
