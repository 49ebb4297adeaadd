"""Opens all that a command's config and flags name before the corpus is read or anything is written.

No payload is read: of models the headers, of checkpoints the sizes of files, of data the first rows. Every command
calls `refuse`; `doctor` reports all that `errors` yields. To add a check, list it with its commands in `CHECKS`.
"""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

from mlm import cluster
from mlm import config as configs
from mlm.cluster import watch
from mlm.data import tokenizer
from mlm.data.manifest import NAME, check_rows, holds_foreign_shards, load_manifest
from mlm.doctor.case import Case, fingerprint_of
from mlm.engine import dask_engine
from mlm.errors import DamageError, InputError, StopError
from mlm.export import folder as export_folder
from mlm.paths import UPath, check_reachable
from mlm.pretrained import locate

ANSWER = 8.0  # seconds for a scheduler to answer
PRETRAINING = ("run", "train", "tokenizer", "shards", "doctor")
Part = Callable[[], Any]  # raises InputError or DamageError
# raises one itself, or yields parts that are tried one by one
Check = Callable[["Case"], Iterator[Part] | None]


def refuse(case: Case) -> None:
    """Raises the first error."""
    for _, error in errors(case):
        raise error


def errors(case: Case) -> Iterator[tuple[str, StopError]]:
    """Yields (what was checked, the error) for each thing that the command could not use."""
    for check, commands in CHECKS.items():
        if case.command not in commands:
            continue
        try:
            parts = check(case) or ()
        except (InputError, DamageError) as error:
            yield check.__name__, error
            continue
        for part in parts:
            try:
                part()
            except (InputError, DamageError) as error:
                yield check.__name__, error
                if check is servers:
                    return  # the other checks would wait for it, too


def servers(case: Case) -> Iterator[Part]:
    """The servers of all buckets in the config."""
    values = [
        value
        for key, value in configs.flatten(case.config).items()
        if not key.startswith(("pod.", "log."))
    ]
    for path in dict.fromkeys(re.findall(r"[a-z0-9+]+://[^'\",()]+", repr(values))):
        yield functools.partial(check_reachable, path)


def hosts(case: Case) -> None:
    """config.data.lanes: whole lanes for each host, or whole hosts for each lane; with mesh.tensor hosts share rows."""
    lanes = case.config.data.lanes
    processes = watch.current.cluster.processes
    if case.config.mesh.tensor == 1 and lanes % processes and processes % lanes:
        allowed = f"must be a multiple or a divisor of the number of hosts, {processes}"
        raise InputError(f"config.data.lanes = {lanes}: {allowed}.")


def torch(case: Case) -> None:
    """--torch: a Python with PyTorch and transformers."""
    python = case.flags.torch
    names = ("torch", "transformers")
    if not python:
        return
    code = f"import importlib.util as u; print(*(n for n in {names} if u.find_spec(n) is None))"
    try:
        finished = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=ANSWER, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise InputError(
            f"--torch={python}: can't be run ({error}); name a Python with PyTorch."
        ) from None
    if missing := finished.stdout.split():
        raise InputError(
            f"--torch={python}: has no {' and no '.join(missing)}; install it there, or name another."
        )


def engine(case: Case) -> None:
    """--engine: its address, the certificates, and whether the scheduler answers, if there is something to do."""
    flags = case.flags
    if not cluster.is_primary():
        return
    if not flags.engine_timeout > 0:  # or not a number
        raise InputError(f"--engine-timeout={flags.engine_timeout}: must be above 0 seconds.")
    if flags.engine and _reads_corpus(case):
        folder = flags.engine_certificates or str(case.workdir.root / "hosts" / "certificates")
        timeout = min(flags.engine_timeout, ANSWER)
        with dask_engine.connect(flags.engine, timeout=timeout, certificates=folder) as opened:
            opened.greet()


def branch(case: Case) -> None:
    """train.branch_from: the step, what the branch changes, and the tokenizer."""
    name = case.config.train.branch_from
    if not name or case.begun:
        return
    from mlm.training import branch

    if case.command in ("tokenizer", "shards"):  # a config of data alone
        locate.branch_source(name)
        return
    source, _ = branch.read_source(case.config, deep=False)
    if case.tokenizer and case.fingerprint() != fingerprint_of(str(source.workdir.tokenizer)):
        reason = f"was trained with another tokenizer than {case.tokenizer}"
        raise InputError(
            f"config.train.branch_from = {name}: {reason}; use its tokenizer, and shards made with it."
        )


