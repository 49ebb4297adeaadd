"""Runs of several real processes: told by flags or by their platform, killed, stopped, hung, asked to stop, moved."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import local_pod
import pytest

from mlm import __main__
from mlm.pretrained import checkpoint_files
from tests import QUICK_COMPILE, ROOT
from tests.cluster.launched import assert_same
from tests.support.metadata_server import PLATFORM, MetadataServer, tpu_vm
from tests.support.processes import environment, logged_step, train_arguments
from tests.support.tiny import meshes_of

pytestmark = pytest.mark.standard

PROGRAM = ("-m", "tests.programs.pod_train")
HEARTBEAT = 10
HANG = 15
STEPS = 30
SETTINGS = (
    f"train.steps={STEPS}",
    "checkpoint.every=4",
    "log.every=1",
    "log.norms_every=4",
    "mesh.fsdp=2",
    "model.hidden_dropout=0.1",
    f"pod.heartbeat={HEARTBEAT}",
    "pod.start_timeout=200",
)
PAUSED = {"MLM_TEST_PAUSE": "0.3"}  # before each step


@pytest.fixture(scope="module", autouse=True)
def quick_compile():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", QUICK_COMPILE)
        yield


def pod(workdir: pathlib.Path, shards: str, processes: int, *overrides: str) -> local_pod.Pod:
    arguments = train_arguments(workdir, shards, *SETTINGS, *overrides)
    return local_pod.Pod(processes, arguments, workdir / "hosts", devices=1, program=PROGRAM)


def until(moment, one: local_pod.Pod) -> None:
    deadline = time.monotonic() + 280
    while not moment():
        assert one.poll(), [folder.joinpath("log").read_text() for folder in one.folders]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def complete(one: local_pod.Pod) -> None:
    one.start()
    cause = one.wait()
    assert cause is None, cause.sentence


def start_bare(arguments: list[str], hosts: list[dict[str, str]]) -> list[subprocess.Popen]:
    """Starts the same line on each host, without a word about hosts: only the environment differs."""
    clean = {key: value for key, value in environment(1).items() if not key.startswith(PLATFORM)}
    clean["JAX_PLATFORMS"] = "cpu"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    line = [sys.executable, *PROGRAM, *arguments]
    return [subprocess.Popen(line, cwd=ROOT, env=clean | host, **pipes) for host in hosts]


def addresses(count: int) -> list[str]:
    """Of a test of its own: all of 127/8 is this machine, and the ports are fixed."""
    return [
        f"127.{1 + os.getpid() % 200}.{1 + os.getpid() // 200 % 200}.{index + 1}"
        for index in range(count)
    ]


def assert_all_saved_one_step(workdir: pathlib.Path, at_least: int) -> None:
    """Process 1 was asked to stop, and process 0 was not."""
    asked = json.loads((workdir / "hosts" / "1" / "cause.json").read_text())
    assert asked["kind"] == "signal" and asked["what"].startswith("SIGTERM: stopped after step ")
    step = int(asked["what"].split()[4])
    assert checkpoint_files.complete_steps(workdir / "checkpoints")[-1] == step
    assert at_least <= step < STEPS
    assert not (workdir / "hosts" / "0" / "cause.json").exists()


def test_a_signal_to_one_saves_all(manifest, tmp_path):
    one = pod(tmp_path, manifest.folder, 2, "checkpoint.every=0")
    one.environments = [PAUSED | {"MLM_TEST_RANDOM": "1"}] * 2
    one.start()
    until(lambda: logged_step(tmp_path) >= 2, one)
    os.kill(one.children[1].pid, signal.SIGTERM)
    cause = one.wait()
    assert (cause.process, cause.code, cause.kind) == (1, 75, "signal"), cause.sentence
    assert [end.exit["code"] for end in one.reports()] == [75, 75]
    assert_all_saved_one_step(tmp_path, at_least=2)


def test_one_host_with_another_config(manifest, tmp_path):
    """Found before the processes meet, and reported to all: nothing compiles."""
    one = pod(tmp_path, manifest.folder, 3, "data.lanes=3", "data.global_batch=12")
    one.arguments[2] = [*one.arguments[2], "--config.train.steps=-5"]
    one.start()
    cause = one.wait()
    assert (cause.process, cause.code) == (2, 2)
    reported = json.loads((tmp_path / "hosts" / "0" / "cause.json").read_text())
    assert reported["process"] == 2 and "config.train.steps = -5" in reported["what"]
    assert [end.exit["code"] for end in one.reports()] == [2, 2, 2]
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.fixture(scope="module")
def whole(manifest, tokenizer_folder, tmp_path_factory) -> pathlib.Path:
    """Two processes that nobody touched; with its tokenizer, for export."""
    workdir = tmp_path_factory.mktemp("hosts") / "whole"
    shutil.copytree(tokenizer_folder, workdir / "tokenizer")
    complete(pod(workdir, manifest.folder, 2))
    return workdir


FAULTS = [
    (0, signal.SIGKILL, "", ["signal"]),
    (1, signal.SIGSTOP, "", ["lost"]),
    (0, None, "hang", ["hang"]),
    (1, None, "block", ["exit"]),
]


def end_by(
    workdir: pathlib.Path,
    shards: str,
    victim: int,
    number: signal.Signals | None,
    fault: str,
    kinds: list,
):
    """Goes on with the run until a fault ends it: all processes, by themselves, and the files name the first."""
    one = pod(workdir, shards, 2, f"pod.hang={HANG}")
    step = logged_step(workdir) + 5
    one.environments = [PAUSED] * 2
    if fault:
        one.environments[victim] = PAUSED | {"MLM_TEST_FAULT": f"{fault}:{step + 1}"}
    one.start()
    until(lambda: logged_step(workdir) >= step - 1, one)
    begin = time.time()
    if number:
        os.kill(one.children[victim].pid, number)
    cause = one.wait()
    assert cause.process == victim and cause.kind in kinds, cause.sentence
    others = [end for end in one.reports() if end.process != victim]
    assert not any(end.ended_by_us for end in others)
    # of a hang, from the moment that it is found
    allowed = HEARTBEAT + 5 + (HANG + 2 if fault else 0)
    assert max(end.exit["ended"] for end in others) - begin < allowed
    if fault == "hang":
        assert "in train_batches" in (one.folders[victim] / "log").read_text()


@pytest.fixture(scope="module")
def stopped(manifest, tmp_path_factory) -> pathlib.Path:
    """A run that all faults ended in turn, and then SIGTERM to one of two pods on GKE."""
    workdir = tmp_path_factory.mktemp("hosts") / "stopped"
    for fault in FAULTS:
        end_by(workdir, manifest.folder, *fault)
    step = logged_step(workdir) + 3
    with MetadataServer(tpu_vm([], 0)) as server:  # of a node of GKE
        variables = PAUSED | {
            "TPU_WORKER_HOSTNAMES": ",".join(addresses(2)),
            "JAX_FORCE_TPU_INIT": "1",
        }
        variables |= {"GCE_METADATA_IP": server.address}
        pods = [variables | {"TPU_WORKER_ID": str(index)} for index in range(2)]
        started = start_bare(train_arguments(workdir, manifest.folder, *SETTINGS), pods)
        while logged_step(workdir) < step:
            assert all(process.poll() is None for process in started)
            time.sleep(0.05)
    started[1].send_signal(signal.SIGTERM)
    printed = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [75, 75], printed
    for index, text in enumerate(printed):
        assert f"process {index} of 2, process 0 at {addresses(2)[0]}" in text
    assert_all_saved_one_step(workdir, at_least=step)
    return workdir


@pytest.mark.slow
def test_whatever_ended_it_tpu_vms_go_on_to_the_bits_of_an_untouched_run(
    stopped, whole, manifest, tmp_path
):
    """Each asks its own metadata server; one answers in the old format and one in the new."""
    shutil.copytree(stopped, tmp_path / "run")
    hosts = addresses(2)
    with (
        MetadataServer(tpu_vm(hosts, 0)) as first,
        MetadataServer(tpu_vm(hosts, 1, old=False)) as second,
    ):
        variables = [
            {"GCE_METADATA_IP": server.address, "JAX_FORCE_TPU_INIT": "1"}
            for server in (first, second)
        ]
        arguments = train_arguments(tmp_path / "run", manifest.folder, *SETTINGS)
        started = start_bare(arguments, variables)
        printed = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], printed
    for index, text in enumerate(printed):
        assert f"process {index} of 2, process 0 at {hosts[0]} (from the TPU VM's metadata)" in text
    assert_same(tmp_path / "run", whole, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 4])
def test_another_number_of_processes_goes_on_with_the_same_batches(
    stopped, whole, manifest, tmp_path, processes
):
    shutil.copytree(stopped, tmp_path / "run")
    if processes == 1:
        with meshes_of(2):
            assert __main__.main(train_arguments(tmp_path / "run", manifest.folder, *SETTINGS)) == 0
    else:
        complete(pod(tmp_path / "run", manifest.folder, processes))
    logs = [
        (workdir / "metrics.jsonl").read_text().splitlines()
        for workdir in (tmp_path / "run", whole)
    ]
    for one, other in zip(*(map(json.loads, lines) for lines in logs), strict=True):
        assert (one["step"], one["kind"]) == (other["step"], other["kind"])
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4), one["step"]


@pytest.mark.slow
def test_export_from_several_processes(whole):
    """The parameters lie split over both, and each reads them whole."""
    assert __main__.main(["export", f"--workdir={whole}"]) == 0
    exported = {path.name: path.read_bytes() for path in (whole / "export").iterdir()}
    shutil.rmtree(whole / "export")
    line = ["export", f"--workdir={whole}", f"--config.pod.heartbeat={HEARTBEAT}"]
    complete(local_pod.Pod(2, line, whole / "hosts", devices=1, program=PROGRAM))
    assert {path.name: path.read_bytes() for path in (whole / "export").iterdir()} == exported
