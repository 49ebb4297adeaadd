"""The rows of the report on advice and loss spikes. Nothing here imports jax."""

from __future__ import annotations

from typing import Any

from mlm.monitor.adviser import LINES

Line = dict[str, Any]


def rows(advice: list[Line], spikes: list[Line]) -> list[tuple[str, str, str]]:
    """Returns (update, what, numbers and likely causes) of the lines of advice.jsonl and spikes.jsonl."""
    found = [(f"{line['step']:,}", LINES.get(line["what"], line["what"]), line["text"]) for line in advice]
    for line in spikes:
        updates = f"{line['first_update']:,} to {line['last_update']:,}"
        losses = f"loss {line['loss']:.3f} nats, {line['median']:.3f} in the lines before"
        found.append((updates, "A spike of the loss", f"{losses}; batches {', '.join(line['batches'])}"))
    return found
