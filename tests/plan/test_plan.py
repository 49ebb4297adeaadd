"""plan without its compiler: the cells of a sweep, what is tried where a step does not fit, hours and dollars."""

import pytest

from mlm.__main__ import main
from mlm.errors import InputError
from mlm.plan import calibration, plan, tables, topology
from mlm.plan import compile as compiling
from tests.plan.planned import LENGTH, ROWS, SIZES, planned, shown_by
from tests.support.tiny import tiny_config

SPEED = {"fits": True, "chips": 4, "tokens_per_second": 1e6}  # as of a program that was compiled


# Sweeps ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        (["chips=4"], "write topology=NAME"),
        (["mesh=8x1"], "mesh=8x1 is not a valid axis"),
        (["per_chip_batch=-2"], "per_chip_batch=-2 is not a valid axis"),
        (["per_chip_batch=2"], "give --topology=NAME"),
    ],
)
def test_a_bad_sweep_is_refused(axes, words):
    with pytest.raises(InputError, match=words):
        plan.cells(axes, "")
    with pytest.raises(InputError, match="--topology=v5e:2x4"):
        plan.cells(["topology=v6e:2x4"], "v5e:2x4")


def test_cells_are_all_combinations():
    cells = plan.cells(["mesh=8x1x1,1x8x1", "model.remat=true,false"], "v5e:2x4")
    assert len(cells) == 4 and cells[0] == {"topology": "v5e:2x4", "mesh": "8x1x1", "model.remat": "true"}


def test_a_batch_of_a_sweep_may_be_smaller_than_those_of_the_stages(monkeypatch):
    measured = []
    monkeypatch.setattr(plan, "measure", lambda config, *_: measured.append(config.data) or (None, {}))
    config = tiny_config("data.global_batch=512", "data.batch_stages=((256, 4),)")
    job = plan.make_job(config, None)
    found = plan.plan_cell(config, job, 1, {"topology": "v5e:2x4", "per_chip_batch": "16"})
    assert "error" not in found, found
    assert (measured[0].global_batch, measured[0].batch_stages) == (128, ())
    assert "v9:1x1" in plan.plan_cell(config, job, 1, {"topology": "v9:1x1"})["error"], "and the others go on"


def test_a_sweep_has_the_sizes_of_each_cell_or_of_the_shards(manifest, monkeypatch):
    """The number of the shards' rows says nothing of rows of another length."""
    monkeypatch.setattr(plan, "measure", lambda config, job, place: (None, (job.info.vocab_size, job.info.length)))
    other = f"config.shards.length = 64: the shards in {manifest.folder} hold 32."
    of_shards = [(manifest.vocab_size, 32), other] * 2
    for shards, expected in ((None, [(512, 32), (512, 64), (1024, 32), (1024, 64)]), (manifest, of_shards)):
        job = plan.make_job(tiny_config(), shards)
        cells = plan.cells(["tokenizer.vocab_size=512,1024", "shards.length=32,64"], "v5e:2x4")
        found = [plan.plan_cell(tiny_config(), job, 1, cell) for cell in cells]
        assert [cell.get("plan", cell.get("error")) for cell in found] == expected


# What does not fit ----------------------------------------------------------------------------------------------------


def pretend(fits):
    """Of a trial, whether it fits; the step itself is compiled."""

    def compile_step(config, info, place, make_task, **options):
        if "kind" in options:
            return compiling.compile_step(config, info, place, make_task, **options)
        return compiling.Program("", 0, 0, 0, 1e9, fits(config))

    return compile_step


def refused(place) -> compiling.Program:
    """Of which a quarter of the temporaries would fit."""
    return compiling.Program("", 10**9, 0, 0, 10**9 + 4 * (place.capacity - 10**9), False)


