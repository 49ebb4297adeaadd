"""The simulation of a big corpus: it follows the real tasks, and its clock is right where the answer is known."""

import argparse
import json

import pytest

from tests.measure import simulate, task_costs
from tests.measure.task_costs import READ, SECONDS, THREADED, WRITTEN
from tests.support.corpora import write_jsonl


@pytest.fixture
def folder(texts, tokenizer_folder, tmp_path):
    """What `fit` leaves, with simple numbers: a second for each 10 MB of a part, and nothing for anything else."""
    costs = {"map_part": [1e-7, 0, 0]} | {name: [0, 0, 0] for name in ("deduplicate", "leave_out", "write_shard")}
    model = simulate.Model(costs, text=1.0, documents=0.001, tokens=0.25, duplicates=0.1)
    (tmp_path / "model.json").write_text(json.dumps(model._asdict()))
    (tmp_path / "tokenizer").symlink_to(tokenizer_folder)
    return tmp_path


@pytest.mark.slow
def test_clock(folder):
    """10 parts of 100 MB on 4 workers are 3 rounds of 10 s, and a request each 5 MB of them takes 0.1 s."""
    numbers = {"hosts": 2, "cores": 2, "parts": 10, "shards": 4, "latency": 100.0, "gigabytes_per_second": 1.0}
    args = argparse.Namespace(folder=folder, **numbers)
    rows, blocks, peak, seconds = task_costs.fresh(simulate.simulate, args, 1e9)
    tokenize = next(row for row in rows if row.name == "tokenize")
    assert tokenize.tasks == 10 and tokenize.hours == pytest.approx(100 / 3600)
    assert tokenize.longest == pytest.approx({"processor": 10.0, "requests": 0.1 * (6 + 2 + 19), "network": 0.0})
    assert tokenize.wall == pytest.approx(3 * sum(tokenize.longest.values()))
    assert blocks == 10 * (26 + 1)  # of 1 GB / 256 in a part's 99 MB for training, and one for validation
    assert peak > 50 and seconds > 0
    assert "bound by the longest task of 'tokenize'" not in simulate.table(rows)
    assert "bound by the number of workers, in 'tokenize'" in simulate.table(rows)


@pytest.mark.slow
def test_real_tasks_make_the_requests_that_the_simulation_counts(texts, folder):
    """`measured` compares them, in every task."""
    write_jsonl(folder / "text.jsonl", texts[:300] + texts[:30])
    made, phases = task_costs.fresh(
        task_costs.write_shards, folder, folder / "text.jsonl", {"train": 2, "validation": 1}, 1
    )
    assert [phase.label for phase in phases] == ["tokenize", "deduplicate", "leave out", "write", ""]
    assert sum(split.duplicates for split in made.splits.values()) == 30
    used = sum(record.used for record in phases[0].records)
    size = (folder / "text.jsonl").stat().st_size
    assert used[READ] > size and used[WRITTEN] > 0.1 * size and used[SECONDS] > 0
    assert phases[0].before[THREADED] == 0 < phases[1].before[THREADED]
