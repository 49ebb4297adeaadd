"""How many words of sentences of the validation split a model fills in as its text has them.

    python -m tests.measure.sentences runs/quickstart runs/quickstart_modernbert

The sentences are those of the first workdir's split, the same in every call; each has one word masked that is a token.
"""

import argparse
import json
import re
import subprocess
import sys

import numpy as np
from transformers import AutoTokenizer

from mlm.data.manifest import load_manifest
from mlm.workdir import Workdir
from tests import ROOT
from tests.support.corpora import shard_rows

SENTENCE = re.compile(r"(?<=[.] )[A-Z][a-z]+(?: [a-z]+){5,20}[.]")


def masked_words(workdir: Workdir, count: int) -> list[tuple[str, str]]:
    """Returns (a sentence with a mask, the word behind it) `count` times."""
    tokenizer, rng = AutoTokenizer.from_pretrained(str(workdir.tokenizer)), np.random.default_rng(0)
    rows = np.concatenate(shard_rows(load_manifest(str(workdir.shards)), "validation"))
    text = " ".join(" ".join(tokenizer.batch_decode(rows, skip_special_tokens=True)).split())
    found = []
    for sentence in rng.permutation(sorted(set(SENTENCE.findall(text)))):
        words = sentence[:-1].split()
        whole = [place for place, word in enumerate(words) if place and len(tokenizer.tokenize(f" {word}")) == 1]
        if whole:
            place = rng.choice(whole)
            found.append((" ".join([*words[:place], tokenizer.mask_token, *words[place + 1 :]]) + ".", words[place]))
    assert len(found) >= count, f"{len(found)} sentences in {workdir.shards}"
    return found[:count]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", metavar="WORKDIR", nargs="+")
    parser.add_argument("--count", type=int, default=200)
    args = parser.parse_args()
    wanted = masked_words(Workdir(args.models[0]), args.count)
    lines = "".join(f"{sentence}\n" for sentence, _ in wanted)
    for model in args.models:
        command = [sys.executable, "-m", "mlm", "predict", f"--workdir={model}"]
        answers = subprocess.run(command, cwd=ROOT, input=lines, stdout=subprocess.PIPE, text=True, check=True).stdout
        first = [json.loads(answer)["fillings"][0][0]["token_str"].strip() for answer in answers.splitlines()]
        hits = sum(guess == word for guess, (_, word) in zip(first, wanted, strict=True))
        print(f"{model}: {hits} of {len(wanted)} words")


if __name__ == "__main__":
    main()
