"""The masks of a run's first batch, as the step will draw them: their rates, and some rows to read.

Dimensions: B rows, L tokens in a row, K predictions in a row, N predictions in the batch.
"""

from collections.abc import Iterator

import jax
import numpy as np
from ml_collections import ConfigDict
from rich.console import RenderableType
from rich.text import Text
from tokenizers import Tokenizer

from mlm import config as configs
from mlm.data.manifest import DatasetInfo, Manifest
from mlm.model.masking import WordMasking
from mlm.tasks.pretraining import Pretraining, train_batches, word_starts
from mlm.text import printable
from mlm.training import sharding, train
from mlm.workdir import Workdir

SHOWN = 3  # rows
DEVIATIONS = 6  # standard deviations: once in 10^9 by chance
COLORS = {"mask": "red", "random": "magenta", "kept": "cyan"}
# text, kind ("" where nothing is predicted), what the model reads there
Piece = tuple[str, str, str]


def draw(
    config: ConfigDict,
    manifest: Manifest,
    workdir: Workdir,
    pretraining: type[Pretraining] | None = None,
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Returns (the first batch, ids [B, L] that the model reads, "mask", "random", "kept" or "" [B, L]).

    With data.short_length, its rows are the short ones.
    """
    # one device of this machine, which may lack the kernel of the run's attention
    kernel = "xla" if config.model.attention == "xla" else "auto"
    task = (pretraining or Pretraining)(
        configs.replace(config, {"model.attention": kernel}),
        DatasetInfo.from_manifest(manifest),
        mesh=sharding.make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1]),
        word_starts_V=word_starts(config, workdir),
        workdir=workdir,
        manifest=manifest,
    )
    batch = next(train_batches(config, manifest, task.mesh, task.stages, start=0))
    batch = train.split_rows(batch, config.data.short_length or manifest.length)
    batch, masked = jax.device_get((batch, jax.jit(task.inputs)(batch, 0)))
    row_N, prediction_N = np.nonzero(masked.weights_BxK > 0)
    place = row_N, masked.positions_BxK[row_N, prediction_N]
    read_N = masked.ids_BxL[place]
    original_N = batch["input_ids"][place]
    kinds_BxL = np.full(masked.ids_BxL.shape, "", "U6")
    is_mask_N = read_N == manifest.special_ids["mask"]
    kinds_BxL[place] = np.select([is_mask_N, read_N == original_N], ["mask", "kept"], "random")
    return batch, masked.ids_BxL, kinds_BxL


def judge(
    config: ConfigDict,
    batch: dict[str, np.ndarray],
    read_BxL: np.ndarray,
    kinds_BxL: np.ndarray,
    special: tuple,
    *,
    draws_as_set: bool = True,
) -> tuple[str, str, str]:
    """Returns (level, what, fix) for the masks that `draw` returns; no `special` id may be predicted or drawn.

    `draws_as_set`: by the config's masking, not by a class's own, so that the rates are those of the config.
    """
    ordinary_BxL = (batch["attention_mask"] > 0) & ~np.isin(batch["input_ids"], special)
    predicted_BxL = kinds_BxL != ""
    count = int(predicted_BxL.sum())
    ordinary = int(ordinary_BxL.sum())
    forbidden = int((predicted_BxL & ~ordinary_BxL).sum())
    drawn = int(np.isin(read_BxL[kinds_BxL == "random"], special).sum())
    if forbidden or drawn:
        what = f"{forbidden} special tokens are predicted, and {drawn} drawn as a replacement"
        return (
            "error",
            what,
            "the manifest's special ids are not the tokenizer's: write the shards again",
        )
    if not count:
        return "error", "nothing is predicted", "check masking.rate, and whether the rows hold text"
    masking = config.masking
    rate = count / ordinary
    rest = (1 - masking.mask_share) / 2
    wanted = {"mask": masking.mask_share, "random": rest, "kept": rest}
    counted = {kind: float((kinds_BxL == kind).sum() / count) for kind in wanted}
    kinds = ", ".join(f"{counted[kind]:.1%} {kind} ({share:g})" for kind, share in wanted.items())
    per_row = predicted_BxL.sum(1)
    what = (
        f"{rate:.2%} of the ordinary tokens are predicted (masking.rate = {masking.rate:g}), "
        f"{per_row.min()} to {per_row.max()} in a row; of them {kinds}; special tokens never"
    )
    # tokens of a word or a span share their fate
    unit = 1 if masking.kind == "token" else WordMasking.longest
    is_off = _is_off(rate, masking.rate, ordinary / unit)
    is_off |= any(_is_off(counted[kind], share, count / unit) for kind, share in wanted.items())
    if is_off and draws_as_set:
        return (
            "error",
            what,
            "these are not the rates that were set: look for what changes random numbers",
        )
    return "ok", what, ""


def _is_off(share: float, wanted: float, draws: float) -> bool:
    """Returns whether a share of so many independent draws is further from the wanted one than chance explains."""
    return abs(share - wanted) > DEVIATIONS * (wanted * (1 - wanted) / draws) ** 0.5 + 1 / draws


def pieces(
    tok: Tokenizer, ids_L: np.ndarray, read_L: np.ndarray, kinds_L: np.ndarray
) -> Iterator[Piece]:
    """Yields the pieces of a row; each predicted token is one, and so is the text between two of them."""
    ids = ids_L.tolist()

    def text(start: int, stop: int) -> str:
        before, both = (tok.decode(ids[:end], skip_special_tokens=False) for end in (start, stop))
        return both[len(before) :]

    begin = 0
    for place in [*np.flatnonzero(kinds_L != "").tolist(), len(ids)]:
        if place > begin:
            yield text(begin, place), "", ""
        if place < len(ids):
            read = tok.decode([int(read_L[place])], skip_special_tokens=False)
            yield text(place, place + 1), str(kinds_L[place]), read.strip()
        begin = place + 1


def render(batch: list[list[Piece]]) -> Iterator[RenderableType]:
    """Yields lines: [token] is masked, [token>other] replaced, [token=] kept."""
    if batch:
        yield ""
        yield "rows of the first batch: [token] is masked, [token>other] replaced by another, [token=] kept"
    for row in batch:
        line = Text("  ")
        for text, kind, read in row:
            text = text.replace("\n", " ")
            if not kind:
                line.append(printable(text))
                continue
            end = {"mask": "", "kept": "="}.get(kind, f">{read}")
            line.append(text[: len(text) - len(text.lstrip(" "))])
            line.append(printable(f"[{text.strip(' ')}{end}]"), COLORS[kind])
        yield ""
        yield line
