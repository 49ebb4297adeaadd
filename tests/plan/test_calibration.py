"""plan by what was measured: verify.json scales its estimates, if it is of that device, config and version."""

import json

import pytest

from mlm.errors import DamageError, InputError
from mlm.plan import calibration, cost_model, plan, tables, topology
from tests.support.tiny import tiny_config


class Device:
    device_kind, process_index = "TPU v5 lite", 0


def write(path, times_plan=1.5, config=None, **changes):
    """A file as verify writes it."""
    content = calibration.header(config or tiny_config(), [Device()])
    lines = [{"what": "step beside plan", "values": {"times_plan": times_plan}}]
    path.write_text(json.dumps(content | {"checks": {"plan": {"results": lines}}} | changes))
    return str(path)


@pytest.fixture
def place():
    family = topology.FAMILIES["v5e"]
    return topology.Topology("v5e:2x4", family, (2, 4), [Device()] * 8)


def test_an_estimate_is_scaled_and_says_so(tmp_path, place, monkeypatch):
    cost, config = cost_model.Cost(), tiny_config()
    cost.cycles["compiler"] = 1.5e6
    cost.collectives["all-reduce"].update(count=1, overlapping=0, bytes=8, cycles=4e5, exposed=3e5)
    monkeypatch.setattr(cost_model, "estimate", lambda module, topology: cost)
    program = plan.Program("ENTRY %main () -> () {\n}\n", 0, 0, 0, 0.0, True, flops_per_token=1e6)
    job = plan.make_job(config, None)

    def estimate(chosen):
        return plan.estimate(program, config, plan.dataclasses.replace(job, calibration=chosen), place)

    plain, scaled = estimate(calibration.NONE), estimate(calibration.read(write(tmp_path / "verify.json")))
    for name, factor in {"milliseconds": 1.5, "tokens_per_second": 1 / 1.5, "mfu": 1 / 1.5}.items():
        assert scaled[name] == pytest.approx(factor * plain[name])
    for name in ("milliseconds", "exposed_milliseconds"):
        one, other = (row["collectives"]["all-reduce"][name] for row in (plain, scaled))
        assert other > 0 and other == pytest.approx(1.5 * one)
    assert plain["calibration"] == "" and "multiplied by 1.50" in scaled["calibration"]
    rows = [row | {"topology": name} for name, row in (("v5e:2x4", plain), ("h100:8", plain), ("v5e:2x4", scaled))]
    texts = [tables.reference([row]) for row in rows]
    assert texts == [tables.CALIBRATION, tables.ROOFLINE, scaled["calibration"]]
    assert tables.reference(rows).splitlines() == "\n".join(texts).splitlines()
    assert "TPU v5e" in texts[2] and "verify.json" in texts[2]
    measured = calibration.read(write(tmp_path / "verify.json"))
    assert "another config" not in measured.sentence(config)
    for change in ("model.layers=2", "shards.length=16"):
        assert "another config" in measured.sentence(tiny_config(change)), "as of a sweep's cells"
        assert change.partition("=")[0] in measured.difference(tiny_config(change))


def test_files_of_the_folder_are_used_by_their_device(tmp_path, place, monkeypatch):
    monkeypatch.setattr(calibration, "FOLDER", tmp_path)
    write(tmp_path / "v5e.json", times_plan=1.25)
    assert calibration.find(place, None).factor == 1.25 and calibration.find(place, calibration.NONE).factor == 1
    monkeypatch.setattr(calibration, "FOLDER", tmp_path / "none")
    assert calibration.find(place, None) == calibration.NONE


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 0}, "format 1"),
        ({"checks": {}}, "run verify on a device"),
        ({"times_plan": None}, "run verify on a device"),
        ({"times_plan": float("nan")}, "run verify on a device"),
        ({"times_plan": 10**400}, "run verify on a device"),
        ({"date": 5}, "run verify on a device"),
        ({"device_kind": ["TPU v4"]}, "measured on a"),
    ],
)
def test_another_file_is_refused(changes, words, tmp_path, place):
    with pytest.raises(InputError, match=words) as caught:
        calibration.find(place, calibration.read(write(tmp_path / "verify.json", **changes)))
    assert str(tmp_path) in str(caught.value)


def test_another_device_is_refused_before_the_compiler_runs_and_a_missing_file(tmp_path, place, monkeypatch):
    monkeypatch.delattr(plan, "compile_step")
    named = calibration.Calibration(2.0, "TPU v4", "2027-01-01", "verify.json", {})
    config = tiny_config()
    job = plan.make_job(config, None)
    with pytest.raises(InputError, match="TPU v4"):
        plan.measure(config, plan.dataclasses.replace(job, calibration=named), place)
    with pytest.raises(InputError, match="no such file"):
        calibration.read(str(tmp_path / "none.json"))
    (tmp_path / "torn.json").write_text("{")
    with pytest.raises(DamageError, match="torn"):
        calibration.read(str(tmp_path / "torn.json"))
