"""verify: what it says of devices that are right, and that a fault is found and named by the right check."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlm import testing
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
from tests.support import processes
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
def test_all_checks(tmp_path, shards):
    """On eight devices with shards: numbers pass, and the file has what is printed; what a killed verify left goes.

    In a process of its own: jax can't profile in one that loaded libtpu to compile for TPUs that are not attached.
    """
    config = [f"--config.{text}" for text in (*TINY, *SMALL, "masking.kind=token", f"shards.dir={shards.folder}")]
    config += ["--config.train.accumulate=2", "--config.data.batch_stages=((8, 4),)"]
    workdir = tmp_path / "run"
    (workdir / ".verify" / "1").mkdir(parents=True)
    command = ["verify", "--config=configs/base.py", f"--workdir={workdir}", "--quick"]
    out, _ = processes.run([*command, *config], devices=8)
    content = json.loads((workdir / "verify.json").read_text())
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
    task = Pretraining.without_data(tiny_config(*SMALL))
    assert speed["useful_flops"] == pytest.approx(8 * 32 * task.flops_per_token(32), rel=1e-3)
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(task.abstract_state))
    assert checks["storage"]["results"][1]["values"]["bytes"] == state
    waiting = checks["input"]["results"][0]["values"]
    assert waiting["rows_per_second"] > 0 and waiting["needed_rows_per_second"] == pytest.approx(8 / speed["median"])
    parts = checks["plan"]["results"][1]["values"]
    assert min(parts[name] for name in ("attention", "feed-forward", "head", "optimizer", "collectives")) > 0, parts
    tried = [line["what"] for line in checks["verdict"]["results"][1:-1]]
    assert set(tried) <= {"--config.train.accumulate=2", "--config.train.accumulate=1"}


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
def test_the_dropout_of_transformers_own_class_is_not_taken_for_a_fault(tmp_path):
    """It depends on the mesh."""
    run = session(tmp_path, "model.implementation=transformers", "masking.kind=token", "mesh.tensor=4")
    assert run.run({"step": numbers.check_step}) == []
    assert all(what.endswith(", without dropout") for what in statuses(run, "step"))


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


@pytest.mark.parametrize("accumulate", [False, True])
def test_rows_that_do_not_fit_are_made_fewer(accumulate, tmp_path, monkeypatch):
    """By what the compiler says of the memory, or half of them; the batch stays what it is."""
    tried = []

    def our_step(task, batch, options):
        tried.append((len(batch["record_id"]), task.config.train.accumulate))
        if len(tried) == 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        if len(tried) == 3:
            raise RuntimeError("it fits")
        return None, None

    monkeypatch.setattr(steps, "our_step", our_step)
    monkeypatch.setattr(steps, "memory", lambda program: {"memory_bytes": 3.0})
    monkeypatch.setattr(times, "memory_limit", lambda: 1.0)
    run = session(tmp_path, "data.global_batch=128", "train.accumulate=2")
    with pytest.raises(RuntimeError, match="it fits"):
        times.measure(run, {}, 64, accumulate=accumulate)
    assert tried == ([(128, 2), (128, 8), (128, 16)] if accumulate else [(64, 1), (16, 1), (8, 1)])


def test_fewer_rows_are_those_of_a_microbatch(tmp_path, monkeypatch):
    """Of 40 on eight devices 16 would be about the half, but they don't divide the batch of 120."""
    tried = []
    monkeypatch.setattr(steps, "our_step", lambda task, batch, options: tried.append(len(batch["record_id"])) or (0, 0))
    monkeypatch.setattr(steps, "memory", lambda program: {"memory_bytes": 1.5})
    monkeypatch.setattr(times, "memory_limit", lambda: 1.0)
    with pytest.raises(MemoryError):
        times.measure(session(tmp_path, "data.global_batch=120", "train.accumulate=3"), {}, 40)
    assert tried == [40, 8]


