"""Proves an export in PyTorch: `PYTHON mlm/export/verify_export.py FOLDER`, by any Python with torch and transformers.

Compares the tokenizer's ids, the logits, and the answers of transformers' pipeline with the proof in the folder. Prints
a line for each; exit code 0 if all are equal, 4 if not, 2 if it can't run.
"""

import json
import math
import os
import sys
from pathlib import Path

LOGITS = 1e-4  # largest absolute difference, float32
SCORES = 2 * LOGITS  # largest relative difference of a softmax over such logits; fillings closer than this are a tie


def verify(folder: str) -> bool:
    """Prints a line for each check of an export; returns whether all hold."""
    import torch
    import transformers
    from safetensors.torch import load_file

    proof = json.loads((Path(folder) / "proof.json").read_text(encoding="utf-8"))
    tensors = load_file(Path(folder) / "proof.safetensors")
    rows, task = proof["rows"], proof.get("task", "fill-mask")
    logits = tensors["logits"] if "logits" in tensors else [tensors[f"logits.{row}"] for row in range(len(rows))]
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {len(rows)} texts")

    tok = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    tok.padding_side = tok.truncation_side = "right"
    auto = {"fill-mask": "MaskedLM", "token-classification": "TokenClassification"}.get(task, "SequenceClassification")
    auto = getattr(transformers, f"AutoModelFor{auto}")
    safe = {"trust_remote_code": False, "use_safetensors": True}  # neither code of the folder nor a pickle
    model, loading = auto.from_pretrained(folder, output_loading_info=True, **safe)
    model = model.float().eval()
    strange = sorted(str(key) for keys in loading.values() for key in keys)
    good = _check(not strange, f"weights: every parameter of {type(model).__name__} is there", f"not so: {strange}")

    cut = {"truncation": "longest_first", "max_length": proof["longest"]} if "longest" in proof else {}
    different = [_texts(row) for row in rows if list(tok(*_texts(row), **cut)["input_ids"]) != row["ids"]]
    equal = f"token ids: {sum(len(row['ids']) for row in rows)} in {len(rows)} texts are equal"
    good &= _check(not different, equal, f"not in {different[:1]}")
    good &= _same_logits(model, tok, rows, logits, cut)
    own = {"ignore_labels": []} if task == "token-classification" else {"top_k": proof.get("top_k")}
    settings = {"model": model, "tokenizer": tok, "device": "cpu", "trust_remote_code": False}
    if task == "token-classification":
        tok.model_max_length = proof["longest"]  # its pipeline takes no other limit
    answer = transformers.pipeline(task, **settings, **own)
    if task == "fill-mask":
        return good & _same_fillings(answer, rows)
    if task == "token-classification":
        return good & _same_labels(answer, rows)
    return good & (model.config.problem_type == "regression" or _same_probabilities(answer, rows, cut))


def _texts(row: dict) -> list[str]:
    return row["texts"] if "texts" in row else [row["text"]]


def _same_logits(model, tok, rows: list[dict], logits, cut: dict) -> bool:
    """Compares all texts but the last as one padded batch, and the last, the longest, alone."""
    import torch

    worst = scale = 0.0
    for first, batch in ((0, rows[:-1]), (len(rows) - 1, rows[-1:])):
        if not batch:
            continue
        columns = [list(column) for column in zip(*map(_texts, batch))]  # noqa: B905
        with torch.inference_mode():
            found = model(**tok(*columns, padding=True, return_tensors="pt", **cut)).logits
        for index, row in enumerate(batch):
            own, wanted = found[index], logits[first + index]
            if own.ndim > 1:  # of a padded row
                own = own[row["positions"]] if "positions" in row else own[: len(row["ids"])]
            if own.shape != wanted.shape:
                return _check(False, "", f"logits: {tuple(own.shape)} where {tuple(wanted.shape)} are expected")
            difference = (own - wanted).abs().max().item()
            worst = difference if math.isnan(difference) else max(worst, difference)
            scale = max(scale, wanted.abs().max().item())
    text = f"logits: largest absolute difference {worst:.1e} (largest logit {scale:.1f}, allowed {LOGITS:.0e})"
    return _check(worst < LOGITS, text, "too large")


