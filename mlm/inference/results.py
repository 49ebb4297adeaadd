"""Where the scores of `evaluate` go: to a terminal or a pipe, and to evaluation.json beside the model."""

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mlm import cluster, logs
from mlm.errors import DamageError
from mlm.paths import UPath, os_errors, write_text
from mlm.pretrained import load, locate
from mlm.text import say, show, table
from mlm.training import sharding
from mlm.workdir import Workdir

Z = 1.959964  # of a 95% interval
FEW = 2000  # masked tokens: on fewer, another draw of the masks changes the third digit of the loss


def publish(result: dict[str, Any], shown: Sequence[Any], *, as_json: bool) -> None:
    """Prints scores from process 0: on a terminal as lines and tables, into a pipe and for --json as a line of JSON."""
    if not cluster.is_primary():
        return
    if as_json or not sys.stdout.isatty():
        print(json.dumps(logs.finite(result)))
    if not as_json:
        show(*shown, out=sys.stdout if sys.stdout.isatty() else sys.stderr)


def score_table(columns: dict[str, dict[str, Any]]) -> Any:
    """Returns a table of scores: a row for each of logs.SCORES and each metric of one's own, a column for each name."""
    specs = logs.SCORES | {name: (name, ".4g") for name in logs.own_metrics(columns.values())}
    rows = [
        (name, *(format(scores[key], spec) if key in scores else "" for scores in columns.values()))
        for key, (name, spec) in specs.items()
        if any(key in scores for scores in columns.values())
    ]
    return table("", *(f">{name}" for name in columns), rows=rows, indent=2)


def add_results(model: str, workdir: Workdir, entries: dict[str, dict[str, Any]]) -> None:
    """Adds entries to evaluation.json beside the model, in the workdir if it is a name on the Hub; keeps the others."""
    if not cluster.is_primary():
        return
    folder = UPath(locate.split_step(model)[0])
    file = (folder if model and folder.is_dir() else workdir.root) / logs.RESULTS
    finite = {key: logs.finite(values) for key, values in entries.items()}
    if keep(file, lambda: json.dumps(logs.read_object(file) | finite, indent=1)):
        say(f"  written to {file}")


def keep(file: UPath, make: Callable[[], str]) -> bool:
    """Writes scores beside the model; prints an error if they can't be written, as in somebody else's folder."""
    try:
        with os_errors():
            write_text(file, make() + "\n")
        return True
    except (DamageError, OSError) as error:
        reason = error if isinstance(error, DamageError) else f"{file}: {error.strerror or error}."
        say(f"evaluate: the scores were not written: {reason}")
        return False


def weights_name(model: load.Pretrained) -> str:
    """Returns the step of a checkpoint, or a digest of other weights: the name of their scores in evaluation.json."""
    if model.step is not None:
        return f"step {model.step}"
    digest = hashlib.sha256()
    for name, value in sharding.named_leaves(model.params):
        digest.update(name.encode() + value.tobytes())
    return f"weights {digest.hexdigest()[:12]}"


def remark_on_few(scores: dict[str, Any]) -> str:
    """Returns a sentence about a split that tells little, "" of one that is large enough."""
    count = scores.get("predictions", FEW)
    if count >= FEW:
        return ""
    error = scores.get("loss_se_records")
    known = "is not known" if error is None else f"is {error:.4f} nats"
    return f"only {count:,} masked tokens: the standard error of the loss {known}"
