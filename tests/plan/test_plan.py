"""plan: programs for TPUs that aren't there, compiled on this machine; its numbers against those counted by hand."""

import dataclasses
import io
import json
import subprocess
import sys

import pytest

from mlm.__main__ import main
from mlm.data.stages import HOURS_STEPS, check_branch
from mlm.errors import InputError
from mlm.plan import compile as compiling
from mlm.plan import plan, tables, topology
from mlm.text import show
from mlm.training import sharding
from tests import ROOT
from tests.plan.planned import FEED, LENGTH, ROWS, SIZES, VOCABULARY, H, planned
from tests.support.processes import environment
from tests.support.tiny import tiny_config

SIZES += ("model.dtype=bfloat16", "model.positions=126")  # 128 with the two that RoBERTa never uses
LAYER = 4 * (H * H + H) + 2 * H + (H * FEED + FEED) + (FEED * H + H) + 2 * H
PARAMETERS = (VOCABULARY + 128 + 1) * H + 2 * H + LAYER + (H * H + H) + 2 * H + VOCABULARY
TAIL = 2 * (H * H + 2 * H * FEED) + 2 * H * H + 2 * H * VOCABULARY  # of a predicted token: behind the last attention
SPEED = {"fits": True, "chips": 4, "tokens_per_second": 1e6}
USEFUL = 3 * (2 * 3 * H * H + 4 * LENGTH * H + 0.2 * TAIL)  # of a token of one layer


def shown_by(table, found) -> str:
    out = io.StringIO()
    show(*table(found), out=out)
    return out.getvalue()


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
    run = compiling.Pretraining.without_data(tiny_config(*SIZES), _mesh())
    assert 3 * 4 * PARAMETERS < compiling.state_bytes(run) <= 3 * 4 * PARAMETERS + 9 * 4


def _mesh():
    return sharding.mesh_of(tiny_config(*SIZES).mesh, topology.find("v3:2x2").devices)


def test_speed_follows_from_the_cycles(found):
    """v3: 123 TFLOP/s a chip at 0.938 GHz; 12 steps; 2 dollars for each of 4 chips and an hour."""
    row = found["plan"]
    cycles = row["cycles"]
    assert sum(cycles.values()) == pytest.approx(2 * cycles["all"]) and cycles["compiler"] > 0.5 * cycles["all"]
    seconds = cycles["all"] / (61.5e12 / 65_536)
    assert row["milliseconds"] == pytest.approx(1e3 * seconds)
    assert row["tokens_per_second"] == pytest.approx(ROWS * LENGTH / seconds)
    assert row["mfu"] == pytest.approx(USEFUL * ROWS * LENGTH / seconds / (4 * 123e12))
    assert row["hours"] == pytest.approx(12 * seconds / 3600) and row["dollars"] == pytest.approx(row["hours"] * 8)
    assert row["tokens"] == 12 * ROWS * LENGTH
    assert row["uncosted"] == {} and row["instructions"]["compiler"] > 50


def test_operations_and_collectives_name_what_they_are(found):
    row = found["plan"]
    shares = [one["share"] for one in row["operations"]]
    assert shares == sorted(shares, reverse=True) and len(shares) == 20 and 0.4 < sum(shares) <= 1
    assert {"forward", "backward", "update"} <= {one["phase"] for one in row["operations"]}
    assert any(one["module"].startswith("roberta/encoder/layer/*/") for one in row["operations"])
    assert any(one["source"].startswith("mlm/training/train.py:") for one in row["operations"])
    gradients = row["collectives"]["all-reduce"]
    assert gradients["count"] >= 1 and 2 * PARAMETERS < gradients["bytes"] < 4.1 * PARAMETERS, "bfloat16 or float32"


def test_baseline_beside_it(found):
    other, ratio = found["baseline"], found["ratio"]
    assert other["step"] == "baseline" and other["fits"] and other["collectives"]["all-reduce"]["count"] >= 1
    assert ratio["cycles"] == found["plan"]["cycles"]["all"] / other["cycles"]["all"]
    ours, theirs = (found[key]["bytes_per_chip"] for key in ("plan", "baseline"))
    assert ratio["temporaries"] == ours["temporaries"] / theirs["temporaries"]
    assert ours["arguments"] == pytest.approx(theirs["arguments"], rel=0.02)


