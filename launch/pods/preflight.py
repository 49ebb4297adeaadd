"""Is every host ready for a run, and are they all alike?"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

from pods.backend import Host
from pods.fanout import label
from pods.hosts import Hosts

LITTLE_DISK = 10e9  # bytes: packages and a checkpoint that is being written


@dataclasses.dataclass(frozen=True)
class Report:
    """problems: sentences that keep a run from starting; remarks: those that do not; lines: a table of the hosts."""

    problems: list[str]
    remarks: list[str]
    lines: list[str]
    requirements: str = ""


def check(hosts: Hosts, code: str, *, clear_lock: bool = False) -> Report:
    """Asks every host. Raises PodError, which names those that did not answer.

    code: the hash that the hosts must have; clear_lock: remove libtpu's lock file where nobody holds it.
    """
    words = ["preflight", "--code", code, *(["--clear-lock"] if clear_lock else [])]
    found = hosts.require(hosts.ask(words), "preflight")
    return judge(dict(zip(hosts.all, found, strict=True)), code) if not hosts.dry else Report([], [], [])


def check_ports(hosts: Hosts) -> list[str]:
    """Returns what is wrong with the ports of the first host, where the processes of a run meet."""
    first, *others = hosts.all
    words = {host: ["ports", first.address, str(host.worker), str(len(hosts.all))] for host in hosts.all}
    found = hosts.require(hosts.ask(words), "preflight")
    problems = []
    for port, fault in found[0]["ports"].items() if not hosts.dry else ():
        if fault:
            problems.append(f"{label(first)}: port {port} {fault}")
            continue
        reasons = {host: answer["ports"][port] for host, answer in zip(others, found[1:], strict=True)}
        if shut := [host for host in others if reasons[host]]:
            problems.append(
                f"{', '.join(map(label, shut))}: can't reach port {port} of {first.address} ({reasons[shut[0]]}): open "
                "it between the hosts (Google's own rule opens 8470, 8471, 8474 and 8476 in the network of a TPU)"
            )
    return problems


def judge(found: dict[Host, dict], code: str) -> Report:
    """Returns what the hosts' answers come to."""
    problems, remarks = [], []

    def name(bad: list[Host]) -> str:
        return ", ".join(map(label, bad))

    def complain(sentence: str, is_bad: Callable[[dict], object], into: list[str] = problems) -> None:
        bad = [host for host, answer in found.items() if is_bad(answer)]
        if bad:
            into.append(f"{name(bad)}: {sentence}")

    complain(f"code {code[:12]} is missing: launch/tpu.py sync", lambda answer: code not in answer["code"])
    complain(
        "its packages are not installed: launch/tpu.py sync",
        lambda answer: code in answer["code"] and not answer["installed"],
    )
    complain("less than 10 GB of disk are free", lambda answer: answer["disk_free"] < LITTLE_DISK, remarks)
    complain("no accelerator is to be seen", lambda answer: not answer["accelerators"], remarks)
    complain(
        "libtpu's lock file is left over: launch/tpu.py preflight --clear-lock",
        lambda answer: answer["libtpu_lock"] == "stale",
        remarks,
    )
    complain(
        f"transparent huge pages are off, and a TPU starts slowly: {max(a['huge_pages'] for a in found.values())}",
        lambda answer: answer["huge_pages"],
        remarks,
    )
    for host, answer in found.items():
        holders = ", ".join(f"{holder['pid']} ({holder['command']})" for holder in answer["holders"])
        if holders:
            problems.append(f"{label(host)}: the accelerator is held by process {holders}")
        elif answer["libtpu_lock"] == "held":
            problems.append(f"{label(host)}: libtpu's lock is held by a process that we can't see")
        alive = [f"{run['id']!r} (attempt {run['attempt']})" for run in answer["runs"]]
        if alive:
            problems.append(f"{label(host)}: run {', '.join(alive)} is alive there: launch/tpu.py stop")
    _compare(found, "packages", lambda answer: answer["installed"] or "none", problems)
    _compare(found, "accelerators", lambda answer: len(answer["accelerators"]), problems)
    _compare(found, "python3", lambda answer: answer["python"], remarks)
    first = next(iter(found.values()))
    return Report(problems, remarks, _table(found, code), first["installed"] or "")


def _compare(found: dict[Host, dict], what: str, value: Callable[[dict], object], into: list[str]) -> None:
    values = {host: value(answer) for host, answer in found.items()}
    (usual, _), *others = collections.Counter(values.values()).most_common()
    if others:
        odd = ", ".join(f"{label(host)} has {value}" for host, value in values.items() if value != usual)
        into.append(f"{what} differ: {odd}; the others have {usual}")


def _table(found: dict[Host, dict], code: str) -> list[str]:
    lines = []
    for host, answer in found.items():
        words = [
            f"python {answer['python']}",
            f"code {code[:12] if code in answer['code'] else 'missing'}",
            f"packages {answer['installed'] or 'missing'}",
            f"disk {answer['disk_free'] / 1e9:.0f} GB",
            f"memory {answer['memory_free'] / 1e9:.0f} GB",
            f"accelerators {len(answer['accelerators'])}",
            f"libtpu lock {answer['libtpu_lock']}",
        ]
        lines.append(f"{label(host)}  {answer['host']}  " + "  ".join(words))
    return lines