def wandb(case: Case) -> None:
    """log.wandb: the package, and that somebody is logged in."""
    project = case.config.log.wandb
    if not project or not cluster.is_primary():
        return
    where = f"config.log.wandb = {project!r}"
    try:
        import wandb

        wandb.login()
    except ImportError:
        raise InputError(
            f"{where}: the wandb package is missing; install it, or leave the key empty."
        ) from None
    except Exception as error:
        raise InputError(f"{where}: {' '.join(str(error).split())}") from error


def warmup(case: Case) -> None:
    """schedule.warmup in steps of a run of epochs, whose steps are known once the shards are there."""
    config = case.config
    if config.train.epochs and config.schedule.warmup >= 1 and not _has_shards(case):
        raise InputError(
            f"config.schedule.warmup = {config.schedule.warmup:g}: how many steps train.epochs = "
            f"{config.train.epochs:g} are is not known before the shards are written; set it to a share of them, below "
            "1, or write the shards first (python -m mlm shards)."
        )


def init_from(case: Case) -> None:
    """train.init_from: config, names and shapes of the weights, tokenizer; of the run's architecture."""
    config = case.config
    if not config.train.init_from or case.begun:
        return
    from mlm.model import families
    from mlm.pretrained import load, warm_start

    source = load.load(config.train.init_from, head=None, flag=load.INIT_FROM, headers=True)
    fingerprint = None
    if locate.has_tokenizer(UPath(source.tokenizer)):
        # the rows of its tables are matched by token
        fingerprint = fingerprint_of(source.tokenizer)
    if case.command in PRETRAINING:
        # no architecture depends on them
        ids = {"cls": 0, "pad": source.config.pad_token_id, "sep": 2}
        model = families.find(config.model.family).make_config(
            config.model, source.config.vocab_size, ids
        )
        warm_start.refuse_another_model(source, model, tiled=config.model.init == "tiled")
    elif case.tokenizer:
        if fingerprint not in (None, case.fingerprint()):
            name = f"{load.INIT_FROM}{config.train.init_from}"
            fix = "leave out tokenizer.path, or use another --workdir"
            raise InputError(f"{case.tokenizer}: is not the tokenizer of {name}; {fix}.")
        tok = tokenizer.load(case.tokenizer)
        warm_start.refuse_unfit_rows(
            source.config,
            length=config.classify.length,
            vocab_size=len(tok),
            pad_id=tok.pad_token_id,
        )


def tokenizers(case: Case) -> None:
    """tokenizer.path: loads, with all special tokens."""
    path = case.config.tokenizer.path
    if path and case.workdir.tokenizer_folder is None:
        fingerprint_of(path)


def folders(case: Case) -> Iterator[Part]:
    """data.mixture, evaluate.sets and shards.dir: shards of this run's length and tokenizer."""
    config = case.config
    named = [("data.mixture", folder) for folder, _ in config.data.mixture]
    named += [("evaluate.sets", folder) for _, folder in config.evaluate.sets]
    reports = case.command == "doctor"  # on the run's own shards, by checks of their own
    if not reports and config.shards.dir and (UPath(config.shards.dir) / NAME).is_file():
        named.append(("shards.dir", config.shards.dir))
    for key, folder in named:
        yield functools.partial(_check_folder, case, key, folder)


def _check_folder(case: Case, key: str, folder: str) -> None:
    try:
        manifest = load_manifest(folder, tokenizer_folder=case.workdir.tokenizer_folder)
    except InputError as error:
        raise InputError(f"config.{key}: {error}") from None
    check_rows(manifest, case.config.shards.rows if key == "shards.dir" else manifest.rows)
    if manifest.length != case.config.shards.length:
        lengths = f"has rows of {manifest.length} tokens, but config.shards.length = {case.config.shards.length}"
        raise InputError(
            f"config.{key}: {folder}: {lengths}; set it to that, or write these shards again."
        )
    fingerprints = {manifest.tokenizer_fingerprint, case.fingerprint()} - {None}
    if len(fingerprints) > 1:
        fix = "set tokenizer.path to the tokenizer of these shards, or write them again"
        raise InputError(
            f"config.{key}: {folder}: was not made with the tokenizer in {case.tokenizer}; {fix}."
        )


