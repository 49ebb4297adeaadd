"""The part of the report that shows what a run was told while it trained. Nothing here imports jax."""

from __future__ import annotations

import html
from typing import Any

from mlm.monitor.adviser import LINES

Line = dict[str, Any]


def section(advice: list[Line], spikes: list[Line]) -> str:
    """Returns the section of the page; nothing if nothing was said.

    Args:
      advice, spikes: lines of advice.jsonl and spikes.jsonl.
    """
    if not advice and not spikes:
        return ""
    rows = [(f"{line['step']:,}", LINES.get(line["what"], line["what"]), line["text"]) for line in advice]
    for line in spikes:
        words = f"loss {line['loss']:.3f} nats, {line['median']:.3f} in the lines before; batches " + ", ".join(
            line["batches"]
        )
        rows.append((f"{line['first_update']:,} to {line['last_update']:,}", "A spike of the loss", words))
    head = "".join(f"<th>{name}</th>" for name in ("update", "what", "numbers and likely causes"))
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    note = (
        "Each kind is told once. The records of a spike's batches are in spikes.jsonl; --skip-batches leaves them out."
    )
    return (
        '<section class="advice"><h2>Advice</h2>'
        f'<table><tr>{head}</tr>{body}</table><p class="note">{note}</p></section>'
    )
