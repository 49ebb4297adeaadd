"""The way to the hosts: gcloud says it once, and ssh goes it; where it fails, the next command asks gcloud anew."""

import json
import pathlib
import subprocess

import pytest
from pods import gcloud

OPTIONS = (
    "-i", "/home/some one/.ssh/key", "-o", "CheckHostIP=no", "-o", "HostKeyAlias=tpu.12-3-Sf9A+0",
    "-o", "UserKnownHostsFile=/home/some one/.ssh/known",
)  # fmt: skip
LINE = f"/usr/bin/ssh -T {' '.join(OPTIONS)} me@10.0.0.1 -- true"
SHARED = [option.partition("=")[0] for option in gcloud.SHARED]
PROXY = (
    "ProxyCommand='/usr/bin/python3' '-S' '/gcloud.py' "
    "alpha compute start-iap-tunnel 't-w-0' '%p' --listen-on-stdin"
)


def options(argv: list[str]) -> list[str]:
    """Returns an ssh command without what shares its connection."""
    shared = [
        i
        for i, word in enumerate(argv)
        if word.startswith((*(f"{name}=" for name in SHARED), "ControlPath="))
    ]
    return [word for i, word in enumerate(argv) if i not in shared and i + 1 not in shared]


def test_a_line_of_gcloud_is_taken_apart_although_nothing_in_it_is_quoted():
    end = ["me@10.0.0.1", "--"]
    assert options(gcloud.parse_route(LINE, [])) == ["/usr/bin/ssh", "-T", *OPTIONS, *end]
    flags = ["-p", "22", "-o", "ProxyJump=x"]
    command = gcloud.parse_route(
        LINE.replace(" me@", f" -o {PROXY} -p 22 -o ProxyJump=x me@"), flags
    )
    assert options(command) == ["/usr/bin/ssh", "-T", *OPTIONS, "-o", PROXY, *flags, *end]
    assert options(gcloud.parse_route("/usr/bin/ssh -T me@10.0.0.1 -- true", [])) == [
        "/usr/bin/ssh",
        "-T",
        *end,
    ]


def test_another_line_is_left_to_gcloud():
    plink = LINE.replace("/usr/bin/ssh", "/sdk/bin/plink")
    nobody = LINE.replace("me@10.0.0.1 ", "")
    terminal = "/usr/bin/ssh -t -i /key me@10.0.0.1"
    for line in ("", terminal, plink, nobody, "/bin/sh -c /usr/bin/ssh"):
        assert gcloud.parse_route(line, []) is None
    assert gcloud.parse_route(LINE, ["-l", "%USER%"]) is None


@pytest.mark.standard
def test_openssh_takes_the_options_and_shares_the_connection(tmp_path, monkeypatch):
    # ssh has its own quotes, and its own signs for what it puts in
    home = tmp_path / "some one 5%d"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(gcloud, "LONGEST", 500)
    command = gcloud.parse_route(LINE, [])[:-1]
    shown = subprocess.run(["ssh", "-G", *command[1:]], capture_output=True, text=True, check=True)
    found = dict(line.split(" ", 1) for line in shown.stdout.splitlines() if " " in line)
    assert found["controlpath"].startswith(f"{home}/.ssh/mlm-") and found["controlmaster"] == "auto"
    assert (found["controlpersist"], found["batchmode"], found["hostkeyalias"]) == (
        "600",
        "yes",
        "tpu.12-3-sf9a+0",
    )
    assert "Identity file /home/some one/.ssh/key not accessible" in shown.stderr
    # a new pod at the same address
    other = gcloud.parse_route(LINE.replace("tpu.12-3", "tpu.13-3"), [])
    assert {*command} ^ {*other} >= {f'ControlPath="{found["controlpath"].replace("%", "%%")}"'}


@pytest.mark.standard
def test_a_home_with_a_long_name_has_its_sockets_elsewhere(tmp_path, monkeypatch):
    """ssh takes 108 letters in all: "ControlPath too long"."""
    monkeypatch.setenv("HOME", f"/home/{'long' * 20}")
    command = gcloud.parse_route(LINE, [])
    (path,) = [
        word.partition("=")[2].strip('"') for word in command if word.startswith("ControlPath=")
    ]
    assert len(path) < 80 and pathlib.Path(path).parent.stat().st_mode & 0o777 == 0o700


ASKED = ["--worker=0", "--worker=all --dry-run"]  # the first host alone, which makes the keys


def of_ssh(pod) -> list[str]:
    """Returns what gcloud itself was asked to do by ssh."""
    calls = [call for call in pod.cloud.calls() if call[3] == "ssh"]
    return [
        " ".join(word for word in call if word.startswith(("--worker", "--dry-run")))
        for call in calls
    ]


def test_gcloud_is_asked_once_for_a_pod(pod):
    pod.tpu("up", "--every=0.01")
    for _ in range(2):
        pod.tpu("status")
    assert of_ssh(pod) == ASKED and len(pod.cloud.calls("ssh.jsonl")) == 4
    pod.tpu("status", "--user=another")
    assert of_ssh(pod) == ASKED * 2
    calls = pod.cloud.calls("ssh.jsonl")
    assert "another@127.0.0.1" in [call[-3] for call in calls]
    pod.tpu("down")
    pod.tpu("up", "--every=0.01")
    pod.tpu("status", "--user=another")
    assert of_ssh(pod) == ASKED * 3, "a new pod of that name has other routes"
    new = pod.cloud.calls("ssh.jsonl")[len(calls) :]
    aliases = [
        {word for call in part for word in call if word.startswith("HostKeyAlias")}
        for part in (calls, new)
    ]
    assert len(aliases[0] | aliases[1]) == 4


def test_where_ssh_fails_the_route_is_found_anew(pod):
    pod.tpu("up", "--every=0.01")
    pod.tpu("status")
    file = pod.repository / "runs" / "pods" / "ssh" / "my-pod.json"
    known = json.loads(file.read_text())
    # the address of a host that is gone
    known["lines"][1] = known["lines"][1].replace("127.0.0.2", "127.0.0.9")
    file.write_text(json.dumps(known))
    said = pod.tpu("status", code=1)
    assert "host 1 (127.0.0.2): ssh failed 3 times" in said and "allow-ssh" in said
    assert of_ssh(pod) == ASKED and not file.exists()
    for text in ("", "[]", '{"key": 1}'):  # damaged since
        file.write_text(text)
        pod.tpu("status")
        assert len(json.loads(file.read_text())["lines"]) == 2
    assert of_ssh(pod) == ASKED * 4


@pytest.mark.standard
def test_a_first_host_that_cannot_be_reached_says_why(pod):
    pod.tpu("up", "--every=0.01")
    pod.cloud.add_fault("ssh", "ssh255_before", match="true")
    said = pod.tpu("sync", code=1)
    assert (
        "host 0 can't be reached by ssh: ssh: connect to host 127.0.0.1 port 22: Connection timed out"
        in said
    )
    assert "allow-ssh" in said and of_ssh(pod) == ["--worker=0"]
    pod.cloud.add_fault("ssh", "ssh255_before", match="true")
    said = pod.tpu("status", "a")
    assert "Connection timed out" in said and not pod.cloud.calls("ssh.jsonl"), (
        "gcloud's own asks the others"
    )
    assert sorted(of_ssh(pod)[2:]) == ["--worker=0", "--worker=1"]
