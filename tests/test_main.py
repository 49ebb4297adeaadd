"""The table of commands: what each takes, and what is imported before a mistake is answered."""

import contextlib
import errno
import importlib
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from mlm import __main__, platforms
from mlm.__main__ import COMMANDS
from mlm.errors import DamageError
from tests.support import processes
from tests.support.refusals import refuse

MLM = pathlib.Path(__main__.__file__).parent
# What must not be imported before flags and config are read.
HEAVY = {
    "jax",
    "tensorflow",
    "transformers",
    "flax",
    "optax",
    "orbax",
    "torch",
    "datasets",
    "matplotlib",
    "numpy",
}
NO_CONFIG = {"average", "compare", "predict", "report"}
# by several processes
SEVERAL = {"run", "shards", "train", "verify", "classify", "evaluate", "export"}


def test_alone_it_prints_the_table_and_ends_with_2(capsys):
    assert __main__.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    for name, line in COMMANDS.items():
        assert name in err.split() and line in " ".join(err.split())
    with pytest.raises(SystemExit) as ended:
        __main__.main(["--help"])
    assert ended.value.code == 0 and capsys.readouterr().out == err


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


@pytest.mark.standard
def test_every_command_is_a_module_of_its_name_and_none_imports_what_is_heavy():
    code = "import sys\nfrom mlm.__main__ import COMMANDS, parser\n"
    code += f"for name in COMMANDS: parser(name)\nprint(*({HEAVY!r} & set(sys.modules)))\n"
    # what each process imports that writes shards
    code += f"import mlm.data.shards\nprint(*({HEAVY!r} & set(sys.modules)))"
    found = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert found == "\nnumpy\n"
    files = {path.stem for path in (MLM / "commands").glob("*.py")}
    assert files == {*COMMANDS, "common", "__init__"}
    for name in COMMANDS:
        assert callable(importlib.import_module(f"mlm.commands.{name}").main)


