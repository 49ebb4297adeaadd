"""Advice and loss spikes are in the report."""

import json

from mlm.monitor import adviser
from tests.support.reports import make_workdir, page_of

ADVICE = {"step": 1200, "kind": "advice", "what": "stuck", "text": "the loss is stuck: <6.02> nats."}
SPIKE = {
    "step": 1250, "kind": "spike", "first_update": 1201, "last_update": 1250, "batches": ["1201:1210", "1213:1252"],
    "loss": 7.25, "median": 4.125, "deviation": 0.01, "rows": [],
}  # fmt: skip


def test_advice_and_spikes_have_a_row_each(tmp_path):
    workdir = make_workdir(tmp_path / "run")
    workdir.advice.write_text(json.dumps(ADVICE) + "\n")
    workdir.spikes.write_text(json.dumps(SPIKE) + "\n")
    page = page_of(workdir)
    assert ["1,200", adviser.LINES["stuck"], "the loss is stuck: <6.02> nats."] in page.rows
    words = "loss 7.250 nats, 4.125 in the lines before; batches 1201:1210, 1213:1252"
    assert ["1,201 to 1,250", "A spike of the loss", words] in page.rows


def test_a_run_without_advice_has_no_such_section(tmp_path):
    page = page_of(make_workdir(tmp_path / "run"))
    assert "Advice" not in page.text
