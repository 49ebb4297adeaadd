"""What is wrong with a run, from the lines of its metrics.jsonl: at most one sentence for each kind of trouble.

Pure: no jax, no files. The lines say everything, so a restart hears them again and knows what was said. "The text"
below is the training split, whose unigram entropy the manifest of the shards holds.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

Line = dict[str, Any]

# Stuck: the loss stays where it is without a look at any other token.
STUCK_UPDATES = 500  # after warmup: small models leave the frequencies of tokens within 300 (the quickstart: 100)
STUCK_SHARE = 0.05  # of all updates, if that is more: large models stay there for thousands, and have time for it
STUCK_LINES = 8  # in the stretch at least, so that the medians of its halves mean something
STUCK_MARGIN = 0.05  # nats above what is known without context: sampling noise of a line, and no model that reads
STUCK_FALL = 0.05  # nats between its halves: a whole run at that pace, 40 halves at most, would gain two nats
ABOVE = 0.3  # nats above the unigram entropy: not even the frequencies were learned, which takes tens of updates

# Diverging: the loss rises and stays up.
RECENT = 5  # lines in a median: single spikes don't move it
DIVERGED_RISE = 0.5  # nats above the lowest such median: noise, epochs and changes of a schedule stay well below it

# Dead: nothing moves any more.
DEAD_NORM = 1e-3  # of the median gradient norm before: healthy runs stay within a factor of 10 of it
DEAD_ABSOLUTE = 1e-7  # a gradient norm that is rounding of float32, wherever it came from
DEAD_MOVE = 0.05  # nats between the losses of the lines
DEAD_LOSS = 0.05  # nats: below it the gradient is small because there is nothing left to learn
DEAD_SKIPPED = 0.5  # of the updates: the guard of the loop sees only those in a row

# Drift: evaluation rises while training falls. The evaluation's masks are fixed, so its noise is the model's alone.
DRIFT_EVALUATIONS = 3  # in a row above the lowest: one is a bad moment
DRIFT_RISE = 0.03  # nats, 3% of perplexity

DOCTOR = "wrong ids (python -m mlm doctor looks for both)"
LINES = {"stuck": "A stuck loss", "diverging": "Divergence", "dead": "A dead run", "drift": "Overfitting"}


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the adviser knows of a run beside its lines.

    Attributes:
      steps, warmup: updates in all, and of the warmup.
      global_batch: rows of an update.
      unigram_entropy: of the ordinary tokens of the training split, in nats; None if unknown.
      mask_share, random_share: of the predictions, replaced by the mask token and by a random one; the rest is kept.
    """

    steps: int
    warmup: int
    global_batch: int
    unigram_entropy: float | None
    mask_share: float
    random_share: float

    @property
    def context_free(self) -> float | None:
        """The loss of the best model that sees no token but the one that it predicts, in nats; None if unknown.

        Behind a mask it knows the frequencies of tokens alone. Of a token that it sees, it knows that this is the right
        one with the share of the kept ones, and the frequencies for the rest.
        """
        if self.unigram_entropy is None:
            return None
        seen = 1 - self.mask_share
        if seen <= 0:
            return self.unigram_entropy
        changed = min(self.random_share / seen, 1.0)
        doubt = -sum(p * math.log(p) for p in (changed, 1 - changed) if p > 0)
        return self.mask_share * self.unigram_entropy + seen * (doubt + changed * self.unigram_entropy)


@dataclasses.dataclass(frozen=True)
class Advice:
    """One sentence: of what kind of trouble (see LINES), after which update."""

    kind: str
    step: int
    text: str


