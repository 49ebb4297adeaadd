"""Writes a transformers folder, with the proof that it is the model that was trained.

    config.json, model.safetensors, flax_model.msgpack    the model, with the tokenizer's vocabulary
    tokenizer.json, ...                                   the tokenizer, copied
    README.md, loss.png, run_config.json                  the model card, the config of the run
    evaluation.json                                       what `evaluate` has found so far
    proof.json, proof.safetensors                         texts, their ids, logits and answers: see `_proof`

A classifier is one of transformers' ...ForSequenceClassification or ...ForTokenClassification. Flax's file is there for
the families that transformers has in Flax.

Dimensions: B rows, L tokens in a row, K positions in a row, V vocabulary entries, C classes, 1 for regression.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax
import jax
import numpy as np
import transformers
from flax.serialization import to_bytes
from safetensors.numpy import save_file
from transformers import PreTrainedTokenizerFast

from mlm import logs
from mlm.data import tokenizer
from mlm.data.tokenizer_checks import vocabulary_size
from mlm.errors import DamageError, InputError
from mlm.export import model_card, verify_export
from mlm.inference import fill_mask
from mlm.inference.classify_texts import TextClassifier
from mlm.model import classifier, weights
from mlm.model.bert import second_texts
from mlm.paths import UPath, is_begun, is_remote, replacing
from mlm.pretrained import load
from mlm.pretrained.load import Pretrained
from mlm.report.summary import RunSummary

PROOF = "proof.json"  # written last: a folder with it is an export
TOP_K = 5
TASKS = ("text-classification", "token-classification")  # transformers' names
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TOKENIZER_FILES += ("vocab.json", "merges.txt", "vocab.txt")
MODEL_INPUTS = ["input_ids", "attention_mask"]
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


class Proof(NamedTuple):
    """What another implementation must reproduce."""

    content: dict[str, Any]  # of proof.json
    tensors: dict[str, np.ndarray]  # of proof.safetensors
    forward: Callable[[Pretrained], list[np.ndarray]]  # a model's logits of each row
    logits: list[np.ndarray]
    last_row: tuple[list[int], Any]  # ids of the last, longest row, and the positions of its logits


def export(
    model: Pretrained,
    folder: UPath,
    *,
    scores: dict[str, Any] | None,
    name: str,
    torch_python: str = "",
    history: RunSummary | None = None,
) -> None:
    """Writes a model as a transformers folder, once its files, read back, give its logits; replaces an earlier export.

    Args:
      folder: absent, or an earlier export. On gs:// its files are replaced one by one, the proof last.
      scores, name, history: for the model card, see `model_card.write`.
      torch_python: a Python with torch and transformers, which loads the folder and repeats the proof; "" for none.
    """
    tok, is_classifier = tokenizer.load(model.tokenizer), load.CLASSIFIER in model.params
    if (size := vocabulary_size(tok.backend_tokenizer)) != model.config.vocab_size:
        raise InputError(
            f"{model.source}: has {model.config.vocab_size} vocabulary entries, its tokenizer {model.tokenizer} "
            f"has {size}; use the tokenizer that the model was trained with."
        )
    if folder.exists() and not (folder / PROOF).is_file() and not is_begun(folder, last=PROOF):
        raise InputError(f"{folder}: is not an export (it has no {PROOF}); name another folder, or move it away.")
    try:
        with replacing(folder, last=PROOF) as new:
            new.mkdir()
            write_model(model, new)
            for file in TOKENIZER_FILES:
                if (source := UPath(model.tokenizer) / file).is_file():
                    (new / file).write_bytes(source.read_bytes())
            _fit_tokenizer_config(new / "tokenizer_config.json", model)
            if model.run_config is not None:
                (new / "run_config.json").write_text(json.dumps(model.run_config, indent=1) + "\n", encoding="utf-8")
            if is_classifier:
                model_card.write_classifier(new, model, scores=scores, name=name)
            else:
                model_card.write(new, model, tok.mask_token, scores=scores, name=name, history=history)
            proof = (_classifier_proof if is_classifier else _proof)(model, tok)
            save_file(proof.tensors, str(new / "proof.safetensors"))
            made_with = {"made_with": {module.__name__: module.__version__ for module in (jax, flax, transformers)}}
            content = json.dumps(proof.content | made_with, indent=1, ensure_ascii=False)
            (new / PROOF).write_text(content + "\n", encoding="utf-8")
            _check_tokenizer(new, proof, _inputs(model))
            check_files(new, proof, load.CLASSIFIER if is_classifier else load.LM_HEAD)
            if (folder / logs.RESULTS).is_file():  # each entry names its weights
                (new / logs.RESULTS).write_bytes((folder / logs.RESULTS).read_bytes())
            if torch_python:
                _check_in_torch(torch_python, new)
            for file in new.iterdir():  # safetensors writes files that no one else can read
                file.chmod((new / PROOF).stat().st_mode)
    except OSError as error:
        if is_remote(folder):
            raise
        raise InputError(f"{folder}: can't be written ({error.strerror or error}); free some space there.") from error


def _fit_tokenizer_config(file: Path, model: Pretrained) -> None:
    """Writes to tokenizer_config.json what the model reads; the tokenizer may be of another kind of model.

    token_type_ids are left out where all tokens have type 0 in training: BERT's tokenizer gives the second text of a
    pair type 1, which a BERT alone reads.
    """
    content = logs.read_object(file) | {"model_max_length": model.longest_row, "model_input_names": _inputs(model)}
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _inputs(model: Pretrained) -> list[str]:
    """Returns what the model reads of what a tokenizer gives."""
    marks_pairs = model.config.model_type == "bert" and model.config.sep_token_id is not None
    is_of_rows = load.CLASSIFIER in model.params and classifier.kind(model.config) != "tokens"
    return [*MODEL_INPUTS, "token_type_ids"] if marks_pairs and is_of_rows else MODEL_INPUTS


def _check_tokenizer(folder: Path, proof: Proof, inputs: list[str]) -> None:
    """Raises DamageError unless the tokenizer, read back, gives the proof's ids, and what the model takes alone."""
    tok = tokenizer.load(str(folder))
    for row in proof.content["rows"]:
        texts, longest = row.get("texts") or [row["text"]], proof.content.get("longest", len(row["ids"]))
        encoded = tok(*texts, truncation="longest_first", max_length=longest)
        if encoded["input_ids"] != row["ids"] or not set(encoded) <= set(inputs):
            what = f"its tokenizer, read back, gives other ids or {', '.join(encoded)} for {texts[0]!r:.80}"
            fix = "use the tokenizer that the model was trained with"
            raise DamageError(f"{folder}: {what}; nothing was exported: {fix}.")