def test_tables_show_it(found):
    text = shown_by(tables.plan, found)
    row = found["plan"]
    for words in (
        "mlm step on v3:2x2: 4 chips, 8 devices, data 8 x fsdp 1 x tensor 1",
        f"{row['milliseconds']:.2f} ms a step, {row['tokens_per_second']:,.0f} tokens/s",
        "baseline step on v3:2x2",
        f"{found['ratio']['cycles']:.2f} of the baseline's cycles",
        "106.4 minutes",
        "all-reduce",
        "every instruction has a cost",
    ):
        assert words in text, text
    lines = [line.split() for line in text.splitlines()]
    counts = row["collectives"]["all-reduce"]
    assert ["all-reduce", str(counts["count"]), str(counts["overlapping"])] in [line[:3] for line in lines]
    top = row["operations"][0]
    assert [f"{top['share']:.1%}", str(top["count"]), top["phase"], top["module"]] in [line[:4] for line in lines]
    kernel = {**row, "uncosted": {"kernel jit(step)/mine": 3}}
    for each in (kernel, {**row, "short": kernel}):
        text = shown_by(tables.plan, {"plan": each})
        assert text.count("NOT COSTED, so the real step is slower: kernel jit(step)/mine (3)") == 1
        cells = [{"cell": {"mesh": "8x1x1"}, "plan": {**each, "hours": 1.0, "dollars": None}}]
        assert "some operations not costed, so it is slower" in shown_by(tables.sweep, {"sweep": cells})
    stages = {**row, "fits": False, "largest": {"rows_per_chip": 4, "global_batch": 64}, "remedies": []}
    hint = "--config.data.global_batch=64"
    assert f'{hint} "--config.data.batch_stages=()"\n' in shown_by(
        tables.plan, {"plan": stages | {"batch_stages": [[8, 1]]}}
    )
    assert f"{hint}\n" in shown_by(tables.plan, {"plan": stages})


@pytest.mark.slow
def test_short_rows_of_the_first_updates_are_counted():
    """Three steps in four on rows of 8 tokens: as many tokens, less attention."""
    found = planned("data.short_length=8", "data.short_share=0.75", name="v5e:1x1", price=2.0)
    row, short = found["plan"], found["plan"]["short"]
    assert (row["length"], short["length"]) == (LENGTH, 8)
    assert short["milliseconds"] * short["tokens_per_second"] == pytest.approx(1e3 * ROWS * LENGTH)
    useful = USEFUL - 3 * 4 * (LENGTH - 8) * H
    assert short["mfu"] == pytest.approx(useful * short["tokens_per_second"] / 197e12)
    seconds = (0.75 * short["milliseconds"] + 0.25 * row["milliseconds"]) / 1e3
    assert row["hours"] == pytest.approx(12 * seconds / 3600) and row["dollars"] == pytest.approx(2 * row["hours"])
    text, said = (
        shown_by(tables.plan, found),
        f"rows of 8 tokens: 0.01 GB a chip, {short['milliseconds']:.2f} ms a step",
    )
    assert said in text and "whole run: 0.0 hours, 6.14e-06 billion tokens, 0 dollars" in text
    found["plan"] = row | {"short": short | {"fits": False}, "hours": None, "dollars": None}
    assert "do not fit: the run's hours are unknown" in shown_by(tables.plan, found)


