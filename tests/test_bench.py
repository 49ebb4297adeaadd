"""bench: its figures are of the run's own step and batches."""

from mlm import bench
from tests.fixtures import tiny_config


def test_measures_input_and_step(manifest, capsys):
    found = bench.run(tiny_config("data.lanes=4"), manifest, seconds=0.2)
    assert found["batches"] > found["real_batches"] > 0
    assert 0 < found["ratio"] < 2
    out = capsys.readouterr().out
    assert f"{found['one_batch']:,.0f}" in out
    assert f"{found['ratio']:.1%}" in out
