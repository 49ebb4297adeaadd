"""Questions to all hosts of a pod: host.py and its words, one ssh a host, all at once, each with its own answer."""

import dataclasses
import json
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from pods.answers import advice, reason
from pods.backend import READY, Host, Pod, PodError, Result, printable, say
from pods.gcloud import TpuVm

LAUNCH = pathlib.Path(__file__).resolve().parent.parent
MODULES = ("host_setup", "host_checks", "host")  # in the order of their imports
PREFIX = "mlm-host "
# stdin's first line is the program, the rest is for it. gcloud runs a command again by itself when ssh fails, with what
# is left of stdin: then there is no program, and code 254 says so
BOOT = (
    "import json,sys;sys.argv.pop(0);line=sys.stdin.buffer.readline();"
    'line[:9]==b"mlm-host " or sys.exit(254);exec(json.loads(line[9:]))'
)
SSH_FAILED = (255, 254)  # ssh's own code, and the one above: the call may have run, or not
BACKOFF = (2.0, 5.0, 10.0)  # seconds before each new try: with ssh's own time-out, a minute in all
AT_ONCE = 64
quoted = shlex.quote  # for a person's shell


@dataclasses.dataclass(frozen=True)
class Answer:
    """What became of one host's call."""

    host: Host
    data: dict  # what host.py reported, {} if nothing
    error: str = ""  # one sentence without the host's name, "" if all is well

    @property
    def fault(self) -> str:
        """The error after the host's name."""
        return f"{self.host}: {self.error}" if self.error else ""


@dataclasses.dataclass(frozen=True)
class Hosts:
    """The hosts of a pod that is ready."""

    cloud: TpuVm
    pod: Pod
    # seconds that a host has to answer a question, unless the question says otherwise
    timeout: float = 60.0
    retry: bool = True  # ssh is tried again

    @property
    def dry(self) -> bool:
        """Whether calls are printed, not run."""
        return self.cloud.dry

    @property
    def all(self) -> tuple[Host, ...]:
        """The hosts, in the order of their workers: process i runs on host i."""
        return self.pod.hosts

    def ask(
        self,
        argv: Sequence[str] | Mapping[Host, Sequence[str]],
        *,
        stdin: Mapping[Host, bytes] | None = None,
        timeout: float | None = None,
    ) -> list[Answer]:
        """Returns each host's answer to host.py's `argv`, the same for all or one per host; raises no error of theirs.

        stdin: what host.py reads; without secrets in a dry run, which prints it.
        """
        argvs = argv if isinstance(argv, Mapping) else dict.fromkeys(self.all, argv)
        code = program()
        texts = dict.fromkeys(argvs, b"") | (stdin or {})
        # once for all hosts that read the same
        whole = {text: code + text for text in {*texts.values()}}
        # a dry run prints one after the other
        pool = ThreadPoolExecutor(1 if self.dry else AT_ONCE)
        limit = timeout or self.timeout
        try:
            jobs = [
                pool.submit(self._ask, host, words, whole[texts[host]], limit)
                for host, words in argvs.items()
            ]
            return [job.result() for job in jobs]
        except BaseException:  # Ctrl-C: nobody waits for a host any longer
            self.cloud.runner.end()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, host: Host, words: Sequence[str], stdin: bytes, timeout: float) -> Answer:
        """Returns one host's answer; ssh itself is tried again, gcloud's own has made ten tries by then."""
        name, *arguments = words
        command = ["python3", "-c", BOOT, "host.py", name, self.cloud.settings.root, *arguments]
        argv = self.cloud.ssh(host.worker, command)
        waits = (*BACKOFF, None) if self.retry and argv[0] != "gcloud" else (None,)
        for wait in waits:
            result = self.cloud.runner.run(argv, timeout, stdin)
            if result.code not in SSH_FAILED:
                return Answer(host, {}) if self.dry else _read(host, result, timeout)
            why = printable(reason(result.stderr))
            if wait is not None:
                say(f"{host}: ssh failed ({why}); again in {wait:g} s.")
            if wait is None or self.cloud.runner.over.wait(wait):
                break
        self.cloud.forget()
        return Answer(
            host, {}, f"ssh failed{f' {len(waits)} times' if len(waits) > 1 else ''}: {why}"
        )

    def require(self, answers: Sequence[Answer], what: str) -> list[dict]:
        """Returns what all hosts have said. Raises PodError, which names every host that failed and says why."""
        if faults := [answer.fault for answer in answers if answer.error]:
            sentence = (
                f"{what} failed on {len(faults)} of {len(answers)} hosts: {'; '.join(faults)}."
            )
            raise PodError(f"{sentence} {advice(sentence, self.cloud.settings)}".rstrip(), "hosts")
        return [answer.data for answer in answers]


def program() -> bytes:
    """Returns host.py and its modules as one line of JSON, the first of stdin."""
    sources = [(name, (LAUNCH / f"{name}.py").read_text(encoding="utf-8")) for name in MODULES]
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
    return f"{PREFIX}{json.dumps(text)}\n".encode()


def connect(
    cloud: TpuVm, timeout: float, pod: Pod | None = None, *, partial: bool = False
) -> Hosts:
    """Returns the hosts of the pod (asked for, if not given). Raises PodError unless all of them are ready.

    partial: a first host that ssh can't reach is reported, and is no error: what the others say is of use.
    """
    pod = pod or cloud.describe()
    settings = cloud.settings
    if pod.state != READY:
        raise PodError(f"{pod.name} is {pod.condition}, not ready: launch/tpu.py up.", "absent")
    if len(pod.hosts) != settings.host_count:
        raise PodError(
            f"{pod.name} should have {settings.host_count} hosts ({settings.accelerator_type}), but {len(pod.hosts)} "
            "hosts are there: wait, or set hosts in pod.toml; a run starts on all hosts or on none.",
            "hosts",
        )
    try:
        cloud.connect(pod)
    except PodError as error:
        if not (partial and error.kind == "hosts"):
            raise
        say(f"{error} The others are asked.")
    return Hosts(cloud, pod, timeout)


def _read(host: Host, result: Result, timeout: float) -> Answer:
    """Returns host.py's answer, which stands among what else a host prints."""
    said = reason(result.stderr)
    if result.code is None:
        return Answer(
            host,
            {},
            f"no answer within {timeout:g} s{f' ({said})' if result.stderr.strip() else ''}",
        )
    lines = [
        line.removeprefix(PREFIX) for line in result.stdout.splitlines() if line.startswith(PREFIX)
    ]
    try:
        data = json.loads(lines[-1])
    except (IndexError, json.JSONDecodeError):
        sentence = (
            f"code {result.code}: {said}" if result.code else "it ended well and gave no answer"
        )
        return Answer(host, {}, sentence)
    error = str(data.get("error") or f"code {result.code}: {said}") if result.code else ""
    return Answer(host, data, error)
