"""The model card: metadata that the Hub's own library reads back, and the numbers of the run that made the model."""

import dataclasses
import html
import html.parser
import json
import pathlib
import re
import shutil

import pytest
from huggingface_hub import metadata_load
from huggingface_hub.repocard_data import model_index_to_eval_results
from markdown_it import MarkdownIt

from mlm import __main__
from mlm import config as configs
from mlm.data import tokenizer
from mlm.export import export, model_card
from mlm.pretrained.load import Pretrained
from mlm.report import plots
from mlm.report.sessions import split_sessions
from mlm.report.summary import RunSummary
from mlm.text import printable
from mlm.workdir import Workdir
from tests.support.corpora import manifest_of
from tests.support.reports import EVALS, TIMING, TRAIN
from tests.support.trained_model import publish

SCORES = {
    "step": 40,
    "kind": "eval",
    "loss": 4.25,
    "perplexity": 70.1,
    "accuracy": 0.2875,
    "predictions": 12345,
}
SPLIT = {
    "documents": 9000,
    "duplicates": 123,
    "tokens": 1_234_567,
    "dropped_tokens": 17,
    "text_bytes": 4_000_000,
}
MANIFEST = manifest_of(
    32,
    train=SPLIT | {"unigram_entropy": 6.5, "records": [700, 77]},
    validation=SPLIT | {"documents": 90, "unigram_entropy": 6.25, "records": [12]},
)


@pytest.fixture
def history(model, monkeypatch) -> RunSummary:
    """Of a run whose curve is not drawn."""
    monkeypatch.setattr(plots, "draw_loss", lambda history: None)
    monkeypatch.setattr(plots, "save", lambda figure, file: file.touch())
    return RunSummary("run", model.run_config, TRAIN, EVALS, split_sessions(TIMING), MANIFEST)


def with_keys(model: Pretrained, **keys) -> Pretrained:
    values = {key.replace("__", "."): value for key, value in keys.items()}
    config = configs.unflatten(configs.flatten(model.run_config) | values)
    dataset = {"records": 1000}
    meta = {
        "config": config,
        "data_fingerprint": "ab" * 32,
        "dataset": dataset,
        "useful_flops": 1.25e18,
    }
    return dataclasses.replace(model, step=40, meta=meta)


def card_of(model: Pretrained, folder: pathlib.Path, **settings) -> str:
    model_card.write(
        folder, model, "<mask>", **{"scores": SCORES, "name": "small", "history": None} | settings
    )
    return (folder / "README.md").read_text()


def row(card: str, name: str, place: int = 0) -> list[str]:
    """The cells of a row of a table, after its name; of several, the first."""
    found = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", card, re.MULTILINE)
    return [cell.strip() for cell in found[place].split("|")]


HUB_SOURCE = "hf:Salesforce/wikitext:wikitext-103-raw-v1"