def test_a_config_too_large_is_reported(monkeypatch):
    """24 x 8192 x 8192 parameters and some more, of 12 bytes: more than the 16.9 GB of a v5e."""
    monkeypatch.setattr(plan, "compile_step", pretend(lambda config: config.mesh.fsdp == 8))
    sizes = ("model.hidden_size=8192", "model.intermediate_size=32768", "model.layers=2", "model.heads=64")
    found = planned(*sizes, "data.global_batch=64", name="v5e:2x4", search=True)
    row = found["plan"]
    assert not row["fits"] and row["largest"] is None and "milliseconds" not in row
    assert row["bytes_per_chip"]["needs"] == pytest.approx(12 * 24 * 8192**2, rel=0.05)
    assert [one["change"] for one in row["remedies"] if one["fits"]] == ["--config.mesh.fsdp=8 --config.mesh.data=1"]
    assert row["remedies"][0]["change"] == "--config.model.remat_feed_forward=2"
    assert f"does not fit: needs {row['bytes_per_chip']['needs'] / 1e9:.2f} GB" in shown_by(tables.plan, found)
    assert "cuDNN" in shown_by(tables.plan, {**found, "plan": row | {"topology": "h100:8"}})
    assert "cuDNN" not in shown_by(tables.plan, found)
    row |= {"largest": {"rows_per_chip": 4, "global_batch": 64}, "remedies": []}
    hint = "--config.data.global_batch=64"
    assert f"{hint}\n" in shown_by(tables.plan, found)
    row["batch_stages"] = [[8, 1]]
    assert f'{hint} "--config.data.batch_stages=()"\n' in shown_by(tables.plan, found)


