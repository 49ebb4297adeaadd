"""Workdirs with a log, and the pages of their reports."""

import html.parser
import json
import math

from mlm import config as configs
from mlm.report import report
from mlm.workdir import Workdir
from tests.support.corpora import manifest_of

# A run that logs every 10 steps, evaluates and saves every 20, is killed after 34 and goes on from 20. Seconds.
TIMING = [
    {"kind": "start", "step": 0, "time": 100.0, "host": "a", "devices": 8, "device": "cpu"},
    {"kind": "first_step", "step": 1, "time": 130.0, "seconds": 1.0},  # 30 start
    # 18 training
    {"kind": "train", "step": 10, "time": 148.0, "seconds": 18.0, "tokens_per_second": 900},
    # 20 training
    {"kind": "train", "step": 20, "time": 168.0, "seconds": 20.0, "tokens_per_second": 1000},
    {"kind": "eval", "step": 20, "time": 173.0, "seconds": 5.0},  # 5 evaluation
    {"kind": "checkpoint", "step": 20, "time": 175.0, "seconds": 2.0},  # 2 checkpoints
    # 20 redone
    {"kind": "train", "step": 30, "time": 195.0, "seconds": 20.0, "tokens_per_second": 100},
    # 55 down
    {"kind": "start", "step": 20, "time": 250.0, "host": "a", "devices": 4, "device": "cpu"},
    {"kind": "first_step", "step": 21, "time": 260.0, "seconds": 1.0},  # 10 start
    # 36 training
    {"kind": "train", "step": 30, "time": 296.0, "seconds": 36.0, "tokens_per_second": 500},
    # SIGTERM: 19 training, 3 checkpoints
    {"kind": "checkpoint", "step": 35, "time": 318.0, "seconds": 3.0},
    # 82 down
    {"kind": "start", "step": 35, "time": 400.0, "host": "b", "devices": 4, "device": "cpu"},
    {"kind": "first_step", "step": 36, "time": 410.0, "seconds": 1.0},  # 10 start
    # 16 training
    {"kind": "train", "step": 40, "time": 426.0, "seconds": 16.0, "tokens_per_second": 700},
    {"kind": "eval", "step": 40, "time": 430.0, "seconds": 4.0},  # 4 evaluation
    {"kind": "checkpoint", "step": 40, "time": 431.0, "seconds": 1.0},  # 1 checkpoints
    # nothing left to do
    {"kind": "start", "step": 40, "time": 9000.0, "host": "b", "devices": 4, "device": "cpu"},
]

for line in TIMING:
    if line["kind"] == "train":
        line["rows_per_second"] = line["tokens_per_second"] / 100

TRAIN = [
    {"kind": "train", "step": step, "loss": 6.5 - step / 16, "accuracy": step / 100, "grad_norm": 1.25 + step / 7,
     "learning_rate": step * 1e-5, "skipped": int(step > 20) * 2}
    for step in (10, 20, 30, 40)
]  # fmt: skip


EVALS = [
    {"kind": "eval", "step": 20, "loss": 4.125, "perplexity": math.exp(4.125), "accuracy": 0.3125,
     "predictions": 12345, "bits_per_byte": 1.71875},
    {"kind": "eval", "step": 40, "loss": 4.25, "perplexity": math.exp(4.25), "accuracy": 0.2875,
     "predictions": 12345, "bits_per_byte": 1.8125},
]  # fmt: skip


class Cells(html.parser.HTMLParser):
    """Collects the rows of all tables, the text of the page, and the names of the elements, which must be nested."""

    def __init__(self, page: str):
        super().__init__()
        self.rows = []
        self.text = ""
        self.tags = []
        self.in_cell = False
        self.open = []
        self.images = {}  # what they show: their source
        self.feed(page)
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.open += [tag] if tag not in ("img", "meta", "wbr") else []
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.in_cell = True
            self.rows[-1].append("")
        if tag == "img":
            self.images[dict(attrs)["alt"]] = dict(attrs)["src"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"closed too early: {tag}"
        self.in_cell = self.in_cell and tag not in ("td", "th")

    def handle_data(self, data):
        self.text += data
        if self.in_cell:
            self.rows[-1][-1] += data

    def row(self, name: str) -> list[str]:
        return next(row[1:] for row in self.rows if row and row[0] == name)


def make_workdir(
    path, *, metrics=(*TRAIN, *EVALS), timing=TIMING, entropy=6.0, overrides=()
) -> Workdir:
    workdir = Workdir(str(path))
    write = lambda file, lines: file.write_text("".join(json.dumps(line) + "\n" for line in lines))  # noqa: E731
    write(workdir.metrics, metrics)
    write(workdir.timing, timing)
    workdir.config.write_text(configs.load("configs/base.py", list(overrides)).to_json())
    if entropy is not None:
        workdir.shards.mkdir(exist_ok=True)
        # a quarter is padding
        train = {"records": (10,), "padding_tokens": 80, "unigram_entropy": 1.0}
        manifest = manifest_of(
            32, train=train, validation={"unigram_entropy": entropy, "records": (3,)}
        )
        (workdir.shards / "manifest.json").write_text(manifest.to_json())
    return workdir


def page_of(workdir: Workdir) -> Cells:
    report.write(workdir)
    return Cells(workdir.report.read_text())
