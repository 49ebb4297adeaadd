"""plan: what it says of hosts and slices; tests/training/test_sharding_hosts.py has the hosts of all topologies."""

import pytest

from mlm.__main__ import main
from mlm.plan import tables
from tests.plan.planned import planned


@pytest.mark.parametrize(
    ("count", "rows", "lanes", "words"),
    [
        (1, 16, 8, "hosts 1: 16 rows and 8 lanes each"),
        (8, 2, 1, "hosts 8: 2 rows and 1 lane each"),
        (32, 8, 0.25, "hosts 32: 8 rows each, 4 hosts share a lane"),
    ],
)
def test_rows_and_lanes_in_words(count, rows, lanes, words):
    assert tables.hosts({"count": count, "rows_per_host": rows, "lanes_per_host": lanes, "fed": True}) == words


def test_hosts_that_can_not_be_fed_are_reported(capfd):
    """Two hosts of 8 rows, three lanes: the step is compiled all the same."""
    row = planned("data.lanes=3", "data.global_batch=24", "evaluate.batch=24", name="v5p:2x2x2", as_json=False)["plan"]
    assert row["fits"] and row["hosts"].pop("error") in (out := capfd.readouterr().out)
    assert row["hosts"] == {"count": 2, "rows_per_host": 12, "lanes_per_host": None, "fed": False}
    assert "\n  hosts 2: NOT ALL CAN BE FED: config.data.lanes = 3: a lane has 8 of 24 rows, a host 12, and" in out


@pytest.mark.slow
def test_several_slices(capfd):
    """Eight chips, two of their hosts, a batch over both; the network between them is named."""
    one = planned(name="v5e:2x2", price=2.0, as_json=False)["plan"]
    two = planned(name="v5e:2x2", price=2.0, slices=2, as_json=False)["plan"]
    assert [(row["chips"], row["devices"], row["hosts"]["count"]) for row in (one, two)] == [(4, 4, 1), (8, 8, 2)]
    assert two["hosts"] == {"count": 2, "rows_per_host": 8, "lanes_per_host": 4, "fed": True}
    assert two["rows_per_chip"] == one["rows_per_chip"] / 2
    assert two["dollars"] / two["hours"] == pytest.approx(2 * one["dollars"] / one["hours"])
    first, second = capfd.readouterr().out.split("mlm step on ")[1:]
    assert second.startswith("2 slices of v5e:2x2: 8 chips, 8 devices, data 8 x fsdp 1 x tensor 1")
    assert "between the slices (DCN) is not costed as such" in second and "DCN" not in first
    assert main(["plan", "--config=configs/quickstart.py", "--topology=v5e:2x2", "--slices=0"]) == 2
    assert capfd.readouterr().err == "mlm plan: --slices=0: must be a whole number from 1 to 256.\n"
