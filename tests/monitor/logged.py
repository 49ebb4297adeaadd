"""Logs of runs, and what the adviser says of them."""

import dataclasses
from typing import NamedTuple

import numpy as np

from mlm.monitor.adviser import Adviser

INFO = Adviser(
    steps=10_000, warmup_steps=100, global_batch=32, unigram_entropy=6.0, mask_share=0.8, random_share=0.1
)  # without context 0.9 * 6 + 0.14 = 5.54 nats


class Advice(NamedTuple):
    kind: str
    step: int
    text: str


def lines(losses, *, every: int = 50, evals=(), norm=1.0, skipped=0, rate: float = 1e-3) -> list[dict]:
    """The lines of a log: the losses of training, {step: loss} of the evaluations."""
    count = len(losses)
    norms, skips = np.broadcast_to(norm, count), np.broadcast_to(skipped, count)
    evals, found = dict(evals), []
    for n, loss in enumerate(losses):
        step = every * (n + 1)
        values = {"loss": loss, "grad_norm": float(norms[n]), "learning_rate": rate, "skipped": int(skips[n])}
        found.append({"step": step, "kind": "train"} | values)
        if step in evals:
            found.append({"step": step, "kind": "eval", "loss": evals[step]})
    return found


def advise(lines: list[dict], settings: Adviser = INFO) -> list[Advice]:
    fresh = dataclasses.replace(settings)
    return [Advice(kind, line["step"], text) for line in lines for kind, text in fresh.add(line).items()]


def falling(count: int = 200, low: float = 3.0, noise: float = 0.02, seed: int = 0) -> np.ndarray:
    noise_ = np.random.default_rng(seed).normal(0, noise, count)
    return low + (9 - low) * np.exp(-np.arange(1, count + 1) / 15) + noise_
