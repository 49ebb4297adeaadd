"""Is every host ready for a run, and are they all alike?"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator

from pods.backend import Host
from pods.hosts import Hosts, label

LITTLE_DISK = 10e9  # bytes: packages and a checkpoint that is being written


@dataclasses.dataclass(frozen=True)
class Report:
    """What the hosts' answers amount to."""

    problems: list[str]  # sentences that keep a run from starting
    remarks: list[str]  # those that do not
    lines: list[str]  # a table of the hosts
    requirements: str = ""


def check(hosts: Hosts, code: str, *, clear_lock: bool = False) -> Report:
    """Returns how the hosts are, which must have the code of this hash. Raises PodError if one does not answer."""
    flag = ["--clear-lock"] if clear_lock else []
    questions = hosts.ask(["preflight", "--code", code, *flag])
    if hosts.dry:
        return Report([], [], [])
    answers = dict(zip(hosts.all, hosts.require(questions, "preflight"), strict=True))
    problems, remarks = _named(answers, lambda answer: _problems(answer, code)), _named(answers, _remarks)
    problems += _differences("packages", {host: answer["installed"] or "none" for host, answer in answers.items()})
    problems += _differences("accelerators", {host: len(answer["accelerators"]) for host, answer in answers.items()})
    remarks += _differences("python3", {host: answer["python"] for host, answer in answers.items()})
    table = [
        f"{label(host)}  {answer['host']}  python {answer['python']}  "
        f"code {code[:12] if code in answer['code'] else 'missing'}  packages {answer['installed'] or 'missing'}  "
        f"disk {answer['disk_free'] / 1e9:.0f} GB  memory {answer['memory_free'] / 1e9:.0f} GB  "
        f"accelerators {len(answer['accelerators'])}  libtpu lock {answer['libtpu_lock']}"
        for host, answer in answers.items()
    ]
    return Report(problems, remarks, table, answers[hosts.all[0]]["installed"] or "")


def check_ports(hosts: Hosts) -> list[str]:
    """Returns what is wrong with the ports of the first host, where the processes of a run meet."""
    first, *others = hosts.all
    words = {host: ["ports", first.address, str(host.worker), str(len(hosts.all))] for host in hosts.all}
    answers, problems = hosts.require(hosts.ask(words), "preflight"), []
    for port, fault in answers[0]["ports"].items() if not hosts.dry else ():
        if fault:
            problems.append(f"{label(first)}: port {port} {fault}")
            continue
        reasons = {host: answer["ports"][port] for host, answer in zip(others, answers[1:], strict=True)}
        if shut := [host for host in others if reasons[host]]:
            problems.append(
                f"{', '.join(map(label, shut))}: can't reach port {port} of {first.address} ({reasons[shut[0]]}): open "
                "it between the hosts (Google's own rule opens 8470, 8471, 8474 and 8476 in the network of a TPU)"
            )
    return problems


def _problems(answer: dict, code: str) -> Iterator[str]:
    if code not in answer["code"]:
        yield f"code {code[:12]} is missing: launch/tpu.py sync"
    elif not answer["installed"]:
        yield "its packages are not installed: launch/tpu.py sync"
    if holders := ", ".join(f"{holder['pid']} ({holder['command']})" for holder in answer["holders"]):
        yield f"the accelerator is held by process {holders}"
    elif answer["libtpu_lock"] == "held":
        yield "libtpu's lock is held by a process that we can't see"
    if alive := ", ".join(f"{run['id']!r} (attempt {run['attempt']})" for run in answer["runs"]):
        yield f"run {alive} is alive there: launch/tpu.py stop"


def _remarks(answer: dict) -> Iterator[str]:
    if answer["disk_free"] < LITTLE_DISK:
        yield "less than 10 GB of disk are free"
    if not answer["accelerators"]:
        yield "no accelerator is to be seen"
    if answer["libtpu_lock"] == "stale":
        yield "libtpu's lock file is left over: launch/tpu.py preflight --clear-lock"
    if answer["huge_pages"]:
        yield f"transparent huge pages are off, and a TPU starts slowly: {answer['huge_pages']}"


def _named(answers: dict[Host, dict], sentences: Callable[[dict], Iterable[str]]) -> list[str]:
    """Returns each sentence once, after the hosts that it is true of."""
    hosts: dict[str, list[str]] = {}
    for host, answer in answers.items():
        for sentence in sentences(answer):
            hosts.setdefault(sentence, []).append(label(host))
    return [f"{', '.join(names)}: {sentence}" for sentence, names in hosts.items()]


def _differences(name: str, values: dict[Host, object]) -> list[str]:
    """Returns the sentence, if any, that names the hosts with another value than most have."""
    (usual, _), *others = collections.Counter(values.values()).most_common()
    exceptions = ", ".join(f"{label(host)} has {value}" for host, value in values.items() if value != usual)
    return [f"{name} differ: {exceptions}; the others have {usual}"] if others else []
