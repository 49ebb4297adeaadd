"""Checks an export in PyTorch: `PYTHON mlm/export/verify_export.py FOLDER`, by any Python with torch and transformers.

Compares the tokenizer's ids, the logits, and the answers of transformers' pipeline with the
folder's proof.json and proof.safetensors. Prints a line for each; exit code 0 if all are equal, 4
if not, 2 if it can't run.
"""

import functools
import json
import math
import os
import sys
from pathlib import Path

LOGITS = 1e-4  # largest absolute difference, float32
# largest relative difference of a softmax over such logits; fillings closer than this are a tie
SCORES = 2 * LOGITS


def verify(folder: str) -> bool:
    """Prints a line for each check of an export; returns whether all hold."""
    import torch
    import transformers
    from safetensors.torch import load_file

    proof = json.loads((Path(folder) / "proof.json").read_text(encoding="utf-8"))
    tensors = load_file(Path(folder) / "proof.safetensors")
    rows = proof["rows"]
    task = proof.get("task", "fill-mask")
    longest = proof.get("longest")
    logits = (
        tensors["logits"]
        if "logits" in tensors
        else [tensors[f"logits.{row}"] for row in range(len(rows))]
    )
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {len(rows)} texts")

    tok = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    tok.padding_side = tok.truncation_side = "right"
    heads = {"fill-mask": "MaskedLM", "token-classification": "TokenClassification"}
    auto = getattr(transformers, f"AutoModelFor{heads.get(task, 'SequenceClassification')}")
    # executes nothing of the folder: neither code nor a pickle
    model, loading = auto.from_pretrained(
        folder, output_loading_info=True, trust_remote_code=False, use_safetensors=True
    )
    model = model.float().eval()
    unmatched = sorted(str(key) for keys in loading.values() for key in keys)
    good = _check(
        not unmatched,
        f"weights: every parameter of {type(model).__name__} is there",
        f"not so: {unmatched}",
    )

    encode = functools.partial(tok, truncation="longest_first", max_length=longest)
    different = [
        _texts(row) for row in rows if list(encode(*_texts(row))["input_ids"]) != row["ids"]
    ]
    equal = f"token ids: {sum(len(row['ids']) for row in rows)} in {len(rows)} texts are equal"
    good &= _check(not different, equal, f"not in {different[:1]}")
    good &= _same_logits(model, encode, rows, logits)
    pipeline = functools.partial(
        transformers.pipeline, task, model=model, tokenizer=tok, device="cpu"
    )
    if task == "fill-mask":
        return good & _same_fillings(pipeline(top_k=proof["top_k"]), rows)
    if task == "token-classification":
        compared = _label_tokens(pipeline(ignore_labels=[]), rows, proof["labels"], logits)
    else:
        compared = _label_texts(
            pipeline(top_k=None, function_to_apply="none"), rows, proof["labels"], logits
        )
    return good & _same_labels(task, list(compared))


def _texts(row: dict) -> list[str]:
    return row["texts"] if "texts" in row else [row["text"]]


def _same_logits(model, encode, rows: list[dict], logits) -> bool:
    """Compares all texts but the last as one padded batch, and the last, the longest, alone."""
    import torch

    worst = scale = 0.0
    for first, batch in ((0, rows[:-1]), (len(rows) - 1, rows[-1:])):
        if not batch:
            continue
        columns = [list(column) for column in zip(*map(_texts, batch))]  # noqa: B905
        with torch.inference_mode():
            computed = model(**encode(*columns, padding=True, return_tensors="pt")).logits
        for index, row in enumerate(batch):
            actual = computed[index]
            expected = logits[first + index]
            if actual.ndim > 1:  # of a padded row
                actual = (
                    actual[row["positions"]] if "positions" in row else actual[: len(row["ids"])]
                )
            if actual.shape != expected.shape:
                return _check(
                    False,
                    "",
                    f"logits: {tuple(actual.shape)} where {tuple(expected.shape)} are expected",
                )
            difference = (actual - expected).abs().max().item()
            worst = difference if math.isnan(difference) else max(worst, difference)
            scale = max(scale, expected.abs().max().item())
    text = f"logits: largest absolute difference {worst:.1e} (largest logit {scale:.1f}, allowed {LOGITS:.0e})"
    return _check(worst < LOGITS, text, "too large")