def search(monkeypatch, *overrides, needs, says=True):
    """Looks for the largest batch, where a device needs so many bytes by its rows, which the compiler says or not.

    Returns it and the global batches that were compiled.
    """
    place, config, compiled = topology.find("v5e:2x4"), tiny_config(*overrides), []

    def compile_step(config, info, place, make_task):
        size = needs(config.data.global_batch // config.train.accumulate // 8)
        compiled.append(config.data.global_batch)
        return compiling.Program("", 10**9, 0, 0, size if says else None, size <= place.capacity)

    monkeypatch.setattr(plan, "compile_step", compile_step)
    job = plan.make_job(config, None)
    refused = compile_step(config, job.info, place, job.make_task)
    assert not refused.fits
    found = plan.largest_batch(config, job, place, refused)
    return found, compiled[1:]


@pytest.mark.parametrize("says", [True, False])
def test_the_largest_batch_is_found_whatever_the_memory_is(monkeypatch, says):
    """That grows with every eighth row alone, or of which the compiler says nothing: by bisection."""
    stages = "data.batch_stages=((96, 5),)"  # which apply to no smaller batch
    for limit in (0, 1, 2, 7, 12, 16, 23):
        needs = [topology.find("v5e:2x4").capacity + (-1 if count <= limit else 1) * 10**8 for count in range(25)]
        found, compiled = search(monkeypatch, "data.global_batch=192", stages, needs=needs.__getitem__, says=says)
        assert found == ((limit and {"rows_per_chip": limit, "global_batch": 8 * limit}) or None)
        assert len(compiled) <= (8 if says else 5)


def test_of_many_numbers_of_rows_one_near_the_largest_is_found(monkeypatch):
    """Of 4,096 rows a device; a third of the memory, or none, is the same for any."""
    capacity = topology.find("v5e:2x4").capacity
    runs = ((1, True, 4), (100, True, 4), (1500, True, 3), (4000, True, 3), (1500, False, 7))
    for limit, says, trials, fixed in (*((*run, 1 / 3) for run in runs), (3000, True, 2, 0)):

        def needs(count: int, limit: int = limit, fixed: float = fixed) -> float:
            return 10**9 + (capacity - 10**9) * (fixed + (1 - fixed) * count / limit)

        found, compiled = search(monkeypatch, f"data.global_batch={8 * 4096}", needs=needs, says=says)
        assert 0.95 * limit < found["rows_per_chip"] <= limit and len(compiled) <= trials, (limit, found, compiled)


def test_only_batches_that_mesh_lanes_and_accumulation_divide_are_tried(monkeypatch):
    """Of 11 or 44 rows a device at once; 32 lanes divide 32, 64, ... rows of the batch."""
    room = topology.find("v5e:2x4").capacity
    for lanes, accumulate, batch in ((8, 4, 96), (16, 1, 16), (32, 1, 96), (32, 4, 96)):
        sizes = ("data.global_batch=352", f"data.lanes={lanes}", f"train.accumulate={accumulate}", "shards.count=32")
        limit = batch // accumulate // 8
        found, compiled = search(monkeypatch, *sizes, needs=lambda count, limit=limit: room + count - limit)
        assert found == {"rows_per_chip": limit, "global_batch": batch}
        assert all(tried % lanes == 0 and tried % (8 * accumulate) == 0 for tried in compiled)
    found, compiled = search(
        monkeypatch, "data.global_batch=32", "data.lanes=32", "shards.count=32", needs=lambda count: room + count
    )
    assert found is None and not compiled


# The whole run --------------------------------------------------------------------------------------------------------


def test_length_of_a_run():
    """Of steps, epochs or hours; the first three quarters may be on short rows, which are read twice as fast."""

    def whole_run(*overrides, records=None, price=None, **short):
        config = tiny_config(*SIZES, *overrides)
        return plan.whole_run(config, plan.make_job(config, None, records=records, price=price), SPEED | short)

    def hours(short_rows: int, rows: int) -> float:
        return pytest.approx(LENGTH * (short_rows / 2e6 + rows / 1e6) / 3600)

    short = {"short": SPEED | {"tokens_per_second": 2e6}}
    lengths = ("data.short_length=8", "data.short_share=0.75")
    assert whole_run() == {"hours": hours(0, 12 * ROWS), "tokens": 12 * ROWS * LENGTH, "dollars": None}
    assert whole_run(*lengths, **short)["hours"] == hours(9 * ROWS, 3 * ROWS)
    stages = ("data.batch_stages=((8, 6),)", *lengths)  # nine of twelve steps are short, six of them of 8 rows
    assert whole_run(*stages, **short)["hours"] == hours(96, 48)
    assert whole_run(*stages, "train.branch_from=runs/a@4", **short)["hours"] == hours(64, 48)
    epochs = ("train.steps=0", "train.epochs=3")
    assert whole_run(*epochs)["hours"] is None, "how many rows an epoch has is not known"
    assert whole_run(*epochs, records=100)["tokens"] == 19 * ROWS * LENGTH, "300 rows in batches of 16: 19 updates"
    given = ("train.steps=0", "train.hours=2")
    assert whole_run(*given, price=1.5) == {"hours": 2, "tokens": 7_200_000_000, "dollars": 12}
    assert whole_run(*given, *lengths, **short)["tokens"] == 1.75 * 7_200_000_000
    assert whole_run(*given, *lengths, short={"fits": False})["tokens"] is None


def test_hosts_that_can_not_be_fed_are_reported(monkeypatch):
    """Two hosts of 8 rows, three lanes: the step is compiled all the same."""
    monkeypatch.setattr(plan, "compile_step", lambda config, info, place, *_, **__: refused(place))
    found = planned("data.lanes=3", "data.global_batch=24", "evaluate.batch=24", name="v5p:2x2x2")
    hosts, text = found["plan"]["hosts"], shown_by(tables.plan, found)
    assert f"hosts 2: NOT ALL CAN BE FED: {hosts['error']}" in text and "config.data.lanes = 3" in hosts.pop("error")
    assert hosts == {"count": 2, "rows_per_host": 12, "lanes_per_host": None, "fed": False}


def test_a_branch_that_ends_before_it_starts_is_refused_before_the_compiler_runs(monkeypatch):
    monkeypatch.setattr(plan, "compile_step", lambda *args, **settings: pytest.fail("compiled"))
    config = tiny_config("train.branch_from=runs/a@1400", "train.steps=1400")
    with pytest.raises(InputError, match=r"runs/a@1400: .* 1,400"):
        plan.measure(config, plan.make_job(config, None), topology.find("v5e:2x4", 1))


def test_bad_flags(capfd):
    file = str(calibration.FOLDER / "nvidia_h200.json")
    for flags, words in (
        ([], "--topology"),
        (["--topology=v5e:2x4", "--price=-1"], "--price=-1.0: "),
        (["--topology=v7:2x4"], "v2:1x1 to"),
        (["--topology=v5e:2x2", "--slices=0"], "--slices=0: "),
        (["--topology=v5e:2x2", "--slices=257"], "1 to 256"),
        (["--topology=v5e:2x2", "--calibration="], "--calibration=: there is no such file"),
        (["--topology=v5e:2x2", f"--calibration={file}"], f"--calibration={file}: was measured with model."),
    ):
        assert main(["plan", "--config=configs/quickstart.py", *flags]) == 2
        assert words in capfd.readouterr().err
    with pytest.raises(InputError, match="does not fit 16 devices"):
        planned("mesh.data=8", name="v5e:4x4")


def test_a_sweep_of_which_nothing_can_be_planned(capsys):
    assert main(["plan", "--config=configs/quickstart.py", "--sweep", "topology=v9:1x1"]) == 0
    assert "there is no such TPU or GPU" in " ".join(capsys.readouterr().out.split())
