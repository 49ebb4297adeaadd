"""What a run needs on every host: the code, its packages, a free accelerator, and ports that the others reach."""

import collections
from typing import NamedTuple

from pods.backend import PodError, say
from pods.code import Code
from pods.hosts import Hosts

COPY = 900.0  # seconds that a host has to unpack the code
INSTALL = 3600.0
COLUMNS = ("python", "packages", "accelerators", "free")  # of the table of hosts


class Report(NamedTuple):
    """What the hosts' answers amount to."""

    problems: list[str]  # sentences that keep a run from starting
    remarks: list[str]  # those that do not
    lines: list[str]  # a table of the hosts
    packages: str  # that all of them have


def sync(hosts: Hosts, code: Code) -> None:
    """Brings the code and its packages to all hosts; what is there is not sent again. Raises PodError."""
    answers = hosts.require(hosts.ask(["preflight", code.hash]), "sync")
    lacking = [
        host for host, answer in zip(hosts.all, answers, strict=True) if not answer.get("has_code")
    ]
    archive = f"the archive, {code.hash}.tar.gz".encode() if hosts.dry else code.data
    unpack = {host: ["unpack", code.hash] for host in lacking}
    hosts.require(
        hosts.ask(unpack, stdin=dict.fromkeys(lacking, archive), timeout=COPY), "copying the code"
    )
    answers = hosts.ask(["install", code.hash, hosts.cloud.settings.python], timeout=INSTALL)
    answers = hosts.require(answers, "installing the packages")
    if hosts.dry:
        return
    if len({answer["packages"] for answer in answers}) > 1:
        versions = [
            f"{host}: Python {answer['python']}"
            for host, answer in zip(hosts.all, answers, strict=True)
        ]
        raise PodError(
            f"the hosts have different Pythons, and so different packages: {', '.join(versions)}.",
            "hosts",
        )
    say(f"{code.label}: copied to {len(lacking)} of {len(answers)} hosts")
    say(
        f"packages {answers[0]['packages']}: installed on {sum(answer['fresh'] for answer in answers)} hosts"
    )


def check(hosts: Hosts, code: Code) -> Report:
    """Returns how the hosts are, and whether they are all alike. Raises PodError if one does not answer."""
    questions = hosts.ask(["preflight", code.hash])
    if hosts.dry:
        return Report([], [], [], "")
    answers = dict(zip(hosts.all, hosts.require(questions, "preflight"), strict=True))

    def said(key: str) -> list[str]:
        """Returns each sentence once, after the hosts that it is true of."""
        names = collections.defaultdict(list)
        for host, answer in answers.items():
            for sentence in answer[key]:
                names[sentence].append(str(host))
        return [f"{', '.join(those)}: {sentence}" for sentence, those in names.items()]

    def differences(key: str) -> list[str]:
        """Returns the sentence, if any, that names the hosts with another value than most have."""
        usual = collections.Counter(answer[key] for answer in answers.values()).most_common(1)[0][0]
        exceptions = [
            f"{host} has {answer[key]}" for host, answer in answers.items() if answer[key] != usual
        ]
        return (
            [f"{key} differ: {', '.join(exceptions)}; the others have {usual}"]
            if exceptions
            else []
        )

    lines = []
    for host, answer in answers.items():
        columns = [f"{key} {answer[key]}" for key in COLUMNS]
        lines.append("  ".join([str(host), answer["host"], *columns]))
    problems = [*said("problems"), *differences("packages"), *differences("accelerators")]
    return Report(
        problems,
        [*said("remarks"), *differences("python")],
        lines,
        answers[hosts.all[0]]["packages"],
    )


def check_ports(hosts: Hosts) -> list[str]:
    """Returns what is wrong with the ports of the first host, where the processes of a run meet."""
    first, *others = hosts.all
    words = {
        host: ["ports", first.address, str(host.worker), str(len(hosts.all))] for host in hosts.all
    }
    answers = hosts.require(hosts.ask(words), "preflight")
    if hosts.dry:
        return []
    problems = []
    for port, fault in answers[0]["ports"].items():
        reasons = {
            str(host): answer["ports"][port]
            for host, answer in zip(others, answers[1:], strict=True)
        }
        shut = [host for host, reason in reasons.items() if reason]
        if fault:
            problems.append(f"{first}: port {port} {fault}")
        elif shut:
            problems.append(
                f"{', '.join(shut)}: can't reach port {port} of {first.address} ({reasons[shut[0]]}): open it between "
                "the hosts (Google's own rule opens 8470, 8471, 8474 and 8476 in the network of a TPU)"
            )
    return problems
