"""launch/README.md: its commands are ones that there are, and the first ones, as they stand, bring a run to its end."""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess

import pytest

from mlm.__main__ import parser
from tests.fixtures_pods import LAUNCH, fake_cloud

TEXT = (LAUNCH / "README.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
LINES = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]
HAS_GCLOUD = shutil.which("gcloud") is not None


def test_from_nothing_to_a_trained_model(pod):
    """The page's own lines on the fake cloud; `python -m mlm` there says what it was asked for."""
    page = [shlex.split(line, comments=True)[2:] for line in LINES if line.startswith("python launch/tpu.py")]
    *first, down, supervise, down_again = page
    assert [words[0] for words in page] == ["up", "sync", "preflight", "run", "down", "supervise", "down"]
    (pod.repository / "configs" / "quickstart.py").touch()
    pod.git("add", "-A")
    pod.git("commit", "-qm", "config")
    environment = {"STUB": "sys.exit(0)", "PATH": f"{pod.bin}:/usr/bin:/bin", **pod.ports}
    fake_cloud().settings(pod.state, env=environment, creating_describes=0)
    for words in [*first, supervise]:
        pod.tpu(*words)
    for worker in range(2):
        argv = json.loads((pod.host_folder(worker, "first") / "job.json").read_text())["argv"]
        assert argv[:3] == ["run", "--config=configs/quickstart.py", "--workdir=gs://my-bucket/runs/first"]
        assert not pod.host_folder(worker, "first", 2).exists()  # `supervise` found it done
    assert down == down_again
    pod.tpu(*down)


def refusals(commands: list[str], folder: pathlib.Path) -> dict[str, str]:
    """What gcloud's own parser says against each of the commands that it refuses."""
    file = folder / "commands.json"
    before_dashes = [command.partition(" -- ")[0] for command in commands]  # what follows them is ssh's
    file.write_text(json.dumps([{"command_string": command} for command in before_dashes]))
    environment = os.environ | {"CLOUDSDK_CONFIG": str(folder / "config"), "CLOUDSDK_CORE_DISABLE_PROMPTS": "1"}
    lint = ["gcloud", "meta", "lint-gcloud-commands", f"--commands-file={file}"]
    done = subprocess.run(lint, env=environment, capture_output=True, text=True, timeout=120)
    results = json.loads(done.stdout)
    assert len(results) == len(commands), done.stderr
    return {result["command_string"]: result["error_message"] for result in results if not result["success"]}


@pytest.mark.parametrize("has_gcloud", [pytest.param(HAS_GCLOUD, id="by_gcloud" if HAS_GCLOUD else "no_gcloud_here")])
def test_its_gcloud_commands_are_parsed(has_gcloud, tmp_path):
    """Where gcloud is not installed, by a shell's rules alone."""
    spans = [" ".join(span.split()) for span in re.findall(r"`(gcloud [^`]*)`", TEXT)]
    commands = [shlex.join(shlex.split(line, comments=True)) for line in LINES if line.startswith("gcloud ")] + spans
    assert len(set(commands)) >= 18
    if has_gcloud:
        assert refusals(commands, tmp_path) == {}
        assert refusals([f"{commands[0]} --bogus"], tmp_path), "it refuses nothing"


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
    copied = re.findall(r"^COPY (\S+) ", TEXT, re.MULTILINE)
    assert {"requirements.txt", "mlm", "configs"} == set(copied)
    for name in [*re.findall(r"`((?:launch|configs)/[\w./]+)`", TEXT), *copied]:
        assert (LAUNCH.parent / name).exists(), name
    headings = {
        re.sub(r"[^a-z0-9 -]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in TEXT.splitlines()
        if re.match("###? ", line)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= headings
    linked = re.findall(r"launch/README\.md#([\w-]+)", (LAUNCH.parent / "README.md").read_text())
    assert "why-it-died" in linked and set(linked) <= headings
