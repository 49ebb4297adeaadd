"""The command `export`: a transformers folder, and the proof that it is the model that was trained.

    config.json, model.safetensors, flax_model.msgpack    the model, with the tokenizer's vocabulary
    tokenizer.json, ...                                   the tokenizer, copied
    README.md, loss.png, run_config.json                  the model card, the config of the run
    evaluation.json                                       what `evaluate` has found so far
    proof.json, proof.safetensors                         texts, their ids, logits and fillings: see `Proof`

Dimensions: B rows, L tokens in a row, K positions in a row.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import flax
import jax
import numpy as np
import transformers
from flax.serialization import to_bytes
from safetensors.numpy import save_file
from transformers import FlaxRobertaForMaskedLM, PreTrainedTokenizerFast, RobertaConfig

from mlm import logs
from mlm.data import tokenizer
from mlm.errors import DamageError, InputError
from mlm.export import model_card, verify_export
from mlm.export.card_history import History
from mlm.inference import fill_mask
from mlm.model import weights
from mlm.paths import UPath, is_begun, is_remote, replacing
from mlm.pretrained import load
from mlm.pretrained.load import Pretrained

PROOF = "proof.json"  # written last: a folder with it is an export
TOP_K = 5
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
# What the tokenizer and the model are compared on: masks first, last, alone, twice, inside a word; figures, letters
# that a vocabulary may lack, and white space. A row as long as the model's positions comes on top.
TEXTS = (
    "The function returns a <mask> of all elements in the list.",
    "If the file does not <mask>, an error is raised and the <mask> is closed.",
    "<mask> the first argument is None, the default value of 0.5 is used.",
    "It was the best of times, it was the worst of <mask>",
    "Compute the mean of an array along the given ax<mask>; see also `numpy.sum()`.",
    "In 1905 he moved  to\tZürich, where the naïve café \N{EM DASH} 東京 \N{THUMBS UP SIGN} \N{EM DASH} <mask> stood.",
    "<mask>",
)
FILLER = "The name of the model is read from the file, and the value of each key is set to that of the default config."


def export(
    trained: Pretrained,
    folder: UPath,
    *,
    scores: dict[str, Any] | None,
    name: str,
    torch_python: str = "",
    history: History | None = None,
) -> None:
    """Writes a model as a transformers folder; one that is there is replaced when the new one is complete and proven.

    The weights are read back from both files and must give the logits of `trained`.

    Args:
      trained: the model.
      folder: to write; absent, or an earlier export. On gs:// its files are replaced one by one, the proof last.
      scores: of the evaluation, for the model card; None if there are none.
      name: of the model, for the card.
      torch_python: a Python interpreter with torch and transformers that loads the folder and repeats the proof; ""
        for none.
      history: of the run, for the model card; None if there is none.

    Raises:
      InputError: `folder` is something else than an export; the tokenizer does not fit the model; `torch_python`
        can't be run or lacks a package.
      DamageError: what was written does not give the same ids, logits or fillings.
    """
    tok = fitting_tokenizer(trained)

    def prove(new: Path) -> None:
        model_card.write(new, trained, tok.mask_token, scores=scores, name=name, history=history)
        _check_files(write_proof(trained, tok, new), new)

    write_folder(trained, folder, prove, torch_python)


def fitting_tokenizer(trained: Pretrained) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of a model; raises InputError if it is another one's."""
    tok = tokenizer.load(trained.tokenizer)
    if len(tok) != trained.config.vocab_size:
        raise InputError(
            f"{trained.source}: has {trained.config.vocab_size} vocabulary entries, its tokenizer {trained.tokenizer} "
            f"has {len(tok)}; use the tokenizer that the model was trained with."
        )
    return tok


