"""Checks an export in PyTorch: `PYTHON mlm/export/verify_export.py FOLDER`, by any Python with torch and transformers.

Compares the tokenizer's ids, the logits, and the answers of transformers' pipeline with the
folder's proof.json and proof.safetensors (see reference.py). Prints a line for each; exit code 0 if
all are equal, 4 if not, 2 if it can't run.
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
HEADS = {
    "fill-mask": "MaskedLM",
    "text-classification": "SequenceClassification",
    "token-classification": "TokenClassification",
}


class WrongError(Exception):
    """What is not equal."""


def checks(folder: str):
    """Yields (what is compared, a function that returns how equal it is, or raises WrongError)."""
    import torch
    import transformers
    from safetensors.torch import load_file

    proof = json.loads((Path(folder) / "proof.json").read_text(encoding="utf-8"))
    tensors = load_file(Path(folder) / "proof.safetensors")
    rows = proof["rows"]
    task = proof["task"]
    logits = [tensors[f"logits.{row}"] for row in range(len(rows))]
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {len(rows)} texts")

    tok = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    tok.padding_side = tok.truncation_side = "right"
    # executes nothing of the folder: neither code nor a pickle
    model, loading = getattr(transformers, f"AutoModelFor{HEADS[task]}").from_pretrained(
        folder, output_loading_info=True, trust_remote_code=False, use_safetensors=True
    )
    model = model.float().eval()
    encode = functools.partial(tok, truncation="longest_first", max_length=proof["longest"])
    pipeline = functools.partial(
        transformers.pipeline, task, model=model, tokenizer=tok, device="cpu"
    )
    yield "weights", lambda: same_parameters(model, loading)
    yield "token ids", lambda: same_ids(encode, rows)
    yield "logits", lambda: same_logits(model, encode, rows, logits)
    if task == "fill-mask":
        yield "fillings", lambda: same_fillings(pipeline(top_k=proof["top_k"]), rows)
        return
    if task == "token-classification":
        classify = pipeline(ignore_labels=[])
    else:  # a dictionary is a text or a pair
        classify_all = pipeline(top_k=None, function_to_apply="none", truncation=True)

        def classify(*texts: str) -> list[dict]:
            return classify_all(dict(zip(("text", "text_pair"), texts)))  # noqa: B905

    yield "labels", lambda: same_labels(classify, rows, proof["labels"], logits)


def same_parameters(model, loading: dict) -> str:
    """Compares the parameters of the class with those of the file."""
    if unmatched := sorted(str(key) for keys in loading.values() for key in keys):
        raise WrongError(f"some are missing, unexpected or of another shape: {unmatched}")
    return f"every parameter of {type(model).__name__} is there"


def same_ids(encode, rows: list[dict]) -> str:
    """Compares the tokenizer's ids."""
    for row in rows:
        if list(encode(*row["texts"])["input_ids"]) != row["ids"]:
            raise WrongError(f"not those of {row['texts']}")
    return f"{sum(len(row['ids']) for row in rows)} in {len(rows)} texts are equal"


def same_logits(model, encode, rows: list[dict], logits) -> str:
    """Compares all texts but the last as one padded batch, and the last, the longest, alone."""
    import torch

    worst = scale = 0.0
    for first, batch in ((0, rows[:-1]), (len(rows) - 1, rows[-1:])):
        if not batch:
            continue
        columns = [list(column) for column in zip(*(row["texts"] for row in batch))]  # noqa: B905
        with torch.inference_mode():
            computed = model(**encode(*columns, padding=True, return_tensors="pt")).logits
        for row, actual, expected in zip(batch, computed, logits[first:]):  # noqa: B905
            if actual.ndim > 1:  # of a padded row
                actual = actual[row.get("positions", range(len(row["ids"])))]
            if actual.shape != expected.shape:
                raise WrongError(
                    f"{tuple(actual.shape)} where {tuple(expected.shape)} are expected"
                )
            difference = (actual - expected).abs().max().item()
            worst = difference if math.isnan(difference) else max(worst, difference)
            scale = max(scale, expected.abs().max().item())
    text = (
        f"largest absolute difference {worst:.1e} (largest logit {scale:.1f}, allowed {LOGITS:.0e})"
    )
    if not worst < LOGITS:
        raise WrongError(text)
    return text


