"""The table of commands: what each takes, and what is imported before a mistake is answered."""

import importlib
import subprocess
import sys

import pytest

from mlm import __main__
from mlm.__main__ import COMMANDS

# What one process may not import for a mistake in the flags or in the config.
HEAVY = {"jax", "tensorflow", "transformers", "flax", "optax", "orbax", "torch", "datasets", "matplotlib", "numpy"}
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
    assert "--config FILE" in shown and "--workdir DIR" in shown
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
    for name in COMMANDS:
        assert callable(importlib.import_module(f"mlm.commands.{name}").main)