def test_settings_are_timed_with_the_run_s_accumulation_and_the_fastest_is_named(tmp_path, monkeypatch):
    """16 rows at once, 8 times: timed as that, as twice and half the rows, and with the attention that is fastest."""
    run, timed = session(tmp_path, "data.global_batch=128", "train.accumulate=8"), {16: 100.0, 32: 150.0, 8: 90.0}
    run.numbers |= {"attention": "xla", "fastest": "fused", "network": 0.8}
    run.numbers["speed"] = {"rows": 16, "median": 1.0, "seconds": [1.0, 1.1], "tokens_per_second": 500.0}
    run.numbers["speed"] |= {"useful_flops": 1.0, "accessed_bytes": 1.0}

    def measure(session, changes, rows, *, accumulate):
        assert accumulate
        return {"rows": rows, "tokens_per_second": timed[rows] + 1000 * ("model.remat" in changes)}

    monkeypatch.setattr(times, "measure", measure)
    limit, *trials, chosen = times.check_verdict(run)
    assert limit.values["network"] == pytest.approx(0.1), "of a microbatch"
    assert [(trial.what, trial.values["times"]) for trial in trials] == [
        ("--config.train.accumulate=8", 1.0),
        ("--config.model.attention=fused --config.train.accumulate=8", 1.0),
        ("--config.train.accumulate=4", 1.5),
        ("--config.train.accumulate=16", 0.9),
    ]
    assert chosen.measured == "--config.train.accumulate=4"


def test_a_setting_that_does_not_fit_is_no_fault_of_the_run(tmp_path, monkeypatch):
    """Without remat not even one row a device fits, where the run's own step does."""
    run = session(tmp_path, "data.global_batch=8", "model.remat=true")
    run.numbers["speed"] = {"rows": 8, "median": 1.0, "seconds": [1.0, 1.1], "tokens_per_second": 500.0}
    run.numbers["speed"] |= {"useful_flops": 1.0, "accessed_bytes": 1.0}
    monkeypatch.setattr(times, "memory_limit", lambda: 1.0)
    monkeypatch.setattr(steps, "our_step", lambda task, batch, options: (None, None))
    monkeypatch.setattr(steps, "memory", lambda program: {"memory_bytes": 3.0})
    assert run.run({"verdict": times.check_verdict}) == []
    _, trial, chosen = run.checks["verdict"]["results"]
    assert "model.remat=false" in trial["what"] and "does not fit" in trial["measured"]
    assert chosen["measured"] == "--config.train.accumulate=1"


def test_what_plan_reads_is_what_is_written(tmp_path, monkeypatch):
    """The time beside plan's estimate for devices that it has, not scaled by an earlier one."""
    run, devices = session(tmp_path), jax.devices()
    v5e = topology.Topology("v5e:2x4", topology.FAMILIES["v5e"], (2, 4), devices)
    run.numbers["speed"] = {"rows": 16, "median": 0.3, "milliseconds_by_part": {"attention": 250.0}}
    run.numbers["attention"] = "cudnn"  # as on a GPU, whose plan has xla's
    monkeypatch.setattr(topology, "attached", lambda devices: v5e)

    def measured(config, job, place):
        assert (job.calibration, place, config.data.global_batch) == (calibration.NONE, v5e, 16)
        return None, {"milliseconds": 200.0, "parts": {"attention": 150.0}, "bytes_per_chip": {"needs": 1e9}}

    monkeypatch.setattr(times.plan, "measure", measured)
    assert run.run({"plan": times.check_plan}) == []
    beside, by_part = run.checks["plan"]["results"]
    assert beside["expected"].endswith("by plan for v5e:2x4, with attention by xla")
    assert (by_part["measured"], by_part["expected"]) == ("attention 250", "attention 150, by plan")
    read = calibration.read(str(tmp_path / "verify.json"))
    assert read.factor == pytest.approx(1.5) and read.kind == devices[0].device_kind
    assert read.difference(run.config) == ""


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
