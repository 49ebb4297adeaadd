"""Questions to all hosts of a pod: host.py and its words, carried by one ssh each."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shlex
from collections.abc import Callable, Mapping, Sequence

from pods import fanout
from pods.answers import advice
from pods.backend import READY, Host, Pod, say
from pods.errors import PodError
from pods.fanout import Answer
from pods.gcloud import TpuVm
from pods.settings import FIELDS

LAUNCH = pathlib.Path(__file__).resolve().parent.parent
MODULES = ("host_setup", "host_keeper", "host_checks", "host")  # in the order of their imports
PREFIX = "mlm-host "
# stdin's first line is the program, the rest is for it. gcloud runs a command again by itself when ssh fails, with what
# is left of stdin: then there is no program, and code 254 says so
quoted = shlex.quote  # for a person's shell
BOOT = (
    "import json,sys;sys.argv.pop(0);line=sys.stdin.buffer.readline();"
    'line[:9]==b"mlm-host " or sys.exit(254);exec(json.loads(line[9:]))'
)


def program() -> bytes:
    """Returns host.py and its modules as one line of JSON, the first of stdin."""
    sources = [(name, (LAUNCH / f"{name}.py").read_text(encoding="utf-8")) for name in MODULES]
    text = (
        f"import sys, types\nfor name, source in {sources!r}:\n"
        "    module = sys.modules[name] = types.ModuleType(name)\n"
        "    exec(compile(source, name + '.py', 'exec'), module.__dict__)\n"
        "sys.exit(module.main(sys.argv[1:]))\n"
    )
    return f"{PREFIX}{json.dumps(text)}\n".encode()


@dataclasses.dataclass(frozen=True)
class Hosts:
    """The hosts of a pod that is ready."""

    cloud: TpuVm
    pod: Pod
    timeout: float = 60.0  # seconds that a host has to answer a question, unless the question says otherwise
    notify: Callable[[str], None] = say  # gets a sentence before each new try

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
        folder = self.cloud.settings.root
        root = [] if folder == FIELDS["root"].default else ["--root", folder]
        code, calls, texts = program(), {}, dict.fromkeys(argvs, b"") | (stdin or {})
        whole = {text: code + text for text in {*texts.values()}}  # once for all hosts that read the same
        for host, words in argvs.items():
            call = self.cloud.ssh(host.worker, ["python3", "-c", BOOT, "host.py", *root, *words], whole[texts[host]])
            calls[host] = dataclasses.replace(call, note=texts[host].decode()) if self.dry else call
        timeout = timeout or self.timeout
        answers = fanout.run(self.cloud.runner, calls, timeout, notify=self.notify)
        if any(answer.result.code in fanout.SSH_FAILED for answer in answers):
            self.cloud.forget()
        return answers if self.dry else [_read(answer) for answer in answers]

    def require(self, answers: Sequence[Answer], what: str) -> list[dict]:
        """Returns what all hosts have said. Raises PodError, which names every host that failed and says why."""
        if bad := [f"{fanout.label(answer.host)}: {answer.error}" for answer in answers if answer.error]:
            sentence = f"{what} failed on {len(bad)} of {len(answers)} hosts: {'; '.join(bad)}."
            raise PodError(f"{sentence} {advice(sentence, self.cloud.settings)}".rstrip(), "hosts")
        return [answer.data for answer in answers]


def connect(cloud: TpuVm, timeout: float, pod: Pod | None = None, *, partial: bool = False) -> Hosts:
    """Returns the hosts of the pod (asked for, if not given). Raises PodError unless all of them are ready.

    partial: a first host that ssh can't reach is reported, and is no error: what the others say is of use.
    """
    pod, settings = pod or cloud.describe(), cloud.settings
    if pod.state != READY:
        raise PodError(f"{pod.name} is {pod.condition}, not ready: launch/tpu.py up.", "absent")
    missing = [f"host {host.worker}" for host in pod.hosts if not host.address]
    if missing or len(pod.hosts) != settings.host_count:
        reason = f"{', '.join(missing)} without an address" if missing else f"{len(pod.hosts)} hosts are there"
        raise PodError(
            f"{pod.name} should have {settings.host_count} hosts ({settings.accelerator_type}), but {reason}: "
            "wait, or set hosts in pod.toml; a run starts on all hosts or on none.",
            "hosts",
        )
    hosts = Hosts(cloud, pod, timeout, (lambda sentence: None) if cloud.dry else say)
    if cloud.dry or cloud.is_connected(pod):
        return hosts
    hosts.notify(f"connecting to {len(pod.hosts)} hosts of {pod.name}")
    try:
        cloud.connect(pod)
    except PodError as error:
        if not (partial and error.kind == "hosts"):
            raise
        hosts.notify(f"{error} The others are asked.")
    return hosts


def _read(answer: Answer) -> Answer:
    lines = [line.removeprefix(PREFIX) for line in answer.result.stdout.splitlines() if line.startswith(PREFIX)]
    try:
        data = json.loads(lines[-1])
    except (IndexError, json.JSONDecodeError):
        return dataclasses.replace(answer, error=answer.error or "it ended well and gave no answer")
    if answer.result.code is None:
        return answer
    return dataclasses.replace(answer, data=data, error=answer.error and str(data.get("error") or answer.error))
