"""`export` of a classifier for transformers' RobertaForSequenceClassification or ...ForTokenClassification, proven.

proof.json holds {"task": transformers' name, "longest", "rows": [{"texts", "ids", "scores"}, ...], "made_with"}, and
proof.safetensors their logits [rows, C], all rows but the last, the longest, as one padded batch. Of token labels,
"scores" are those of each token, and the logits [L, C] of each row are "logits.{row}".

Dimensions: N rows, L tokens in a row, C classes, 1 for regression.
"""

import numpy as np

from mlm import logs
from mlm.data import tokenizer
from mlm.export import export as exports
from mlm.export import model_card
from mlm.inference.classify_texts import TextClassifier, Texts
from mlm.inference.fill_mask import longest_row
from mlm.model import classifier
from mlm.paths import UPath
from mlm.pretrained import load
from mlm.pretrained.load import Pretrained
from mlm.workdir import Workdir

TASKS = ("text-classification", "token-classification")  # transformers' names


def export(model: Pretrained, workdir: Workdir, folder: UPath, *, name: str, torch_python: str = "") -> None:
    """Writes a run's classifier into a folder, as `exports.export` does."""
    tok = exports.fitting_tokenizer(model)
    predictor, longest = TextClassifier(model, tok), longest_row(model)
    texts = _proof_texts(longest, pair=len(predictor.columns) == 2)
    ids = [tok(*each, truncation="longest_first", max_length=longest)["input_ids"] for each in texts]

    def logits_of(again: Pretrained) -> list[np.ndarray]:
        return TextClassifier(again, tokenizer.load(again.tokenizer)).logits(ids)

    with exports.writing(model, folder, torch_python) as new:
        (new / "README.md").write_text(_card(model, workdir, name), encoding="utf-8")
        logits = predictor.logits(ids)
        if predictor.of_tokens:
            found, proof = predictor.label_tokens(ids), {f"logits.{row}": own for row, own in enumerate(logits)}
        else:
            answers = predictor.classify(ids, max(len(predictor.names), 1))
            found, proof = [own.get("probabilities", own) for own in answers], {"logits": np.stack(logits)}
        columns = zip(map(list, texts), ids, found, strict=True)
        rows = [dict(zip(("texts", "ids", "scores"), row, strict=True)) for row in columns]
        exports.save_proof(new, {"task": TASKS[predictor.of_tokens], "longest": longest, "rows": rows}, proof)
        exports.check_files(new, load.CLASSIFIER, logits_of, logits, ids[-1])


def _proof_texts(longest: int, *, pair: bool) -> list[Texts]:
    """Returns texts, or pairs of them, of several lengths, the last too long for the model."""
    texts = [text.replace("<mask>", "none") for text in exports.TEXTS]
    long = " ".join([exports.FILLER] * longest)  # a word is a token at least
    if pair:
        return [*((text, texts[-1]) for text in texts), (texts[1], texts[0]), (texts[0], long)]
    return [(text,) for text in (*texts, long)]


def _card(model: Pretrained, workdir: Workdir, name: str) -> str:
    """Returns the model card as Markdown, with the metadata that the Hugging Face Hub reads on top."""
    scores = [line for line in logs.read(workdir.metrics, "eval") if line["step"] == model.step]
    return model_card.render(
        "classifier_card.md.j2",
        task=TASKS[classifier.kind(model.config) == "tokens"],
        name=name,
        config=model.config,
        run=model.run_config,
        pair=len(model.run_config["classify.text"]) == 2,
        reads=longest_row(model),
        step=model.step,
        averaged=model_card.averaged(model),
        scores=[(key, value) for line in scores[-1:] for key, value in line.items() if key not in ("step", "kind")],
        labels=classifier.class_names(model.config),
    )
