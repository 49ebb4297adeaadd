"""Questions to all hosts of a pod: host.py and its words, one ssh a host, all at once, each with its own answer."""

import dataclasses
import json
import pathlib
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from pods import backend
from pods.answers import advice, reason
from pods.backend import READY, Host, Pod, PodError, Result, printable, say
from pods.gcloud import TpuVm

LAUNCH = pathlib.Path(__file__).resolve().parent.parent
PREFIX = "mlm-host "
# stdin's first line is the program, the rest is for it
BOOT = "import json,sys;sys.argv.pop(0);exec(json.loads(sys.stdin.buffer.readline()))"
SSH_FAILED = 255  # ssh's own code: the call may have run, or not
BACKOFF = (2.0, 5.0, 10.0)  # seconds before each new try: with ssh's own time-out, a minute in all
TIMEOUT = 60.0  # seconds that a host has to answer a question, unless the question says otherwise


@dataclasses.dataclass(frozen=True)
class Answer:
    """What became of one host's call."""

    host: Host
    data: dict  # what host.py reported, {} if nothing
    error: str = ""  # one sentence that begins with the host, "" if all is well


@dataclasses.dataclass(frozen=True)
class Hosts:
    """The hosts of a pod that is ready."""

    cloud: TpuVm
    pod: Pod

    @property
    def all(self) -> tuple[Host, ...]:
        """The hosts, in the order of their workers: process i runs on host i."""
        return self.pod.hosts

    def ask(
        self,
        argv: Sequence[str] | Mapping[Host, Sequence[str]],
        *,
        stdin: Mapping[Host, bytes] | None = None,
        timeout: float = TIMEOUT,
    ) -> list[Answer]:
        """Returns each host's answer to host.py's `argv`, the same for all or one per host; raises no error of theirs.

        stdin: what host.py reads.
        """
        argvs = argv if isinstance(argv, Mapping) else dict.fromkeys(self.all, argv)
        code = program()
        over = threading.Event()
        pool = ThreadPoolExecutor(64)
        try:
            jobs = []
            for host, words in argvs.items():
                text = code + (stdin or {}).get(host, b"")
                jobs.append(pool.submit(self._ask, host, words, text, timeout, over))
            return [job.result() for job in jobs]
        finally:  # after Ctrl-C nobody waits for a host any longer
            over.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _ask(
        self,
        host: Host,
        words: Sequence[str],
        stdin: bytes,
        timeout: float,
        over: threading.Event,
    ) -> Answer:
        """Returns one host's answer; where ssh fails, it is tried again."""
        argv = self.cloud.ssh(host.worker, ["python3", "-c", BOOT, "host.py", *words])
        for wait in (*BACKOFF, None):
            result = backend.run(argv, timeout, stdin)
            if result.code != SSH_FAILED:
                return _read(host, result, timeout)
            why = printable(reason(result.stderr))
            if wait is None or over.is_set():
                break
            say(f"{host}: ssh failed ({why}); again in {wait:g} s.")
            over.wait(wait)
        # the next command asks gcloud, which brings a new key to the hosts
        if "Permission denied" in why:
            self.cloud.routes_file.unlink(missing_ok=True)
        return Answer(host, {}, f"{host}: ssh failed {len(BACKOFF) + 1} times: {why}")

    def require(self, answers: Sequence[Answer], what: str) -> list[dict]:
        """Returns what all hosts have said. Raises PodError, which names every host that failed and says why."""
        if errors := [answer.error for answer in answers if answer.error]:
            failed = f"{what} failed on {len(errors)} of {len(answers)} hosts: {'; '.join(errors)}."
            raise PodError(f"{failed} {advice(failed, self.cloud.settings)}".rstrip(), "hosts")
        return [answer.data for answer in answers]


def program() -> bytes:
    """Returns host.py and its modules as one line of JSON, the first of stdin."""
    names = ("host_setup", "host")  # in the order of their imports
    sources = [(name, (LAUNCH / f"{name}.py").read_text(encoding="utf-8")) for name in names]
    text = (
        "import sys, types\n"
        "if sys.version_info < (3, 10):\n"
        "    it_is = 'python3 is %d.%d there, and must be 3.10 or later' % sys.version_info[:2]\n"
        "    sys.exit(it_is + ': choose another runtime_version in pod.toml')\n"
        f"for name, source in {sources!r}:\n"
        "    module = sys.modules[name] = types.ModuleType(name)\n"
        "    exec(compile(source, name + '.py', 'exec'), module.__dict__)\n"
        "sys.exit(module.main(sys.argv[1:]))\n"
    )
    return f"{json.dumps(text)}\n".encode()


def connect(cloud: TpuVm, pod: Pod | None = None) -> Hosts:
    """Returns the hosts of the pod (asked for, if not given). Raises PodError unless all of them are ready."""
    pod = pod or cloud.describe()
    count = cloud.settings.host_count
    if pod.state != READY:
        raise PodError(f"{pod.name} is {pod.condition}, not ready: launch/tpu.py up.", "absent")
    if len(pod.hosts) != count:
        raise PodError(
            f"{pod.name} should have {count} hosts by its accelerator_type, and has {len(pod.hosts)}; a run starts on "
            "all hosts or on none."
        )
    cloud.connect(pod)
    return Hosts(cloud, pod)


def _read(host: Host, result: Result, timeout: float) -> Answer:
    """Returns host.py's answer, which stands among what else a host prints."""
    said = reason(result.stderr)
    if result.code is None:
        return Answer(host, {}, f"{host}: no answer within {timeout:g} s ({said})")
    lines = [line for line in result.stdout.splitlines() if line.startswith(PREFIX)]
    data = json.loads(lines[-1].removeprefix(PREFIX)) if lines else {}
    error = ""
    if result.code or not lines:
        error = f"{host}: {data.get('error') or f'code {result.code}: {said}'}"
    return Answer(host, data, printable(error))
