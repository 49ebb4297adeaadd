"""The code and its packages on every host: what is there is not sent again."""

from __future__ import annotations

from collections.abc import Sequence

from pods.code import Code
from pods.errors import PodError
from pods.hosts import Hosts, label

COPY, INSTALL = 900.0, 3600.0  # seconds that a host has


def sync(hosts: Hosts, code: Code, extras: Sequence[str] = ()) -> None:
    """Copies the code to all hosts, and installs its packages. Raises PodError."""
    before = hosts.require(hosts.ask(["preflight", "--code", code.hash]), "sync")
    lacking = [host for host, answer in zip(hosts.all, before, strict=True) if code.hash not in answer.get("code", ())]
    hosts.notify(f"{code.label}: to {len(lacking)} of {len(hosts.all)} hosts")
    archive = f"the archive, {code.hash}.tar.gz".encode() if hosts.dry else code.data
    unpack = {host: ["unpack", code.hash] for host in lacking}
    hosts.require(hosts.ask(unpack, stdin=dict.fromkeys(lacking, archive), timeout=COPY), "copying the code")
    python = [f"--python={hosts.cloud.settings.python}"] if hosts.cloud.settings.python else []
    words = ["install", code.hash, *(f"--extra={extra}" for extra in extras), *python]
    answers = hosts.require(hosts.ask(words, timeout=INSTALL), "installing the packages")
    if hosts.dry:
        return
    names = {answer["requirements"] for answer in answers}
    if len(names) > 1:
        versions = [f"{label(host)}: Python {a['python']}" for host, a in zip(hosts.all, answers, strict=True)]
        raise PodError(f"the hosts have different Pythons, and so different packages: {', '.join(versions)}.", "hosts")
    fresh = sum(answer["fresh"] for answer in answers)
    hosts.notify(f"packages {min(names)}: installed on {fresh} hosts, there already on {len(answers) - fresh}")
