"""The stages of `run` after the data: train, report, export, and what a person is told in the end."""

from __future__ import annotations

import re

import jax
from ml_collections import ConfigDict

from mlm import logs
from mlm.cluster import distributed, watch
from mlm.data import batches, tokenizer
from mlm.data.manifest import Manifest
from mlm.export import card_history
from mlm.export import export as exports
from mlm.inference import fill_mask
from mlm.pretrained import load
from mlm.report import report
from mlm.tasks import pretraining
from mlm.workdir import Workdir

SENTENCES = 5  # shown with their fillings at the end of a run


def train(config: ConfigDict, workdir: Workdir, manifest: Manifest) -> None:
    """Trains on the shards of `manifest`, with compiled programs kept in the workdir."""
    if jax.config.jax_compilation_cache_dir is None:  # JAX_COMPILATION_CACHE_DIR goes before
        jax.config.update("jax_compilation_cache_dir", str(workdir.root / "xla_cache"))
    pretraining.train(config, workdir, manifest)


def finish(workdir: Workdir, manifest: Manifest) -> None:
    """Writes the report and the export of a trained workdir, and says what came out: the first process for all."""
    model = export(workdir, torch_python="")
    if distributed.is_first():
        report.write(workdir)
        summarize(workdir, manifest, model)
    watch.current.wait_for_all("finished")


def export(workdir: Workdir, *, torch_python: str) -> load.Pretrained:
    """Writes the newest checkpoint as a transformers folder; returns its model.

    Every process reads the checkpoint, the first one writes, and the others wait for what comes of it.
    """
    model = load.from_workdir(workdir, head=load.LM_HEAD)
    if distributed.is_first():
        scores = [line for line in logs.read(workdir.metrics, "eval") if line["step"] == model.step]
        exports.export(
            model,
            workdir.export,
            scores=scores[-1] if scores else None,
            name=workdir.root.name,
            torch_python=torch_python,
            history=card_history.gather(workdir, model),
        )
    watch.current.wait_for_all("exported")
    return model


def summarize(workdir: Workdir, manifest: Manifest, model: load.Pretrained) -> None:
    """Prints the scores beside the unigram entropy, some sentences of the validation split filled, and the paths."""
    scores = logs.read(workdir.metrics, "eval")[-1]
    entropy = manifest.splits["validation"].unigram_entropy
    print(f"\nevaluation after {scores['step']} updates, on {scores['predictions']:,} masked tokens")
    print(f"  loss {scores['loss']:.3f} nats, perplexity {scores['perplexity']:.1f}, accuracy {scores['accuracy']:.1%}")
    if entropy is not None:
        print(
            f"  unigram entropy of the split {entropy:.3f} nats: the model is {entropy - scores['loss']:.2f} under it"
        )
    tok = tokenizer.load(str(workdir.tokenizer))
    texts, answers = masked_sentences(manifest, tok, SENTENCES)
    for text, answer, fillings in zip(texts, answers, fill_mask.fill(model, tok, texts, top_k=5), strict=True):
        print(f"\n  {text}    (was: {answer})")
        print("    " + "   ".join(f"{_shown(f['token_str'])} {f['score']:.0%}" for f in fillings[0]))
    print(f"\nreport  {workdir.report}\nexport  {workdir.export}")


def _shown(token: str) -> str:
    return token.strip() or repr(token)  # a line break is a filling too


def masked_sentences(manifest: Manifest, tok, count: int) -> tuple[list[str], list[str]]:
    """Returns sentences of the validation split with one whole word masked, and the words.

    The word is the middle one of those that are one token and at least four letters long.

    Args:
      manifest: of the shards.
      tok: the fast tokenizer of the shards.
      count: how many, or as many as there are.
    """
    texts, answers = [], []
    rows = batches.eval_batches(manifest, split="validation", batch=16, rows=(0, 16))
    for batch in rows:
        for ids in batch["input_ids"][batch["valid"] > 0]:
            text = " ".join(tok.decode(ids, skip_special_tokens=True).split())
            for sentence in re.findall(r"(?<=[.] )[A-Z][^.`:=>{}\[\]]{30,110}[.](?= )", text)[:1]:
                words = [w for w in re.findall(r"(?<= )[a-z]{4,}(?= )", sentence) if len(tok.tokenize(" " + w)) == 1]
                if words:
                    word = words[len(words) // 2]
                    texts.append(re.sub(rf"(?<= ){word}(?= )", tok.mask_token, sentence, count=1))
                    answers.append(word)
            if len(texts) == count:
                return texts, answers
    return texts, answers
