"""Every command of README.md and of the pages in mlm/ runs: as it stands there, with overrides that make it short."""

import itertools
import json
import os
import pathlib
import re
import subprocess
import tomllib
from collections.abc import Sequence

import pytest

from mlm import config
from tests import ROOT
from tests.support import glue_shaped, labelled_texts, pytorch, trained_model
from tests.support.corpora import write_jsonl
from tests.support.processes import environment
from tests.support.tiny import TINY

SHORT = (
    "tokenizer.vocab_size=600",
    "tokenizer.sample_megabytes=0.3",
    "shards.count=8",
    "corpus.validation_fraction=0.1",
    "model.layers=1",
    "train.steps=8",
    "log.every=4",
    "checkpoint.every=4",
    "evaluate.every=0",
)

BASE_ON_A_LAPTOP = (
    "corpus.weights=1.0",
    "data.lanes=8",
    "train.accumulate=1",
    "model.remat_feed_forward=0",
)
PUBLISHED = "FacebookAI/roberta-base"
# PUBLISHED's own
OF_MODEL = (
    "tokenizer.",
    "model.positions=",
    "model.layers=",
    "model.h",
    "model.intermediate_size=",
)


README = ROOT / "README.md"
BENCH = ROOT / "mlm/bench/README.md"
OTHERS = [page for page in sorted(ROOT.glob("mlm/*/README.md")) if page != BENCH]
PAGES = (README, BENCH, *OTHERS)


def read(pages: Sequence[pathlib.Path] = PAGES) -> str:
    return "".join(page.read_text() for page in pages)


def commands(pages: Sequence[pathlib.Path] = PAGES) -> list[str]:
    """The lines of the bash blocks, and the examples in the tables."""
    text = read(pages)
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    joined = [line for block in blocks for line in block.replace("\\\n", "").splitlines()]
    lines = [line for line in (re.sub(r"(^|\s+)#.*", "", line) for line in joined) if line.strip()]
    lines += re.findall(r"^`(python -c [^`]* > docs\.jsonl)`$", text, re.MULTILINE)
    return lines + re.findall(r"\| `(?:time )?(python -m mlm [^`]*)` \|", text)


def test_every_command_has_an_example():
    from mlm.__main__ import COMMANDS

    examples = {line.split()[3] for line in commands() if line.startswith("python -m mlm")}
    assert examples == set(COMMANDS)


@pytest.mark.parametrize("name", ["S", "M"])
def test_settings_below_the_table(name):
    """`$S` and `$M` are settings that load."""
    (text,) = re.findall(rf'`{name}="([^"]*)"`', read())
    (file,) = re.findall(r"--config=(\S+)", text)
    loaded = config.load(file, re.findall(r"--config\.(\S+)", text))
    assert loaded.shards.length == 128 and loaded.tokenizer.vocab_size == 16384


