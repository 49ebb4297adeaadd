"""verify: what it says of devices that are right, and that a fault is found and named by the right check."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlm import testing
from mlm.__main__ import main
from mlm.bench import steps
from mlm.commands import verify as command
from mlm.errors import InputError
from mlm.model import fused_attention
from mlm.plan import calibration, topology
from mlm.tasks.pretraining import Pretraining
from mlm.training import sharding
from mlm.verify import kernels, numbers, times
from mlm.verify.session import Result, Session
from mlm.workdir import Workdir
from tests.support.refusals import refuse
from tests.support.tiny import TINY, tiny_config

SMALL = ("tokenizer.vocab_size=500", "data.lanes=4", "model.hidden_dropout=0.1", "masking.kind=word")


def session(folder, *overrides: str, pretraining=Pretraining, manifest=None) -> Session:
    return Session(tiny_config(*SMALL, *overrides), Workdir(str(folder)), manifest, pretraining, quick=True)


def statuses(run: Session, name: str) -> dict[str, str]:
    """{what: status} of a check."""
    return {line["what"]: line["status"] for line in run.checks[name]["results"]}


@pytest.fixture
def shards(tmp_path):
    manifest = testing.write_shards(tmp_path / "shards", vocab_size=500, length=32)
    manifest = dataclasses.replace(manifest, tokenizer_fingerprint=64 * "0")
    (tmp_path / "shards" / "manifest.json").write_text(manifest.to_json())
    return manifest


@pytest.mark.standard
def test_all_checks(tmp_path, shards, capsys):
    """On eight devices with shards: numbers pass, and the file has what is printed; what a killed verify left goes."""
    config = [f"--config.{text}" for text in (*TINY, *SMALL, "masking.kind=token", f"shards.dir={shards.folder}")]
    config += ["--config.train.accumulate=2", "--config.data.batch_stages=((8, 4),)", "--config.model.remat=true"]
    workdir = tmp_path / "run"
    (workdir / ".verify" / "1").mkdir(parents=True)
    assert main(["verify", "--config=configs/base.py", f"--workdir={workdir}", "--quick", *config]) == 0
    out, content = capsys.readouterr().out, json.loads((workdir / "verify.json").read_text())
    assert not (workdir / ".verify").exists()
    checks = content["checks"]
    assert list(checks) == ["kernels", "step", "rows", "speed", "plan", "input", "storage", "verdict"]
    for name, check in checks.items():
        assert check["status"] == ("no reference" if name in ("speed", "plan", "input", "verdict") else "pass"), name
        for line in check["results"]:
            assert any(
                all(text in shown for text in (name, line["what"], line["status"])) for shown in out.splitlines()
            )
    assert content["devices"] == 8 and content["config"]["train.accumulate"] == 2
    speed = checks["speed"]["results"][0]["values"]
    assert (speed["rows"], len(speed["seconds"])) == (8, times.STEPS_QUICK) and "8 rows of 32 tokens" in out
    assert speed["tokens_per_second"] == pytest.approx(8 * 32 / np.median(speed["seconds"]))
    task = Pretraining.without_data(tiny_config(*SMALL, "model.remat=true"))
    assert speed["useful_flops"] == pytest.approx(8 * 32 * task.flops_per_token(32), rel=1e-3)
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(task.abstract_state))
    assert checks["storage"]["results"][1]["values"]["bytes"] == state
    waiting = checks["input"]["results"][0]["values"]
    assert waiting["rows_per_second"] > 0 and waiting["needed_rows_per_second"] == pytest.approx(8 / speed["median"])
    tried = [line["what"] for line in checks["verdict"]["results"][1:-1]]
    assert set(tried) <= {
        "--config.model.remat=false --config.model.remat_feed_forward=0 --config.train.accumulate=2",
        "--config.train.accumulate=1",
    }


def test_a_wrong_kernel_is_named(tmp_path, monkeypatch):
    """In the forward pass, and in one of the gradients alone; the others pass."""
    run = session(tmp_path, "shards.length=128", "model.positions=128", "model.attention_dropout=0.1")
    assert run.run({"kernels": kernels.check}) == []
    right = fused_attention.attend

    def wrong_keys(q, k, *rest, **settings):
        return right(q, jnp.roll(k, 1, 1), *rest, **settings)

    def wrong_gradient(q, k, v, *rest, **settings):
        return right(q, k, 1.1 * v - jax.lax.stop_gradient(0.1 * v), *rest, **settings)

    for wrong in (wrong_keys, wrong_gradient):
        monkeypatch.setattr(fused_attention, "attend", wrong)
        assert run.run({"kernels": kernels.check}) == ["kernels"]
        assert statuses(run, "kernels")["fused"] == "fail" and statuses(run, "kernels")["xla"] == "pass"
    assert "gradient of values" in run.checks["kernels"]["results"][1]["measured"]


class MasksByDevice(Pretraining):
    """Masks that depend on the number of devices."""

    def inputs(self, batch, position):
        return super().inputs(batch | {"epoch": batch["epoch"] + np.uint32(self.mesh.size > 1)}, position)


@pytest.mark.standard
def test_a_wrong_mask_is_named(tmp_path):
    run = session(tmp_path, pretraining=MasksByDevice)
    assert run.run({"rows": numbers.check_rows, "step": numbers.check_step}) == ["rows", "step"]
    wrong = [what for name in ("rows", "step") for what, status in statuses(run, name).items() if status == "fail"]
    assert [what.partition(",")[0] for what in wrong] == [
        "masks",
        "float32 here and on the host's CPU",
        "float32 on all 8 devices and on one",
    ]
    assert "host 0" in run.checks["rows"]["results"][1]["measured"]


@pytest.mark.standard
def test_a_wrong_order_of_rows_is_named(tmp_path, shards, monkeypatch):
    run, checks = session(tmp_path, "masking.kind=token", manifest=shards), {"rows": numbers.check_rows}
    assert run.run(checks) == []
    right, read = sharding.put_batch, numbers.train_batches

    def swapped(batch, mesh, rows):
        return right({name: np.roll(column, mesh.size > 1, 0) for name, column in batch.items()}, mesh, rows)

    def late(*args, start):
        return read(*args, start=start + 1)

    with monkeypatch.context() as patch:  # on the devices
        patch.setattr(sharding, "put_batch", swapped)
        assert run.run(checks) == ["rows"]
        assert statuses(run, "rows")["rows of a batch"] == "fail"
    monkeypatch.setattr(numbers, "train_batches", late)  # from the shards
    assert run.run(checks) == ["rows"]
    assert [what for what, status in statuses(run, "rows").items() if status == "fail"] == [
        "order of the shards' rows, 2 batches"
    ]


def test_a_check_that_raises_fails_and_the_others_go_on(tmp_path, capsys):
    def breaks(run):
        yield Result("first", "1", "1", True)
        raise ValueError("no such thing\nmore")

    run = session(tmp_path)
    assert run.run({"one": breaks, "two": lambda run: iter([Result("b", "nan", "-", None, {"x": float("nan")})])}) == [
        "one"
    ]
    content = json.loads((tmp_path / "verify.json").read_text())["checks"]
    assert [line["measured"] for line in content["one"]["results"]] == ["1", "ValueError: no such thing"]
    assert content["two"]["results"][0]["values"] == {"x": None}
    assert "verify: one: fail" in (out := capsys.readouterr().out) and "verify: two: no reference" in out


def test_rows_that_do_not_fit_are_made_fewer(tmp_path, monkeypatch):
    """By what the compiler says of the memory, or half of them; the batch stays what it is."""
    tried = []

    def our_step(task, batch):
        tried.append(len(batch["record_id"]))
        if tried[-1] == 16:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        if tried[-1] == 8:
            raise RuntimeError("it fits")
        return None, None

    monkeypatch.setattr(steps, "our_step", our_step)
    monkeypatch.setattr(steps, "memory", lambda program: {"memory_bytes": 3.0})
    monkeypatch.setattr(times, "memory_limit", lambda: 1.0)
    run = session(tmp_path, "data.global_batch=128", "train.accumulate=2")
    with pytest.raises(RuntimeError, match="it fits"):
        times.measure(run, {})
    assert tried == [64, 16, 8]
    assert times._flags(run, {"data.global_batch": 64, "model.remat": True}, 8) == (
        "--config.model.remat=true --config.train.accumulate=16"
    )


def test_what_plan_reads_is_what_is_written(tmp_path, monkeypatch):
    """The time beside plan's estimate for devices that it has, not scaled by an earlier one."""
    run, devices = session(tmp_path), jax.devices()
    v5e = topology.Topology("v5e:2x4", topology.FAMILIES["v5e"], (2, 4), devices)
    run.numbers["speed"] = {"rows": 16, "median": 0.3}
    monkeypatch.setattr(topology, "attached", lambda devices: v5e)

    def measured(config, job, place):
        assert (job.calibration, place, config.data.global_batch) == (calibration.NONE, v5e, 16)
        return None, {"milliseconds": 200.0, "bytes_per_chip": {"needs": 1e9}}

    monkeypatch.setattr(times.plan, "measure", measured)
    assert run.run({"plan": times.check_plan}) == []
    read = calibration.read(str(tmp_path / "verify.json"), run.config)
    assert read.factor == pytest.approx(1.5) and read.kind == devices[0].device_kind


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], ["--workdir"]),
        (["--workdir=requirements.txt/below"], ["requirements.txt/below", "can't be written"]),
        (["--workdir={}", "--config.mesh.data=3"], ["config.mesh", "8 devices"]),
        (["--workdir={}", "--config.shards.dir={}/none"], ["no shards"]),
    ],
)
def test_bad_input(flags, words, tmp_path, capsys):
    config = [f"--config.{text}" for text in TINY]
    flags = [flag.format(tmp_path) for flag in flags]
    refuse(["verify", "--config=configs/base.py", *config, *flags], 2, *words, capsys=capsys)


def test_the_host_s_cpu_must_be_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    refuse(["verify", "--config=configs/base.py", f"--workdir={tmp_path}"], 2, "JAX_PLATFORMS=cuda,cpu", capsys=capsys)
    command.check_platform("cpu,tpu")
    with pytest.raises(InputError, match="JAX_PLATFORMS=cuda,cpu: jax finds no cuda, but a cpu"):
        command.check_platform("cuda,cpu")
