"""plan without its compiler: the cells of a sweep, hours and dollars, and what is refused."""

import pytest

from mlm.__main__ import main
from mlm.errors import InputError
from mlm.plan import compile as compiling
from mlm.plan import plan, tables, topology
from tests.plan.planned import LENGTH, ROWS, SIZES, planned, shown_by
from tests.support.tiny import tiny_config


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        (["chips=4"], "write topology=NAME"),
        (["mesh=8x1x1"], "mesh=8x1x1"),
        (["model.layers="], "model.layers="),
        (["per_chip_batch=2"], "give --topology=NAME"),
    ],
)
def test_a_bad_sweep_is_refused(axes, words):
    with pytest.raises(InputError, match=words):
        plan.cells(axes, "")


def test_cells_are_all_combinations():
    cells = plan.cells(["mesh.fsdp=1,8", "model.remat=true,false"], "v5e:2x4")
    assert len(cells) == 4
    assert cells[0] == {"topology": "v5e:2x4", "mesh.fsdp": "1", "model.remat": "true"}
    topologies = [cell["topology"] for cell in plan.cells(["topology=v3-8"], "v5e:2x4")]
    assert topologies == ["v5e:2x4", "v3-8"]


def test_a_batch_of_a_sweep_may_be_smaller_than_those_of_the_stages(monkeypatch):
    monkeypatch.setattr(plan, "measure", lambda config, *_: config.data)
    config = tiny_config("data.global_batch=512", "data.batch_stages=((256, 4),)")
    job = plan.Job()
    found = plan.plan_cell(config, job, 1, {"topology": "v5e:2x4", "per_chip_batch": "16"})["plan"]
    assert (found.global_batch, found.batch_stages) == (128, ())
    for cell, words in (
        ({"topology": "v9:1x1"}, "v9:1x1"),
        ({"topology": "v3-8", "per_chip_batch": "-1"}, "batch"),
    ):
        assert words in plan.plan_cell(config, job, 1, cell)["error"], "and the others go on"


def test_a_sweep_has_the_sizes_of_each_cell_or_of_the_shards(manifest, monkeypatch):
    """The number of the shards' rows says nothing of rows of another length."""
    monkeypatch.setattr(
        plan,
        "measure",
        lambda config, job, place: (job.info(config).vocab_size, job.info(config).length),
    )
    other = f"config.shards.length = 64: the shards in {manifest.folder} hold 32."
    of_shards = [(manifest.vocab_size, 32), other] * 2
    for shards, expected in (
        (None, [(512, 32), (512, 64), (1024, 32), (1024, 64)]),
        (manifest, of_shards),
    ):
        job = plan.Job(shards)
        cells = plan.cells(["tokenizer.vocab_size=512,1024", "shards.length=32,64"], "v5e:2x4")
        found = [plan.plan_cell(tiny_config(), job, 1, cell) for cell in cells]
        assert [cell.get("plan", cell.get("error")) for cell in found] == expected


def test_a_state_too_large_is_reported_without_the_compiler():
    """24 x 8192 x 8192 parameters and some more, of 12 bytes: more than the 16.9 GB of a v5e."""
    sizes = ("model.hidden_size=8192", "model.intermediate_size=32768", "model.layers=2")
    found = planned(*sizes, "model.heads=64", "data.global_batch=64", name="v5e:2x4")
    row = found["plan"]
    needs = row["bytes_per_chip"]["needs"]
    assert not row["fits"] and "milliseconds" not in row and row["hours"] is None
    assert needs == pytest.approx(12 * 24 * 8192**2, rel=0.05)
    assert f"does not fit: needs {needs / 1e9:.2f} GB" in shown_by(tables.plan, found)