@pytest.mark.slow
def test_hours_of_smaller_batches_are_in_proportion_to_their_rows():
    """Six steps of 8 rows and six of 16; the first nine are of short rows, so 96 of the 144 rows."""
    stages = ("data.batch_stages=((8, 6),)", "data.short_length=8", "data.short_share=0.75")
    found = planned(*stages, name="v5e:1x1")
    row, short = found["plan"], found["plan"]["short"]
    seconds = (96 * short["milliseconds"] + 48 * row["milliseconds"]) / ROWS / 1e3
    assert row["hours"] == pytest.approx(seconds / 3600) and row["batch_stages"] == [[8, 6]]
    assert "billion tokens, smaller batches at the same tokens/s" in shown_by(tables.plan, found)
    row = planned(*stages, "train.branch_from=runs/a@4", name="v5e:1x1")["plan"]  # its own: 64 short rows, 48 others
    seconds = (64 * row["short"]["milliseconds"] + 48 * row["milliseconds"]) / ROWS / 1e3
    assert row["hours"] == pytest.approx(seconds / 3600)


@pytest.mark.slow
def test_sweep_over_topologies(capfd):
    """Three families in one table; a cell that can't be does not stop the others."""
    axes = ["topology=v5e:1x1,v4:2x2x1,tpu7x:1x1x1,v9:1x1", "per_chip_batch=8"]
    found = planned("train.steps=0", "train.epochs=1", sweep=axes, name="")
    assert json.loads(capfd.readouterr().out) == found
    rows = {one["cell"]["topology"]: one for one in found["sweep"]}
    assert "there is no such TPU" in rows.pop("v9:1x1")["error"]
    for name, chips in (("v5e:1x1", 1), ("v4:2x2x1", 4), ("tpu7x:1x1x1", 1)):
        row = rows[name]["plan"]
        assert row["fits"] and (row["global_batch"], row["chips"]) == (8 * chips, chips)
        assert row["milliseconds"] > 0 and row["hours"] is None, "how many epochs' records isn't known"
        assert bool(row["collectives"]) == (row["devices"] > 1)
    text = shown_by(tables.sweep, found)
    assert len(text.split("\n\n")[0].splitlines()) == 5 and "v9:1x1" in text and "106.4" in text


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        (["chips=4"], "write topology=NAME"),
        (["topology="], "write topology=NAME"),
        (["mesh=8x1"], "mesh=8x1 is not a valid axis"),
        (["per_chip_batch=-2"], "per_chip_batch=-2 is not a valid axis"),
        (["per_chip_batch=2"], "give --topology=NAME"),
    ],
)
def test_a_bad_sweep_is_refused(axes, words):
    with pytest.raises(InputError, match=words):
        plan.cells(axes, "")


def test_cells_are_all_combinations():
    cells = plan.cells(["mesh=8x1x1,1x8x1", "model.remat=true,false"], "v5e:2x4")
    assert len(cells) == 4 and cells[0] == {"topology": "v5e:2x4", "mesh": "8x1x1", "model.remat": "true"}
    twice = plan.cells(["topology=v5e:2x4", "topology=v6e:2x4"], "")
    assert twice == [{"topology": "v5e:2x4"}, {"topology": "v6e:2x4"}]


LARGE = ("model.hidden_size=512", "model.intermediate_size=512", "tokenizer.vocab_size=4194304", "model.heads=8")


@pytest.mark.standard
def test_a_config_too_large_is_reported(capfd, monkeypatch):
    """4,194,304 x 512 parameters x 12 bytes are 25.8 GB: more than the 16.9 GB of a v5e."""
    monkeypatch.setattr(plan, "compile_step", _pretend(lambda config: config.mesh.fsdp == 8))
    config = [*LARGE, "data.global_batch=64"]
    found = planned(*config, name="v5e:2x4", search=True)["plan"]
    assert not found["fits"] and found["largest"] is None and "milliseconds" not in found
    assert 25.7e9 < found["bytes_per_chip"]["needs"] < 25.9e9
    assert [one["change"] for one in found["remedies"] if one["fits"]] == ["--config.mesh.fsdp=8 --config.mesh.data=1"]
    assert found["remedies"][0]["change"] == "--config.model.remat_feed_forward=1"
    planned(*config, name="v5e:2x4", as_json=False)
    assert "does not fit: needs 25.8" in capfd.readouterr().out


