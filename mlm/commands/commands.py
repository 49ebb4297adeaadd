"""What each command does, from its arguments: the config and the workdir first, then the module that does the work.

A function's heavy imports stand within it: a mistake is answered before jax or TensorFlow is there.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import time

from ml_collections import ConfigDict

from mlm import config as configs
from mlm.cluster import detect, watch
from mlm.errors import InputError, StopError
from mlm.pretrained import task_type
from mlm.text import printable
from mlm.workdir import Workdir


def join(args: argparse.Namespace, overrides: list[str]) -> None:
    """Finds out which process of the run this is, says so, and starts to connect to the others."""
    flags = {"coordinator": args.coordinator, "processes": args.processes, "process_id": args.process_id}
    cluster = detect.detect(**flags, meets=args.name != "shards")  # whose hosts can meet in its folder alone
    args.processes, args.process_id = cluster.processes, cluster.process_id
    if cluster.processes > 1:
        print(f"mlm {args.name}: {printable(cluster.sentence)}", file=sys.stderr, flush=True)
    try:
        config = configs.load(args.config, overrides) if args.config else _saved(args, overrides)
    except StopError:  # which the command finds as well, when the others can be told
        config = configs.load(str(configs.BASE), [])
    if cluster.processes > 1:  # what proves that a process belongs to the run lies in its folder
        Workdir(args.workdir, create=args.name not in ("evaluate", "export"))
    watch.current.join(cluster, args.workdir, config.pod)


def _saved(args: argparse.Namespace, overrides: list[str]) -> ConfigDict:
    return configs.load_saved(Workdir(args.workdir, create=False).config, overrides)


def _open(args: argparse.Namespace, overrides: list[str]) -> tuple[ConfigDict, Workdir]:
    """Returns (config, workdir) for a command that writes; the config is checked before anything else is touched."""
    config = configs.load(args.config, overrides)
    if getattr(args, "skip_batches", []):
        ranges = tuple(dict.fromkeys([*config.data.skip_batches, *args.skip_batches]))
        config = configs.changed(config, [f"data.skip_batches={ranges!r}"])
    return config, Workdir(args.workdir)


def _locked(workdir: Workdir) -> contextlib.AbstractContextManager[None]:
    """Holds the workdir for the run: its first process does that for all."""
    return workdir.locked() if watch.current.process == 0 else contextlib.nullcontext()


def run(args: argparse.Namespace, overrides: list[str]) -> None:
    """Makes all that is not there yet, from the tokenizer to the export."""
    config, workdir = _open(args, overrides)
    from mlm.commands import stages

    begin = time.monotonic()
    with _locked(workdir):
        hosts = stages.Hosts(args.processes, args.process_id)
        watch.at(watch.UNTIMED)
        stages.make_tokenizer(config, workdir, hosts)
        stages.make_shards(config, workdir, hosts)
        watch.current.wait_for_all("data")
        manifest = stages.open_data(config, workdir)
        from mlm.cluster import distributed
        from mlm.commands import run

        distributed.initialize(config, workdir, manifest, saves=True)
        run.train(config, workdir, manifest)
        run.finish(workdir, manifest)
    if args.process_id == 0:
        print(f"\n{time.monotonic() - begin:.0f} s in all")


def tokenizer(args: argparse.Namespace, overrides: list[str]) -> None:
    """Makes the tokenizer."""
    config, workdir = _open(args, overrides)
    from mlm.commands import stages

    with workdir.locked():
        stages.make_tokenizer(config, workdir)


def shards(args: argparse.Namespace, overrides: list[str]) -> None:
    """Makes the tokenizer and the shards."""
    config, workdir = _open(args, overrides)
    from mlm.commands import stages

    hosts = stages.Hosts(args.processes, args.process_id)
    watch.at(watch.UNTIMED)
    with workdir.locked(part=str(args.process_id) if args.processes > 1 else ""):
        stages.make_tokenizer(config, workdir, hosts)
        stages.make_shards(config, workdir, hosts)


def doctor(args: argparse.Namespace, overrides: list[str]) -> None:
    """Looks for what is wrong, and writes nothing."""
    config, workdir = configs.load(args.config, overrides), Workdir(args.workdir, create=False)
    from mlm.plan import topology

    if args.topology and importlib.util.find_spec("libtpu") is not None:
        topology.prepare()  # before jax is imported
    from mlm.doctor import doctor

    wishes = {key: getattr(args, key) for key in ("hosts", "devices", "topology", "slices", "rows")}
    doctor.run(config, workdir, **wishes, as_json=args.json)


def train(args: argparse.Namespace, overrides: list[str]) -> None:
    """Trains on shards that are there."""
    config, workdir = _open(args, overrides)
    from mlm.commands import stages

    watch.at(watch.UNTIMED)
    manifest = stages.open_data(config, workdir)  # faults of the data are told before jax is imported
    from mlm.cluster import distributed
    from mlm.commands import run

    distributed.initialize(config, workdir, manifest, saves=True)
    with _locked(workdir):
        run.train(config, workdir, manifest)


def classify(args: argparse.Namespace, overrides: list[str]) -> None:
    """Fine-tunes."""
    config, workdir = _open(args, overrides)
    from mlm.cluster import distributed
    from mlm.commands import classify, stages

    with _locked(workdir):
        examples = classify.open_data(config, workdir, stages.Hosts(args.processes, args.process_id))
        distributed.initialize(config, workdir, examples, saves=True)
        classify.run(config, workdir, examples)


def evaluate(args: argparse.Namespace, overrides: list[str]) -> None:
    """Scores a model on a split."""
    workdir = Workdir(args.workdir, create=False)
    config = configs.load(args.config, overrides) if args.config else _saved(args, overrides)
    if task_type.is_classifier(workdir, args.model):
        from mlm.cluster import distributed
        from mlm.commands import classify

        distributed.initialize(config, workdir, None, saves=False)
        classify.evaluate(config, workdir, model=args.model, split=args.split)
        return
    from mlm.commands import stages

    manifest = stages.open_data(config, workdir)
    from mlm.cluster import distributed
    from mlm.commands import evaluate

    distributed.initialize(config, workdir, manifest, saves=False)
    wishes = {"model": args.model, "split": args.split, "masks": args.masks, "pseudo": args.pseudo}
    evaluate.run(config, workdir, manifest, **wishes)


def predict(args: argparse.Namespace, overrides: list[str]) -> None:
    """Fills masks, or classifies."""
    workdir = None if args.model else Workdir(args.workdir, create=False)
    if task_type.is_classifier(workdir, args.model):
        from mlm.inference import classify_texts
        from mlm.pretrained import load

        model = load.load(args.model, head=load.CLASSIFIER, workdir=workdir)
        classify_texts.run(model, texts=args.texts, top_k=args.top_k, stdin=sys.stdin, stdout=sys.stdout)
        return
    from mlm.inference import fill_mask
    from mlm.pretrained import load

    model = load.load(args.model, head=load.LM_HEAD, workdir=workdir)
    wishes = {"texts": args.texts, "top_k": args.top_k, "targets": args.targets}
    fill_mask.run(model, **wishes, stdin=sys.stdin, stdout=sys.stdout)


def export(args: argparse.Namespace, overrides: list[str]) -> None:
    """Writes, proves and pushes the export."""
    workdir = Workdir(args.workdir, create=False)
    if args.public and not args.push:
        raise InputError("--public: goes with --push=USER/NAME.")
    if args.push:
        from mlm.export import push

        push.check(args.push)  # before anything that takes time
    with _locked(workdir):
        if args.processes > 1:
            from mlm.cluster import distributed

            config = configs.load_saved(workdir.config, overrides)
            distributed.initialize(config, workdir, None, saves=False)
        from mlm.commands import classify, run

        kind = classify if task_type.is_classifier(workdir, "") else run
        kind.export(workdir, torch_python=args.torch)
    if args.process_id == 0:
        print(workdir.export)
        if args.push:
            print(push.push(workdir.export, args.push, public=args.public))


def bench(args: argparse.Namespace, overrides: list[str]) -> None:
    """Measures beside the stock loops."""
    config, manifest, folder = configs.load(args.config, overrides), None, ""
    if set(args.parts) - {"step", "products"}:
        from mlm.commands import stages
        from mlm.data import tokenizer

        workdir = Workdir(args.workdir, create=False)
        if {"batches", "loop"} & set(args.parts):
            manifest = stages.open_data(config, workdir)
        if "shards" in args.parts:
            folder = str(workdir.tokenizer)
            tokenizer.load_fast(folder)  # told now, if it is missing
    from mlm.bench import bench

    bench.run(
        config,
        args.parts,
        manifest,
        seconds=args.seconds,
        as_json=args.json,
        tokenizer_folder=folder,
        megabytes=args.megabytes,
        torch_python=args.torch,
    )


def plan(args: argparse.Namespace, overrides: list[str]) -> None:
    """Compiles for a TPU that is not there."""
    config, manifest = configs.load(args.config, overrides), None
    from mlm.plan import topology

    topology.prepare()  # before jax is imported
    if args.workdir:
        from mlm.commands import stages

        manifest = stages.open_data(config, Workdir(args.workdir, create=False))
    from mlm.plan import plan

    job = plan.make_job(config, manifest, records=args.records, price=args.price)
    wishes = {"compare": bool(args.compare), "sweep": args.sweep, "search": not args.no_search, "as_json": args.json}
    plan.run(config, job, name=args.topology, slices=args.slices, **wishes)


def report(args: argparse.Namespace, overrides: list[str]) -> None:
    """Writes the report, or the comparison."""
    workdir = Workdir(args.workdir, create=False)
    if args.compare:
        from mlm.report import compare

        print(compare.write([workdir, *(Workdir(folder, create=False) for folder in args.compare)]))
        return
    from mlm.report import report

    report.write(workdir)
    print(workdir.report)
