"""What is known of a run before, and without, asking its hosts."""

import pathlib
import types

from pods import preflight
from pods.backend import Host
from pods.causes import HostReport
from pods.hosts import Answer
from pods.runs import Job, RunStatus, difference

from tests.launch.pod import RUN


def test_in_what_two_jobs_differ():
    job = Job("a", ("run", "--config=c", "--config.x=1", "--config.x=2"), (), None)
    place = ["--coordinator=h", "--processes=2", "--process-id=1"]  # of whichever host was asked
    assert difference(job, {"argv": [*job.argv, *place]}) == ""
    assert difference(job, {"argv": [*job.argv, *place], "program": "rare.py"}) == "only there: rare.py"
    assert difference(job, {"argv": ["train", *job.argv[1:], *place]}) == "only there: train; only here: run"
    assert difference(job, {"argv": [*job.argv, "--x=y z", *place]}) == "only there: '--x=y z'"
    assert "order" in difference(job, {"argv": ["run", "--config=c", "--config.x=2", "--config.x=1", *place]})


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
    (said,) = preflight.check_ports(hosts)
    assert "host 1 (10.0.0.1), host 2 (10.0.0.2): can't reach port 8474 of 10.0.0.0 (timed out)" in said


def host(worker, **answer):
    """A host, and what it answers before a run: all is well but for `answer`."""
    well = {"host": f"w-{worker}", "python": "3.12.1", "code": ["c" * 64], "installed": "p", "disk_free": 5e10}
    well |= {"memory_free": 1e9, "accelerators": ["/dev/accel0"], "holders": [], "libtpu_lock": "absent", "runs": []}
    return Host(worker, f"10.0.0.{worker}"), well | {"huge_pages": ""} | answer


def test_what_keeps_a_run_from_starting_and_what_does_not():
    def check(*more):
        answers = dict(host(worker, **answer) for worker, answer in enumerate([*more, {}, {}]))
        hosts = types.SimpleNamespace(all=(*answers,), dry=False, ask=lambda words: [])
        hosts.require = lambda *_: list(answers.values())
        report = preflight.check(hosts, "c" * 64)
        return "; ".join(report.problems), "; ".join(report.remarks)

    assert check() == ("", "")
    for answer, word in [
        ({"code": []}, "code cccccccccccc is missing"),
        ({"installed": None}, "packages are not installed"),
        ({"holders": [{"pid": 7, "command": "python"}]}, "7 (python)"),
        ({"libtpu_lock": "held"}, "lock is held"),
        ({"runs": [{"id": "b", "attempt": 3}]}, "'b' (attempt 3)"),
        ({"installed": "q"}, "packages differ: host 0 (10.0.0.0) has q; the others have p"),
        ({"accelerators": ["x", "y"]}, "accelerators differ: host 0 (10.0.0.0) has 2"),
    ]:
        problems, remarks = check(answer)
        assert word in problems and "host 0 (10.0.0.0)" in problems and remarks == ""
    for answer, word in [
        ({"disk_free": 9e9}, "10 GB"),
        ({"libtpu_lock": "stale"}, "--clear-lock"),
        ({"huge_pages": "sudo x"}, "sudo x"),
        ({"python": "3.10.1"}, "python3 differ: host 0 (10.0.0.0) has 3.10.1"),
    ]:
        problems, remarks = check(answer)
        assert word in remarks and problems == ""


def test_mistakes_are_found_before_anybody_is_asked(pod, monkeypatch):
    packed = types.SimpleNamespace(files={"configs/a.py"}, hash="c" * 64)
    monkeypatch.setattr("pods.code.pack", lambda root: packed)
    monkeypatch.setattr("pods.code.repository", lambda: pod.repository)
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
