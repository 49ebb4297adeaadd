"""launch/environment.sh: which Python .venv is made of, and what is said where none will do."""

import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from tests.launch.pod import LAUNCH

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
echo ".venv: $@" >>{log}
cp /bin/true .venv/bin/uv
"""


class Machine:
    """A folder with the script, and a python3 as some machines have it."""

    def __init__(self, folder: pathlib.Path):
        self.folder, self.log = folder, folder / "log"
        (folder / "launch").mkdir()
        (folder / "bin").mkdir()
        shutil.copy(LAUNCH / "environment.sh", folder / "launch")
        (folder / "requirements.txt").write_text("jax==0.10.2\n")
        self.write(folder / "works", WORKS.format(log=self.log))
        for name in ("bash", "cat", "cksum", "cut", "cp", "mkdir", "rm", "sed"):
            (folder / "bin" / name).symlink_to(shutil.which(name))

    def write(self, path: pathlib.Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def python3(self, version: str, *, no_pip: int = 0, no_uv: int = 0) -> None:
        words = {"version": version, "no_pip": no_pip, "no_uv": no_uv}
        self.write(self.folder / "bin" / "python3", UV.format(log=self.log, works=self.folder / "works", **words))

    def run(self, **more: str) -> subprocess.CompletedProcess:
        argv, environment = ["bash", "launch/environment.sh"], {"PATH": str(self.folder / "bin"), **more}
        return subprocess.run(argv, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.standard
@pytest.mark.parametrize(("version", "base"), [("3.10.12", "3.12"), ("3.11.2", "python3")])
def test_uv_makes_what_python3_can_not(machine, version, base):
    """A TPU VM's 3.10 is too old, Debian's 3.11 has no ensurepip without its package python3-venv."""
    machine.python3(version)
    done = machine.run()
    assert done.returncode == 0, done.stderr
    lines = machine.log.read_text().splitlines()
    (made,) = [line for line in lines if line.startswith("-m uv")]
    assert made == f"-m uv venv --quiet --seed --python {base} .venv"
    assert f"--upgrade {re.search('uv==[0-9.]+', (LAUNCH / 'environment.sh').read_text())[0]}" in "".join(lines)
    assert any(line.startswith(".venv: -m pip install") for line in lines)
    before = machine.log.read_text()
    assert machine.run().returncode == 0 and "install" not in machine.log.read_text().removeprefix(before)
    known = subprocess.run(
        [pathlib.Path(sys.executable).with_name("uv"), "venv", "--help"], capture_output=True, text=True
    )
    assert all(flag in known.stdout for flag in re.findall("--[a-z]+", made)), "of the real uv"


@pytest.mark.standard
@pytest.mark.parametrize("lacking", ["no_pip", "no_uv"])
def test_without_pip_or_network_one_sentence_says_so(machine, lacking):
    machine.python3("3.10.12", **{lacking: 1})
    for _ in range(2):  # nothing half made is taken for an environment
        done = machine.run()
        assert done.returncode == 2 and not (machine.folder / ".venv").exists()
        (said,) = [line for line in done.stderr.splitlines() if "environment" in line]
        assert "python3 is Python 3.10.12" in said and "PYTHON=/path/to/python3.12" in said


def test_a_named_python_that_will_not_do(machine):
    machine.python3("3.10.12")
    machine.write(machine.folder / "bin" / "python3.11", "#!/bin/sh\necho 3.11\n")  # would do, but is not the one named
    done = machine.run(PYTHON="python3")
    assert done.returncode == 2 and "python3 is Python 3.10.12; it must be Python 3.11, 3.12 or 3.13" in done.stderr
    assert not (machine.folder / ".venv").exists()


@pytest.mark.standard
def test_a_python_is_one_that_answers(machine):
    def found() -> str:
        done = machine.run(MLM_FIND="1")
        assert done.returncode == 0 and not (machine.folder / ".venv").exists()
        return done.stdout

    machine.python3("3.10.12")
    for name, text in {"3.12": "exit 127", "3.11": "exit 127", "3.13": "echo 3.9"}.items():  # wrappers for nothing
        machine.write(machine.folder / "bin" / f"python{name}", f"#!/bin/sh\n{text}\n")
    assert found() == "3.12\n", "uv brings it"
    machine.write(machine.folder / "bin" / "python3.11", "#!/bin/sh\necho 3.11\n")
    assert found() == "3.11\n"


@pytest.mark.standard
def test_another_folder_with_more_packages(machine):
    machine.write(machine.folder / "works", WORKS.format(log=machine.log).replace(".venv/bin", "'a b'/bin"))
    machine.python3("3.10.12")
    (machine.folder / "more.txt").write_text("six")
    where = {"MLM_VENV": "a b", "MLM_EXTRAS": "more.txt"}
    machine.write(machine.folder / "uv", f"#!/bin/sh\necho uv: $@ >>{machine.log}\n")
    (machine.folder / "works").write_text((machine.folder / "works").read_text().replace("/bin/true", "uv"))
    assert machine.run(**where).returncode == 0 and not (machine.folder / ".venv").exists()
    made = "uv: pip install --quiet --compile-bytecode --python a b/bin/python -r requirements.txt -r more.txt"
    assert machine.log.read_text().splitlines().count(made) == 1
    (machine.folder / "more.txt").write_text("six==1.17.0")
    assert machine.run(**where).returncode == 0 and machine.log.read_text().splitlines().count(made) == 2


def test_jax_s_tpu_library_is_among_the_requirements():
    assert re.search(r"^libtpu==", (LAUNCH.parent / "requirements.txt").read_text(), re.MULTILINE)
