"""launch/environment.sh: which Python .venv is made of, and what is said where none will do."""

import pathlib
import re
import shutil
import subprocess

import pytest

from tests.launch import LAUNCH

UV = """#!/bin/sh
echo "$@" >>{log}
case "$1 $2" in
  "-V "*) echo Python {version} ;;
  "-c "*) echo {version} | cut -d. -f1,2 ;;
  "-m venv") mkdir -p "$3/bin"; echo "ensurepip is not available"; exit 1 ;;
  "-m pip") exit {no_pip} ;;
  "-m uv") for last; do :; done; [ -e "$last" ] && exit 2
    mkdir -p "$last/bin"; cp {works} "$last/bin/python"; exit {no_uv} ;; # it may fail when it brings pip
esac
"""
WORKS = """#!/bin/sh
echo "made: $@" >>{log}
printf '#!/bin/sh\\necho uv: $@ >>{log}\\n' >"$(dirname "$0")/uv"
chmod +x "$(dirname "$0")/uv"
"""


class Machine:
    """A folder with the script, and a python3 as some machines have it."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.log = folder / "log"
        (folder / "launch").mkdir()
        (folder / "bin").mkdir()
        for name in ("environment.sh", "local.sh"):
            shutil.copy(LAUNCH / name, folder / "launch")
        (folder / "requirements.txt").write_text("jax==0.10.2\n")
        self.write("works", WORKS.format(log=self.log))
        for name in (
            "basename",
            "bash",
            "cat",
            "chmod",
            "cksum",
            "cut",
            "cp",
            "dirname",
            "mkdir",
            "rm",
            "sed",
        ):
            (folder / "bin" / name).symlink_to(shutil.which(name))

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def python3(self, version: str, *, no_pip: int = 0, no_uv: int = 0) -> None:
        words = {"version": version, "no_pip": no_pip, "no_uv": no_uv}
        self.write("bin/python3", UV.format(log=self.log, works=self.folder / "works", **words))

    def run(
        self, code: int = 0, *, had_one: bool = False, **more: str
    ) -> subprocess.CompletedProcess:
        argv = ["bash", "launch/environment.sh"]
        environment = {"PATH": str(self.folder / "bin"), **more}
        done = subprocess.run(
            argv, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == code, done.stderr
        is_there = (self.folder / ".venv").exists()
        assert code == 0 or is_there == had_one, (
            "nothing half made is taken for one, and what was there stays"
        )
        return done


pytestmark = pytest.mark.standard


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(("version", "base"), [("3.10.12", "3.12"), ("3.11.2", "python3")])
def test_uv_makes_what_python3_can_not(machine, version, base):
    """A TPU VM's 3.10 is too old, Debian's 3.11 has no ensurepip without its package python3-venv."""
    machine.python3(version)
    machine.run()
    lines = machine.log.read_text().splitlines()
    (made,) = [line for line in lines if line.startswith("-m uv")]
    assert made == f"-m uv venv --quiet --seed --python {base} .venv"
    assert (
        f"--upgrade {re.search('uv==[0-9.]+', (LAUNCH / 'environment.sh').read_text())[0]}"
        in "".join(lines)
    )
    assert any(line.startswith("made: -m pip install") for line in lines)
    before = machine.log.read_text()
    machine.run()
    assert "install" not in machine.log.read_text().removeprefix(before)


@pytest.mark.parametrize("lacking", ["no_pip", "no_uv"])
def test_without_pip_or_network_one_sentence_says_so(machine, lacking):
    machine.python3("3.10.12", **{lacking: 1})
    for _ in range(2):
        (said,) = [
            line for line in machine.run(code=2).stderr.splitlines() if "environment" in line
        ]
        assert "Python 3.10.12" in said and "PYTHON=/path/to/python3.12" in said


@pytest.mark.parametrize(
    ("then", "said"),
    [
        ("exit 0", "package index"),  # pip can't install
        # Ctrl-C while it was made, `uv venv`, or another Python's: it may be somebody's
        ("exit 1", "rm -rf .venv"),
    ],
)
def test_an_environment_that_is_there_stays(machine, then, said):
    machine.python3("3.11.2")
    (machine.folder / ".venv/bin").mkdir(parents=True)
    machine.write(".venv/bin/python", f'#!/bin/sh\n[ "$1" = -c ] && echo 3.11 && {then}\nexit 1\n')
    assert said in machine.run(2, had_one=True).stderr.splitlines()[-1]
    assert not (machine.folder / ".venv/.requirements").exists()


def test_the_python_that_is_named_or_none(machine):
    machine.python3("3.10.12")
    assert "python3 is Python 3.10.12" in machine.run(code=2, PYTHON="python3").stderr


def test_the_main_job_from_another_folder(machine):
    """What is written is there, and so are the files that are named."""
    machine.python3("3.11.2")
    (elsewhere := machine.folder / "my texts").mkdir()
    machine.write(
        "works", machine.folder.joinpath("works").read_text().replace("$@", "$PWD $PYTHONPATH $@")
    )
    environment = {"PATH": str(machine.folder / "bin")}
    subprocess.run(
        ["bash", "../launch/local.sh"], cwd=elsewhere, env=environment, check=True, timeout=60
    )
    last = machine.log.read_text().splitlines()[-1]
    config = machine.folder / "configs" / "quickstart.py"
    assert (
        last
        == f"made: {elsewhere} {machine.folder} -m mlm run --config={config} --workdir=runs/quickstart"
    )
    assert (machine.folder / ".venv").is_dir() and not (elsewhere / ".venv").exists()