def test_on_a_gpu_the_memory_alone_is_shown(monkeypatch):
    program = compiling.Program(True, 2 * 10**9, 10**9, 10**9, 0)
    monkeypatch.setattr(plan, "compile_step", lambda *args, **settings: program)
    devices = topology.find("v5e:2x2").devices[:2]
    place = topology.Topology("h100:2", topology.FAMILIES["h100"], (2,), devices)
    row = plan.measure(tiny_config("data.short_length=8"), plan.Job(price=2.0), place)
    assert row["fits"] and row["short"]["fits"]
    assert "milliseconds" not in row and row["dollars"] is None
    text = shown_by(tables.plan, {"plan": row})
    assert "fits: 2.00 GB of 63.67 GB" in text and "cuDNN" in text and "tokens/s" not in text


def test_length_of_a_run():
    """Of steps, epochs or hours; the first nine tenths may be on short rows, which are read twice as fast."""

    def whole_run(*overrides, records=None, price=None, **short):
        config = tiny_config(*SIZES, *overrides)
        row = {"chips": 4, "length": LENGTH, "milliseconds": 1000.0}
        return plan.whole_run(config, plan.Job(records=records, price=price), row | short)

    def hours(short_rows: int, rows: int) -> float:
        return pytest.approx((short_rows / 2 + rows) / ROWS / 3600)

    short = {"short": {"length": 8, "milliseconds": 500.0}}
    lengths = ("data.short_length=8",)
    assert whole_run()["hours"] == hours(0, 12 * ROWS)
    assert whole_run(*lengths, **short)["hours"] == hours(11 * ROWS, ROWS)
    # eleven of twelve steps are short, six of them of 8 rows
    stages = ("data.batch_stages=((8, 6),)", *lengths)
    assert whole_run(*stages, **short)["hours"] == hours(128, 16)
    assert whole_run(*stages, "train.branch_from=runs/a@4", **short)["hours"] == hours(96, 16)
    epochs = ("train.steps=0", "train.epochs=3")
    assert whole_run(*epochs)["hours"] is None, "how many rows an epoch has is not known"
    # 300 rows in batches of 16: 19 updates
    assert whole_run(*epochs, records=100)["tokens"] == 19 * ROWS * LENGTH
    given = ("train.steps=0", "train.hours=2")
    tokens = 7200 * ROWS * LENGTH
    assert whole_run(*given, price=1.5) == {"hours": 2, "tokens": tokens, "dollars": 12}
    faster = whole_run(*given, *lengths, **short)["tokens"]
    assert faster == pytest.approx(tokens / 0.55, rel=1e-3)
    assert whole_run(*given, *lengths, short={"length": 8})["tokens"] is None


def test_hosts_that_can_not_be_fed_are_reported(monkeypatch):
    """Two hosts of 8 rows, three lanes: the step is compiled all the same."""
    refused = compiling.Program(fits=False, needs=None, arguments=10**9)
    monkeypatch.setattr(plan, "compile_step", lambda *args, **settings: refused)
    found = planned("data.lanes=3", "data.global_batch=24", "evaluate.batch=24", name="v5p:2x2x2")
    error = found["plan"]["hosts"]["error"]
    assert "config.data.lanes = 3" in error
    assert f"hosts 2: NOT ALL CAN BE FED: {error}" in shown_by(tables.plan, found)


def test_bad_flags(capfd):
    for flags, words in (
        ([], "--topology"),
        (["--topology=v5e:2x4", "--price=-1"], "--price=-1.0: "),
        (["--topology=v7:2x4"], "v2:1x1 to"),
        (["--topology=v5e:2x2", "--slices=257"], "1 to 256"),
        (
            ["--topology=v5e:2x2", "--config.classify.train=csv:mine.csv"],
            "config.classify.train = csv:mine.csv",
        ),
    ):
        assert main(["plan", "--config=configs/quickstart.py", *flags]) == 2
        assert words in capfd.readouterr().err
    with pytest.raises(InputError, match="does not fit 16 devices"):
        planned("mesh.fsdp=3", name="v5e:4x4")


@pytest.mark.parametrize(
    ("asked", "listed", "others"), [("v2:?", "v2:2x2", "v3:2x2"), ("?", "h100:8", "")]
)
def test_names_are_listed(asked, listed, others, capsys):
    assert main(["plan", "--config=configs/quickstart.py", f"--topology={asked}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert listed in lines and others not in lines
