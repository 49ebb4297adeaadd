"""The table of commands: what each takes, and what is imported before a mistake is answered."""

import ast
import importlib
import pathlib
import signal
import subprocess
import sys

import pytest

from mlm import __main__
from mlm.__main__ import COMMANDS
from mlm.cluster import watch
from tests.test_bad_input import refuse

MLM = pathlib.Path(__main__.__file__).parent
# What must not be imported before flags and config are read.
HEAVY = {"jax", "tensorflow", "transformers", "flax", "optax", "orbax", "torch", "datasets", "matplotlib", "numpy"}
NO_CONFIG = {"average", "predict", "report"}
SEVERAL = {"run", "shards", "train", "classify", "evaluate", "export"}  # commands that several processes do together


def test_alone_it_prints_the_table_and_ends_with_2(capsys):
    assert __main__.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    for name, line in COMMANDS.items():
        assert name in err.split() and line in " ".join(err.split())


def test_help_of_all_commands_is_the_same_table(capsys):
    with pytest.raises(SystemExit) as ended:
        __main__.main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    __main__.main([])
    assert capsys.readouterr().err == shown


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command_names_its_flags(name, capsys):
    with pytest.raises(SystemExit) as ended:
        __main__.main([name, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"python -m mlm {name}" in shown and COMMANDS[name] in " ".join(shown.split())
    assert ("--config FILE" in shown) == (name not in NO_CONFIG) and "--workdir DIR" in shown
    assert ("--process-id I" in shown) == (name in SEVERAL)
    assert ("--skip-batches A:B" in shown) == (name in ("run", "train"))


def test_a_command_that_does_not_exist_is_refused_with_those_that_do(capsys):
    with pytest.raises(SystemExit) as ended:
        __main__.main(["trian"])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert "'trian'" in err and all(name in err for name in COMMANDS)


def test_every_command_is_a_module_of_its_name_and_none_imports_what_is_heavy():
    code = "import sys\nfrom mlm.__main__ import COMMANDS, parser\n"
    code += f"for name in COMMANDS: parser(name)\nprint(*({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
    files = {path.stem for path in (MLM / "commands").glob("*.py")}
    assert files == {*COMMANDS, "common", "__init__"}
    for name in COMMANDS:
        assert callable(importlib.import_module(f"mlm.commands.{name}").main)


def test_nothing_below_imports_a_command():
    files = [path for path in MLM.rglob("*.py") if path.parent.name != "commands" and path.name != "__main__.py"]
    assert len(files) > 50
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            else:
                continue
            assert not any(name.startswith(("mlm.commands", "mlm.__main__")) for name in names), path


@pytest.mark.parametrize("name", ["predict", "report"])
def test_a_command_that_reads_no_config_takes_no_key(name, tmp_path, capsys):
    line = [name, f"--workdir={tmp_path}"]
    sentence = f"--config.train.steps=1: {name} takes no --config.KEY; leave it out."
    refuse([*line, "--config.train.steps=1"], 2, sentence, capsys=capsys)
    with pytest.raises(SystemExit):
        __main__.main([*line, "--config=configs/base.py"])


def test_export_checks_the_config_that_it_is_given(family, capsys):
    line = ["export", f"--workdir={family.root}"]
    refuse([*line, "--config=/nonexistent.py"], 2, "--config=/nonexistent.py: there is no such file", capsys=capsys)
    refuse([*line, "--config.pod.such=1"], 2, "--config.pod.such: there is no such key", capsys=capsys)
    sentence = "--config.train.seed=1: export writes the checkpoint as it is; only pod.* can be set."
    refuse([*line, "--config.train.seed=1"], 2, sentence, capsys=capsys)


def test_only_what_trains_speaks_of_steps_when_it_is_stopped(monkeypatch):
    said = []
    for command in ("train", "bench"):
        own = watch.Watch(command, None)
        monkeypatch.setattr(own, "end_now", lambda kind, what, message: said.append(message))
        monkeypatch.setattr(watch, "current", own)
        __main__._stop(signal.SIGTERM, None)
    train = "stopped before the first step; run the same command to continue."
    assert said == [train, "stopped; run the same command again."]


@pytest.mark.parametrize(("name", "code"), [("predict", 0), ("report", 0), ("train", 1), ("shards", 1)])
def test_an_output_that_nobody_reads_is_the_end_of_a_page_but_no_success_of_a_run(name, code):
    line = [name, "--workdir=x"] + ["--config=configs/base.py"] * (name not in NO_CONFIG)
    program = (
        f"import sys\nfrom mlm import __main__\nfrom mlm.commands import {name} as command\n"
        "def main(args, overrides): raise BrokenPipeError\n"
        f"command.main = main\nsys.exit(__main__.main({line!r}))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == code
