"""Workdirs with a log, and the pages of their reports."""

import html
import json
import math
import re

from mlm import config as configs
from mlm.report import report
from mlm.workdir import Workdir
from tests.support.corpora import manifest_of


# A run that logs every 10 steps, evaluates and saves every 20, is killed after 34 and goes on from 20. Seconds.
def logged(kind: str, step: int, time: float, seconds: float = 0.0, **rest) -> dict:
    return {"kind": kind, "step": step, "time": time, "seconds": seconds} | rest


def _start(step: int, time: float, devices: int) -> dict:
    return logged("start", step, time, devices=devices, device="cpu")


def _trained(step: int, time: float, seconds: float, tokens: int) -> dict:
    speed = {"tokens_per_second": tokens, "rows_per_second": tokens / 100}
    return logged("train", step, time, seconds, **speed)


TIMING = [
    _start(0, 100.0, devices=8),
    logged("first_step", 1, 130.0, 1.0),  # 30 start
    _trained(10, 148.0, 18.0, 900),
    _trained(20, 168.0, 20.0, 1000),
    logged("eval", 20, 173.0, 5.0),
    logged("checkpoint", 20, 175.0, 2.0),
    _trained(30, 195.0, 20.0, 100),  # made again
    # 55 down
    _start(20, 250.0, devices=4),
    logged("first_step", 21, 260.0, 1.0),
    _trained(30, 296.0, 36.0, 500),
    # SIGTERM: 19 training, 3 checkpoints
    logged("checkpoint", 35, 318.0, 3.0),
    # 82 down
    _start(35, 400.0, devices=4),
    logged("first_step", 36, 410.0, 1.0),
    _trained(40, 426.0, 16.0, 700),
    logged("eval", 40, 430.0, 4.0),
    logged("checkpoint", 40, 431.0, 1.0),
    # nothing left to do
    _start(40, 9000.0, devices=4),
]
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


class Cells:
    """The rows of all tables, the text of a page, the names of its elements and what its images show."""

    def __init__(self, page: str):
        rows = re.findall(r"<tr.*?</tr>", page, re.DOTALL)
        cells = [re.findall(r"<t[dh].*?>(.*?)</t[dh]>", row, re.DOTALL) for row in rows]
        self.rows = [list(map(text_of, row)) for row in cells]
        self.text = text_of(page)
        self.tags = re.findall(r"<(\w+)", page)
        self.images = dict(re.findall(r'<img alt="(.*?)" src="(.*?)"', page))

    def row(self, name: str) -> list[str]:
        return next(row[1:] for row in self.rows if row and row[0] == name)


def text_of(markup: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", markup))


def make_workdir(
    path, *, metrics=(*TRAIN, *EVALS), timing=TIMING, entropy=6.0, overrides=()
) -> Workdir:
    workdir = Workdir(str(path))
    for file, lines in ((workdir.metrics, metrics), (workdir.timing, timing)):
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
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