@pytest.mark.parametrize(
    ("line", "flag", "words"),
    [
        ("train --config=configs/base.py", "--learning_rate=1", "--config.optimizer.learning_rate"),
        ("train --config=configs/base.py", "--per_device_train_batch_size", "data.global_batch"),
        ("train --config=configs/base.py", "--zzz", "there is no such flag"),
        ("report", "--config=configs/base.py", "there is no such flag"),
        ("report", "--config.train.steps=1", "report takes no --config.KEY; leave it out."),
        ("predict", "--config.train.steps=1", "predict takes no --config.KEY; leave it out."),
    ],
)
def test_an_unknown_flag_suggests_the_key(tmp_path, capsys, line, flag, words):
    arguments = [*line.split(), f"--workdir={tmp_path}/run", flag]
    refuse(arguments, 2, f"{flag}: ", words, capsys=capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("variable", ["JAX_PLATFORMS", "JAX_PLATFORM_NAME"])
@pytest.mark.parametrize("value", ["gpu,cpu", "ROCM", "cupu"])
def test_a_platform_that_this_machine_has_not_is_refused_first(
    tmp_path, capsys, monkeypatch, variable, value
):
    absent = {"cuda": ("/dev/none",), "rocm": ("/dev/none",)}
    monkeypatch.setattr(platforms, "DEVICES", platforms.DEVICES | absent)
    monkeypatch.setenv(variable, value)
    line = ["run", "--config=configs/quickstart.py", f"--workdir={tmp_path}/run"]
    words = (f"{variable}={value} in the environment", value.partition(",")[0].lower())
    refuse(line, 2, *words, capsys=capsys)
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv(variable, "cpu")
    platforms.check()


@pytest.mark.standard
def test_a_user_without_a_home_gets_no_folder_named_tilde(tmp_path):
    code = "import os, mlm; os.makedirs(os.path.expanduser('~/.keras')); print(os.environ['HOME'])"
    environment = processes.environment(1)
    environment.pop("HOME", None)
    line = ["unshare", "-U", "--map-user=54321", sys.executable, "-c", code]
    home = subprocess.check_output(line, cwd=tmp_path, env=environment, text=True)
    assert not list(tmp_path.iterdir()) and not pathlib.Path(home.strip()).exists()


@pytest.mark.standard
@pytest.mark.parametrize(("name", "code"), [("predict", 0), ("train", 1)])
def test_an_output_that_nobody_reads_is_the_end_of_a_page_but_no_success_of_a_run(name, code):
    line = [name, "--workdir=x"] + ["--config=configs/base.py"] * (name not in NO_CONFIG)
    program = (
        f"import sys\nfrom mlm import __main__\nfrom mlm.commands import {name} as command\n"
        "def main(args, overrides): raise BrokenPipeError\n"
        f"command.main = main\nsys.exit(__main__.main({line!r}))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == code


@pytest.mark.parametrize("line", [["report", "--workdir=x"], ["report", "--unknown"]])
def test_a_program_has_its_own_signals_back_after_a_command_and_may_start_it_in_a_thread(
    monkeypatch, line
):
    during = []
    monkeypatch.setattr(
        "mlm.commands.report.main", lambda *_: during.append(signal.getsignal(signal.SIGTERM))
    )

    def command():
        with contextlib.suppress(SystemExit):
            codes.append(__main__.main(line))

    codes = []
    before = signal.getsignal(signal.SIGTERM)
    command()
    assert signal.getsignal(signal.SIGTERM) is before
    thread = threading.Thread(target=command)
    thread.start()
    thread.join()
    works = "--unknown" not in line
    assert (codes, during) == (([0, 0], [__main__._stop, before]) if works else ([2, 2], []))


IN_ANY_LOCALE = """
import sys
from mlm import __main__
from mlm.commands import predict
def main(args, overrides):
    print(args.texts)
    with open(args.workdir, "w") as file:
        file.write(args.texts[0])
predict.main = main
sys.exit(__main__.main())
"""


@pytest.mark.standard
@pytest.mark.parametrize("encoding", ["ascii", ""])
def test_files_and_texts_are_utf8_in_any_locale(tmp_path, encoding):
    """A file that a library opens without an encoding, an argument, and what is printed through a pipe."""
    (tmp_path / "program.py").write_text(IN_ANY_LOCALE)
    environment = processes.environment(1) | {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": encoding,
    }
    line = [sys.executable, tmp_path / "program.py", "predict", f"--workdir={tmp_path}/größe"]
    printed = subprocess.check_output([*line, "東京"], env=environment)
    assert printed.decode() == "['東京']\n"
    assert (tmp_path / "größe").read_text(encoding="utf-8") == "東京"


def interrupted(error: Exception) -> Exception:
    """As an import of tensorstore wraps a Ctrl-C."""
    error.__context__ = KeyboardInterrupt()
    return error


NO_TEMPORARY = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in []")
ERRORS = [  # of a command: its exit code, and what the sentence names
    (OSError(errno.EROFS, "Read-only", "/x/y"), 2, ("/x/y", "Read-only", "another folder")),
    (OSError(errno.ENAMETOOLONG, "too long", "/x/y"), 2, ("/x/y", "too long", "another one")),
    (NO_TEMPORARY, 2, ("temporary", "TMPDIR")),
    (interrupted(ImportError("no module")), 75, ("interrupted",)),
    (interrupted(DamageError("x: is bad.")), 4, ("is bad.",)),
]


@pytest.mark.parametrize(("error", "code", "words"), ERRORS)
def test_an_error_that_a_person_can_do_something_about_is_a_sentence(
    monkeypatch, capsys, error, code, words
):
    """What a disk refuses; a Ctrl-C that a library wraps, but for a sentence of ours."""
    monkeypatch.setattr("mlm.commands.report.main", fail(error))
    refuse(["report", "--workdir=x"], code, *words, capsys=capsys)


@pytest.mark.parametrize(
    "error", [OSError(errno.EACCES, "Permission denied"), FileNotFoundError(2, "none", "/x")]
)
def test_another_error_of_the_system_keeps_its_traceback(monkeypatch, capsys, error):
    """As of a socket, or a file that a fault in the code looks for."""
    monkeypatch.setattr("mlm.commands.report.main", fail(error))
    assert __main__.main(["report", "--workdir=x"]) == 1
    assert "Traceback" in capsys.readouterr().err


def fail(error: Exception) -> Callable:
    def main(args, overrides):
        raise error

    return main
