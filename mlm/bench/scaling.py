"""Fits a scaling law of the loss to finished runs, and predicts others.

    python -m mlm.bench.scaling runs/scaling/*/steps=* --at 111e6:83.3e9 --flops 5.5e19

L(N, D) = E + A / N^alpha + B / D^beta of Hoffmann et al., 2022 (approach 3: Huber loss of log L, the best of many
starts), N parameters outside the embeddings, D tokens. Intervals are 90% of a bootstrap over the residuals.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict
from scipy.optimize import minimize
from scipy.special import huber, logsumexp

from mlm import config as configs
from mlm import logs
from mlm.data.manifest import DatasetInfo
from mlm.model import families
from mlm.report import summary
from mlm.workdir import Workdir

DELTA = 1e-3  # of the Huber loss, the paper's
STARTS = tuple(
    itertools.product((0.0, 5.0, 10.0), (0.0, 5.0, 10.0), (-1.0, 0.0, 1.0), (0.2, 0.5, 1.0), (0.2, 0.5, 1.0))
)
DRAWS = 200


class Point(NamedTuple):
    """A finished run, or one to predict."""

    workdir: str
    parameters: float  # outside the embeddings
    tokens: float
    loss: float  # nats on the validation split


def read(folder: str) -> Point | None:
    """Returns the last evaluation of a run of train.steps, None if it is not finished or its tokens are not known."""
    workdir = Workdir(folder, create=False)
    config, lines = configs.read(workdir.config), logs.read(workdir.metrics, "eval")
    if not lines or lines[-1]["step"] != config.train.steps:
        return None
    tokens = summary.tokens_read(summary.ancestry(workdir.root), config.train.steps)
    return None if tokens is None else Point(folder, parameters(config), tokens, lines[-1]["loss"])


def parameters(config: ConfigDict) -> int:
    """Returns the number of parameters outside the embeddings."""
    info = DatasetInfo.synthetic(vocab_size=config.tokenizer.vocab_size, length=config.shards.length, records=1)
    module = families.make_module(config.model, info)
    params = flatten_dict(jax.eval_shape(module.init_params, jax.random.key(0)), sep="/")
    return sum(leaf.size for name, leaf in params.items() if not name.endswith("/embedding"))


def log_loss(law: np.ndarray, parameters_N: np.ndarray, tokens_N: np.ndarray) -> np.ndarray:
    """Returns log L of a law (log A, log B, log E, alpha, beta)."""
    a, b, e, alpha, beta = law
    terms = a - alpha * np.log(parameters_N), b - beta * np.log(tokens_N), np.full_like(parameters_N, e)
    return logsumexp(terms, axis=0)


def fit(parameters_N: np.ndarray, tokens_N: np.ndarray, log_loss_N: np.ndarray, starts=STARTS) -> np.ndarray:
    """Returns the law of the smallest Huber loss."""

    def objective(law: np.ndarray) -> float:
        return huber(DELTA, log_loss(law, parameters_N, tokens_N) - log_loss_N).sum() / DELTA

    bounds = [(None, None)] * 3 + [(0.0, 2.0)] * 2
    results = [minimize(objective, start, method="L-BFGS-B", bounds=bounds) for start in starts]
    return min(results, key=lambda result: result.fun).x


def bootstrap(law: np.ndarray, parameters_N: np.ndarray, tokens_N: np.ndarray, log_loss_N: np.ndarray) -> np.ndarray:
    """Returns laws fitted to the law's losses with residuals drawn again, which are scaled for the five parameters."""
    fitted_N, rng = log_loss(law, parameters_N, tokens_N), np.random.default_rng(0)
    count = len(fitted_N)
    residuals_N = (log_loss_N - fitted_N) * np.sqrt(count / max(count - len(law), 1))
    drawn = fitted_N + rng.choice(residuals_N, (DRAWS, count))
    nearby = law + rng.normal(0, [1.0, 1.0, 0.3, 0.1, 0.1], (4, len(law)))
    starts = [law, *np.clip(nearby, [-np.inf] * 3 + [0.01] * 2, np.inf)]
    return np.array([fit(parameters_N, tokens_N, losses_N, starts) for losses_N in drawn])


def best_parameters(law: np.ndarray, flops: float) -> float:
    """Returns the N of the least loss for FLOPs of 6 N D."""
    a, b, _, alpha, beta = law
    return np.exp((np.log(alpha / beta) + a - b + beta * np.log(flops / 6)) / (alpha + beta))


def interval(values: Sequence[float], spec: str = ".3g") -> str:
    """Returns the 90% interval for people."""
    low, high = np.quantile(values, [0.05, 0.95])
    return f"{low:{spec}} to {high:{spec}}"


def report(points: list[Point], predicted: list[Point], flops: float | None) -> Iterator[str]:
    """Yields the lines of the law of finished runs and of what it predicts."""
    _, parameters_N, tokens_N, losses_N = (np.array(column) for column in zip(*points, strict=True))
    data = (parameters_N.astype(float), tokens_N.astype(float), np.log(losses_N))
    law = fit(*data)
    laws = bootstrap(law, *data)
    shown = np.array([[*np.exp(drawn[:3]), *drawn[3:]] for drawn in (law, *laws)]).T
    for name, (value, *draws) in zip(("A", "B", "E", "alpha", "beta"), shown, strict=True):
        yield f"{name} {value:.4g} ({interval(draws)})"
    if flops:
        size, *sizes = (best_parameters(drawn, flops) for drawn in (law, *laws))
        yield f"best of {flops:g} FLOPs: {size:.3g} parameters ({interval(sizes)}), {flops / 6 / size:.3g} tokens"
    yield f"{'parameters':>12} {'tokens':>12} {'measured':>9} {'law':>7}  90%"
    for point in points + predicted:
        sizes = (np.array([point.parameters], float), np.array([point.tokens], float))
        loss, *draws = (np.exp(log_loss(drawn, *sizes))[0] for drawn in (law, *laws))
        measured = "" if np.isnan(point.loss) else f"{point.loss:.3f}"
        columns = f"{point.parameters:12,.0f} {point.tokens:12,.0f} {measured:>9} {loss:7.3f}"
        yield f"{columns}  {interval(draws, '.3f')}  {point.workdir}"


def main() -> None:
    """Prints the law of some workdirs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workdirs", metavar="WORKDIR", nargs="+", help="of the runs to fit to")
    parser.add_argument("--at", metavar="N:D", nargs="+", default=[], help="parameters and tokens to predict")
    parser.add_argument("--flops", type=float, help="of a budget, to find the best size for")
    args = parser.parse_args()
    folders = [folder for folder in args.workdirs if (Path(folder) / "config.json").is_file()]
    points = [point for folder in folders if (point := read(folder))]
    if len(points) < 6:
        parser.error(f"found {len(points)} finished runs of train.steps; a law of five parameters needs six or more")
    predicted = [Point("", *map(float, text.split(":")), np.nan) for text in args.at]
    print("\n".join(report(points, predicted, args.flops)))


if __name__ == "__main__":
    main()
