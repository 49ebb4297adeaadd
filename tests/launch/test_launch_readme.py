"""launch/README.md: its commands are ones that there are, and the first ones, as they stand, bring a run to its end."""

import json
import pathlib
import re
import shlex

import pytest

from mlm.__main__ import parser
from tests.launch import LAUNCH

TEXT = (LAUNCH / "README.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
LINES = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]


@pytest.mark.standard
def test_from_nothing_to_a_trained_model(pod):
    """The page's own lines on the fake cloud; `python -m mlm` there says what it was asked for."""
    page = [
        shlex.split(line, comments=True)[2:]
        for line in LINES
        if line.startswith("python launch/tpu.py")
    ]
    *first, down, supervise = page
    assert [words[0] for words in page] == ["up", "sync", "run", "run", "down", "supervise"]
    for name in ("quickstart", "roberta_base"):
        (pod.repository / "configs" / f"{name}.py").touch()
    pod.git("add", "-A")
    pod.settings(spot=True, queued=True)  # as in pod.toml.example
    pod.stub = "sys.exit(0)"
    for words in [*first, ["logs", "first"], ["status", "first"]]:
        pod.tpu(*words)
    for worker in range(2):
        argv = json.loads((pod.host_folder(worker, "verify") / "job.json").read_text())["argv"]
        assert argv[:2] == ["verify", "--config=configs/roberta_base.py"]
        argv = json.loads((pod.host_folder(worker, "first") / "job.json").read_text())["argv"]
        workdir = "--workdir=gs://my-bucket/runs/first"
        assert argv[:3] == ["run", "--config=configs/quickstart.py", workdir]
    said = pod.tpu(*supervise)  # with --down
    assert "attempt 2 ended with 0" in said and "deleted queued resource my-pod" in said
    assert "nothing named my-pod" in pod.tpu(*down)


def test_the_bare_line():
    """`environment.sh` on every host, and then this."""
    commands = re.findall(r"--command='([^']*)'", TEXT)
    assert [command for command in commands if "environment.sh" in command] and len(commands) == 2
    (line,) = [command for command in commands if "-m mlm" in command]
    folder, _, program = line.partition(" && ")
    argv = shlex.split(program)
    assert (folder, argv[:3]) == ("cd mlm", [".venv/bin/python", "-m", "mlm"])
    args = parser("run").parse_args(argv[3:])
    assert args.name == "run" and pathlib.Path(LAUNCH.parent / args.config).exists()


def test_a_key_with_a_passphrase_is_told_what_to_do():
    assert "`ssh-add ~/.ssh/google_compute_engine`" in TEXT


def test_files_and_sections_that_it_names_are_there():
    for name in re.findall(r"`((?:launch|configs)/[\w./]+)`|^COPY (\S+) ", TEXT, re.MULTILINE):
        assert (LAUNCH.parent / "".join(name)).exists(), name
    titles = re.findall("^###? (.*)", TEXT, re.MULTILINE)
    headings = {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}
    linked = re.findall(r"launch/README\.md#([\w-]+)", (LAUNCH.parent / "README.md").read_text())
    assert {*linked, *re.findall(r"\]\(#([^)]+)\)", TEXT)} <= headings and "why-it-died" in linked
