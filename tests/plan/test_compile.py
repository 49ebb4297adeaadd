"""plan: programs for TPUs that aren't there, compiled on this machine; its numbers against those counted by hand."""

import jax
import pytest

from mlm.plan import compile as compiling
from mlm.plan import plan, tables, topology
from mlm.training import sharding
from tests.plan.planned import (
    FEED,
    LENGTH,
    PARAMETERS,
    ROWS,
    SIZES,
    VOCABULARY,
    H,
    planned,
    shown_by,
)
from tests.support.tiny import tiny_config

# of a predicted token: behind the last attention
TAIL = 2 * (H * H + 2 * H * FEED) + 2 * H * H + 2 * H * VOCABULARY
USEFUL = 3 * (2 * 3 * H * H + 4 * LENGTH * H + 0.2 * TAIL)  # of a token of one layer


@pytest.mark.standard
def test_a_step_beside_the_baseline():
    """Compiled once, for all that is said of it."""
    found = planned(compare=True, price=2.0)
    assert_bytes_are_those_counted_by_hand(found)
    assert_speed_follows_from_the_cycles(found)
    assert_baseline_is_beside_it(found)
    assert_tables_show_it(found)


def assert_bytes_are_those_counted_by_hand(found):
    """Parameters and two moments in float32 on every device, 9 counters at most, and the device's rows."""
    row = found["plan"]
    assert row["fits"] and (row["chips"], row["devices"], row["rows_per_chip"]) == (4, 8, 4)
    chip = 2 * (3 * 4 * PARAMETERS + ROWS // 8 * (2 * 4 * LENGTH + 8))
    size = row["bytes_per_chip"]
    assert chip < size["arguments"] < 1.03 * chip, "the TPU pads what does not fill a tile"
    assert 0 < size["outputs"] < 0.01 * chip, "the state takes the place of the old one"
    assert (
        size["arguments"] + size["temporaries"] + size["outputs"]
        <= size["needs"]
        < size["capacity"]
    )
    mesh = sharding.mesh_of(tiny_config(*SIZES).mesh, topology.find("v3:2x2").devices)
    run = compiling.Pretraining.without_data(tiny_config(*SIZES), mesh)
    assert 3 * 4 * PARAMETERS < compiling.state_bytes(run) <= 3 * 4 * PARAMETERS + 9 * 4


def assert_speed_follows_from_the_cycles(found):
    """v3: 123 TFLOP/s a chip at 0.938 GHz; 12 steps; 2 dollars for each of 4 chips and an hour."""
    row = found["plan"]
    cycles = row["cycles"]
    assert sum(cycles.values()) == pytest.approx(2 * cycles["all"])
    assert cycles["compiler"] > 0.5 * cycles["all"] and row["uncosted"] == {}
    seconds = cycles["all"] / (61.5e12 / 65_536)
    tokens = ROWS * LENGTH
    expected = {
        "milliseconds": 1e3 * seconds,
        "tokens_per_second": tokens / seconds,
        "mfu": USEFUL * tokens / seconds / (4 * 123e12),
        "hours": 12 * seconds / 3600,
        "dollars": 8 * 12 * seconds / 3600,
        "tokens": 12 * tokens,
    }
    assert {key: row[key] for key in expected} == pytest.approx(expected)
    gradients = row["collectives"]["all-reduce"]
    # bfloat16 or float32
    assert gradients["count"] >= 1 and 2 * PARAMETERS < gradients["bytes"] < 4.1 * PARAMETERS


def assert_baseline_is_beside_it(found):
    ours = found["plan"]["bytes_per_chip"]
    other = found["baseline"]
    theirs = other["bytes_per_chip"]
    cycles = [found[kind]["cycles"]["all"] for kind in ("plan", "baseline")]
    assert other["step"] == "baseline" and other["fits"]
    assert other["collectives"]["all-reduce"]["count"] >= 1
    temporaries = ours["temporaries"] / theirs["temporaries"]
    assert found["ratio"] == {"cycles": cycles[0] / cycles[1], "temporaries": temporaries}
    assert ours["arguments"] == pytest.approx(theirs["arguments"], rel=0.02)


def assert_tables_show_it(found):
    text = shown_by(tables.plan, found)
    row = found["plan"]
    speed = f"{row['milliseconds']:.2f} ms a step, {row['tokens_per_second']:,.0f} tokens/s"
    ratio = f"{found['ratio']['cycles']:.2f} of the baseline's cycles"
    for words in (speed, f"MFU {row['mfu']:.1%}", tables.memory(row), ratio):
        assert words in text, text
    counts = row["collectives"]["all-reduce"]
    lines = [line.split()[:3] for line in text.splitlines()]
    assert ["all-reduce", str(counts["count"]), str(counts["overlapping"])] in lines
    uncosted = {"uncosted": {"kernel mine": 3}}
    for kernel in (uncosted, {"short": row | uncosted}):
        assert "kernel mine (3)" in shown_by(tables.plan, {"plan": row | kernel})
        swept = {"sweep": [{"cell": {"topology": "v3-8"}, "plan": row | kernel}]}
        assert "not costed" in shown_by(tables.sweep, swept)


@pytest.mark.slow
def test_short_rows_of_the_first_updates_on_several_slices():
    """Eleven steps of twelve on rows of 8 tokens: as many tokens, less attention. Eight chips, two of their hosts."""
    found = planned("data.short_length=8", name="v5e:2x2", price=2.0, slices=2)
    row = found["plan"]
    short = row["short"]
    assert (row["chips"], row["devices"], row["rows_per_chip"]) == (8, 8, 2)
    assert row["hosts"] == {"count": 2, "rows_per_host": 8, "lanes_per_host": 4, "fed": True}
    assert (row["length"], short["length"], short["rows_per_chip"]) == (LENGTH, 8, 8)
    useful = USEFUL - 3 * 4 * (LENGTH - 8) * H
    assert short["mfu"] == pytest.approx(useful * short["tokens_per_second"] / (8 * 197e12))
    seconds = (11 * short["milliseconds"] + row["milliseconds"]) / 1e3
    assert row["hours"] == pytest.approx(seconds / 3600)
    text = shown_by(tables.plan, found)
    for words in (f"{short['milliseconds']:.2f} ms a step", "2 slices of v5e:2x2: 8 chips", "DCN"):
        assert words in text, text


@pytest.mark.slow
@pytest.mark.parametrize(("name", "family"), [("v3:2x2", "modernbert"), ("v5e:2x4", "roberta")])
def test_long_rows_of_isolated_documents_compile(name, family):
    """By our kernel, in whole rows and in windows, and with dropout."""
    rate = 0.1 if family == "roberta" else 0.0
    model = (f"model.family={family}", "model.layers=2", "model.attention=fused")
    dropout = (f"model.attention_dropout={rate}", f"model.hidden_dropout={rate}")
    rows = ("shards.length=512", "model.positions=512", "data.isolate_documents=true")
    found = planned(*model, *dropout, *rows, "data.global_batch=64", name=name)
    assert found["plan"]["fits"] and found["plan"]["cycles"]["kernels"] > 0


@pytest.mark.parametrize(
    ("message", "temporaries"),
    [
        ("RESOURCE_EXHAUSTED: memory required for HLO temporaries (114.37G)", 114.37 * 2**30),
        ("RESOURCE_EXHAUSTED", None),
    ],
)
def test_a_refusal_is_read(message, temporaries, monkeypatch):
    """What is too large for a core's own memory is a kernel, and no batch that does not fit."""

    class Refused:
        def compile(self, options):
            raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(compiling, "_lower", lambda task, kind: Refused())
    place = topology.find("v5e:2x4")
    size = plan.measure(tiny_config(*SIZES), plan.Job(), place)["bytes_per_chip"]
    assert size["needs"] == (temporaries and size["arguments"] + temporaries)
    message += " in memory space vmem"
    with pytest.raises(jax.errors.JaxRuntimeError, match="vmem"):
        plan.measure(tiny_config(*SIZES), plan.Job(), place)