def write_folder(trained: Pretrained, folder: UPath, prove: Callable[[Path], None], torch_python: str) -> None:
    """Writes a folder as `export` says; `prove` writes the card and the proof into it, and checks what it can."""
    if folder.exists() and not (folder / PROOF).is_file() and not is_begun(folder, last=PROOF):
        raise InputError(
            f"{folder}: is there and is no export (it holds no {PROOF}); name another folder, or move it away."
        )
    with _replacing(folder) as new:
        write_model(trained, new)
        for file in TOKENIZER_FILES:
            if (UPath(trained.tokenizer) / file).is_file():
                _copy(UPath(trained.tokenizer) / file, UPath(new / file))
        if trained.run_config is not None:
            (new / "run_config.json").write_text(json.dumps(trained.run_config, indent=1) + "\n", encoding="utf-8")
        prove(new)
        if (folder / logs.RESULTS).is_file():  # each entry says which weights it is of
            _copy(folder / logs.RESULTS, UPath(new / logs.RESULTS))
        if torch_python:
            _check_in_torch(torch_python, new)
        for file in new.iterdir():  # safetensors writes files that no one else can read
            file.chmod((new / PROOF).stat().st_mode)


def write_model(trained: Pretrained, folder: Path) -> None:
    """Writes config.json and the parameters, float32, under PyTorch's names and under Flax's."""
    config = RobertaConfig.from_dict(trained.config.to_dict())
    config.dtype = "float32"
    config.save_pretrained(str(folder))
    save_file(weights.to_torch(trained.params), str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "flax_model.msgpack").write_bytes(to_bytes(trained.params))


class Proof(NamedTuple):
    """What another implementation must reproduce: one entry a text."""

    ids: list[list[int]]
    positions: list[list[int]]  # the first, the middle and the last token, and the first four masks
    logits: list[np.ndarray]  # [K, V] at those positions; all texts but the last are one padded batch


