"""The command `doctor`: what can be wrong with a run before anything is paid for. It writes nothing into the workdir.

Each check gives findings: what, where, how to mend it. A wrong one means that the run can't be right; a doubtful one
that somebody should look.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict
from rich.console import RenderableType
from rich.text import Text

from mlm.data.manifest import load_manifest
from mlm.doctor import checks, first_batch
from mlm.doctor.checks import Case, Finding
from mlm.errors import DamageError, InputError
from mlm.plan import topology as topologies
from mlm.text import show, table
from mlm.workdir import Workdir

COLORS = {"wrong": "red", "doubtful": "yellow", "fine": "green"}


def run(
    config: ConfigDict,
    workdir: Workdir,
    *,
    hosts: int,
    devices: int,
    topology: str,
    slices: int,
    rows: int,
    as_json: bool,
) -> None:
    """Looks, and prints what it finds.

    Args:
      config, workdir: of the run; the shards are made.
      hosts, devices: that the run will have; 0 for those of the topology, or of this machine.
      topology, slices: of a TPU to compile the step for, as `plan` does; "" for none.
      rows: of the training split in which to look for what comes twice.
      as_json: one object for programs.

    Raises:
      InputError: the run can't be right.
    """
    if min(hosts, devices) < 0 or rows < 1:
        raise InputError("--hosts, --devices: must be from 1 up, or left away; --rows: from 1 up.")
    topologies.check_slices(slices)
    findings: list[Finding] = []
    batch: list[list[Any]] = []
    case = _open(config, workdir, findings, hosts=hosts, devices=devices, topology=topology, slices=slices, rows=rows)
    if case is not None:
        for check in checks.ALL:
            found = _guarded(check, case)
            findings += [each for each in found if isinstance(each, Finding)]
            batch += [each for each in found if not isinstance(each, Finding)]
    wrong = [finding for finding in findings if finding.level == "wrong"]
    if as_json:
        content = {"findings": [dataclasses.asdict(finding) for finding in findings], "batch": batch}
        print(json.dumps(content | {"wrong": len(wrong)}), flush=True)
    else:
        show(_table(findings), *first_batch.shown(batch))
    if wrong:
        names = ", ".join(dict.fromkeys(finding.check for finding in wrong))
        raise InputError(f"{len(wrong)} of {len(findings)} findings say that the run can't be right: {names}.")


def _open(config: ConfigDict, workdir: Workdir, findings: list[Finding], **flags: Any) -> Case | None:
    """Returns what is to be looked at, or None with a finding that says why there is nothing."""
    folder = str(workdir.tokenizer) if (workdir.tokenizer / "tokenizer.json").is_file() else None
    place = workdir.shards_of(config)
    try:
        manifest = load_manifest(place, tokenizer_folder=folder)
    except (InputError, DamageError) as error:
        findings.append(Finding("wrong", "data", str(error), place, "python -m mlm shards writes them"))
        return None
    return Case(config, workdir, manifest, folder, **flags)


def _guarded(check: Callable[[Case], list], case: Case) -> list:
    """Returns what a check finds; what it refuses is a finding too."""
    try:
        return check(case)
    except (InputError, DamageError) as error:
        return [Finding("wrong", check.__name__, str(error), case.manifest.folder, "as it says")]


def _table(findings: list[Finding]) -> RenderableType:
    rows = []
    for finding in findings:
        words = " | ".join(part for part in (finding.what, finding.where, finding.mend) if part)
        rows.append((Text(finding.level, COLORS[finding.level]), finding.check, words))
    return table("", "", "", rows=rows)
