"""The reference: transformers' model in PyTorch, with the usual AdamW loop. Run by tests/model/test_torch.py.

    PYTHON tests/pytorch/reference.py FOLDER...

reads from each folder: settings.json (the recipe, and the config of the model), params.safetensors (PyTorch's names)
and batches.safetensors ("ids", "attention", "labels" [steps, rows, length], int64; labels are -100 where nothing is
predicted); writes gradient.safetensors (of the first batch), trained.safetensors (parameters after all steps) and
losses.json (losses and gradient norms of each step).
"""

import json
import pathlib
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForMaskedLM, get_linear_schedule_with_warmup


def run(folder: pathlib.Path) -> None:
    settings = json.loads((folder / "settings.json").read_text())
    recipe = settings["recipe"]
    config = AutoConfig.for_model(**settings["config"])
    model = AutoModelForMaskedLM.from_config(config, attn_implementation="eager")
    params = load_file(folder / "params.safetensors")
    missing, unexpected = model.load_state_dict(params, strict=False)
    tied = {"lm_head.decoder.weight", "lm_head.decoder.bias", "decoder.weight"}
    assert set(missing) <= tied and not unexpected, (missing, unexpected)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    model.train()  # the dropout rates are 0

    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": recipe["weight_decay"]},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=recipe["learning_rate"],
        betas=(recipe["b1"], recipe["b2"]),
        eps=recipe["eps"],
    )
    schedule = get_linear_schedule_with_warmup(optimizer, recipe["warmup_steps"], recipe["steps"])

    batches = load_file(folder / "batches.safetensors")
    losses = []
    norms = []
    for ids, attention, labels in zip(
        batches["ids"], batches["attention"], batches["labels"], strict=True
    ):
        loss = model(input_ids=ids, attention_mask=attention, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        if not losses:
            gradient = {
                name: parameter.grad.clone() for name, parameter in model.named_parameters()
            }
            save_file(gradient, folder / "gradient.safetensors")
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), recipe["clip_norm"]).item())
        optimizer.step()
        schedule.step()
        losses.append(loss.item())

    trained = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    save_file(trained, folder / "trained.safetensors")
    (folder / "losses.json").write_text(json.dumps({"losses": losses, "norms": norms}))


for name in sys.argv[1:]:
    run(pathlib.Path(name))
