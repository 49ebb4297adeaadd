"""Runs of several real processes: asked to stop, killed, stopped, hung, restarted on other numbers of them."""

import json
import os
import pathlib
import random
import shutil
import signal
import time

import local_pod
import pytest

from mlm.pretrained import checkpoint_files
from tests import QUICK_COMPILE
from tests.support.processes import logged_step, run, train_arguments
from tests.support.states import state_of
from tests.support.tiny import slow

pytestmark = pytest.mark.standard

PROGRAM = ("-m", "tests.programs.pod_train")
HEARTBEAT = 10
SETTINGS = (
    "train.steps=12",
    "checkpoint.every=4",
    "log.every=1",
    "mesh.fsdp=2",
    "model.hidden_dropout=0.1",
    f"pod.heartbeat={HEARTBEAT}",
    "pod.start_timeout=200",
)


@pytest.fixture(autouse=True)
def quick_compile(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", QUICK_COMPILE)


def pod(workdir: pathlib.Path, shards: str, processes: int, *overrides: str, devices: int = 1) -> local_pod.Pod:
    arguments = train_arguments(workdir, shards, *SETTINGS, *overrides)
    return local_pod.Pod(processes, arguments, workdir / "hosts", devices=devices, program=PROGRAM)


def command(workdir: pathlib.Path, *arguments: str, processes: int = 2) -> local_pod.Pod:
    line = [*arguments, f"--workdir={workdir}", f"--config.pod.heartbeat={HEARTBEAT}"]
    return local_pod.Pod(processes, line, workdir / "hosts", devices=1, program=PROGRAM)


def until(one: local_pod.Pod, moment) -> None:
    deadline = time.monotonic() + 280
    while not moment():
        assert one.poll(), (
            f"the run ended before the moment came: {[f.joinpath('log').read_text() for f in one.folders]}"
        )
        assert time.monotonic() < deadline
        time.sleep(0.02)


def paced(processes: int, seconds: float) -> dict[int, dict[str, str]]:
    """The environment in which each step takes so long at least."""
    return {process: {"MLM_TEST_PAUSE": str(seconds)} for process in range(processes)}


def complete(one: local_pod.Pod) -> None:
    one.start()
    cause = one.wait()
    assert cause is None, cause.sentence


def lines(workdir: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def causes(one: local_pod.Pod) -> list[dict]:
    return [json.loads((folder / "cause.json").read_text()) for folder in one.folders]


def assert_same_losses(one: pathlib.Path, other: pathlib.Path, rel: float = 1e-5) -> None:
    old, new = lines(one), lines(other)
    assert [(line["step"], line["kind"]) for line in old] == [(line["step"], line["kind"]) for line in new]
    for a, b in zip(old, new, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=rel), f"step {a['step']}"


@pytest.fixture(scope="module")
def straight(manifest, tokenizer_folder, tmp_path_factory) -> pathlib.Path:
    """One process, two devices, uninterrupted; with its tokenizer, for export."""
    workdir = tmp_path_factory.mktemp("hosts") / "straight"
    shutil.copytree(tokenizer_folder, workdir / "tokenizer")
    run(train_arguments(workdir, manifest.folder, *SETTINGS))
    return workdir


@pytest.fixture(scope="module")
def stopped_and_moved(manifest, tokenizer_folder, tmp_path_factory) -> tuple[pathlib.Path, list[dict], list[int]]:
    """Two processes, of which one gets SIGTERM; then one process to the end. (workdir, causes, saved steps)."""
    workdir = tmp_path_factory.mktemp("hosts") / "moved"
    shutil.copytree(tokenizer_folder, workdir / "tokenizer")
    one = pod(workdir, manifest.folder, 2)
    one.start(environment=paced(2, 0.5))
    until(one, lambda: logged_step(workdir) >= 5)
    os.kill(one.children[1].pid, signal.SIGTERM)
    cause = one.wait()
    assert (cause.process, cause.code, cause.kind) == (1, 75, "signal"), cause.sentence
    assert [end.exit["code"] for end in one.reports()] == [75, 75]
    saved = checkpoint_files.complete_steps(workdir / "checkpoints")
    found = causes(one)
    run(train_arguments(workdir, manifest.folder, *SETTINGS))
    return workdir, found, saved


@pytest.mark.slow
def test_a_signal_to_one_saves_all(stopped_and_moved):
    _, found, saved = stopped_and_moved
    assert [cause["kind"] for cause in found] == ["peer", "signal"]
    assert found[1]["what"].startswith("SIGTERM: stopped after step ")
    step = int(found[1]["what"].split()[4])
    assert found[0]["what"].split()[3] == str(step)
    assert saved[-1] == step
    assert 5 <= step < 12


@pytest.mark.slow
def test_the_other_number_of_processes_goes_on_with_the_same_batches(straight, stopped_and_moved):
    assert_same_losses(straight, stopped_and_moved[0])


@pytest.mark.slow
def test_evaluate_and_export_from_several_processes(straight, manifest, capfd):
    """The parameters lie split over both processes while they are scored, and each reads them whole to export."""
    data = [f"--config.shards.dir={manifest.folder}"]
    alone, _ = run(["evaluate", f"--workdir={straight}", *data])
    run(["export", f"--workdir={straight}"])
    first = {path.name: path.read_bytes() for path in (straight / "export").iterdir()}
    shutil.rmtree(straight / "export")
    capfd.readouterr()
    complete(command(straight, "evaluate", *data))
    printed = [line[3:] for line in capfd.readouterr().out.splitlines() if '"loss"' in line]
    assert len(printed) == 1, "one process prints"
    one, two = json.loads(alone), json.loads(printed[0])
    assert (one.pop("model"), one.pop("split")) == (two.pop("model"), two.pop("split"))
    assert two == pytest.approx(one, rel=1e-6)
    complete(command(straight, "export"))
    second = {path.name: path.read_bytes() for path in (straight / "export").iterdir()}
    assert first.keys() == second.keys()
    assert {name for name in first if first[name] != second[name]} == set()


@pytest.mark.slow
def test_one_host_with_another_config(manifest, tmp_path):
    """Told before anything compiles, by all of them, with exit code 2."""
    one = pod(tmp_path, manifest.folder, 3, "data.lanes=3", "data.global_batch=12")
    one.start(changes={1: ["--config.optimizer.learning_rate=0.25"]})
    cause = one.wait()
    assert (cause.process, cause.code) == (1, 2)
    words = "host 1 (.*) failed: differs from 2 of 3 hosts in config.optimizer.learning_rate (0.25, not 0.003)"
    assert words.split(" (.*) ")[1] in causes(one)[0]["what"]
    assert [end.exit["code"] for end in one.reports()] == [2, 2, 2]
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.slow
def test_one_host_with_a_bad_config_or_bad_data(manifest, tmp_path):
    """Found before the processes meet: the others hear of it all the same, and end at once with its code."""
    one = pod(tmp_path, manifest.folder, 3, "data.lanes=3", "data.global_batch=12")
    begin = time.monotonic()
    one.start(changes={2: ["--config.train.steps=-5"]})
    cause = one.wait()
    assert time.monotonic() - begin < 60
    assert (cause.process, cause.code) == (2, 2)
    assert "config.train.steps = -5: must be" in causes(one)[0]["what"]
    damaged = tmp_path / "shards"
    shutil.copytree(manifest.folder, damaged)
    next((damaged / "train").iterdir()).write_bytes(b"x")
    one = pod(tmp_path, damaged, 2)
    one.start()
    cause = one.wait()
    assert cause.code == 4, cause.sentence
    assert [end.exit["code"] for end in one.reports()] == [4, 4]


def test_no_coordinator_given(manifest, tmp_path):
    arguments = [*train_arguments(tmp_path, manifest.folder), "--processes=2", "--process-id=1"]
    assert "--coordinator=HOST: give the address of process 0; several processes need it" in run(arguments, code=2)[1]


FAULTS = [
    slow("killed", 1, signal.SIGKILL, "", "signal"),
    slow("killed", 0, signal.SIGKILL, "", "signal"),
    slow("stopped", 1, signal.SIGSTOP, "", "lost"),
    slow("stopped", 0, signal.SIGSTOP, "", "lost"),
    slow("hangs", 1, None, "hang:5", "hang"),
    slow("hangs", 0, None, "hang:5", "hang"),
    slow("blocked", 1, None, "block:5", "exit silent"),
    slow("raises", 1, None, "raise:5", "exception"),
]


@pytest.mark.parametrize(("name", "victim", "number", "fault", "kind"), FAULTS)
def test_all_end_when_one_does(manifest, tmp_path, name, victim, number, fault, kind):
    """Within the heartbeat and 5 s, and the files say which was the first, and why."""
    one = pod(tmp_path, manifest.folder, 2, "train.steps=400", "checkpoint.every=0", "pod.hang=15")
    environment = paced(2, 0.3)
    environment[victim]["MLM_TEST_FAULT"] = fault
    one.start(environment=environment)
    until(one, lambda: logged_step(tmp_path) >= 3)
    begin = time.time()
    if number:
        os.kill(one.children[victim].pid, number)
    cause = one.wait()
    assert cause.process == victim, cause.sentence
    assert cause.kind in kind.split(), cause.sentence
    others = [end for end in one.reports() if end.process != victim]
    assert not any(end.ended_by_us for end in others), "they are to end by themselves"
    allowed = HEARTBEAT + 5 + (15 + 2 if fault else 0)  # of a hang, from the moment that it is found
    assert max(end.exit["ended"] for end in others) - begin < allowed
    if kind == "hang":
        assert "in fault" in (one.folders[victim] / "stacks.txt").read_text()


@pytest.mark.slow
def test_four_two_four_one(manifest, tmp_path):
    """Saved by SIGTERM some steps after each start, gone on with elsewhere."""
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    settings = ("train.steps=40", "checkpoint.every=0")
    run(train_arguments(whole, manifest.folder, *SETTINGS, *settings))
    for processes in (4, 2, 4):
        moment = logged_step(moved) + 2
        one = pod(moved, manifest.folder, processes, *settings)
        one.start(environment=paced(processes, 0.4))
        until(one, lambda moment=moment: logged_step(moved) >= moment)
        os.kill(one.children[-1].pid, signal.SIGTERM)
        cause = one.wait()
        assert cause is not None, "it was done before it was asked to stop"
        assert cause.code == 75, cause.sentence
    run(train_arguments(moved, manifest.folder, *SETTINGS, *settings))
    assert_same_losses(whole, moved, rel=1e-4)  # rounding of forty updates


@pytest.mark.slow
def test_ten_kills(manifest, tmp_path):
    """Ten processes of chance killed at moments of chance: the run ends as the one that nobody touched."""
    settings = ("train.steps=40", "checkpoint.every=5", "evaluate.every=10", "log.every=2")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    complete(pod(whole, manifest.folder, 4, *settings))
    chance = random.Random(7)
    for kill in range(10):
        one = pod(broken, manifest.folder, 4, *settings)
        one.start(environment=paced(4, 0.15))
        target = min(logged_step(broken) + 2 * chance.randrange(0, 5), 36)
        until(one, lambda target=target: logged_step(broken) >= target)
        time.sleep(chance.uniform(0, 1.0))
        victim = chance.randrange(4)
        one.children[victim].kill()
        cause = one.wait()
        assert (cause.process, cause.kind) == (victim, "signal"), f"kill {kill}: {cause.sentence}"
    complete(pod(broken, manifest.folder, 4, *settings))
    assert (whole / "metrics.jsonl").read_text() == (broken / "metrics.jsonl").read_text()
    a, b = state_of(whole, 40), state_of(broken, 40)
    assert all((a[name] == b[name]).all() for name in a)
