"""Jupyter on one host, reached through ssh's tunnel on localhost, closed to whoever hasn't the token."""

from __future__ import annotations

import json
import pathlib
import secrets
import sys
import threading

from pods import backend
from pods.backend import say
from pods.code import Code
from pods.errors import PodError
from pods.hosts import BOOT, Hosts, program
from pods.runs import RECORDS
from pods.settings import FIELDS


def run(hosts: Hosts, code: Code, *, worker: int, port: int) -> int:
    """Runs Jupyter until Ctrl-C, or until it ends; returns its exit code. port: here and there.

    The token goes there on stdin, never on a command line; here it lies in a file that only its owner reads. The host's
    Jupyter ends when our end of stdin is closed, however we end. Raises PodError if there is no such worker.
    """
    if worker not in range(len(hosts.all)):
        raise PodError(f"there is no host {worker}: {hosts.pod.name} has {len(hosts.all)}.", "hosts")
    root = [] if hosts.settings.root == FIELDS["root"].default else ["--root", hosts.settings.root]
    words = ["python3", "-c", BOOT, "host.py", *root, "notebook", code.hash, str(port)]
    words += ["--alone"] if len(hosts.all) > 1 else []
    call = hosts.backend.ssh(worker, words, flags=[f"-L{port}:localhost:{port}"])
    if hosts.dry:
        hosts.runner.run(call, 0)
        return 0
    token = secrets.token_urlsafe(24)
    file = RECORDS / "notebook-token"
    write_private(file, token)
    process = backend.start(call)
    try:
        process.stdin.write(program() + json.dumps({"token": token}).encode() + b"\n")
        process.stdin.flush()
        say(f"http://localhost:{port}/lab (when Jupyter says so below); the token is in {file}; Ctrl-C ends it.")
        threads = [
            threading.Thread(target=_show, args=(pipe, token), daemon=True) for pipe in (process.stdout, process.stderr)
        ]
        for thread in threads:
            thread.start()
        return process.wait()
    except BrokenPipeError:
        return process.wait()
    except KeyboardInterrupt:
        say("closing the notebook")
        return 0
    finally:
        file.unlink(missing_ok=True)
        with_closed_stdin(process)


def with_closed_stdin(process) -> None:
    """Lets the host see that we are gone, and waits for it a little."""
    try:
        process.stdin.close()
        process.wait(timeout=10)
    except Exception:  # whatever it is, the call must not outlive us
        pass
    finally:
        backend.kill(process)


def write_private(file: pathlib.Path, text: str) -> None:
    """Writes a file that only its owner can read."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    file.touch(mode=0o600)
    file.write_text(text + "\n")


def _show(pipe, token: str) -> None:
    for line in pipe:
        sys.stderr.write(line.decode(errors="replace").replace(token, "TOKEN"))
        sys.stderr.flush()