def test_metadata_are_read_back_by_the_hub_s_library(model, tmp_path, monkeypatch):
    """License, language, data sets, the model that it started from, and scores, also of what is on no Hub."""
    publish(model, "someone/base", tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    def metadata(name: str = "small", scores=SCORES, **keys) -> dict:
        card_of(with_keys(model, **keys), tmp_path, name=name, scores=scores)
        return metadata_load(tmp_path / "README.md")

    found = metadata(
        "hostile: 'name' | # \n---\n",
        hub__license="apache-2.0",
        hub__language=("en", "de"),
        train__init_from="someone/base",
        corpus__sources=[HUB_SOURCE],
    )
    assert found["datasets"] == ["Salesforce/wikitext"] and found["base_model"] == "someone/base"
    assert (found["license"], found["language"]) == ("apache-2.0", ["en", "de"])
    assert (found["pipeline_tag"], found["mask_token"]) == ("fill-mask", "<mask>")
    name, results = model_index_to_eval_results(found["model-index"])
    assert name == "hostile: 'name' | # ---"
    values = {result.metric_type: result.metric_value for result in results}
    assert values == {key: SCORES[key] for key in ("loss", "perplexity", "accuracy")}
    assert {(r.dataset_type, r.dataset_split) for r in results} == {
        ("Salesforce/wikitext", "validation")
    }
    sources = [HUB_SOURCE, "text:a.txt"]
    for folder in ("../first", "/runs/first@100", "runs/first"):
        found = metadata(corpus__sources=sources, train__init_from=folder)
        assert found["datasets"] == ["Salesforce/wikitext"] and "base_model" not in found, folder
    assert "license" not in found and "language" not in found
    _, results = model_index_to_eval_results(found["model-index"])
    assert {result.dataset_type for result in results} == {"text"}, "not of that data set alone"
    found = metadata(corpus__sources=["docstrings"], scores=None)
    assert found["language"] == ["en"] and not {"model-index", "datasets"} & found.keys()


def test_the_numbers_are_those_of_the_run(model, history, tmp_path):
    """Of its data, recipe, tokenizer, hardware and compute; what is not known is not shown."""
    trained = with_keys(model, masking__rate=0.3, train__steps=60)
    mixture = {"name": "wiki", "share": 0.75, "records": 100}
    trained.meta["dataset"]["mixture"] = [mixture]
    card = card_of(trained, tmp_path, history=history)
    assert row(card, "wiki") == ["0.75", "100", "9.60"], "of 40 steps of 32 rows"
    wanted = {
        "rows": ["777", "12"],
        "documents": ["9,000", "90"],
        "duplicates dropped": ["123", "123"],
        "tokens": ["1,234,567", "1,234,567"],
        "unigram entropy, nats": ["6.5", "6.25"],
        "steps": ["40 of 60"],
        "rows in a step": ["32 of 32 tokens"],
        "optimizer": ["adamw, weight decay 0.01"],
        "kind": ["unigram"],
        "entries": ["1,000"],
        "devices": ["8 x cpu, then 4 x cpu"],
        "hours from the first start to the last line of the log": [f"{331 / 3600:.4g}"],
        "device-hours, stops left out": [f"{(8 * 95 + 4 * 68 + 4 * 31) / 3600:.4g}"],
        "share of the time in steps that were kept": ["36.3%"],
        "tokens read": [f"{40 * 32 * 32:,}"],
        "useful FLOPs": ["1.25e+18"],
    }
    assert {name: row(card, name) for name in wanted} == wanted
    assert "A RoBERTa masked language model" in card and " 30% of the tokens" in card
    assert re.search(r" heads, \d+,\d{3} parameters", card), "of a model this small, all of them"
    assert "| documents |" not in card_of(
        trained, tmp_path, history=dataclasses.replace(history, manifest=None)
    )
    staged = card_of(
        with_keys(model, data__batch_stages=[[8, 1200]], train__init_from="hub/name"), tmp_path
    )
    assert row(staged, "rows in a step") == ["8 for 1,200 steps, then 32 of 32 tokens"]
    assert "Pretrained from scratch;" in card and "Pretrained;" in staged


def test_what_a_class_makes_is_not_said_to_be_the_config_s(model, tmp_path):
    changed = with_keys(model)
    changed.meta["class"] = {
        "name": "a.B",
        "overrides": ["make_masking", "make_optimizer"],
        "files": [],
    }
    card = card_of(changed, tmp_path)
    for name in ("optimizer", "gradient clipping", "predicted"):
        assert " of its class; the config has " in row(card, name)[0]
    assert "It was trained to predict" not in card


def test_a_branch_names_the_keys_that_change_a_number_and_a_mean_its_checkpoints(model, tmp_path):
    branch = with_keys(model)
    changes = ["log.every: 1 -> 2", "data.seed: 0 -> 1"]
    branch.meta["branch"] = {"from": "runs/a", "step": 30, "config_changes": changes}
    parts = [{"checkpoint": f"runs/a@{step}", "weight": 0.5} for step in (20, 40)]
    branch.meta["averaged"] = parts
    card = html.unescape(card_of(branch, tmp_path))
    assert row(card, "started from") == ["step 30 of runs/a, with data.seed: 0 -> 1"]
    assert row(card, "parameters") == ["the mean of a@20 (weight 0.5), a@40 (weight 0.5)"]


def test_the_whole_config_and_every_fingerprint(model, history, tmp_path):
    trained = with_keys(model, corpus__sources=["text:a|b\n</details>*"])
    card = card_of(trained, tmp_path, history=history)
    (shown,) = re.findall(
        r"<details><summary>Config, \d+ keys</summary>\n\n```json\n(.*?)\n```", card, re.DOTALL
    )
    assert configs.unflatten(json.loads(shown)) == trained.run_config
    assert row(card, "config") == [f"`{configs.fingerprint(trained.run_config)}`"]
    assert row(card, "data", -1) == [f"`{'ab' * 32}`"]
    assert row(card, "tokenizer", -1) == [f"`{tokenizer.fingerprint(model.tokenizer)}`"]
    code = r"\| code that exported it \| `[0-9a-f]{64}`(, commit `[0-9a-f]{12}(-dirty)?`)? \|"
    assert re.search(code, card)


HOSTILE = (
    "```\n# heading\n<script>alert(1)</script>a|b `code` [link](javascript:x) ![image](http://x/y.png)",
    "\n---\ntags: [x]\n---\n</details></code>&lt;&#60; \\| \\\\| *b* _i_ ~~s~~ $x$ {{ x }} https://x.y @me",
    "- ' \" : # %TAG ! &anchor *alias \x1b[2J\x9b\u202e\udcff\x00\r\t\x85\u2028",
)


def elements(markdown: str) -> list[str]:
    """The elements of the page: markup in a text would be a further one."""
    page = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    tags = []
    parser = html.parser.HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append(tag)
    parser.feed(page.render(markdown))
    return tags


@pytest.mark.parametrize("hostile", HOSTILE)
def test_what_a_config_or_a_name_holds_comes_out_as_text(model, history, tmp_path, hostile):
    cards = []
    for text in (hostile, "x"):
        keys = {"tokenizer.path": text, "train.init_from": text, "model.dtype": text}
        trained = with_keys(model, **keys, corpus__sources=[f"text:{text}", "x"])
        cards.append(card_of(trained, tmp_path, history=history, name=text).partition("\n---\n")[2])
    card, plain = cards
    assert elements(card) == elements(plain), "the same elements as with plain text"
    (cell,) = row(card, "computed in")
    assert html.unescape(cell) == " ".join(printable(hostile).split())
    assert all(line.isprintable() for line in card.splitlines())


@pytest.mark.standard
def test_an_export_of_a_run_has_its_history(trained_workdir, tmp_path, monkeypatch):
    """From the logs of the workdir, to the model's step, which is 5, and not beyond."""
    monkeypatch.setattr(export, "check_files", lambda *_: [])  # which other tests hold
    workdir = Workdir(shutil.copytree(trained_workdir.root, tmp_path / "run"))
    lines = [line | {"step": line["step"] // 10} for line in (*TRAIN, *EVALS)]
    lines.append(EVALS[0] | {"step": 6, "loss": 9.0})
    workdir.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    workdir.shards.mkdir()
    (workdir.shards / "manifest.json").write_text(MANIFEST.to_json())
    workdir.export.mkdir()
    (workdir.export / "proof.json").write_text("{}")
    results = '{"of earlier weights": {}}'
    (workdir.export / "evaluation.json").write_text(results)
    assert __main__.main(["export", f"--workdir={workdir.root}"]) == 0
    card = (workdir.export / "README.md").read_text()
    assert row(card, "documents") == ["9,000", "90"]
    assert row(card, "4") == ["4.25", "28.7%"] and "| 6 |" not in card
    assert (workdir.export / "loss.png").is_file()
    assert (workdir.export / "evaluation.json").read_text() == results, "a result was lost"
