"""Counts the words in sentences of the validation split that a model fills in as the text has them.

    python -m mlm.bench.sentences runs/quickstart runs/quickstart_modernbert

The sentences are those of the first workdir's split, the same in every call; each has one word masked that is a token.
"""

import argparse
import re

import numpy as np
from transformers import PreTrainedTokenizerFast

from mlm.data import tokenizer
from mlm.data.batches import eval_batches
from mlm.data.manifest import Manifest, load_manifest
from mlm.errors import InputError
from mlm.inference.fill_mask import FillMask
from mlm.pretrained import load
from mlm.workdir import Workdir

SENTENCE = re.compile(r"(?<=[.] )[A-Z][a-z]+(?: [a-z]+){5,20}[.]")
ROWS = 256  # read at once


def masked_words(manifest: Manifest, tok: PreTrainedTokenizerFast, count: int) -> list[tuple[str, str]]:
    """Returns (a sentence with a mask, the masked word) `count` times."""
    rng = np.random.default_rng(0)
    batches = eval_batches(manifest, split="validation", batch=ROWS, rows=(0, ROWS))
    rows = np.concatenate([batch["input_ids"][batch["valid"] > 0] for batch in batches])
    text = " ".join(" ".join(tok.batch_decode(rows, skip_special_tokens=True)).split())
    masked = []
    for sentence in rng.permutation(sorted(set(SENTENCE.findall(text)))):
        words = sentence[:-1].split()
        places = [place for place, word in enumerate(words) if place and len(tok.tokenize(f" {word}")) == 1]
        if places:
            place = rng.choice(places)
            sentence = " ".join([*words[:place], tok.mask_token, *words[place + 1 :]]) + "."
            masked.append((sentence, words[place]))
    if len(masked) < count:
        raise InputError(f"--count={count}: {manifest.folder} has {len(masked)} such sentences.")
    return masked[:count]


def main() -> None:
    """Prints a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workdirs", metavar="WORKDIR", nargs="+")
    parser.add_argument("--count", type=int, default=200, help="of sentences; default: 200")
    args = parser.parse_args()
    first = Workdir(args.workdirs[0], create=False)
    tok = tokenizer.load(str(first.tokenizer))
    masked = masked_words(load_manifest(str(first.shards)), tok, args.count)
    for folder in args.workdirs:
        model = load.from_workdir(Workdir(folder, create=False), head=load.LM_HEAD)
        fill_mask = FillMask(model, tokenizer.load(model.tokenizer), top_k=1)
        fillings = fill_mask([sentence for sentence, _ in masked])
        guesses = [masks[0][0]["token_str"].strip() for masks in fillings]
        hits = sum(guess == word for guess, (_, word) in zip(guesses, masked, strict=True))
        print(f"{folder}: {hits} of {len(masked)} words")


if __name__ == "__main__":
    main()
