"""launch/README.md: its commands are ones that there are, and the first ones, as they stand, bring a run to its end."""

import json
import pathlib
import re
import shlex

from mlm.__main__ import parser
from tests.fixtures_pods import LAUNCH, fake_cloud

TEXT = (LAUNCH / "README.md").read_text()
LINES = [line for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()]


def test_from_nothing_to_a_trained_model(pod):
    """The page's own lines on the fake cloud; `python -m mlm` there says what it was asked for."""
    page = [shlex.split(line, comments=True)[2:] for line in LINES if line.startswith("python launch/tpu.py")]
    *first, supervise = page
    assert [words[0] for words in page] == ["up", "sync", "preflight", "run", "down", "supervise"]
    (pod.repository / "configs" / "roberta_base.py").touch()
    pod.git("add", "-A")
    pod.git("commit", "-qm", "config")
    environment = {"STUB": "sys.exit(0)", "PATH": f"{pod.bin}:/usr/bin:/bin", **pod.ports}
    fake_cloud().settings(pod.state, env=environment, creating_describes=0)
    for words in [*first[:-1], supervise]:
        pod.tpu(*words)
    for worker in range(2):
        argv = json.loads((pod.host_folder(worker, "first") / "job.json").read_text())["argv"]
        assert argv[:3] == ["run", "--config=configs/roberta_base.py", "--workdir=gs://my-bucket/runs/first"]
        assert not pod.host_folder(worker, "first", 2).exists()  # `supervise` found it done
    pod.tpu(*first[-1])


def test_the_bare_line():
    commands = re.findall(r"--command='([^']*)'", TEXT)
    assert [command for command in commands if "environment.sh" in command] and len(commands) == 2
    (line,) = [command for command in commands if "-m mlm" in command]
    folder, _, program = line.partition(" && ")
    argv = shlex.split(program)
    assert (folder, argv[:3]) == ("cd mlm", [".venv/bin/python", "-m", "mlm"])
    args = parser("run").parse_args(argv[3:])
    assert args.name == "run" and pathlib.Path(LAUNCH.parent / args.config).exists()


def test_files_and_sections_that_it_names_are_there():
    for name in re.findall(r"`(launch/[\w./]+)`", TEXT):
        assert (LAUNCH.parent / name).exists(), name
    headings = {
        re.sub(r"[^a-z0-9 -]", "", line[3:].lower()).replace(" ", "-")
        for line in TEXT.splitlines()
        if line[:3] == "## "
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= headings and "why-it-died" in headings  # README.md links to it