def test_each_guarantee_has_tests_that_are_not_among_the_slow():
    """tests/guarantees.toml names them, for each line of README's list."""
    section = re.search(r"## Guarantees.*?\n## ", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    table = tomllib.loads((ROOT / "tests" / "guarantees.toml").read_text())
    assert list(table) == re.findall(r"^- \*\*(\w+)", section, re.MULTILINE)
    assert all(table.values())
    for name in itertools.chain(*table.values()):
        file, _, function = name.partition("::")
        text = (ROOT / "tests" / file).read_text()
        # its decorators, and what the file says of all its tests
        (marks,) = re.findall(rf"((?:^[@ )\]].*\n)*)^def {function}\(", text, re.MULTILINE)
        marks += "".join(re.findall(r"^pytestmark = (?:\[[^]]*\]|.*)$", text, re.MULTILINE))
        assert not re.search(r"mark\.(slow|hosts)", marks), name


def with_settings(command: str, *settings: str) -> str:
    return command + "".join(f" --config.{setting}" for setting in settings)


def shortened(line: str, folder: pathlib.Path) -> str:
    """A command of the pages as it runs here: on a small corpus, a small model, in some steps."""
    command = line.replace("my/texts/*.txt", f"{folder}/my.txt").replace("runs/", f"{folder}/runs/")
    # the steps of the short run
    command = command.replace("quickstart@1000..1575", "quickstart@4..8")
    command = command.replace("> docs.jsonl", f"> {folder}/docs.jsonl")
    corpus = f"jsonl:{folder}/corpus.jsonl"
    if line.startswith("gcloud"):  # what it runs on every host
        command = re.search(r"--command='cd mlm && (.*)'", command)[1]
        command = command.replace("gs://BUCKET", str(folder))
        command = with_settings(command, *TINY, *BASE_ON_A_LAPTOP)
    if "mlm bench" in line and "shards" in line:
        command += " --megabytes=0.2"
    if "launch/local.sh" in line or "--config=" in line:
        of_published = [setting for setting in (*TINY, *SHORT) if not setting.startswith(OF_MODEL)]
        command = with_settings(command, *(of_published if PUBLISHED in line else SHORT))
        if "my.txt" not in command:
            command = with_settings(command, f"corpus.sources={corpus}")
    if "mlm glue" in line:
        data = glue_shaped.write(folder / "glue")
        command = f"{command.partition('--config.')[0]} --data={data} --tasks rte wnli"
        settings = ("data.global_batch=16", "train.epochs=1", "model.dtype=float32")
        command = with_settings(command, *settings)
    if re.search("mlm (sweep )?classify", line):
        *_, train, validation, _ = labelled_texts.settings(folder, "")
        lengths = ("train.steps=0", "train.epochs=1", "schedule.warmup=0", "data.global_batch=16")
        command = with_settings(command, train, validation, "classify.label=label", *lengths)
    if "mlm compare" in line:
        command = f"{command.partition(' --source=')[0]} --source={corpus} --words=50"
    if "mlm verify" in line:
        command = with_settings(command, *TINY, *BASE_ON_A_LAPTOP)
    if line == "bash launch/local.sh":
        command += f" --workdir={folder}/runs/quickstart"
    if line.startswith("python -m mlm bench"):
        command += " --seconds=0.5"
    return command


@pytest.mark.slow
@pytest.mark.longest
@pytest.mark.parametrize("pages", [[README, *OTHERS], [BENCH]], ids=["README and others", "bench"])
def test_commands_run(texts, model, pages, tmp_path):
    """One after the other, in the pages' order: later ones work on what earlier ones made, README's first above all."""
    corpus = write_jsonl(tmp_path / "corpus.jsonl", texts)
    (tmp_path / "my.txt").write_text("\n".join(text.replace("\n", " ") for text in texts))
    env = environment(1) | {"PATH": f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"}
    pytorch.torch_python(4)  # which the page on speed names
    trained_model.publish(model, PUBLISHED, tmp_path / "hub")
    env |= {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    base = "--config=configs/base.py"
    speed = f"{base} --workdir={tmp_path}/runs/speed"
    env["S"] = with_settings(speed, *SHORT, f"corpus.sources={corpus}")
    env["M"] = with_settings(base, *TINY, SHORT[0])
    first, this, *_ = commands([README])
    assert (first, this) == ("bash launch/local.sh", "bash tests/run.sh")
    lines = [line for line in commands(pages) if line not in (first, this)]
    assert len(lines) >= 10
    for line in [first, *lines]:
        command = ["bash", "-c", shortened(line, tmp_path)]
        process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        assert process.returncode == 0, f"{line}\n{process.stdout}\n{process.stderr}"
        assert "Traceback" not in process.stderr, line
        if "local.sh" in line or "mlm run" in line:
            for words in ("perplexity", "report.html", "export"):
                assert words in process.stdout, f"{words!r} is not in:\n{process.stdout}"
        if "mlm predict" in line:
            assert len(process.stdout.splitlines()) >= 5, process.stdout
        if "mlm evaluate" in line:
            assert json.loads(process.stdout)["predictions"] > 0
    assert (tmp_path / "runs" / "quickstart" / "export" / "model.safetensors").is_file()
