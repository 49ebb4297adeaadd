"""The command `doctor`: what can be wrong with a run, found before it starts. It writes nothing into the workdir."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from ml_collections import ConfigDict
from rich.text import Text

from mlm.data.manifest import load_manifest
from mlm.doctor import checks, first_batch
from mlm.doctor.checks import Case, Finding
from mlm.errors import DamageError, InputError
from mlm.text import show, table
from mlm.workdir import Workdir

COLORS = {"error": "red", "warning": "yellow", "ok": "green"}


def run(config: ConfigDict, workdir: Workdir, *, as_json: bool, **options: Any) -> None:
    """Runs the checks and prints their findings; `options` are the fields of `checks.Case` from `hosts` to `slices`.

    Raises:
      InputError: a finding is an error.
    """
    if min(options["hosts"], options["devices"]) < 0 or options["rows"] < 1:
        raise InputError("--hosts, --devices: must not be negative; --rows: must be 1 or more.")
    tokenizer = str(workdir.tokenizer) if (workdir.tokenizer / "tokenizer.json").is_file() else None
    folder, batch = workdir.shards_of(config), []
    try:
        manifest = load_manifest(folder, tokenizer_folder=tokenizer)
    except (InputError, DamageError) as error:
        findings = [Finding("error", str(error), "python -m mlm shards writes them", folder, "data")]
    else:
        case = Case(config, workdir, manifest, tokenizer, **options)
        findings, batch = [finding for check in checks.ALL for finding in checks.run(check, case)], case.batch
    errors = [finding.check for finding in findings if finding.level == "error"]
    if as_json:
        content = {"findings": list(map(dataclasses.asdict, findings)), "batch": batch, "errors": len(errors)}
        print(json.dumps(content), flush=True)
    else:
        cells = [
            (Text(f.level, COLORS[f.level]), f.check, " | ".join(filter(None, (f.what, f.where, f.fix))))
            for f in findings
        ]
        show(table("", "", "", rows=cells), *first_batch.render(batch))
    if errors:
        names = ", ".join(dict.fromkeys(errors))
        raise InputError(f"{len(errors)} of {len(findings)} findings are errors ({names}); the run can't be right.")