def write_model(model: Pretrained, folder: Path) -> None:
    """Writes config.json and the parameters, float32, under PyTorch's names, and under Flax's if transformers can."""
    config = type(model.config).from_dict(model.config.to_dict())
    config.dtype = "float32"
    config.save_pretrained(str(folder))
    save_file(weights.to_torch(model.params), str(folder / "model.safetensors"), metadata={"format": "pt"})
    if _flax_class(model):
        (folder / "flax_model.msgpack").write_bytes(to_bytes(model.params))


def _flax_class(model: Pretrained) -> "type[transformers.FlaxPreTrainedModel] | None":
    """Returns transformers' Flax class of the model, None where it has none."""
    head = classifier.head_name(model.config) if load.CLASSIFIER in model.params else "MaskedLM"
    return model.family.flax_class(head)


def check_files(folder: Path, proof: Proof, head: str) -> None:
    """Raises DamageError unless both weight files give the logits of the proof, Flax's those of its last row."""
    ids, positions = proof.last_row
    try:
        if not (folder / "model.safetensors").is_file():  # flax_model.msgpack can't stand in for it
            raise InputError(f"{folder}: has no model.safetensors")
        again = load.load(str(folder), head=head, flag="")
        found = proof.forward(again)
        checks = [("model.safetensors", proof.logits, found)]
        if flax_class := _flax_class(again):
            reference = flax_class.from_pretrained(str(folder), trust_remote_code=False)
            with jax.default_matmul_precision("highest"):
                last = np.asarray(reference(**_columns(again, ids)).logits[0])[positions]
            checks.append(("flax_model.msgpack", proof.logits[-1:], [last]))
    except (InputError, OSError, ValueError) as error:
        raise DamageError(f"what export wrote can't be read back ({error}); check the disk, and try again.") from None
    for file, wanted, own in checks:
        worst = float(np.max([np.max(np.abs(one - other)) for one, other in zip(wanted, own, strict=True)]))
        if not worst < verify_export.LOGITS:  # NaN is no proof either
            raise DamageError(
                f"{file}: read back, its logits differ from the trained model's by {worst:.1e}; nothing was exported: "
                "check the disk, and export again."
            )
        print(f"export: {file} read back, largest difference of the logits {worst:.1e}", file=sys.stderr)


def _columns(model: Pretrained, ids: list[int]) -> dict[str, np.ndarray]:
    """Returns a row of ids, [1, L], as transformers' Flax classes read it."""
    columns = {"input_ids": np.asarray([ids], np.int32)}
    if "token_type_ids" not in _inputs(model):
        return columns
    types_1xL = second_texts(columns["input_ids"], np.ones((1, len(ids))), model.config.sep_token_id)
    return columns | {"token_type_ids": np.asarray(types_1xL, np.int32)}


