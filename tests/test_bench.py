"""bench: its figures are of the run's own step and batches, and the table shows them."""

import json

import pytest

from mlm import bench
from tests.fixtures import tiny_config


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(bench, "TURN", 0.05)


def test_measures_step_and_input(manifest, capsys):
    config = tiny_config("data.lanes=4", "tokenizer.vocab_size=5000", "data.global_batch=64")
    found = bench.run(config, ["step", "batches", "loop"], manifest, seconds=0.2, as_json=False)
    step, looped = found["step"], found["loop"]
    for name in ("mlm", "stock"):
        row = step[name]
        assert row["tokens_per_second"] * row["milliseconds"] == pytest.approx(64 * 32 * 1e3)
        assert row["mfu"] is None  # no peak is known of a CPU
    assert step["stock"]["temporary_bytes"] > 1.5 * step["mlm"]["temporary_bytes"], (
        "every position's logits and one-hots"
    )
    assert found["batches"]["tokens_per_second"] > looped["real_batches"] > 0
    assert 0 < looped["ratio"] < 2
    out = capsys.readouterr().out
    for number in (step["mlm"]["tokens_per_second"], step["stock"]["tokens_per_second"], looped["one_batch"]):
        assert f"{number:,.0f}" in out
    assert f"{step['ratio']:.2f} times" in out and f"{looped['ratio']:.1%}" in out


def test_json_is_what_is_returned(capsys):
    found = bench.run(tiny_config(), ["step"], None, seconds=0.1, as_json=True)
    assert json.loads(capsys.readouterr().out) == found and set(found) == {"step"}


def test_turns_alternate():
    calls = []

    def work(name):
        calls.append(name)
        return bench.np.zeros(())

    pairs = bench.alternate(lambda: work("a"), lambda: work("b"), 0.0)
    assert len(pairs) == 3 and all(rate > 0 for pair in pairs for rate in pair)
    turns = [name for name, previous in zip(calls, [None, *calls], strict=False) if name != previous]
    assert turns == ["a", "b"] * (len(turns) // 2) and len(turns) >= 6