def write_proof(trained: Pretrained, tok: PreTrainedTokenizerFast, folder: Path) -> Proof:
    """Writes proof.json and proof.safetensors.

    {"rows": [{"text", "ids", "positions", "fillings"}, ...], "top_k", "made_with": {package: version}}; the logits of
    a row are "logits.{row}" in proof.safetensors.
    """
    texts = proof_texts(trained, tok)
    ids = [tok(text)["input_ids"] for text in texts]
    positions = [
        sorted({0, len(row) // 2, len(row) - 1, *[i for i, token in enumerate(row) if token == tok.mask_token_id][:4]})
        for row in ids
    ]
    logits = _logits(trained, ids, positions)
    top_k = min(TOP_K, trained.config.vocab_size)
    fillings = fill_mask.FillMask(trained, tok, top_k)(texts)
    rows = zip(texts, ids, positions, fillings, strict=True)
    content = {
        "made_with": {module.__name__: module.__version__ for module in (jax, flax, transformers)},
        "top_k": top_k,
        "rows": [dict(zip(("text", "ids", "positions", "fillings"), row, strict=True)) for row in rows],
    }
    save_file({f"logits.{row}": values for row, values in enumerate(logits)}, str(folder / "proof.safetensors"))
    (folder / PROOF).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return Proof(ids, positions, logits)


def proof_texts(trained: Pretrained, tok: PreTrainedTokenizerFast) -> list[str]:
    """Returns the TEXTS that fit into the model's positions, and, at the end, one that fills them to the last."""
    longest = fill_mask.longest_row(trained)
    texts = [text.replace("<mask>", tok.mask_token) for text in TEXTS]
    words = FILLER.split() * longest
    while len(ids := tok(" ".join([*words, tok.mask_token]))["input_ids"]) > longest and words:
        words = words[: len(words) * longest // (len(ids) + 1)]  # fewer, however few they are
    long = " ".join([*words, *[tok.mask_token] * (longest - len(ids) + 1)])
    return [text for text in (*texts, long) if len(tok(text)["input_ids"]) <= longest]


def _logits(trained: Pretrained, ids: list[list[int]], positions: list[list[int]]) -> list[np.ndarray]:
    """Returns float32 logits [K, V] of each row at its positions, with the rows batched as `Proof` says."""
    forward = jax.jit(trained.network.masked_logits)
    found: list[np.ndarray] = []
    for rows in (slice(0, -1), slice(-1, None)):
        if not ids[rows]:
            continue
        ids_BxL, attention_BxL = fill_mask.pad(ids[rows], max(map(len, ids[rows])), trained.config.pad_token_id)
        positions_BxK, _ = fill_mask.pad(positions[rows], max(map(len, positions[rows])), 0)
        with jax.default_matmul_precision("highest"):  # float32 products on a TPU or GPU too
            logits_BxKxV = jax.device_get(forward(trained.params, ids_BxL, attention_BxL, positions_BxK))
        found += [np.array(logits[: len(where)]) for logits, where in zip(logits_BxKxV, positions[rows], strict=True)]
    return found


def _check_files(proof: Proof, folder: Path) -> None:
    """Raises DamageError unless both weight files, read back, give the logits of the proof."""
    # The longest row goes through transformers' own Flax class: its head on every position, its position numbers.
    try:
        found = _logits(read_back(folder, load.LM_HEAD), proof.ids, proof.positions)
        stock = FlaxRobertaForMaskedLM.from_pretrained(str(folder), trust_remote_code=False)
        with jax.default_matmul_precision("highest"):
            stock_LxV = np.asarray(stock(np.asarray(proof.ids[-1:], np.int32)).logits[0])
    except (InputError, OSError, ValueError) as error:
        raise DamageError(f"what export wrote can't be read back ({error}); look at the disk, and try again.") from None
    check_logits("model.safetensors", proof.logits, found)
    check_logits("flax_model.msgpack", proof.logits[-1:], [stock_LxV[proof.positions[-1]]])


def read_back(folder: Path, head: str) -> Pretrained:
    """Returns the model of the model.safetensors that was written, which the other file can't stand in for."""
    if not (folder / "model.safetensors").is_file():
        raise InputError(f"{folder}: has no model.safetensors")
    return load.load(str(folder), head=head, flag="")


def check_logits(file: str, wanted: list[np.ndarray], found: list[np.ndarray]) -> None:
    """Says how far what was read back from a file is from what it should be; raises DamageError if too far."""
    worst = float(np.max([np.max(np.abs(one - other)) for one, other in zip(wanted, found, strict=True)]))
    if not worst < verify_export.LOGITS:  # NaN is no proof either
        raise DamageError(
            f"{file}: read back, its logits differ from the trained model's by {worst:.1e}; nothing was exported: look "
            "at the disk, and export again."
        )
    print(f"export: {file} read back, largest difference of the logits {worst:.1e}", file=sys.stderr)


def _check_in_torch(python: str, folder: Path) -> None:
    """Runs mlm/export/verify_export.py in another interpreter; raises as `export` says."""
    command = [python, verify_export.__file__, str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise InputError(f"--torch={python}: can't be run ({error.strerror}); name a Python interpreter.") from None
    if done.returncode == 2:
        raise InputError(f"--torch={python}: {done.stderr.strip().splitlines()[-1]}")
    sys.stderr.writelines(f"export: {line}\n" for line in done.stdout.splitlines())
    if done.returncode != 0:
        wrong = [line for line in done.stdout.splitlines() if line.startswith("WRONG")] or done.stderr.splitlines()[-1:]
        raise DamageError(
            f"--torch={python}: the export is not proven ({' '.join(wrong)}); nothing was exported, and an earlier "
            "export is as it was."
        )


@contextmanager
def _replacing(folder: UPath) -> Iterator[Path]:
    """Yields an empty local folder that becomes `folder` at the end, unless something was raised."""
    if is_remote(folder):
        with replacing(folder, last=PROOF) as new:
            new.mkdir()
            yield new
        return
    target = Path(str(folder))
    temporary = target.with_name(f".{target.name}.tmp")
    new, old = temporary / "new", temporary / "old"
    if old.exists() and not target.exists():
        old.rename(target)  # a process was killed between the two renames below
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        new.mkdir(parents=True)
        yield new
        if target.exists():
            target.rename(old)
        new.rename(target)
    except OSError as error:
        if old.exists() and not target.exists():
            old.rename(target)
        raise InputError(f"{folder}: can't be written ({error.strerror or error}); make room there.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _copy(source: UPath, target: UPath) -> None:
    with source.open("rb") as reader, target.open("wb") as writer:
        shutil.copyfileobj(reader, writer, 1 << 20)
