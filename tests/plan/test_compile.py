"""plan: programs for TPUs that aren't there, compiled on this machine; its numbers against those counted by hand."""

import re
import time
import types
from unittest import mock

import jax
import pytest

from mlm.doctor import checks
from mlm.errors import InputError
from mlm.plan import compile as compiling
from mlm.plan import plan, tables, topology
from mlm.training import sharding
from tests.plan.planned import FEED, LENGTH, PARAMETERS, ROWS, SIZES, VOCABULARY, H, planned, shown_by
from tests.support.doctored import case_of
from tests.support.tiny import tiny_config

TAIL = 2 * (H * H + 2 * H * FEED) + 2 * H * H + 2 * H * VOCABULARY  # of a predicted token: behind the last attention
USEFUL = 3 * (2 * 3 * H * H + 4 * LENGTH * H + 0.2 * TAIL)  # of a token of one layer


@pytest.fixture(scope="module")
def found():
    return planned(compare=True, price=2.0)


@pytest.mark.standard
def test_bytes_are_those_counted_by_hand(found):
    """Parameters and two moments in float32 on every device, 9 counters at most, and the device's rows."""
    row = found["plan"]
    assert row["fits"] and (row["chips"], row["devices"], row["rows_per_chip"]) == (4, 8, 4)
    device = 3 * 4 * PARAMETERS + ROWS // 8 * (2 * 4 * LENGTH + 8)
    chip = 2 * device
    assert chip < row["bytes_per_chip"]["arguments"] < 1.03 * chip, "the TPU pads what does not fill a tile"
    assert 0 < row["bytes_per_chip"]["outputs"] < 0.01 * chip, "the state takes the place of the old one"
    size = row["bytes_per_chip"]
    assert size["arguments"] + size["temporaries"] + size["outputs"] <= size["needs"] < size["capacity"]
    mesh = sharding.mesh_of(tiny_config(*SIZES).mesh, topology.find("v3:2x2").devices)
    run = compiling.Pretraining.without_data(tiny_config(*SIZES), mesh)
    assert 3 * 4 * PARAMETERS < compiling.state_bytes(run) <= 3 * 4 * PARAMETERS + 9 * 4


@pytest.mark.standard
def test_speed_follows_from_the_cycles(found):
    """v3: 123 TFLOP/s a chip at 0.938 GHz; 12 steps; 2 dollars for each of 4 chips and an hour."""
    row = found["plan"]
    cycles = row["cycles"]
    assert sum(cycles.values()) == pytest.approx(2 * cycles["all"]) and cycles["compiler"] > 0.5 * cycles["all"]
    seconds = cycles["all"] / (61.5e12 / 65_536)
    assert row["milliseconds"] == pytest.approx(1e3 * seconds) == pytest.approx(sum(row["parts"].values()))
    assert row["tokens_per_second"] == pytest.approx(ROWS * LENGTH / seconds)
    assert row["mfu"] == pytest.approx(USEFUL * ROWS * LENGTH / seconds / (4 * 123e12))
    assert row["hours"] == pytest.approx(12 * seconds / 3600) and row["dollars"] == pytest.approx(row["hours"] * 8)
    assert row["tokens"] == 12 * ROWS * LENGTH
    assert row["uncosted"] == {} and row["instructions"]["compiler"] > 50


@pytest.mark.standard
def test_operations_and_collectives_name_what_they_are(found):
    row = found["plan"]
    shares = [one["share"] for one in row["operations"]]
    assert shares == sorted(shares, reverse=True) and len(shares) == 20 and 0.4 < sum(shares) <= 1
    assert {"forward", "backward", "update"} <= {one["phase"] for one in row["operations"]}
    assert any(one["module"].startswith("roberta/encoder/layer/*/") for one in row["operations"])
    assert any(one["source"].startswith("mlm/training/train.py:") for one in row["operations"])
    gradients = row["collectives"]["all-reduce"]
    assert gradients["count"] >= 1 and 2 * PARAMETERS < gradients["bytes"] < 4.1 * PARAMETERS, "bfloat16 or float32"


@pytest.mark.standard
def test_baseline_beside_it(found):
    other, ratio = found["baseline"], found["ratio"]
    assert other["step"] == "baseline" and other["fits"] and other["collectives"]["all-reduce"]["count"] >= 1
    assert ratio["cycles"] == found["plan"]["cycles"]["all"] / other["cycles"]["all"]
    ours, theirs = (found[key]["bytes_per_chip"] for key in ("plan", "baseline"))
    assert ratio["temporaries"] == ours["temporaries"] / theirs["temporaries"]
    assert ours["arguments"] == pytest.approx(theirs["arguments"], rel=0.02)