def sources(case: Case) -> Iterator[Part]:
    """corpus.sources and corpus.keep_out, if they are read: the first row of each has the columns."""
    from mlm.data.corpus import Corpus

    elsewhere = getattr(case.flags, "engine", "") and not cluster.is_primary()
    if elsewhere or not _reads_corpus(case):
        return
    corpus = Corpus.from_config(case.config.corpus)
    for texts in (corpus, corpus.kept_out()):
        for source in dict.fromkeys(texts.sources):
            yield functools.partial(texts.check, source)


def _reads_corpus(case: Case) -> bool:
    """Returns whether the tokenizer or the shards are still to be made."""
    return not case.tokenizer or (case.command != "tokenizer" and not _has_shards(case))


def _has_shards(case: Case) -> bool:
    folder = case.workdir.shards_of(case.config)
    foreign = case.config.shards.dir and holds_foreign_shards(folder)
    return bool(case.config.data.mixture or foreign or (UPath(folder) / NAME).is_file())


def against(case: Case) -> Iterator[Part]:
    """--against: the texts of benchmarks."""
    from mlm.data.corpus import Corpus

    corpus = Corpus.from_config(case.config.corpus).of_texts(tuple(case.flags.against), "--against")
    for source in corpus.sources:
        yield functools.partial(corpus.check, source)


def tables(case: Case) -> Iterator[Part]:
    """The sources of config.classify: their first row has the columns of text and label."""
    from mlm.data import labelled

    settings = case.config.classify
    columns = labelled.Columns(settings.text, settings.label, settings.kind)
    for split in ("train", "validation", "test"):
        if settings[split]:
            yield functools.partial(labelled.check, settings[split], columns, split=split)
    for name, source in settings.predict:
        yield functools.partial(
            labelled.check,
            source,
            columns,
            split=name,
            key="config.classify.predict",
            require_labels=False,
        )


def pairs(case: Case) -> None:
    """--pairs: their first row has both sentences."""
    if case.flags.pairs:
        from mlm.inference import minimal_pairs

        minimal_pairs.check(case.flags.pairs, case.flags.phenomenon)


def model(case: Case) -> None:
    """--model: config, names and shapes of the weights, and the head."""
    from mlm.pretrained import load

    if case.flags.model:
        name = locate.at_step(case.flags.model, case.flags.step)
        head = (
            load.CLASSIFIER if not case.flags.pairs and locate.is_classifier(name) else load.LM_HEAD
        )
        load.load(name, head=head, headers=True)


def export(case: Case) -> None:
    """The folder of the export: absent, empty, or an earlier one."""
    flags = case.flags
    step = getattr(flags, "step", None) if case.command == "export" else None
    export_folder.check(UPath(getattr(flags, "to", "") or case.workdir.export_of(step)))


def hub(case: Case) -> None:
    """hub.name: the Hub would take a push. In the middle of a run, a refusal is a warning."""
    settings = case.config.hub
    if settings.name and case.command == "glue":
        raise InputError(
            f"config.hub.name = {settings.name}: all runs would push to it; leave it empty."
        )
    if settings.name and not case.begun and cluster.is_primary():
        from mlm.export import push  # huggingface_hub takes half a second

        push.try_out(settings.name)


CHECKS: dict[Check, tuple[str, ...]] = {
    servers: (*PRETRAINING, "classify", "glue", "evaluate", "bench", "verify"),
    hosts: ("run", "train", "classify", "verify"),
    torch: ("export", "bench"),
    engine: ("run", "tokenizer", "shards"),
    wandb: ("run", "train", "classify", "glue"),
    warmup: ("run", "doctor"),
    branch: PRETRAINING,
    init_from: (*PRETRAINING, "classify", "glue"),
    tokenizers: (*PRETRAINING, "classify"),
    folders: PRETRAINING,
    sources: ("run", "tokenizer", "shards", "doctor"),
    against: ("doctor",),
    tables: ("classify",),
    model: ("evaluate",),
    pairs: ("evaluate",),
    export: ("run", "classify", "export"),
    hub: ("run", "train", "classify", "glue"),  # the last one: it creates the repository
}
