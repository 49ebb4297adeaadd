"""`doctor`: check the data and the settings of a run before it starts; writes nothing into the workdir."""

import argparse
import dataclasses
import json
import re

from mlm.commands import common
from mlm.data import tokenizer
from mlm.data.manifest import Manifest
from mlm.doctor import preflight
from mlm.errors import DamageError, InputError
from mlm.plan import topology
from mlm.text import printable, show, table
from mlm.workdir import Workdir

COLORS = {"error": "red", "warning": "yellow", "ok": "green"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_config_flags(parser)
    parser.add_argument(
        "--hosts", type=int, default=0, metavar="N", help="hosts of the planned run"
    )
    parser.add_argument(
        "--devices",
        type=int,
        default=0,
        metavar="N",
        help="devices of all hosts; default: those here",
    )
    parser.add_argument(
        "--topology",
        default="",
        metavar="NAME",
        help="TPU, such as v5e:2x4, whose hosts and devices are those of the planned run",
    )
    parser.add_argument(
        "--slices", type=int, default=1, metavar="N", help="number of slices of that topology"
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=200_000,
        metavar="N",
        help="training rows to search for duplicates; default: 200,000",
    )
    parser.add_argument(
        "--against",
        nargs="+",
        type=common.source,
        default=[],
        metavar="SOURCE",
        help="benchmarks, as sources of a corpus (hf:nyu-mll/glue:rte, jsonl:FILE#FIELD): what training has of them",
    )
    parser.add_argument(
        "--record",
        default="",
        metavar="ID",
        help="only print the text of a training record (validation:ID, test:ID for others) and its documents",
    )
    common.add_json_flag(parser)


def main(args: argparse.Namespace, overrides: list[str]) -> None:
    if args.rows < 1:
        raise InputError(f"--rows={args.rows}: must be a whole number from 1 up.")
    if args.topology:
        topology.prepare()  # before jax is imported
    config = common.read_config(args, overrides, says=True)
    workdir = Workdir(args.workdir, create=None)
    common.refuse_classifier(config)
    common.check_sources("--against", args.against)
    if args.record:
        show_record(
            common.load_data(config, workdir),
            str(workdir.tokenizer),
            args.record,
            as_json=args.json,
        )
        return
    from rich.text import Text

    from mlm.doctor import checks, first_batch

    findings = [
        checks.Finding("error", str(error), "see the message", "the config", name)
        for name, error in preflight.errors(preflight.Case(args.name, config, workdir, args))
    ]
    batch = []
    shards = " + ".join(name for name, _ in config.data.mixture) or workdir.shards_of(config)
    try:
        manifest = common.open_data(config, workdir)
    except (InputError, DamageError) as error:
        findings = [finding for finding in findings if str(error) not in finding.what]
        fix = "python -m mlm shards writes them"
        findings.append(checks.Finding("error", str(error), fix, shards, "data"))
    else:
        rows = ", ".join(
            f"{split.records:,} {name} rows" for name, split in manifest.splits.items()
        )
        findings.append(checks.Finding("ok", f"{rows}, verified", "", shards, "data"))
        case = checks.DataCase(config, workdir, args, manifest)
        findings += [finding for check in checks.ALL for finding in checks.run(check, case)]
        batch = case.batch
    errors = [finding.check for finding in findings if finding.level == "error"]
    if args.json:
        content = {
            "findings": list(map(dataclasses.asdict, findings)),
            "batch": batch,
            "errors": len(errors),
        }
        print(json.dumps(content), flush=True)
    else:
        rows = [
            (
                Text(f.level, COLORS[f.level]),
                f.check,
                " | ".join(filter(None, (f.what, f.where, f.fix))),
            )
            for f in findings
        ]
        show(table("", "", "", rows=rows), *first_batch.render(batch))
    if errors:
        names = ", ".join(dict.fromkeys(errors))
        raise InputError(
            f"{len(errors)} of {len(findings)} findings are errors ({names}); fix them before you train."
        )


def show_record(manifest: Manifest, tokenizer_folder: str, name: str, *, as_json: bool) -> None:
    """Prints the text of a record, and which documents of the corpus it is from."""
    from mlm.data import write_shard
    from mlm.doctor import scan

    split, _, number = name.rpartition(":")
    split = split or "train"
    if split not in manifest.splits or not re.fullmatch("[0-9]{1,18}", number):
        others = " or ".join(f"{split}:NUMBER" for split in manifest.splits if split != "train")
        raise InputError(f"--record={name}: must be the number of a training record, or {others}.")
    documents = write_shard.find_documents(manifest, split, int(number))
    ids = scan.row(manifest, split, int(number)).tolist()
    text = tokenizer.load_fast(tokenizer_folder).decode(ids, skip_special_tokens=False)
    if as_json:
        content = {"split": split, "record": int(number), "text": text}
        content["documents"] = [document._asdict() for document in documents]
        print(json.dumps(content), flush=True)
        return
    print(*map(printable, text.splitlines()), sep="\n")
    for document in documents:
        print(
            printable(f"from {document.source}, {document.part}, document {document.place}"),
            flush=True,
        )
