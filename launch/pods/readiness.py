"""What a run needs on every host: the code, its packages, and nobody else's run."""

import collections

from pods.backend import say
from pods.code import Code
from pods.hosts import Hosts

COPY = 900.0  # seconds that a host has to unpack the code
INSTALL = 3600.0


def sync(hosts: Hosts, code: Code) -> tuple[list[str], list[str]]:
    """Brings the code and its packages to all hosts; what is there is not sent again.

    Returns (what keeps a run from starting, a table of the hosts). Raises PodError if a host fails.
    """
    answers = hosts.require(hosts.ask(["preflight", code.hash]), "sync")
    lacking = [
        host for host, answer in zip(hosts.all, answers, strict=True) if not answer["has_code"]
    ]
    stdin = dict.fromkeys(lacking, code.data)
    copied = hosts.ask({host: ["unpack", code.hash] for host in lacking}, stdin=stdin, timeout=COPY)
    hosts.require(copied, "copying the code")
    installed = hosts.ask(["install", code.hash, hosts.cloud.settings.python], timeout=INSTALL)
    installed = hosts.require(installed, "installing the packages")
    say(f"{code.label}: copied to {len(lacking)} of {len(answers)} hosts, with its packages")
    problems = collections.defaultdict(list)  # each one's hosts
    lines = []
    for host, answer, python in zip(hosts.all, answers, installed, strict=True):
        for sentence in answer["problems"]:
            problems[sentence].append(str(host))
        columns = [f"{answer['accelerators']} accelerators", answer["free"], python["python"]]
        lines.append("  ".join([str(host), *columns]))
    return [f"{', '.join(those)}: {what}" for what, those in problems.items()], lines
