"""The PyTorch baseline of `bench`: the training loop of transformers' run_mlm.py, a few steps at a time.

Any Python with torch, transformers (4.57 or 5) and accelerate runs this file. It measures
`Trainer.train()` with its defaults, masks drawn on the host and logits of every position; on CUDA
if there is any, else on the CPU in float32.

It speaks JSON lines, with one answer to each line. The first line has the settings: a run's
flattened config, "model" (transformers' config) and "special_ids" {"cls", "pad", "sep", "unk",
"mask"} -> id; the answer {"torch", "transformers", "device", "dtype"} means that it is ready.
{"calls": N} runs N steps; the answer is {}. It exits when its input ends.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TextIO

EPOCH = 64  # batches of the data loader


def train(settings: dict, answers: TextIO) -> None:
    """Trains until the input ends; `answers` takes the lines of JSON."""
    import accelerate  # noqa: F401 (the Trainer needs it)
    import torch
    import transformers

    rows = settings["data.global_batch"]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=rows // max(1, torch.cuda.device_count()),
            max_steps=10**9,
            learning_rate=settings["optimizer.learning_rate"],
            weight_decay=settings["optimizer.weight_decay"],
            bf16=torch.cuda.is_available() and settings["model.dtype"] == "bfloat16",
            save_strategy="no",
            dataloader_drop_last=True,
            report_to="none",
            disable_tqdm=True,
        )
        model = settings["model"]
        config = transformers.CONFIG_MAPPING[model["model_type"]].from_dict(model)
        transformers.Trainer(
            model=transformers.AutoModelForMaskedLM.from_config(config),
            args=arguments,
            train_dataset=_random_rows(settings) * EPOCH,
            data_collator=transformers.DataCollatorForLanguageModeling(
                _tokenizer(settings), mlm_probability=settings["masking.rate"]
            ),
            callbacks=[_pauses(answers)],
        ).train()


def _pauses(answers: TextIO):
    """Returns the TrainerCallback that holds the loop after the requested steps, and reads the next request."""
    import torch
    import transformers

    cuda = torch.cuda.is_available()

    class Pauses(transformers.TrainerCallback):
        steps_left = 0

        def on_train_begin(self, arguments, *others, **more):
            dtype = "bfloat16" if arguments.bf16 else "float32"
            versions = {"torch": torch.__version__, "transformers": transformers.__version__}
            self.answer(versions | {"device": "cuda" if cuda else "cpu", "dtype": dtype})

        def on_step_end(self, *arguments, **more):
            self.steps_left -= 1
            if self.steps_left == 0:
                if cuda:
                    torch.cuda.synchronize()
                self.answer({})

        def answer(self, content: dict) -> None:
            """Answers, and waits for the next request."""
            print(json.dumps(content), file=answers, flush=True)
            self.steps_left = json.loads(sys.stdin.readline() or sys.exit(0))["calls"]

    return Pauses()


def _random_rows(settings: dict) -> list[dict]:
    """Returns a batch of random ordinary tokens as run_mlm.py's data set has it: lists, with special_tokens_mask."""
    import torch

    length = settings["shards.length"]
    first = max(settings["special_ids"].values()) + 1
    shape = (settings["data.global_batch"], length)
    ids = torch.randint(
        first, settings["model"]["vocab_size"], shape, generator=torch.Generator().manual_seed(0)
    )
    columns = {"attention_mask": [1] * length, "special_tokens_mask": [0] * length}
    return [{"input_ids": row} | columns for row in ids.tolist()]


def _tokenizer(settings: dict):
    """Returns a tokenizer with what the collator needs: the special tokens and the vocabulary size."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    names = {number: f"<{role}>" for role, number in settings["special_ids"].items()}
    words = {
        names.get(number, f"w{number}"): number for number in range(settings["model"]["vocab_size"])
    }
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    )
    tokenizer.add_special_tokens({f"{role}_token": f"<{role}>" for role in settings["special_ids"]})
    return tokenizer


def main() -> None:
    """Answers until the input ends."""
    # Whatever else is printed, by the Trainer for instance, must not come between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        train(json.loads(sys.stdin.readline()), answers)
    except ImportError as error:
        sys.exit(f"install torch, transformers and accelerate in this Python ({error}).")


if __name__ == "__main__":
    # Python puts this folder first on the path, where our modules would shadow installed ones of
    # the same names.
    sys.path[:] = [
        entry
        for entry in sys.path
        if Path(entry or ".").resolve() != Path(__file__).resolve().parent
    ]
    # bench starts this file in an environment that hides PyTorch from transformers.
    os.environ.update(
        USE_TORCH="1", USE_FLAX="0", USE_TF="0", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error"
    )
    main()
