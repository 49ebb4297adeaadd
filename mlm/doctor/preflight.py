"""Opens all that a command's config and flags name before the corpus is read or anything is written.

No payload is read: of models the headers, of checkpoints the sizes of files, of data the first rows. Every command
calls `refuse`; `doctor` reports all that `errors` yields. To add a check, list it in `CHECKS`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import subprocess
from collections.abc import Callable, Iterator

from ml_collections import ConfigDict

from mlm import cluster
from mlm import config as configs
from mlm.cluster import watch
from mlm.data import tokenizer
from mlm.data.manifest import NAME, check_rows, holds_foreign_shards, load_manifest
from mlm.engine import dask_engine
from mlm.errors import DamageError, InputError, StopError
from mlm.export import folder as export_folder
from mlm.paths import UPath, check_reachable, of_a_command
from mlm.pretrained import checkpoint_files, locate
from mlm.workdir import Workdir

ANSWER = 8.0  # seconds for a scheduler to answer
PRETRAINING = ("run", "train", "tokenizer", "shards", "doctor")
Check = Callable[["Case"], None]  # raises InputError or DamageError


@dataclasses.dataclass(frozen=True)
class Case:
    """A command that is about to start."""

    command: str
    config: ConfigDict
    workdir: Workdir | None  # which may not exist yet
    flags: argparse.Namespace

    @property
    def begun(self) -> bool:
        """Whether there is a checkpoint to resume from, so that nothing is needed from which a run starts."""
        return bool(checkpoint_files.complete_steps(self.workdir.checkpoints))

    @property
    def tokenizer(self) -> str:
        """The tokenizer that the workdir has, or will be given a copy of; "" for one that is still to be trained."""
        if path := self.workdir.tokenizer_folder or self.config.tokenizer.path:
            return path
        branch = self.config.train.branch_from
        folder = f"{locate.split_step(branch)[0]}/tokenizer" if branch else ""
        # rows need none
        is_needed = self.command != "train" or (UPath(folder) / "tokenizer.json").is_file()
        return folder if is_needed else ""

    def fingerprint(self) -> str | None:
        """Returns that of `tokenizer`, None without one; raises InputError if it can't be used."""
        if self.workdir.tokenizer_folder:
            return tokenizer.fingerprint(self.tokenizer)
        return fingerprint_of(self.tokenizer) if self.tokenizer else None


@of_a_command
@functools.cache
def fingerprint_of(path: str) -> str:
    """Returns the fingerprint of the copy that `tokenizer` makes; raises InputError if it can't be used."""
    return tokenizer.content_hash(tokenizer.load(path).backend_tokenizer)


def refuse(case: Case) -> None:
    """Raises the first error."""
    for _, error in errors(case):
        raise error


def errors(case: Case) -> Iterator[tuple[str, StopError]]:
    """Yields (what was checked, the first error) for each check of something that the command could not use."""
    for check, key, commands in CHECKS:
        group, _, name = key.partition(".")
        if case.command not in commands or (key and not case.config[group][name]):
            continue
        try:
            check(case)
        except (InputError, DamageError) as error:
            yield check.__name__, error
            if check is servers:
                return  # the other checks would wait for it, too


def servers(case: Case) -> None:
    """The servers of all buckets in the config."""
    values = [
        value
        for key, value in configs.flatten(case.config).items()
        if not key.startswith(("pod.", "log."))
    ]
    for path in re.findall(r"[a-z0-9+]+://[^'\",()]+", repr(values)):
        check_reachable(path)


def hosts(case: Case) -> None:
    """config.data.lanes: whole lanes for each host, or whole hosts for each lane; with mesh.tensor hosts share rows."""
    lanes = case.config.data.lanes
    processes = watch.current.cluster.processes
    if case.config.mesh.tensor == 1 and lanes % processes and processes % lanes:
        allowed = f"must be a multiple or a divisor of the number of hosts, {processes}"
        raise InputError(f"config.data.lanes = {lanes}: {allowed}.")


def torch(case: Case) -> None:
    """--torch: a Python with PyTorch and transformers."""
    if not case.flags.torch:
        return
    code = "from importlib.util import find_spec as s; exit(not (s('torch') and s('transformers')))"
    command = [case.flags.torch, "-c", code]
    try:
        code = subprocess.run(command, capture_output=True, timeout=ANSWER).returncode
    except (OSError, subprocess.SubprocessError) as error:
        code = error
    if code != 0:
        raise InputError(
            f"--torch={case.flags.torch}: is no Python with PyTorch and transformers ({code}); install them there, or "
            "name another."
        )


def engine(case: Case) -> None:
    """--engine: its address, the certificates, and whether the scheduler answers, if there is something to do."""
    flags = case.flags
    if flags.engine and cluster.is_primary() and _reads_corpus(case):
        folder = flags.engine_certificates or str(case.workdir.root / "hosts" / "certificates")
        with dask_engine.connect(flags.engine, timeout=ANSWER, certificates=folder) as opened:
            opened.greet()


def branch(case: Case) -> None:
    """train.branch_from: the step, what the branch changes, and the tokenizer."""
    if case.begun:
        return
    from mlm.training import branch

    name = case.config.train.branch_from

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
    if not cluster.is_primary():
        return
    try:
        import wandb

        wandb.login()
    except ImportError:
        reason = "the wandb package is missing; install it, or leave the key empty."
    except Exception as error:
        reason = " ".join(str(error).split())
    else:
        return
    raise InputError(f"config.log.wandb = {case.config.log.wandb!r}: {reason}")


