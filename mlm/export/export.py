"""Writes a transformers folder, and checks that any reader gets the model that was trained.

    config.json, model.safetensors, flax_model.msgpack    the model, with the tokenizer's vocabulary
    tokenizer.json, ...                                   the tokenizer, copied
    README.md, loss.png, run_config.json                  the model card, the config of the run
    evaluation.json                                       the scores that `evaluate` has written so far
    proof.json, proof.safetensors                         texts, their ids, logits and answers: see reference.py

A classifier is one of transformers' ...ForSequenceClassification or ...ForTokenClassification.
Flax's file is there for the families that transformers has in Flax.
"""

import dataclasses
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.errors import FlaxError
from flax.serialization import msgpack_restore, to_bytes
from safetensors.numpy import save_file

from mlm import config as configs
from mlm import logs
from mlm.data import tokenizer
from mlm.entry import Entry
from mlm.errors import DamageError, InputError
from mlm.export import folder as export_folder
from mlm.export import model_card, reference, verify_export
from mlm.export.folder import PROOF
from mlm.export.reference import Reference
from mlm.model import weights
from mlm.model.module import SEQUENCES
from mlm.paths import UPath, replacing
from mlm.pretrained import load
from mlm.pretrained.load import Pretrained
from mlm.pretrained.locate import MSGPACK, SAFETENSORS
from mlm.report import summary
from mlm.tasks.changed_model import with_class
from mlm.workdir import Workdir

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
MODEL_INPUTS = ["input_ids", "attention_mask"]


def load_checkpoint(
    workdir: Workdir, entry: Entry, *, step: int | None = None, best: bool = False
) -> Pretrained:
    """Returns the model of a checkpoint, see `load.from_workdir`, by the class that made it."""
    model = load.from_workdir(workdir, head=None, step=step, best=best)
    configs.check_version(model.run_config, model.source)  # the card shows it
    return with_class(model, entry, command="export")


def export_checkpoint(
    model: Pretrained, workdir: Workdir, folder: UPath, *, torch_python: str = ""
) -> list[str]:
    """Exports the model of a workdir, with what its logs say of the run up to that step."""
    history = None
    if load.CLASSIFIER not in model.params:
        history = summary.gather(workdir, model.run_config, until=model.step)
    lines = logs.read(workdir.metrics, "eval")
    return export(
        model,
        folder,
        scores=next((line for line in reversed(lines) if line["step"] == model.step), None),
        name=workdir.root.name,
        torch_python=torch_python,
        history=history,
    )


def export(
    model: Pretrained,
    folder: UPath,
    *,
    scores: dict[str, Any] | None,
    name: str,
    torch_python: str = "",
    history: summary.RunSummary | None = None,
) -> list[str]:
    """Writes a model as a transformers folder, once its files, read back, give its logits; replaces an earlier export.

    Returns lines on what was proven.

    Args:
      folder: absent, empty or an earlier export. On gs:// its files are replaced one by one,
        proof.json last.
      scores, name, history: for the model card, see `model_card.write`.
      torch_python: a Python with torch and transformers, which loads the folder and checks it too;
        "" for none.
    """
    export_folder.check(folder)
    mask_token = tokenizer.load(model.tokenizer).mask_token
    with replacing(folder, last=PROOF) as new:
        new.mkdir()
        write_model(model, new)
        write_tokenizer(model, new)
        if model.run_config is not None:
            text = model.run_config.to_json(indent=1) + "\n"
            (new / "run_config.json").write_text(text, encoding="utf-8")
        model_card.write(new, model, mask_token, scores=scores, name=name, history=history)
        expected = reference.compute(model)
        expected.write(new)
        _check_tokenizer(new, expected, _inputs(model))
        lines = check_files(new, expected, model)
        if (folder / logs.RESULTS).is_file():  # each entry names its weights
            (new / logs.RESULTS).write_bytes((folder / logs.RESULTS).read_bytes())
        if not model.module.in_transformers:
            lines.append(
                f"transformers has no class for {type(model.module).__name__}: Flax weights alone are written, and not "
                "proven in PyTorch"
            )
        elif torch_python:
            lines += _check_in_torch(torch_python, new)
        for file in new.iterdir():  # safetensors writes files that no one else can read
            file.chmod((new / PROOF).stat().st_mode)
    return lines