def _same_probabilities(classify, rows: list[dict], cut: dict) -> bool:
    worst = 0.0
    for row in rows:
        answers = classify(dict(zip(("text", "text_pair"), row["texts"])), **cut)  # noqa: B905
        found = {answer["label"]: answer["score"] for answer in answers}
        if found.keys() != row["scores"].keys():
            return _check(False, "", f"pipeline: its labels are {sorted(found)[:5]}")
        worst = max(worst, *(abs(found[label] - score) for label, score in row["scores"].items()))
    text = f"probabilities: of pipeline('text-classification') are equal to {worst:.1e}"
    return _check(worst < SCORES, text, "too large a difference")


def _same_labels(label, rows: list[dict]) -> bool:
    worst, count = 0.0, 0
    for row in rows:
        for theirs in label(row["texts"][0]):
            ours = row["scores"][theirs["index"]]
            difference = abs(theirs["score"] - ours["probability"])
            worst = max(worst, difference)
            if theirs["entity"] != ours["label"] and difference >= SCORES:  # closer than this, the labels tie
                return _check(False, "", f"labels: {theirs['entity']}, not {ours['label']} in {row['texts']}")
            count += 1
    text = f"labels: {count} of pipeline('token-classification') are equal, probabilities to {worst:.1e}"
    return _check(worst < SCORES, text, "too large a difference")


def _same_fillings(fill, rows: list[dict]) -> bool:
    """Compares token, its text and the score of every filling of every mask, rank by rank; ties may change places."""
    worst, count = 0.0, 0
    for row in rows:
        found = fill(row["text"])
        found = found if isinstance(found[0], list) else [found]
        if [len(mask) for mask in found] != [len(mask) for mask in row["fillings"]]:
            return _check(False, "", f"fillings: another number of them in {row['text']!r}")
        for mask, wanted in zip(found, row["fillings"]):  # noqa: B905
            by_token = {filling["token"]: filling for filling in wanted}
            for theirs, ours in zip(mask, wanted):  # noqa: B905
                # A token that is not in the list at all can only have tied with the last one.
                tied = by_token.get(theirs["token"], {**theirs, "score": wanted[-1]["score"]})
                difference = max(_relative(theirs, ours), _relative(theirs, tied))
                if not (difference < SCORES and theirs["token_str"] == tied["token_str"]):
                    one, other = (f"{filling['token_str']!r} {filling['score']:.6f}" for filling in (theirs, ours))
                    return _check(False, "", f"fillings: {one}, not {other} in {row['text']!r}")
                worst, count = max(worst, difference), count + 1
    return _check(True, f"fillings: {count} of pipeline('fill-mask') are equal, scores to {worst:.1e} relative", "")


def _relative(one: dict, other: dict) -> float:
    return abs(one["score"] - other["score"]) / max(one["score"], other["score"], 1e-30)


def _check(good: bool, text: str, otherwise: str) -> bool:
    print(f"ok    {text}" if good else f"WRONG {text}{': ' if text else ''}{otherwise}")
    return good


def main(arguments: list[str]) -> int:
    """Runs the checks of the folder named; returns the exit code."""
    if len(arguments) != 1 or not (Path(arguments[0]) / "proof.json").is_file():
        print("verify_export: name one folder that export wrote (with a proof.json in it).", file=sys.stderr)
        return 2
    try:
        return 0 if verify(arguments[0]) else 4
    except ImportError as error:
        print(f"verify_export: {sys.executable} lacks a package: {error}.", file=sys.stderr)
        return 2
    except Exception as error:  # whatever transformers raises at a file that is not what was written
        print(f"WRONG {type(error).__name__}: {error}")
        return 4


if __name__ == "__main__":
    # Python puts this folder first on the path, where our modules would stand in for installed ones of the same names.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    # export, which runs this, hides PyTorch from itself by these.
    os.environ.update(USE_TORCH="1", USE_FLAX="0", USE_TF="0", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    sys.exit(main(sys.argv[1:]))
