"""The PyTorch baseline of `bench`: the training loop of transformers' run_mlm.py, a few steps at a time.

Any Python with torch, transformers (4.57 or 5) and accelerate runs this file. It measures `Trainer.train()` with its
defaults, masks drawn on the host and logits of every position; on CUDA if there is any, else on the CPU in float32.

It speaks JSON lines, with one answer to each line. The first line has the settings: a run's flattened config, "model"
(transformers' config) and "special_ids" {"cls", "pad", "sep", "unk", "mask"} -> id; the answer {"torch",
"transformers", "device", "dtype"} means that it is ready. {"calls": N} runs N steps; the answer is {"steps", "seconds"
of training so far, "learning_rate"}. Optional settings are "rows", a .npy file of ids [N, L] instead of random ones,
and "seconds", over which the learning rate falls to 0. {"until": SECONDS} trains until that many are used, with the
same answer; {"save": FOLDER} saves the parameters, and its answer is {}. It exits when its input ends, or with 2 if a
package is missing.
"""

import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TextIO

EPOCH = 64  # batches of the data loader


def train(settings: dict, answers: TextIO) -> None:
    """Trains until the input ends; `answers` takes the lines of JSON."""
    import accelerate  # noqa: F401 (the Trainer needs it)
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=settings["data.global_batch"] // max(1, torch.cuda.device_count()),
            max_steps=10**9,
            learning_rate=settings["optimizer.learning_rate"],
            weight_decay=settings["optimizer.weight_decay"],
            bf16=torch.cuda.is_available() and settings["model.dtype"] == "bfloat16",
            save_strategy="no",
            dataloader_drop_last=True,
            report_to="none",
            disable_tqdm=True,
        )
        tokenizer, rate = _tokenizer(settings), settings["masking.rate"]
        config = transformers.CONFIG_MAPPING[settings["model"]["model_type"]].from_dict(settings["model"])
        transformers.Trainer(
            model=transformers.AutoModelForMaskedLM.from_config(config),
            args=arguments,
            train_dataset=_Rows(settings) if "rows" in settings else _random_rows(settings) * EPOCH,
            data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=rate),
            callbacks=[_pauses(settings, answers)],
        ).train()


def _pauses(settings: dict, answers: TextIO):
    """Returns the TrainerCallback that holds the loop after the requested steps, and reads the next request."""
    import torch
    import transformers

    cuda, peak = torch.cuda.is_available(), settings["optimizer.learning_rate"]

    class Pauses(transformers.TrainerCallback):
        left, until, used, begin, rate = 0, math.inf, 0.0, None, peak

        def seconds(self) -> float:
            """Of training, without the pauses."""
            return self.used + (0.0 if self.begin is None else time.monotonic() - self.begin)

        def on_train_begin(self, arguments: transformers.TrainingArguments, *others: object, **more: object) -> None:
            versions = {"torch": torch.__version__, "transformers": transformers.__version__}
            dtype = "bfloat16" if arguments.bf16 else "float32"
            self.ask(more["model"], versions | {"device": "cuda" if cuda else "cpu", "dtype": dtype})

        def on_step_begin(self, *arguments: object, optimizer: torch.optim.Optimizer, **more: object) -> None:
            self.started = self.seconds()
            for group in optimizer.param_groups if "seconds" in settings else ():
                group["lr"] = self.rate = peak * max(0.0, 1 - self.started / settings["seconds"])

        def on_step_end(self, arguments: object, state: transformers.TrainerState, *others: object, **more: object):
            if state.global_step == 1:
                self.begin = time.monotonic()  # its time went into imports
            self.left -= 1
            if self.left == 0 or self.started >= self.until:
                if cuda:
                    torch.cuda.synchronize()
                self.used, self.begin = self.seconds(), None
                progress = {"steps": state.global_step, "seconds": self.used, "learning_rate": self.rate}
                self.ask(more["model"], progress)

        def ask(self, model: torch.nn.Module, answer: dict) -> None:
            print(json.dumps(answer), file=answers, flush=True)
            message = json.loads(sys.stdin.readline() or sys.exit(0))
            if "save" in message:
                model.save_pretrained(message["save"])
                self.ask(model, {})
            else:
                self.left, self.until = message.get("calls", 0), message.get("until", math.inf)
                self.begin = time.monotonic()

    return Pauses()


class _Rows:
    """The rows of a file; the Trainer drops special_tokens_mask, and the collator makes it from the ids."""

    def __init__(self, settings: dict):
        import numpy as np

        self.rows_NxL, self.pad_id = np.load(settings["rows"], mmap_mode="r"), settings["special_ids"]["pad"]

    def __len__(self) -> int:
        return len(self.rows_NxL)

    def __getitem__(self, row: int) -> dict:
        ids = self.rows_NxL[row]
        return {"input_ids": ids.tolist(), "attention_mask": (ids != self.pad_id).astype(int).tolist()}


def _random_rows(settings: dict) -> list[dict]:
    """Returns a batch of random ordinary tokens as run_mlm.py's data set has it: lists, with special_tokens_mask."""
    import torch

    rows, length = settings["data.global_batch"], settings["shards.length"]
    first, size = max(settings["special_ids"].values()) + 1, settings["model"]["vocab_size"]
    ids = torch.randint(first, size, (rows, length), generator=torch.Generator().manual_seed(0))
    ones, zeros = [1] * length, [0] * length
    return [{"input_ids": row, "attention_mask": ones, "special_tokens_mask": zeros} for row in ids.tolist()]


def _tokenizer(settings: dict):
    """Returns a tokenizer with what the collator needs: the special tokens and the vocabulary size."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    names = {number: f"<{role}>" for role, number in settings["special_ids"].items()}
    words = {names.get(number, f"w{number}"): number for number in range(settings["model"]["vocab_size"])}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")))
    tokenizer.add_special_tokens({f"{role}_token": f"<{role}>" for role in settings["special_ids"]})
    return tokenizer


def main() -> int:
    """Answers until the input ends; returns the exit code."""
    # Whatever else is printed, by the Trainer for instance, must not come between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        train(json.loads(sys.stdin.readline()), answers)
    except ImportError as error:
        print(f"install torch, transformers and accelerate in this Python ({error}).", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    # Python puts this folder first on the path, where our modules would shadow installed ones of the same names.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    # bench starts this file in an environment that hides PyTorch from transformers.
    os.environ.update(USE_TORCH="1", USE_FLAX="0", USE_TF="0", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    sys.exit(main())
