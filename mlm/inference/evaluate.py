"""Scores of a masked language model on a split: a checkpoint, an export or any RoBERTa folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from mlm import cluster, logs
from mlm import config as configs
from mlm.data import batches, tokenizer
from mlm.data.dataset_info import DatasetInfo
from mlm.data.manifest import Manifest
from mlm.errors import DamageError, InputError
from mlm.inference import pseudo_perplexity
from mlm.inference.fill_mask import longest_row
from mlm.model import factory
from mlm.model.masking import TokenMasking
from mlm.model.roberta import Network
from mlm.paths import UPath, is_remote, write_text
from mlm.pretrained import load
from mlm.tasks import pretraining
from mlm.training import sharding, step
from mlm.workdir import Workdir


@dataclasses.dataclass(frozen=True)
class Scored:
    """A model on its devices, and where the masks of its evaluation come from.

    Attributes:
      network, params, shardings: the parameters have the padded vocabulary.
      maskings: (name, masking) of each kind of mask to score; the first is the run's own.
    """

    network: Network
    params: Any
    shardings: Any
    maskings: list[tuple[str, TokenMasking]]


def run(
    config: ConfigDict,
    workdir: Workdir,
    manifest: Manifest,
    *,
    model: str,
    split: str,
    masks: Sequence[str] = (),
    pseudo: int = 0,
) -> dict[str, Any]:
    """Scores a model and returns the scores.

    The first process prints them as a line of JSON, and for a person on stderr, and adds them to evaluation.json beside
    the model: in its folder, or in the workdir.

    Args:
      config: says which masks, which batch size.
      workdir: of the run.
      manifest: of the shards.
      model: a workdir, a folder or a name on the hub; "" for the workdir's newest checkpoint.
      split: of the shards.
      masks: kinds of masks to score beside the run's own, "token", "word" or "span".
      pseudo: rows whose pseudo-perplexity is taken; 0 for none.

    Raises:
      InputError: no such split, an empty one, or a model of another tokenizer than the shards, or of shorter rows.
    """
    if split not in manifest.splits or manifest.splits[split].records == 0:
        raise InputError(f"--split={split}: the shards in {manifest.folder} hold no records of that split.")
    if pseudo < 0:
        raise InputError(f"--pseudo={pseudo}: must be a number of rows, from 0 up.")
    mesh = sharding.make_mesh(**config.mesh.to_dict())
    sharding.check_batch(mesh, rows=config.evaluate.batch, key="evaluate.batch")
    found = load.load(model, head=load.LM_HEAD, workdir=workdir)
    _check_fit(found, workdir, manifest)
    which = f"step {found.step}" if found.step is not None else f"weights {_digest(found.params)}"
    which += f", data {manifest.fingerprint[:12]}"
    scored = _place(found, config, workdir, manifest, mesh, [config.masking.kind, *masks])
    scores = {name: _masked_scores(config, manifest, mesh, scored, m, split) for name, m in scored.maskings}
    entries = {f"{split}, {_setting(config, name)}, {which}": values for name, values in scores.items()}
    result = {"split": split, "model": found.source, **next(iter(scores.values()))}
    if len(scores) > 1:
        result["masks"] = scores
    if pseudo:
        values = _pseudo_scores(config, manifest, mesh, scored, split, pseudo)
        entries[f"{split}, pseudo-perplexity of {values['pseudo_rows']} rows, {which}"] = values
        result |= values
    if cluster.is_primary():
        print(json.dumps(result))
        print(table(result), file=sys.stderr)
        entries = {key: {"model": found.source, **values} for key, values in entries.items()}
        add_results(UPath(model) if model and UPath(model).is_dir() else workdir.root, entries)
    return result


def table(result: dict[str, Any]) -> str:
    """Returns the scores for a person."""
    lines = [f"{result['model']} on {result['split']}"]
    for name, scores in result.get("masks", {"": result}).items():
        words = f"  {name + ' masks: ' if name else ''}loss {scores['loss']:.4f} nats, perplexity "
        words += f"{scores['perplexity']:,.2f}, accuracy {scores['accuracy']:.2%}"
        if "bits_per_byte" in scores:
            words += f", {scores['bits_per_byte']:.4f} bits per byte"
        lines.append(f"{words}, on {scores['predictions']:,} masked tokens")
    if "pseudo_loss" in result:
        lines.append(
            f"  pseudo-perplexity {result['pseudo_perplexity']:,.2f} ({result['pseudo_loss']:.4f} nats, accuracy "
            f"{result['pseudo_accuracy']:.2%}): {result['pseudo_tokens']:,} tokens of {result['pseudo_rows']:,} rows, "
            "each masked alone"
        )
    return "\n".join(lines)


def add_results(folder: UPath, entries: dict[str, dict[str, Any]]) -> None:
    """Adds entries to the folder's evaluation.json; those of other names stay. What can't be written is said."""
    file = folder / logs.RESULTS
    finite = {
        key: {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        for key, values in entries.items()
    }
    try:
        write_text(file, json.dumps(logs.read_object(file) | finite, indent=1) + "\n")
    except DamageError as error:
        print(f"evaluate: the scores were not written: {error}", file=sys.stderr)
    except Exception as error:  # a bucket's client raises its own
        if not isinstance(error, OSError) and not is_remote(file):
            raise
        words = getattr(error, "strerror", None) or error
        print(f"evaluate: the scores were not written: {file}: {words}.", file=sys.stderr)
    else:
        print(f"  written to {file}", file=sys.stderr)


def _check_fit(found: load.Pretrained, workdir: Workdir, manifest: Manifest) -> None:
    if found.config.vocab_size != manifest.vocab_size:
        raise InputError(
            f"{found.source}: has {found.config.vocab_size} vocabulary entries, the shards in {manifest.folder} "
            f"{manifest.vocab_size}; score it on shards of its own tokenizer."
        )
    both = [folder for folder in (UPath(found.tokenizer), workdir.tokenizer) if (folder / "tokenizer.json").is_file()]
    if len(both) == 2 and not _same_vocabulary(*map(str, both)):
        raise InputError(
            f"{found.source}: its tokenizer gives other ids than {workdir.tokenizer}, that of the shards in "
            f"{manifest.folder}; score it on shards of its own tokenizer."
        )
    if longest_row(found) < manifest.length:
        raise InputError(
            f"{found.source}: reads {longest_row(found)} tokens at most, the rows of the shards in {manifest.folder} "
            f"have {manifest.length}; score it on shorter ones."
        )


def _same_vocabulary(one: str, other: str) -> bool:
    return one == other or tokenizer.load_fast(one).get_vocab() == tokenizer.load_fast(other).get_vocab()


def _place(
    found: load.Pretrained,
    config: ConfigDict,
    workdir: Workdir,
    manifest: Manifest,
    mesh: jax.sharding.Mesh,
    kinds: Sequence[str],
) -> Scored:
    """Returns the model with the vocabulary padded as in training, on the devices."""
    info = DatasetInfo.from_manifest(manifest)
    maskings = [(kind, _masking(config, workdir, info, kind)) for kind in dict.fromkeys(kinds)]
    own = factory.make_network(config.model.to_dict(), info, isolated=config.data.isolate_documents)
    padded = found.padded(config.model.vocab_multiple)
    shardings = sharding.tree_shardings(padded.params, mesh, padded.params)
    network = dataclasses.replace(own, config=padded.config)
    return Scored(network, sharding.put_tree(padded.params, shardings), shardings, maskings)


def _masking(config: ConfigDict, workdir: Workdir, info: DatasetInfo, kind: str) -> TokenMasking:
    config = configs.replace(config, {"masking.kind": kind, "masking.end_rate": 0.0})
    return factory.make_masking(config.masking.to_dict(), info, pretraining.word_starts(config, workdir))


def _masked_scores(
    config: ConfigDict, manifest: Manifest, mesh: jax.sharding.Mesh, scored: Scored, masking: TokenMasking, split: str
) -> dict[str, float]:
    eval_step = step.make_eval_step(
        network=scored.network,
        masking=masking,
        mask_seed=config.evaluate.seed,
        mesh=mesh,
        param_shardings=scored.shardings,
    )
    return pretraining.score_split(config, manifest, mesh, eval_step, scored.params, split)


def _pseudo_scores(
    config: ConfigDict, manifest: Manifest, mesh: jax.sharding.Mesh, scored: Scored, split: str, count: int
) -> dict[str, float]:
    rows = config.evaluate.batch
    read = batches.eval_batches(manifest, split=split, batch=rows, rows=(0, rows))  # every host needs all of them
    records = manifest.splits[split].records
    ids_NxL, attention_NxL = pseudo_perplexity.sample(read, count=count, records=records)
    score_step = pseudo_perplexity.make_step(
        network=scored.network,
        mask_id=manifest.special_ids["mask"],
        vocab_size=manifest.vocab_size,
        mesh=mesh,
        param_shardings=scored.shardings,
    )
    special = manifest.all_special_ids
    return pseudo_perplexity.score(
        score_step, scored.params, ids_NxL, attention_NxL, special_ids=special, mesh=mesh, batch=rows
    )


def _setting(config: ConfigDict, name: str) -> str:
    own = config.masking
    words = f"{name} masks {own.rate:g} {own.mask_share:g}/{own.random_share:g} seed {config.evaluate.seed}"
    words += "" if name == "token" else f" longest {own.longest}"
    return words + (f" p {own.span_p:g}" if name == "span" else "")


def _digest(params: Any) -> str:
    """Returns the beginning of the SHA-256 of the parameters: what a folder's results belong to."""
    digest = hashlib.sha256()
    for name, value in sharding.named_leaves(params):
        digest.update(name.encode() + value.tobytes())
    return digest.hexdigest()[:12]
