"""Advice from the lines of metrics.jsonl alone, so that a restart, which reads them again, gives the same advice."""

import dataclasses
import math
from statistics import median
from typing import Any

Line = dict[str, Any]

# Stuck: the loss stays where a model without context has it.
STUCK_STEPS = 500  # after the warmup; small models leave the token frequencies within 300 (the quickstart: 100)
STUCK_SHARE = 0.05  # of all steps, if that is more: large models stay there for thousands
STUCK_LINES = 8  # at least, so that the medians of the two halves mean something
STUCK_MARGIN = 0.05  # nats above the context-free loss: the sampling noise of a line
STUCK_FALL = 0.05  # nats between the halves: at that pace a whole run, 40 halves at most, would gain two nats
ABOVE = 0.3  # nats above the unigram entropy: not even token frequencies were learned, which takes tens of steps

# Diverging: the loss rises and stays up.
RECENT = 5  # lines in a median, which ignores single spikes
DIVERGED_RISE = 0.5  # nats above the lowest such median, well above noise, epochs and schedules

# Dead: nothing moves any more.
DEAD_NORM = 1e-3  # of the median gradient norm before: healthy runs stay within a factor of 10
DEAD_ABSOLUTE = 1e-7  # a gradient norm that is float32 rounding
DEAD_MOVE = 0.05  # nats between the losses of the lines
DEAD_LOSS = 0.05  # nats: below it the gradient is small because nothing is left to learn
DEAD_SKIPPED = 0.5  # of the steps; the nonfinite guard only counts consecutive ones

# Drift: the evaluation loss rises while the training loss falls. Evaluation masks are fixed and add no noise.
DRIFT_EVALUATIONS = 3  # consecutive ones above the lowest
DRIFT_RISE = 0.03  # nats: 3% of perplexity

DOCTOR = "wrong ids (python -m mlm doctor looks for both)"
LINES = {"stuck": "A stuck loss", "diverging": "Divergence", "dead": "A dead run", "drift": "Overfitting"}


