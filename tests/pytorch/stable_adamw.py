"""The reference of stable_adamw: algorithm 2 of Wortsman et al. (2023), as optimi does it. Run by test_optimizer.py.

    PYTHON tests/pytorch/stable_adamw.py FOLDER

reads from FOLDER: settings.json (the recipe), start.safetensors (parameters) and gradients.safetensors (of each step);
writes trained.safetensors and rms.json ({name: RMS of each step}).
"""

import json
import pathlib
import sys

import torch
from safetensors.torch import load_file, save_file

folder = pathlib.Path(sys.argv[1])
recipe = json.loads((folder / "settings.json").read_text())
params, gradients = (load_file(folder / f"{name}.safetensors") for name in ("start", "gradients"))
beta1, beta2, eps, steps, warmup = (recipe[key] for key in ("b1", "b2", "eps", "steps", "warmup_steps"))
found = {}
for name, parameter in params.items():
    moment, square, found[name] = torch.zeros_like(parameter), torch.zeros_like(parameter), []
    for t, gradient in enumerate(gradients[name], 1):
        hat1, hat2 = (beta * (1 - beta ** (t - 1)) / (1 - beta**t) for beta in (beta1, beta2))
        moment.mul_(hat1).add_(gradient, alpha=1 - hat1)
        square.mul_(hat2).addcmul_(gradient, gradient, value=1 - hat2)
        rms = (gradient**2 / square.clamp(min=eps**2)).mean().sqrt().item()
        done = t - 1
        share = done / warmup if done < warmup else (steps - done) / (steps - warmup)
        rate = recipe["learning_rate"] * share / max(1, rms)
        if parameter.ndim > 1:
            parameter.mul_(1 - rate * recipe["weight_decay"])
        parameter.addcdiv_(moment, square.sqrt() + eps, value=-rate)
        found[name].append(rms)
save_file(params, folder / "trained.safetensors")
(folder / "rms.json").write_text(json.dumps(found))