def _same_fillings(fill, rows: list[dict]) -> bool:
    """Compares token, its text and the score of every filling of every mask, rank by rank; ties may change places."""
    worst = 0.0
    count = 0
    for row in rows:
        answers = fill(row["text"])
        answers = answers if isinstance(answers[0], list) else [answers]  # of one mask
        if [len(fillings) for fillings in answers] != [
            len(fillings) for fillings in row["fillings"]
        ]:
            return _check(False, "", f"fillings: another number of them in {row['text']!r}")
        for fillings, all_expected in zip(answers, row["fillings"]):  # noqa: B905
            by_token = {filling["token"]: filling for filling in all_expected}
            for filling, expected in zip(fillings, all_expected):  # noqa: B905
                # A token that is not in the list at all can only have tied with the last one.
                tied = by_token.get(
                    filling["token"], filling | {"score": all_expected[-1]["score"]}
                )
                difference = max(_relative(filling, expected), _relative(filling, tied))
                if not (difference < SCORES and filling["token_str"] == tied["token_str"]):
                    actual, other = (
                        f"{f['token_str']!r} {f['score']:.6f}" for f in (filling, expected)
                    )
                    return _check(False, "", f"fillings: {actual}, not {other} in {row['text']!r}")
                worst = max(worst, difference)
                count = count + 1
    return _check(
        True,
        f"fillings: {count} of pipeline('fill-mask') are equal, scores to {worst:.1e} relative",
        "",
    )


def _label_texts(classify, rows: list[dict], labels: list[str], logits):
    """Yields the answers to texts and pairs, cut by the tokenizer's own limit, and how far they are from the logits."""
    for row, expected in zip(rows, logits):  # noqa: B905
        texts = dict(zip(("text", "text_pair"), row["texts"]))  # noqa: B905
        logit_of = dict(zip(labels, expected.tolist()))  # noqa: B905
        for answer in classify(texts, truncation=True):
            yield (
                abs(answer["score"] - logit_of.get(answer["label"], math.inf)),
                answer["label"],
                row["texts"],
            )


def _label_tokens(classify, rows: list[dict], labels: list[str], logits):
    """Yields the label of every token, and how far its probability is from that of this label, and from the largest."""
    for row, expected in zip(rows, logits):  # noqa: B905
        for answer in classify(row["texts"][0]):
            probs = dict(zip(labels, expected[answer["index"]].softmax(-1).tolist()))  # noqa: B905
            # of labels that tie, either is right
            right = (
                probs.get(answer["entity"], math.inf),
                max(probs.values()),
            )
            yield max(abs(answer["score"] - prob) for prob in right), answer["entity"], row["texts"]


def _same_labels(task: str, compared: list[tuple[float, str, list[str]]]) -> bool:
    for difference, label, texts in compared:
        if not difference < LOGITS:
            return _check(
                False,
                "",
                f"labels: pipeline('{task}') gives {label!r} another score in {texts!r:.80}",
            )
    largest = max(difference for difference, _, _ in compared)
    return _check(
        True,
        f"labels: {len(compared)} of pipeline('{task}') have the same scores, to {largest:.1e}",
        "",
    )


def _relative(one: dict, other: dict) -> float:
    return abs(one["score"] - other["score"]) / max(one["score"], other["score"], 1e-30)


def _check(good: bool, text: str, otherwise: str) -> bool:
    print(f"ok    {text}" if good else f"WRONG {text}{': ' if text else ''}{otherwise}")
    return good


def main(arguments: list[str]) -> int:
    """Runs the checks of the folder named; returns the exit code."""
    if len(arguments) != 1 or not (Path(arguments[0]) / "proof.json").is_file():
        print(
            "verify_export: name one folder that export wrote (with a proof.json in it).",
            file=sys.stderr,
        )
        return 2
    try:
        return 0 if verify(arguments[0]) else 4
    except ImportError as error:
        print(f"verify_export: {sys.executable} lacks a package: {error}.", file=sys.stderr)
        return 2
    # whatever transformers raises at a file that is not what was written
    except Exception as error:
        print(f"WRONG {type(error).__name__}: {error}")
        return 4


if __name__ == "__main__":
    # Python puts this folder first on the path, where our modules would stand in for installed ones
    # of the same names.
    sys.path[:] = [
        entry
        for entry in sys.path
        if Path(entry or ".").resolve() != Path(__file__).resolve().parent
    ]
    # export, which runs this, hides PyTorch from itself by these.
    os.environ.update(
        USE_TORCH="1", USE_FLAX="0", USE_TF="0", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error"
    )
    sys.exit(main(sys.argv[1:]))