def same_fillings(fill, rows: list[dict]) -> str:
    """Compares token, its text and the score of every filling of every mask, rank by rank; ties may change places."""
    worst = 0.0
    count = 0
    for row in rows:
        (text,) = row["texts"]
        answers = fill(text)
        answers = answers if isinstance(answers[0], list) else [answers]  # of one mask
        if list(map(len, answers)) != list(map(len, row["fillings"])):
            raise WrongError(f"another number of them in {text!r}")
        for fillings, all_expected in zip(answers, row["fillings"]):  # noqa: B905
            by_token = {filling["token"]: filling for filling in all_expected}
            for filling, expected in zip(fillings, all_expected):  # noqa: B905
                # A token that is not in the list at all can only have tied with the last one.
                last = filling | {"score": all_expected[-1]["score"]}
                tied = by_token.get(filling["token"], last)
                difference = max(relative(filling, expected), relative(filling, tied))
                if not (difference < SCORES and filling["token_str"] == tied["token_str"]):
                    pair = (f"{f['token_str']!r} {f['score']:.6f}" for f in (filling, expected))
                    raise WrongError(f"{', not '.join(pair)} in {text!r}")
                worst = max(worst, difference)
                count = count + 1
    return f"{count} of pipeline('fill-mask') are equal, scores to {worst:.1e} relative"


def relative(one: dict, other: dict) -> float:
    """Returns the relative difference of two scores."""
    return abs(one["score"] - other["score"]) / max(one["score"], other["score"], 1e-30)


def same_labels(classify, rows: list[dict], labels: list[str], logits) -> str:
    """Compares the logit of each label of a text or pair, or the probability of each token's label; ties are equal."""
    worst = 0.0
    count = 0
    for row, expected in zip(rows, logits):  # noqa: B905
        for answer in classify(*row["texts"]):
            label = answer.get("entity") or answer["label"]
            scores = expected[answer["index"]].softmax(-1) if "entity" in answer else expected
            right = [scores[labels.index(label)].item() if label in labels else math.inf]
            if "entity" in answer:
                right.append(scores.max().item())
            difference = max(abs(answer["score"] - score) for score in right)
            if not difference < LOGITS:
                raise WrongError(
                    f"the pipeline gives {label!r} another score in {row['texts']!r:.80}"
                )
            worst = max(worst, difference)
            count = count + 1
    return f"{count} of the pipeline have the same scores, to {worst:.1e}"


def main(arguments: list[str]) -> int:
    """Runs the checks of the folder named; returns the exit code."""
    if len(arguments) != 1 or not (Path(arguments[0]) / "proof.json").is_file():
        print(
            "verify_export: name one folder that export wrote (with a proof.json in it).",
            file=sys.stderr,
        )
        return 2
    code = 0
    try:
        for name, compare in checks(arguments[0]):
            try:
                print(f"ok    {name}: {compare()}")
            except WrongError as error:
                print(f"WRONG {name}: {error}")
                code = 4
    except ImportError as error:
        print(f"verify_export: {sys.executable} lacks a package: {error}.", file=sys.stderr)
        return 2
    # whatever transformers raises at a file that is not what was written
    except Exception as error:
        print(f"WRONG {type(error).__name__}: {error}")
        return 4
    return code


if __name__ == "__main__":
    # Python puts this folder first on the path, where our modules would stand in for installed ones
    # of the same names.
    folder = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != folder]
    # export, which runs this, hides PyTorch from itself by these.
    os.environ.update(
        USE_TORCH="1", USE_FLAX="0", USE_TF="0", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error"
    )
    sys.exit(main(sys.argv[1:]))