@dataclasses.dataclass
class Adviser:
    """Takes the lines in order, and reports each kind of trouble once."""

    steps: int
    warmup_steps: int
    global_batch: int
    unigram_entropy: float | None  # of the ordinary tokens of the training split, in nats; None if unknown
    mask_share: float  # of the predictions
    random_share: float  # of the predictions; the other tokens are kept

    def __post_init__(self) -> None:
        self._reported: set[str] = set()
        self._train: list[Line] = []
        self._evals: list[Line] = []
        self._lowest = (math.inf, 0)  # median of RECENT lines, and its step

    @property
    def context_free_loss(self) -> float | None:
        """The loss of the best model that sees only the token it predicts, in nats; None if unknown.

        Behind the mask token it knows the token frequencies. A token that it sees is right with the probability that it
        was kept; otherwise the frequencies hold again.
        """
        if self.unigram_entropy is None:
            return None
        seen = 1 - self.mask_share
        if seen <= 0:
            return self.unigram_entropy
        random = min(self.random_share / seen, 1.0)
        kept_or_random = -sum(p * math.log(p) for p in (random, 1 - random) if p > 0)
        return self.mask_share * self.unigram_entropy + seen * (kept_or_random + random * self.unigram_entropy)

    def add(self, line: Line) -> dict[str, str]:
        """Returns the new advice after a line, {a key of LINES: a sentence}."""
        if line["kind"] == "eval":
            self._evals.append(line)
            checks = {"drift": self._drift}
        else:
            self._train.append(line)
            checks = {"stuck": self._stuck, "diverging": self._diverging, "dead": self._dead}
        texts = {kind: check() for kind, check in checks.items() if kind not in self._reported}
        advice = {kind: text for kind, text in texts.items() if text}
        self._reported |= advice.keys()
        return advice

    def _stuck(self) -> str | None:
        floor, now = self.context_free_loss, self._train[-1]["step"]
        length = max(STUCK_STEPS, STUCK_SHARE * self.steps)
        if floor is None or now < length or "diverging" in self._reported:
            return None
        lines = [line for line in self._train[-int(length) :] if line["step"] > now - length]
        lines = self._train[-STUCK_LINES:] if len(lines) < STUCK_LINES else lines
        losses = _values(lines)
        if len(losses) < STUCK_LINES or lines[0]["step"] <= self.warmup_steps:
            return None
        half = len(losses) // 2
        before, after = median(losses[:half]), median(losses[half:])
        if min(before, after) < floor - STUCK_MARGIN or abs(before - after) > STUCK_FALL:
            return None
        above = after > self.unigram_entropy + ABOVE
        causes = self._causes("too low" if above else "too high or too low", "duplicate lines in the text", DOCTOR)
        return (
            f"the loss is stuck: {before:.2f} then {after:.2f} nats in the steps {lines[0]['step']:,} to {now:,}, "
            f"{'above' if above else 'at'} what the frequencies of tokens alone give ({self.unigram_entropy:.2f} nats "
            f"behind a mask, {floor:.2f} over all predictions){causes}"
        )

    def _diverging(self) -> str | None:
        losses = _values(self._train[-RECENT:])
        if len(losses) < RECENT:
            return None
        now, step = median(losses), self._train[-1]["step"]
        lowest, when = self._lowest = min(self._lowest, (now, step))
        if now <= lowest + DIVERGED_RISE:
            return None
        causes = self._causes("too high", "a stretch of duplicate lines", "wrong ids (spikes.jsonl names records)")
        then = f"{lowest:.2f} in those before step {when:,}"
        return f"the loss is diverging: {now:.2f} nats in the last {RECENT} lines before step {step:,}, {then}{causes}"

    def _dead(self) -> str | None:
        earlier, lines, step = self._train[:-RECENT], self._train[-RECENT:], self._train[-1]["step"]
        if not earlier:
            return None
        count = step - earlier[-1]["step"]
        skipped = lines[-1].get("skipped", 0) - earlier[-1].get("skipped", 0)
        causes = self._causes("too high", "a stretch of duplicate lines", DOCTOR)
        if skipped >= DEAD_SKIPPED * count:
            what = f"{skipped:,} of the {count:,} steps before step {step:,} were skipped"
            return f"the run is dead: {what}, because loss or gradient was not finite{causes}"
        norms, losses = _values(lines, "grad_norm"), _values(lines)
        if len(norms) < RECENT or len(losses) < RECENT:
            return None
        usual = median(_values(earlier, "grad_norm") or [0.0])
        moves = max(losses) - min(losses) > DEAD_MOVE or max(norms) > max(DEAD_ABSOLUTE, DEAD_NORM * usual)
        if moves or median(losses) < DEAD_LOSS:
            return None
        what = f"the loss stays at {losses[-1]:.2f} nats and the gradient norm is at most {max(norms):.1g}"
        return f"the run is dead: {what} in the last {RECENT} lines before step {step:,}{causes}"

    def _drift(self) -> str | None:
        evals = [line for line in self._evals if line.get("loss") is not None]
        if len(evals) <= DRIFT_EVALUATIONS:
            return None
        best, last = min(evals, key=lambda line: line["loss"]), evals[-DRIFT_EVALUATIONS:]
        if any(line["loss"] < best["loss"] + DRIFT_RISE for line in last) or last[-1]["loss"] < last[0]["loss"]:
            return None
        then = _values([line for line in self._train if line["step"] <= best["step"]][-RECENT:])
        now = _values(self._train[-RECENT:])
        if not then or not now or median(now) >= median(then):
            return None
        return (
            f"the evaluation drifts from training: its loss rose from {best['loss']:.3f} nats at step "
            f"{best['step']:,} to {last[-1]['loss']:.3f} at step {last[-1]['step']:,} while that of training fell "
            f"from {median(then):.3f} to {median(now):.3f}; likely causes, in order: too many epochs over too little "
            "text (train for fewer, add text, or raise the dropout), duplicate lines in it (python -m mlm doctor "
            "looks), a learning rate that is too high; the checkpoint of the best evaluation is kept."
        )

    def _causes(self, rate: str, *data: str) -> str:
        """Returns the end of a sentence: what to look at, the likeliest first."""
        learning_rate = self._train[-1].get("learning_rate", math.nan)
        causes = [f"a learning rate that is {rate} ({learning_rate:.2g} now)"]
        causes += [f"a batch that is too small ({self.global_batch:,} rows)", *data]
        causes += [f"a warmup that is too short ({self.warmup_steps:,} steps)"]
        return f"; likely causes, in order: {', '.join(causes)}."


def _values(lines: list[Line], key: str = "loss") -> list[float]:
    return [line[key] for line in lines if line.get(key) is not None]
