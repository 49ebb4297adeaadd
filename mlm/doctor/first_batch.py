"""The masks of a run's first batch, as the step will draw them: their rates, and some rows for a person to read.

Dimensions: B rows, L tokens in a row, K predictions in a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from ml_collections import ConfigDict
from rich.console import RenderableType
from rich.text import Text

from mlm.config_rules import parse_ranges
from mlm.data import skip_batches, tokenizer
from mlm.data.manifest import Manifest
from mlm.text import printable

SHOWN = 3  # rows
SIGMAS = 5.0  # of a share that is drawn: more is no chance
COLORS = {"mask": "red", "random": "magenta", "kept": "cyan"}


def look(
    config: ConfigDict, manifest: Manifest, special: tuple[int, ...], folder: str | None
) -> tuple[str, str, str, list[list[Any]]]:
    """Returns (level, what, how to mend it, rows of the batch as `pieces`).

    Args:
      config, manifest: of the run.
      special: ids that must neither be predicted nor be drawn as a replacement, but for the mask itself.
      folder: of the tokenizer; None to show no rows.
    """
    import jax

    from mlm.data import batches
    from mlm.data.dataset_info import DatasetInfo
    from mlm.model import factory

    rows = config.data.global_batch
    before = skip_batches.batch_of(1, parse_ranges(config.data.skip_batches)) - 1
    order = {"seed": config.data.seed, "global_batch": rows, "lanes": config.data.lanes}
    stream = batches.train_batches(manifest, split="train", start_step=before, rows=(0, rows), **order)
    batch = next(stream)
    starts_V = None
    if config.masking.kind != "token":
        starts_V = tokenizer.word_starts(folder or "the workdir", key=f"config.masking.kind = {config.masking.kind}")
    masking = factory.make_masking(config.masking.to_dict(), DatasetInfo.from_manifest(manifest), starts_V)
    columns = (batch[key] for key in ("input_ids", "attention_mask", "record_id", "epoch"))
    masked = jax.device_get(jax.jit(masking)(jax.random.key(config.masking.seed), *columns))
    kinds_BxL = kinds_of(batch["input_ids"], masked, manifest.special_ids["mask"])
    level, what, mend = judge(config, batch, masked.ids_BxL, kinds_BxL, special)
    shown = []
    if folder is not None:
        tok = tokenizer.load_fast(folder)
        for ids_L, read_L, kinds_L in list(zip(batch["input_ids"], masked.ids_BxL, kinds_BxL, strict=True))[:SHOWN]:
            shown.append(list(pieces(tok, ids_L, read_L, kinds_L)))
    return level, what, mend, shown


def kinds_of(ids_BxL: np.ndarray, masked: Any, mask_id: int) -> np.ndarray:
    """Returns "mask", "random" or "kept" where a token is predicted, "" elsewhere."""
    kinds_BxL = np.full(ids_BxL.shape, "", "U6")
    row_N, slot_N = np.nonzero(masked.weights_BxK > 0)
    place = row_N, masked.positions_BxK[row_N, slot_N]
    read_N, original_N = masked.ids_BxL[place], ids_BxL[place]
    kinds_BxL[place] = np.select([read_N == mask_id, read_N == original_N], ["mask", "kept"], "random")
    return kinds_BxL


def judge(
    config: ConfigDict,
    batch: dict[str, np.ndarray],
    read_BxL: np.ndarray,
    kinds_BxL: np.ndarray,
    special: tuple[int, ...],
) -> tuple[str, str, str]:
    """Returns (level, what, how to mend it) of the masks of a batch."""
    ids_BxL = batch["input_ids"]
    ordinary_BxL = (batch["attention_mask"] > 0) & ~np.isin(ids_BxL, special)
    predicted_BxL = kinds_BxL != ""
    count, ordinary = int(predicted_BxL.sum()), int(ordinary_BxL.sum())
    forbidden = int((predicted_BxL & ~ordinary_BxL).sum())
    drawn = int(np.isin(read_BxL[kinds_BxL == "random"], special).sum())
    if forbidden or drawn:
        what = f"{forbidden} special tokens are predicted, and {drawn} drawn as a replacement"
        return "wrong", what, "the manifest's special ids are not the tokenizer's: write the shards again"
    if not count:
        return "wrong", "nothing is predicted", "see masking.rate, and whether the rows hold text"
    share, wanted = count / ordinary, config.masking.rate
    per_row = predicted_BxL.sum(1)
    kept = 1 - config.masking.mask_share - config.masking.random_share
    shares = {"mask": config.masking.mask_share, "random": config.masking.random_share, "kept": max(kept, 0.0)}
    found = {kind: float((kinds_BxL == kind).sum()) / count for kind in shares}
    odd = [k for k, p in shares.items() if abs(found[k] - p) > SIGMAS * (p * (1 - p) / count) ** 0.5 + 1 / count]
    # A row's number of predictions is rounded at random: a deviation of half a token a row at most.
    off = abs(share - wanted) > (SIGMAS * 0.5 * len(ids_BxL) ** 0.5 + 1) / ordinary
    words = ", ".join(f"{found[kind]:.1%} {kind} ({p:g})" for kind, p in shares.items())
    what = f"{share:.2%} of the ordinary tokens are predicted (masking.rate = {wanted:g}), {per_row.min()} to "
    what += f"{per_row.max()} in a row; of them {words}; special tokens never"
    if off or odd:
        return "doubtful", what, "the masks are not what config.masking says: see mlm/model/masking.py"
    return "fine", what, ""


def pieces(tok: Any, ids_L: np.ndarray, read_L: np.ndarray, kinds_L: np.ndarray) -> Iterator[tuple[str, str, str]]:
    """Yields (text, kind, what the model reads there) of a row; the kind is "" where nothing is predicted."""
    ids = ids_L.tolist()

    def text(stop: int) -> str:
        return tok.decode(ids[:stop], skip_special_tokens=False)

    begin = 0
    for place in [*np.flatnonzero(kinds_L != "").tolist(), len(ids)]:
        if place > begin:
            yield text(place)[len(text(begin)) :], "", ""
        if place < len(ids):
            read = tok.decode([int(read_L[place])], skip_special_tokens=False)
            yield text(place + 1)[len(text(place)) :], str(kinds_L[place]), read.strip()
        begin = place + 1


def shown(batch: list[list[tuple[str, str, str]]]) -> Iterator[RenderableType]:
    """Yields lines for a person: [token] is masked, [token>other] replaced, [token=] kept."""
    if batch:
        yield ""
        yield "rows of the first batch: [token] is masked, [token>other] replaced by another, [token=] kept"
    ends = {"mask": "", "kept": "="}
    for row in batch:
        line = Text("  ")
        for text, kind, read in row:
            text = text.replace("\n", " ")
            if not kind:
                line.append(printable(text))
                continue
            line.append(text[: len(text) - len(text.lstrip(" "))])
            line.append(printable(f"[{text.strip(' ')}{ends.get(kind, '>' + read)}]"), COLORS[kind])
        yield ""
        yield line