def write_model(model: Pretrained, folder: Path) -> None:
    """Writes config.json and the parameters, float32, under PyTorch's names, and under Flax's if transformers can."""
    config = type(model.config).from_dict(model.config.to_dict())
    config.dtype = "float32"
    config.save_pretrained(str(folder))
    if model.module.in_transformers:
        save_file(
            weights.to_torch(model.params), str(folder / SAFETENSORS), metadata={"format": "pt"}
        )
    else:  # transformers' classes must not load it as another model
        name = type(model.module).__name__
        content = logs.read_object(folder / "config.json") | {
            "architectures": [name],
            "model_type": name.lower(),
        }
        (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if not model.module.in_transformers or model.family.flax_class(model.module.head_name):
        (folder / MSGPACK).write_bytes(to_bytes(model.params))


def write_tokenizer(model: Pretrained, folder: Path) -> None:
    """Copies the tokenizer's files, and fits tokenizer_config.json, perhaps another kind of model's, to this one."""
    for name in TOKENIZER_FILES:
        if (source := UPath(model.tokenizer) / name).is_file():
            (folder / name).write_bytes(source.read_bytes())
    file = folder / "tokenizer_config.json"
    content = logs.read_object(file) | {
        "model_max_length": model.longest_row,
        "model_input_names": _inputs(model),
    }
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _inputs(model: Pretrained) -> list[str]:
    """Returns the tokenizer's outputs that the model reads: token types only where training had others than 0.

    BERT's tokenizer gives type 1 to the second text of a pair, which a BERT alone reads.
    """
    marks_pairs = model.config.model_type == "bert" and model.config.sep_token_id is not None
    if marks_pairs and model.module.head_name == SEQUENCES:
        return [*MODEL_INPUTS, "token_type_ids"]
    return MODEL_INPUTS


def _check_tokenizer(folder: Path, expected: Reference, inputs: list[str]) -> None:
    """Raises DamageError unless the tokenizer, read back, gives the expected ids, and no column but the inputs."""
    tok = tokenizer.load(str(folder))
    for row in expected.content["rows"]:
        encoded = tok(
            *row["texts"], truncation="longest_first", max_length=expected.content["longest"]
        )
        if encoded["input_ids"] != row["ids"] or not set(encoded) <= set(inputs):
            raise DamageError(
                f"{folder}: its tokenizer, read back, gives other ids or {', '.join(encoded)} for "
                f"{row['texts'][0]!r:.80}; nothing was exported: use the tokenizer that the model was trained with."
            )


def check_files(folder: Path, expected: Reference, model: Pretrained) -> list[str]:
    """Raises DamageError unless both weight files give the expected logits, Flax's those of the last row."""
    try:
        logits_of = _read_back(folder, expected, model)
    except (InputError, OSError, ValueError, FlaxError) as error:
        raise DamageError(
            f"what export wrote can't be read back ({error}); check the disk, and try again."
        ) from None
    lines = []
    for file, logits in logits_of.items():
        pairs = zip(expected.logits[-len(logits) :], logits, strict=True)
        difference = float(np.max([np.max(np.abs(right - read)) for right, read in pairs]))
        if not difference < verify_export.LOGITS:  # NaN is not equal either
            raise DamageError(
                f"{file}: read back, its logits differ from the trained model's by {difference:.1e}; nothing was "
                "exported: check the disk, and export again."
            )
        lines.append(f"{file} read back, largest difference of the logits {difference:.1e}")
    return lines


def _read_back(folder: Path, expected: Reference, model: Pretrained) -> dict[str, list[np.ndarray]]:
    """Returns {file: its logits of the last rows}."""
    if not model.module.in_transformers:
        params = msgpack_restore((folder / MSGPACK).read_bytes())
        return {MSGPACK: expected.logits_by(dataclasses.replace(model, params=params))}
    if not (folder / SAFETENSORS).is_file():  # Flax's file can't stand in for it
        raise InputError(f"{folder}: has no {SAFETENSORS}")
    head = load.CLASSIFIER if load.CLASSIFIER in model.params else load.LM_HEAD
    read = load.load(str(folder), head=head, flag="")
    logits_of = {SAFETENSORS: expected.logits_by(read)}
    if flax_class := read.family.flax_class(read.module.head_name):
        # drawn initial values and a call without jit would take ten times as long
        flax_model, params = flax_class.from_pretrained(
            str(folder), trust_remote_code=False, _do_init=False
        )
        row = expected.content["rows"][-1]
        columns = tokenizer.load(str(folder))(
            *row["texts"],
            truncation="longest_first",
            max_length=expected.content["longest"],
            return_tensors="np",
        )
        forward = jax.jit(lambda params: flax_model(**columns, params=params).logits[0])
        with jax.default_matmul_precision("highest"):
            last = np.asarray(forward(params))
        logits_of[MSGPACK] = [last[row["positions"]] if "positions" in row else last]
    return logits_of


def _check_in_torch(python: str, folder: Path) -> list[str]:
    """Runs mlm/export/verify_export.py in another interpreter, returns its lines; raises as `export` says."""
    try:
        done = subprocess.run(
            [python, verify_export.__file__, str(folder)],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=os.environ | {"PYTHONIOENCODING": "utf-8"},
        )
    except OSError as error:
        raise InputError(
            f"--torch={python}: can't be run ({error.strerror}); name a Python interpreter."
        ) from None
    lines = done.stdout.splitlines()
    last = done.stderr.strip().splitlines()[-1:]
    if done.returncode == 2:
        raise InputError(f"--torch={python}: {last[0]}")
    if done.returncode != 0:
        wrong = [line for line in lines if line.startswith("WRONG")] or last
        raise DamageError(
            f"--torch={python}: the export is not proven ({' '.join(wrong)}); nothing was exported, and an earlier "
            "export is as it was."
        )
    return lines
