"""What is known of a run before, and without, asking its hosts."""

import pathlib
import types

from pods import readiness
from pods.backend import Host
from pods.causes import HostReport
from pods.code import Code
from pods.hosts import Answer
from pods.runs import RunStatus

from tests.launch.pod import RUN


def test_an_end_that_no_host_confirms_is_no_success():
    report = HostReport(0, "h", "exited", {"code": 0, "signal": None, "ended": 1.0})
    assert RunStatus(1, (report,)).code == 0
    assert RunStatus(1, ()).code == RunStatus(1, (report,), ("host 1: no answer",)).code == 1


def test_a_closed_port_is_named():
    first, second, third = (Host(worker, f"10.0.0.{worker}") for worker in range(3))
    silent = {"ports": {"8474": "timed out", "8476": ""}}
    hosts = types.SimpleNamespace(all=(first, second, third), dry=False)
    hosts.ask = lambda words: [Answer(host, {}) for host in words]
    hosts.require = lambda answers, what: [{"ports": {"8474": "", "8476": ""}}, silent, silent]
    (said,) = readiness.check_ports(hosts)
    assert (
        "host 1 (10.0.0.1), host 2 (10.0.0.2): can't reach port 8474 of 10.0.0.0 (timed out)"
        in said
    )


def test_what_keeps_a_run_from_starting_and_what_does_not():
    well = {
        "host": "w",
        "python": "3.12.1",
        "packages": "p",
        "accelerators": 4,
        "free": "",
        "problems": [],
    }

    def check(**answer):
        hosts = types.SimpleNamespace(
            all=tuple(Host(i, f"10.0.0.{i}") for i in range(3)), dry=False
        )
        hosts.ask = lambda words: []
        hosts.require = lambda *_: [
            well | {"remarks": []} | answer,
            well | {"remarks": ["pages"]},
            well | {"remarks": []},
        ]
        report = readiness.check(hosts, types.SimpleNamespace(hash="c"))
        return "; ".join(report.problems), "; ".join(report.remarks)

    assert check() == ("", "host 1 (10.0.0.1): pages")
    assert check(remarks=["pages"])[1] == "host 0 (10.0.0.0), host 1 (10.0.0.1): pages"
    assert check(problems=["is held"])[0] == "host 0 (10.0.0.0): is held"
    assert check(packages="q")[0] == "packages differ: host 0 (10.0.0.0) has q; the others have p"
    assert check(accelerators=2)[0].startswith("accelerators differ: host 0 (10.0.0.0) has 2")
    assert "python differ: host 0 (10.0.0.0) has 3.10.1" in check(python="3.10.1")[1]


def test_mistakes_are_found_before_anybody_is_asked(pod, monkeypatch):
    packed = Code(pod.repository, "c" * 64, b"", "code", frozenset(["configs/a.py"]), "")
    monkeypatch.setattr("pods.code.pack", lambda: packed)
    monkeypatch.setenv("SECRET", "canary-4a7f")
    for words, said in {
        ("run", "configs/b.py"): "configs/b.py",
        (*RUN, "--program=research/rara.py"): "research/rara.py",
        (*RUN, "--workdir=runs/x"): "'runs/x' must be absolute or gs://",
        (*RUN, "--id=" + "x" * 201): "1 to 200 characters",
        (*RUN, "--env=SECRET=canary-4a7f"): "--env SECRET: give the name",
        (*RUN, "--env=NOT_SET_HERE"): "--env NOT_SET_HERE",
        ("status", "--config.x=1", "a"): "--config.x=1",
    }.items():
        found = pod.tpu(*words, code=2)
        assert said in found and "canary" not in found
    text = pathlib.Path("pod.toml").read_text()
    pathlib.Path("pod.toml").write_text(text.replace("bucket", "# bucket"))
    assert "--workdir" in pod.tpu(*RUN, code=2)
    assert pod.cloud.calls() == []