def _pretend(fits):
    def compile_step(config, info, place, make_task, **options):
        if "kind" in options:  # the step itself, not a trial
            return compiling.compile_step(config, info, place, make_task, **options)
        return compiling.Program("", 0, 0, 0, 1e9, fits(config))

    return compile_step


@pytest.mark.parametrize(("limit", "rows", "trials"), [(5, 4, 2), (16, 16, 2), (1, 1, 4), (0, None, 4)])
def test_the_largest_batch_is_found_in_few_trials(monkeypatch, limit, rows, trials):
    """32 rows a device, whose temporaries, were they in proportion, would fit at 8."""
    seen = []

    def fits(config):
        seen.append(config.data.global_batch // 8)
        return seen[-1] <= limit

    monkeypatch.setattr(plan, "compile_step", _pretend(fits))
    stages = "data.batch_stages=((128, 5),)"  # which apply to no smaller batch
    place, config = topology.find("v5e:2x4"), tiny_config("data.global_batch=256", stages)
    job = plan.make_job(config, None, records=None, price=None)
    refused = compiling.Program("", 10**9, 0, 0, 10**9 + 4 * (place.capacity - 10**9), False)
    found = plan.largest_batch(config, job, place, refused)
    assert found == (rows and {"rows_per_chip": rows, "global_batch": 8 * rows})
    assert seen[0] == 8 and len(seen) == trials and max(seen) <= 16


def test_smaller_batches_of_an_odd_number_of_rows_are_tried(monkeypatch):
    """Halves of 11 or 44 rows a device, rounded down; those that lanes don't divide are not."""
    monkeypatch.setattr(plan, "compile_step", _pretend(lambda config: config.data.global_batch <= 64))
    place, job = topology.find("v5e:2x4"), plan.make_job(tiny_config(), None, records=None, price=None)
    refused = compiling.Program("", 10**9, 0, 0, 10**9 + 4 * (place.capacity - 10**9), False)
    for lanes, accumulate, batch in ((8, 4, 64), (16, 1, 16), (32, 1, None)):
        own = ("data.global_batch=352", f"data.lanes={lanes}", f"train.accumulate={accumulate}")
        found = plan.largest_batch(tiny_config("shards.count=32", *own), job, place, refused)
        assert found == (batch and {"rows_per_chip": 2, "global_batch": batch})


def test_a_refusal_is_read():
    message = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (114.37G) exceeds available HBM (15.75G). HLO module: jit_step."
    )
    assert compiling.temporary_bytes(message) == 114.37 * 2**30
    assert compiling.temporary_bytes("RESOURCE_EXHAUSTED") is None


@pytest.mark.parametrize(
    "words",
    [
        "Used 27.50M of 16.00M vmem. Exceeded vmem capacity by 11.50M.",
        "while allocating on stack for %x. Scoped allocation with size 27.50M and limit 16.00M exceeded scoped limit",
    ],
)
def test_a_kernel_too_large_for_a_core_is_not_called_too_large_a_batch(words):
    message = f"RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. {words}"
    with pytest.raises(InputError, match=r"config\.model\.attention: the kernel needs 27\.50M .*TPU v3 has 16\.00M"):
        compiling.refuse_kernel(message, "TPU v3")
    compiling.refuse_kernel("RESOURCE_EXHAUSTED: Ran out of memory on HBM", "TPU v3")


def test_a_batch_of_a_sweep_may_be_smaller_than_those_of_the_stages(monkeypatch):
    measured = []
    monkeypatch.setattr(plan, "measure", lambda config, *_: measured.append(config.data) or (None, {}))
    config = tiny_config("data.global_batch=512", "data.batch_stages=((256, 4),)")
    job = plan.make_job(config, None, records=None, price=None)
    found = plan.plan_cell(config, job, 1, {"topology": "v5e:2x4", "per_chip_batch": "16"})
    assert "error" not in found, found
    assert (measured[0].global_batch, measured[0].batch_stages) == (128, ())