class Adviser:
    """Hears the lines of metrics.jsonl in order."""

    def __init__(self, facts: Facts):
        """Starts before the first update."""
        self._facts = facts
        self._said: set[str] = set()
        self._train: list[Line] = []
        self._evals: list[Line] = []
        self._lowest = (math.inf, 0)  # median of RECENT lines, and its update

    def hear(self, line: Line) -> list[Advice]:
        """Returns what there is to say after a line, for each kind of trouble the first time alone."""
        if line["kind"] == "eval":
            self._evals.append(line)
            checks = {"drift": self._drift}
        elif line["kind"] == "train":
            self._train.append(line)
            checks = {"stuck": self._stuck, "diverging": self._diverging, "dead": self._dead}
        else:
            return []
        found = []
        for kind, check in checks.items():
            words = None if kind in self._said else check()
            if words:
                self._said.add(kind)
                found.append(Advice(kind, line["step"], words))
        return found

    def _losses(self, lines: list[Line]) -> list[float]:
        return [line["loss"] for line in lines if line.get("loss") is not None]

    def _stuck(self) -> str | None:
        facts, floor, now = self._facts, self._facts.context_free, self._train[-1]["step"]
        length = max(STUCK_UPDATES, STUCK_SHARE * facts.steps)
        if floor is None or now < length or "diverging" in self._said:
            return None
        lines = [line for line in self._train[-int(length) :] if line["step"] > now - length]
        lines = self._train[-STUCK_LINES:] if len(lines) < STUCK_LINES else lines
        losses = self._losses(lines)
        if len(losses) < STUCK_LINES or lines[0]["step"] <= facts.warmup:
            return None
        half = len(losses) // 2
        before, after = statistics.median(losses[:half]), statistics.median(losses[half:])
        if min(before, after) < floor - STUCK_MARGIN or abs(before - after) > STUCK_FALL:
            return None
        entropy = facts.unigram_entropy
        above = after > entropy + ABOVE
        return (
            f"the loss is stuck: {before:.2f} then {after:.2f} nats in the updates {lines[0]['step']:,} to {now:,}, "
            f"{'above' if above else 'at'} what the frequencies of tokens alone give ({entropy:.2f} nats behind a "
            f"mask, {floor:.2f} over all predictions)"
            + self._causes("too low" if above else "too high or too low", "duplicate lines in the text", DOCTOR)
        )

    def _diverging(self) -> str | None:
        losses = self._losses(self._train[-RECENT:])
        if len(losses) < RECENT:
            return None
        now, step = statistics.median(losses), self._train[-1]["step"]
        lowest, when = self._lowest
        if now < lowest:
            self._lowest = now, step
        if now <= lowest + DIVERGED_RISE:
            return None
        return (
            f"the loss is diverging: {now:.2f} nats in the last {RECENT} lines before update {step:,}, {lowest:.2f} in "
            f"those before update {when:,}"
            + self._causes("too high", "a stretch of duplicate lines", "wrong ids (spikes.jsonl names records)")
        )

    def _dead(self) -> str | None:
        lines = self._train[-RECENT:]
        if len(self._train) <= RECENT:
            return None
        before, step = self._train[-RECENT - 1], lines[-1]["step"]
        updates = step - before["step"]
        skipped = lines[-1].get("skipped", 0) - before.get("skipped", 0)
        causes = self._causes("too high", "a stretch of duplicate lines", DOCTOR)
        if skipped >= DEAD_SKIPPED * updates:
            return (
                f"the run is dead: {skipped:,} of the {updates:,} updates before update {step:,} were skipped, because "
                "loss or gradient was not finite" + causes
            )
        norms, losses = [line.get("grad_norm") for line in lines], self._losses(lines)
        if None in norms or len(losses) < RECENT:
            return None
        earlier = [line["grad_norm"] for line in self._train[:-RECENT] if line.get("grad_norm") is not None]
        small = max(DEAD_ABSOLUTE, DEAD_NORM * statistics.median(earlier)) if earlier else DEAD_ABSOLUTE
        if max(norms) > small or max(losses) - min(losses) > DEAD_MOVE or statistics.median(losses) < DEAD_LOSS:
            return None
        return (
            f"the run is dead: the loss stays at {losses[-1]:.2f} nats and the gradient norm is at most "
            f"{max(norms):.1g} in the last {RECENT} lines before update {step:,}" + causes
        )

    def _drift(self) -> str | None:
        evals = [line for line in self._evals if line.get("loss") is not None]
        if len(evals) <= DRIFT_EVALUATIONS:
            return None
        best, last = min(evals, key=lambda line: line["loss"]), evals[-DRIFT_EVALUATIONS:]
        if any(line["loss"] < best["loss"] + DRIFT_RISE for line in last) or last[-1]["loss"] < last[0]["loss"]:
            return None
        then = self._losses([line for line in self._train if line["step"] <= best["step"]][-RECENT:])
        now = self._losses(self._train[-RECENT:])
        if not then or not now or statistics.median(now) >= statistics.median(then):
            return None
        return (
            f"the evaluation drifts from training: its loss rose from {best['loss']:.3f} nats at update "
            f"{best['step']:,} to {last[-1]['loss']:.3f} at update {last[-1]['step']:,} while that of training fell "
            f"from {statistics.median(then):.3f} to {statistics.median(now):.3f}; likely causes, in order: more passes "
            "over the text than it bears (fewer epochs, more text, or dropout), duplicate lines in it (python -m mlm "
            "doctor looks), a learning rate that is too high; the checkpoint of the best evaluation is kept."
        )

    def _causes(self, rate: str, *data: str) -> str:
        """The end of a sentence: what to look at, the likeliest first."""
        now, facts = self._train[-1].get("learning_rate", math.nan), self._facts
        words = [
            f"a learning rate that is {rate} ({now:.2g} now)",
            f"a batch that is too small ({facts.global_batch:,} rows)",
            *data,
            f"a warmup that is too short for post-norm layers ({facts.warmup:,} updates)",
        ]
        return f"; likely causes, in order: {', '.join(words)}."
