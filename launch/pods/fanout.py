"""One call a host, all at once, each with its own result, time-out and tries."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from pods import answers
from pods.backend import Call, Host, Result, Runner

SSH_FAILED = (255, 254)  # ssh's own code, and that of host.py run again without its stdin: it may have run, or not
BACKOFF = (2.0, 5.0, 10.0)  # seconds before each new try: with ssh's own time-out, a minute in all
AT_ONCE = 64


@dataclasses.dataclass(frozen=True)
class Answer:
    """What became of one host's call."""

    host: Host
    data: dict  # what host.py reported, {} if nothing
    error: str = ""  # one sentence without the host's name, "" if all is well
    result: Result | None = None
    tries: int = 1


def run(runner: Runner, calls: Mapping[Host, Call], timeout: float, notify: Callable[[str], None]) -> list[Answer]:
    """Returns one answer per host, without data, in the order of `calls`; each try has `timeout` seconds.

    A call is tried again, and reported to `notify`, if ssh itself failed; gcloud's own has made ten tries by then. It
    may have run before: no call of host.py does harm the second time.
    """
    if runner.dry:
        return [Answer(host, {}, result=runner.run(call, timeout)) for host, call in calls.items()]
    pool = ThreadPoolExecutor(max(1, min(AT_ONCE, len(calls))))
    try:
        jobs = [pool.submit(_one, runner, host, call, timeout, notify) for host, call in calls.items()]
        return [job.result() for job in jobs]
    except BaseException:  # Ctrl-C: nobody waits for a host any longer
        runner.end()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _one(runner: Runner, host: Host, call: Call, timeout: float, notify: Callable[[str], None]) -> Answer:
    for tries, wait in enumerate((*(BACKOFF if call.direct else ()), None), 1):
        result = runner.run(call, timeout)
        answer = Answer(host, {}, _error(result, timeout, tries), result, tries)
        if result.code not in SSH_FAILED or wait is None:
            break
        notify(f"{label(host)}: ssh failed ({answers.reason(result.stderr)}); again in {wait:g} s.")
        if runner.over.wait(wait):
            break
    return answer


def _error(result: Result, timeout: float, tries: int) -> str:
    if result.code == 0:
        return ""
    said = answers.reason(result.stderr)
    if result.code is None:
        return f"no answer within {timeout:g} s{f' ({said})' if result.stderr.strip() else ''}"
    if result.code in SSH_FAILED:
        return f"ssh failed{f' {tries} times' if tries > 1 else ''}: {said}"
    if result.code < 0:
        return f"the call was killed by signal {-result.code}: {said}"
    return f"code {result.code}: {said}"


def label(host: Host) -> str:
    """Returns how a host is named to a person."""
    return f"host {host.worker} ({host.address})" if host.address else f"host {host.worker}"
