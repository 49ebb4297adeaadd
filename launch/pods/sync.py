"""The code and its packages on every host: what is there is not sent again."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from pods import fanout
from pods.code import Code
from pods.errors import PodError
from pods.hosts import Answer, Hosts

COPY, INSTALL = 900.0, 3600.0  # seconds that a host has


def sync(hosts: Hosts, code: Code, folder: pathlib.Path, extras: Sequence[str] = ()) -> str:
    """Brings the code to all hosts and installs its packages; returns the hash of the packages ("" in a dry run).

    folder: where the archive is kept here; extras: packages beside requirements.txt. Raises PodError, which names the
    hosts that failed.
    """
    file, target = folder / f"{code.hash}.tar.gz", f"mlm-pod-{code.hash}.tar.gz"
    if not hosts.dry:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.tar.gz"):
            old.unlink()
        file.write_bytes(code.data)
    found = zip(hosts.all, hosts.require(hosts.ask(["preflight", "--code", code.hash]), "sync"), strict=True)
    lacking = [host for host, answer in found if code.hash not in answer.get("code", ())]
    hosts.tell(f"{code.label}: to {len(lacking)} of {len(hosts.all)} hosts")
    calls = {host: hosts.backend.copy(host.worker, str(file), target) for host in lacking}
    copied = fanout.run(hosts.runner, calls, COPY, repeatable=True, tell=hosts.tell)
    hosts.require([Answer(outcome.host, {}, outcome.error) for outcome in copied], "copying the code")
    unpack = ["unpack", code.hash, f"~/{target}"]
    hosts.require(hosts.ask(dict.fromkeys(lacking, unpack)), "unpacking the code")
    python = [f"--python={hosts.settings.python}"] if hosts.settings.python else []
    words = ["install", code.hash, *(f"--extra={extra}" for extra in extras), *python]
    answers = hosts.require(hosts.ask(words, timeout=INSTALL), "installing the packages")
    if hosts.dry:
        return ""
    names = {answer["requirements"] for answer in answers}
    if len(names) > 1:
        both = zip(hosts.all, answers, strict=True)
        odd = ", ".join(f"{fanout.label(host)}: Python {answer['python']}" for host, answer in both)
        raise PodError(f"the hosts have different Pythons, and so different packages: {odd}.", "hosts")
    fresh = sum(answer["fresh"] for answer in answers)
    hosts.tell(f"packages {min(names)}: installed on {fresh} hosts, there already on {len(answers) - fresh}")
    return min(names)