def test_length_of_a_run_in_epochs():
    config = tiny_config(*SIZES, "train.steps=0", "train.epochs=3")
    unknown, known = (plan.make_job(config, None, records=records, price=None) for records in (None, 100))
    assert not unknown.known_records and known.known_records
    assert plan.whole_run(config, unknown, SPEED)["hours"] is None
    found = plan.whole_run(config, known, SPEED)
    assert found["tokens"] == 19 * ROWS * LENGTH, "300 rows in batches of 16: 19 updates"
    assert found["hours"] == pytest.approx(found["tokens"] / 1e6 / 3600) and found["dollars"] is None


def test_a_branch_that_ends_before_it_starts_is_refused_before_the_compiler_runs(monkeypatch):
    monkeypatch.setattr(plan, "compile_step", lambda *args, **settings: pytest.fail("compiled"))
    config = tiny_config("train.branch_from=runs/a@1400", "train.steps=1400")
    job = plan.make_job(config, None, records=None, price=None)
    sentence = "runs/a@1400: the run would end after step 1,400, but the branch starts after step 1,400; train longer."
    with pytest.raises(InputError, match=sentence):
        plan.measure(config, job, topology.find("v5e:2x4", 1))
    hours = tiny_config("train.branch_from=runs/a@1400000", "train.steps=0", "train.hours=1")
    check_branch(hours, HOURS_STEPS)


def test_tokens_of_a_run_in_hours():
    """Two hours on four chips, three quarters of them on short rows, which are read twice as fast."""
    config = tiny_config(*SIZES, "train.steps=0", "train.hours=2")
    job = plan.make_job(config, None, records=None, price=1.5)
    assert plan.whole_run(config, job, SPEED) == {"hours": 2, "tokens": 7_200_000_000, "dollars": 12}
    config = tiny_config(*SIZES, "train.steps=0", "train.hours=2", "data.short_length=8", "data.short_share=0.75")
    short = SPEED | {"tokens_per_second": 2e6}
    assert plan.whole_run(config, job, SPEED | {"short": short})["tokens"] == 1.75 * 7_200_000_000
    assert plan.whole_run(config, job, SPEED | {"short": {"fits": False}})["tokens"] is None


def test_a_sweep_over_the_vocabulary_has_each_one_s_size(manifest, monkeypatch):
    monkeypatch.setattr(plan, "measure", lambda config, job, place: (None, job.info.vocab_size))
    for shards, sizes in ((None, [512, 1024]), (manifest, [manifest.vocab_size] * 2)):
        job = plan.make_job(tiny_config(), shards, records=None, price=None)
        cells = plan.cells(["tokenizer.vocab_size=512,1024"], "v5e:2x4")
        assert [plan.plan_cell(tiny_config(), job, 1, cell).get("plan") for cell in cells] == sizes


def test_bad_flags(capfd):
    assert main(["plan", "--config=configs/quickstart.py"]) == 2
    assert "--topology" in capfd.readouterr().err
    assert main(["plan", "--config=configs/quickstart.py", "--topology=v5e:2x4", "--price=-1"]) == 2
    assert "--price=-1.0: must be a number above 0" in capfd.readouterr().err
    assert main(["plan", "--config=configs/quickstart.py", "--topology=v7:2x4"]) == 2
    assert "known are v2:1x1 to" in capfd.readouterr().err
    with pytest.raises(InputError, match="does not fit 16 devices"):
        planned("mesh.data=8", name="v5e:4x4")


def test_needs_no_tensorflow():
    code = "import sys, mlm.plan; assert not {'tensorflow', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(1), check=True)


def test_programs_stay_out_of_the_cache():
    """jax could write them there, and not read them back."""
    key = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(compiling.jax.config, key)
    with compiling.no_cache():
        assert getattr(compiling.jax.config, key) == float("inf")
    assert getattr(compiling.jax.config, key) == before


def test_job_of_shards(manifest):
    job = plan.make_job(tiny_config(), manifest, records=None, price=None)
    assert job.known_records and job.info.records == manifest.splits["train"].records
    assert dataclasses.replace(job.info, records=7) == plan.make_job(tiny_config(), manifest, records=7, price=1.0).info