def warmup(case: Case) -> None:
    """schedule.warmup in steps of a run of epochs, whose steps are known once the shards are there."""
    config = case.config
    if config.schedule.warmup >= 1 and not _has_shards(case):
        raise InputError(
            f"config.schedule.warmup = {config.schedule.warmup:g}: how many steps train.epochs = "
            f"{config.train.epochs:g} are is not known before the shards are written; set it to a share of them, below "
            "1, or write the shards first (python -m mlm shards)."
        )


def init_from(case: Case) -> None:
    """train.init_from: config, names and shapes of the weights, tokenizer; of the run's architecture."""
    config = case.config
    if case.begun:
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
    if case.workdir.tokenizer_folder is None:
        fingerprint_of(case.config.tokenizer.path)


def folders(case: Case) -> None:
    """data.mixture, evaluate.sets and shards.dir: shards of this run's length and tokenizer."""
    config = case.config
    named = [("data.mixture", folder) for folder, _ in config.data.mixture]
    named += [("evaluate.sets", folder) for _, folder in config.evaluate.sets]
    reports = case.command == "doctor"  # on the run's own shards, by checks of their own
    if not reports and config.shards.dir and (UPath(config.shards.dir) / NAME).is_file():
        named.append(("shards.dir", config.shards.dir))
    for key, folder in named:
        try:
            manifest = load_manifest(folder, tokenizer_folder=case.workdir.tokenizer_folder)
        except InputError as error:
            raise InputError(f"config.{key}: {error}") from None
        if key == "shards.dir":
            check_rows(manifest, config.shards.rows)
        if manifest.length != config.shards.length:
            raise InputError(
                f"config.{key}: {folder}: has rows of {manifest.length} tokens, but config.shards.length = "
                f"{config.shards.length}; set it to that, or write these shards again."
            )
        if len({manifest.tokenizer_fingerprint, case.fingerprint()} - {None}) > 1:
            raise InputError(
                f"config.{key}: {folder}: was not made with the tokenizer in {case.tokenizer}; set tokenizer.path to "
                "the tokenizer of these shards, or write them again."
            )


def sources(case: Case) -> None:
    """corpus.sources and corpus.keep_out, if they are read: the first row of each has the columns."""
    from mlm.data.corpus import Corpus

    elsewhere = getattr(case.flags, "engine", "") and not cluster.is_primary()
    if elsewhere or not _reads_corpus(case):
        return
    corpus = Corpus.from_config(case.config.corpus)
    for texts in (corpus, corpus.kept_out()):
        for source in dict.fromkeys(texts.sources):
            texts.check(source)


def _reads_corpus(case: Case) -> bool:
    """Returns whether the tokenizer or the shards are still to be made."""
    return not case.tokenizer or (case.command != "tokenizer" and not _has_shards(case))


def _has_shards(case: Case) -> bool:
    folder = case.workdir.shards_of(case.config)
    foreign = case.config.shards.dir and holds_foreign_shards(folder)
    return bool(case.config.data.mixture or foreign or (UPath(folder) / NAME).is_file())


def against(case: Case) -> None:
    """--against: the texts of benchmarks."""
    from mlm.data.corpus import Corpus

    corpus = Corpus.from_config(case.config.corpus).of_texts(tuple(case.flags.against), "--against")
    for source in corpus.sources:
        corpus.check(source)


def tables(case: Case) -> None:
    """The sources of config.classify: their first row has the columns of text and label."""
    from mlm.data import labelled

    settings = case.config.classify
    columns = labelled.Columns(settings.text, settings.label, settings.kind)
    for split in ("train", "validation", "test"):
        if settings[split]:
            labelled.check(settings[split], columns, split=split)
    key = "config.classify.predict"
    for name, source in settings.predict:
        labelled.check(source, columns, split=name, key=key, require_labels=False)


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
    if case.command == "glue":
        raise InputError(
            f"config.hub.name = {settings.name}: all runs would push to it; leave it empty."
        )
    if not case.begun and cluster.is_primary():
        from mlm.export import push  # huggingface_hub takes half a second

        push.try_out(settings.name)


# Each check, the key without which there is nothing to check ("" if there always is), and the commands.
CHECKS: tuple[tuple[Check, str, tuple[str, ...]], ...] = (
    (servers, "", (*PRETRAINING, "classify", "glue", "evaluate", "bench", "verify")),
    (hosts, "", ("run", "train", "classify", "verify")),
    (torch, "", ("export", "bench")),
    (engine, "", ("run", "tokenizer", "shards")),
    (wandb, "log.wandb", ("run", "train", "classify", "glue")),
    (warmup, "train.epochs", ("run", "doctor")),
    (branch, "train.branch_from", PRETRAINING),
    (init_from, "train.init_from", (*PRETRAINING, "classify", "glue")),
    (tokenizers, "tokenizer.path", (*PRETRAINING, "classify")),
    (folders, "", PRETRAINING),
    (sources, "", ("run", "tokenizer", "shards", "doctor")),
    (against, "", ("doctor",)),
    (tables, "", ("classify",)),
    (model, "", ("evaluate",)),
    (pairs, "", ("evaluate",)),
    (export, "", ("run", "classify", "export")),
    # the last one: it creates the repository
    (hub, "hub.name", ("run", "train", "classify", "glue")),
)