def _proof(model: Pretrained, tok: PreTrainedTokenizerFast) -> Proof:
    """Returns the proof of a masked language model: logits [K, V] and fillings of some texts.

    The positions of a text are its first, middle and last token and its first four masks. proof.json holds {"rows":
    [{"text", "ids", "positions", "fillings"}, ...], "top_k", "made_with": {package: version}}, and proof.safetensors
    the logits of each row as "logits.{row}".
    """
    longest = model.longest_row
    filler = FILLER.split() * longest
    while len(row := tok(" ".join([*filler, tok.mask_token]), verbose=False)["input_ids"]) > longest and filler:
        filler = filler[: len(filler) * longest // (len(row) + 1)]  # always fewer
    long = " ".join([*filler, *[tok.mask_token] * (longest - len(row) + 1)])  # fills the positions to the last
    texts = [*(text.replace("<mask>", tok.mask_token) for text in TEXTS), long]
    texts = [text for text in texts if len(tok(text, verbose=False)["input_ids"]) <= longest]
    ids = [tok(text)["input_ids"] for text in texts]
    positions = [
        sorted({0, len(row) // 2, len(row) - 1, *[i for i, token in enumerate(row) if token == tok.mask_token_id][:4]})
        for row in ids
    ]
    logits = _logits(model, ids, positions)
    top_k = min(TOP_K, model.config.vocab_size)
    rows = zip(texts, ids, positions, fill_mask.FillMask(model, tok, top_k)(texts), strict=True)
    keys = ("text", "ids", "positions", "fillings")
    content = {"top_k": top_k, "rows": [dict(zip(keys, row, strict=True)) for row in rows]}
    tensors = {f"logits.{row}": own for row, own in enumerate(logits)}
    return Proof(content, tensors, lambda again: _logits(again, ids, positions), logits, (ids[-1], positions[-1]))


def _logits(model: Pretrained, ids: list[list[int]], positions: list[list[int]]) -> list[np.ndarray]:
    """Returns float32 logits [K, V] of each row at its positions: all rows but the last are one padded batch."""
    forward = jax.jit(model.module.logits)
    found: list[np.ndarray] = []
    for rows in (slice(0, -1), slice(-1, None)):
        if not ids[rows]:
            continue
        ids_BxL, attention_BxL = fill_mask.pad(ids[rows], max(map(len, ids[rows])), model.config.pad_token_id)
        positions_BxK, _ = fill_mask.pad(positions[rows], max(map(len, positions[rows])), 0)
        with jax.default_matmul_precision("highest"):  # float32 products on a TPU or GPU too
            logits_BxKxV = jax.device_get(forward(model.params, ids_BxL, attention_BxL, positions_BxK))
        found += [np.array(logits[: len(own)]) for logits, own in zip(logits_BxKxV, positions[rows], strict=True)]
    return found


def _classifier_proof(model: Pretrained, tok: PreTrainedTokenizerFast) -> Proof:
    """Returns the proof of a classifier: logits and scores of texts, or pairs of them, the last too long for it.

    proof.json holds {"task": transformers' name, "longest", "rows": [{"texts", "ids", "scores"}, ...], "made_with"},
    and proof.safetensors "logits" [B, C], all rows but the last as one padded batch. Of token labels, "scores" are
    those of each token, and the logits [L, C] of each row are "logits.{row}".
    """
    predictor, longest = TextClassifier(model, tok), model.longest_row
    plain = [text.replace("<mask>", "none") for text in TEXTS]
    long = " ".join([FILLER] * longest)  # a word is a token at least
    texts = [[text] for text in (*plain, long)]
    if len(predictor.columns) == 2:
        texts = [*([text, plain[-1]] for text in plain), [plain[1], plain[0]], [plain[0], long]]
    ids = [tok(*each, truncation="longest_first", max_length=longest)["input_ids"] for each in texts]
    logits = predictor.logits(ids)
    if predictor.of_tokens:
        scores, tensors = predictor.label_tokens(ids), {f"logits.{row}": own for row, own in enumerate(logits)}
    else:
        answers = predictor.classify(ids, max(len(predictor.names), 1))
        scores, tensors = [own.get("probabilities", own) for own in answers], {"logits": np.stack(logits)}
    rows = [dict(zip(("texts", "ids", "scores"), row, strict=True)) for row in zip(texts, ids, scores, strict=True)]
    content = {"task": TASKS[predictor.of_tokens], "longest": longest, "rows": rows}

    def forward(again: Pretrained) -> list[np.ndarray]:
        return TextClassifier(again, tokenizer.load(again.tokenizer)).logits(ids)

    return Proof(content, tensors, forward, logits, (ids[-1], ...))


def _check_in_torch(python: str, folder: Path) -> None:
    """Runs mlm/export/verify_export.py in another interpreter; raises as `export` says."""
    command = [python, verify_export.__file__, str(folder)]
    try:
        environment = os.environ | {"PYTHONIOENCODING": "utf-8"}
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", env=environment)
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