@pytest.mark.standard
def test_tables_and_doctor_show_it(found, manifest, tmp_path, monkeypatch):
    text, row = shown_by(tables.plan, found), found["plan"]
    assert f"{row['milliseconds']:.2f} ms a step, {row['tokens_per_second']:,.0f} tokens/s" in text, text
    assert f"{found['ratio']['cycles']:.2f} of the baseline's cycles" in text, text
    lines = [line.split() for line in text.splitlines()]
    counts, top = row["collectives"]["all-reduce"], row["operations"][0]
    assert ["all-reduce", str(counts["count"]), str(counts["overlapping"])] in [line[:3] for line in lines]
    assert [f"{top['share']:.1%}", str(top["count"]), top["phase"], top["module"]] in [line[:4] for line in lines]
    for kernel in ({"uncosted": {"kernel mine": 3}}, {"short": {**row, "uncosted": {"kernel mine": 3}}}):
        assert shown_by(tables.plan, found | {"plan": row | kernel}).count("kernel mine (3)") == 1
        assert "not costed" in shown_by(
            tables.sweep, found | {"sweep": [{"cell": {"mesh": "8x1x1"}, "plan": row | kernel}]}
        )
    monkeypatch.setattr(plan, "measure", lambda *arguments: (None, row))
    (finding,) = checks.step(case_of(manifest, tmp_path, topology="v3:2x2"))
    assert finding.level == "ok" and finding.where == "v3:2x2" and f"{row['milliseconds']:.1f} ms" in finding.what


@pytest.mark.slow
def test_short_rows_of_the_first_updates_are_counted():
    """Three steps in four on rows of 8 tokens: as many tokens, less attention."""
    found = planned("data.short_length=8", "data.short_share=0.75", name="v5e:1x1", price=2.0)
    row, short = found["plan"], found["plan"]["short"]
    assert "hours" not in short, "those are the run's, of both lengths"
    assert (row["length"], short["length"], short["rows_per_chip"]) == (LENGTH, 8, 4 * ROWS)
    assert short["milliseconds"] * short["tokens_per_second"] == pytest.approx(1e3 * ROWS * LENGTH)
    useful = USEFUL - 3 * 4 * (LENGTH - 8) * H
    assert short["mfu"] == pytest.approx(useful * short["tokens_per_second"] / 197e12)
    seconds = (0.75 * short["milliseconds"] + 0.25 * row["milliseconds"]) / 1e3
    assert row["hours"] == pytest.approx(12 * seconds / 3600) and row["dollars"] == pytest.approx(2 * row["hours"])
    assert f"{short['milliseconds']:.2f} ms a step" in shown_by(tables.plan, found)
    found["plan"] = row | {"short": short | {"fits": False}, "hours": None, "dollars": None}
    assert "do not fit: the run's hours are unknown" in shown_by(tables.plan, found)


@pytest.mark.slow
def test_several_slices():
    """Eight chips, two of their hosts, a batch over both; the network between them is named."""
    found = planned(name="v5e:2x2", price=2.0, slices=2)
    row, text = found["plan"], shown_by(tables.plan, found)
    assert (row["chips"], row["devices"], row["rows_per_chip"]) == (8, 8, 2)
    assert row["hosts"] == {"count": 2, "rows_per_host": 8, "lanes_per_host": 4, "fed": True}
    assert row["dollars"] == pytest.approx(2 * 8 * row["hours"])
    assert "2 slices of v5e:2x2: 8 chips, 8 devices, data 8 x fsdp 1 x tensor 1" in text and "DCN" in text


def test_a_refusal_is_read():
    message = (
        "RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (114.37G) exceeds available HBM (15.75G)"
    )
    assert compiling.temporary_bytes(message) == 114.37 * 2**30
    assert compiling.temporary_bytes("RESOURCE_EXHAUSTED") is None


def test_a_kernel_too_large_for_a_core_is_not_called_too_large_a_batch():
    message = "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 27.50M of 16.00M vmem."
    with pytest.raises(InputError, match=r"config\.model\.attention: .* 27\.50M .*TPU v3 has 16\.00M"):
        compiling.refuse_kernel(message, "TPU v3")
    compiling.refuse_kernel("RESOURCE_EXHAUSTED: Ran out of memory on HBM", "TPU v3")


def test_cudnn_is_refused_for_gpus_that_are_not_attached_and_planned_as_xla_for_those_that_are(monkeypatch):
    """The latter by verify, which measures the run as it is."""
    family, gpu, tasks = topology.FAMILIES["h200"], types.SimpleNamespace(), mock.Mock(side_effect=StopIteration)
    place, config = topology.Topology("h200:1", family, (1,), [gpu]), tiny_config("model.attention=cudnn")
    with pytest.raises(InputError, match=r"cudnn: .* plan with xla"):
        compiling.compile_step(config, None, place, tasks)
    assert not tasks.called
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    monkeypatch.setattr(sharding, "mesh_of", lambda *_: None)
    with pytest.raises(StopIteration):
        compiling.compile_step(config, None, place, tasks)
    assert tasks.call_args[0][0].model.attention == "xla"


def test_how_long_the_compiler_has_taken_is_printed(monkeypatch, capsys):
    """Again and again while it works, and at the end, of a step that does not fit, too."""

    class Slow:
        def compile(self, options):
            time.sleep(0.5)
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(compiling, "PROGRESS", 0.1)
    monkeypatch.setattr(compiling, "_lower", lambda task, kind: Slow())
    job = plan.make_job(tiny_config(), None)
    assert not compiling.compile_step(tiny_config(), job.info, topology.find("v5e:2x4"), job.make_task).fits
    first, *lines, last = capsys.readouterr().err.splitlines()
    assert re.fullmatch("compiling the mlm step, .* for v5e:2x4", first)
    assert len(lines) >= 2 and all(re.fullmatch(re.escape(first) + r": \d+ s so far", line) for line in lines)
    assert re.fullmatch(re.escape(first) + r": \d+ s in all", last)
