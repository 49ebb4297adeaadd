"""TPU VMs and queued resources through gcloud: its argument lists, its answers, its errors in clear words.

What `up` creates carries the label LABEL=account, on the TPU VM and in the request for it: nothing else is ever deleted
unasked. Hosts are reached one by one (--worker=i): with --worker=all, gcloud gives one code for all of them, and runs
the command again by itself when a connection drops.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
import shlex
from collections.abc import Sequence

import host_setup

from pods import answers, backend
from pods.backend import Host, Pod, PodError, SettingsError, say
from pods.settings import Settings

LABEL = "mlm-made-by"
INITIATORS = {"USER": "by a person", "SERVICE": "by Google Cloud"}  # of a suspended request
ASK = 120.0  # seconds that gcloud may take to answer
CHANGE = 1800.0  # to create or delete
CONNECT = 180.0  # for the first connection, in which gcloud makes a key and brings it to the hosts
# of the API, by gcloud's name
COLLECTION = {"tpu-vm": "nodes", "queued-resources": "queuedResources"}
# between questions
SHARED = ("ControlMaster=auto", "ControlPersist=600", "BatchMode=yes", "ServerAliveInterval=15")
# or a closed port takes ssh two minutes, and gcloud tries ten times
PATIENCE = "--ssh-flag=-o ConnectTimeout=10"
LONGEST = 60  # of a folder for ssh's sockets, whose whole path has 104 characters at most


class TpuVm:
    """The TPU VM of the settings. What asks the cloud raises PodError."""

    def __init__(self, settings: Settings, runner: backend.Runner):
        self.settings = settings
        self.runner = runner
        self.dry = runner.dry
        # an ssh command for each host; none where gcloud's own goes
        self.routes: list[list[str]] = []
        # under the folder we are in
        self._routes_file = pathlib.Path("runs/pods/ssh") / f"{settings.name}.json"

    @functools.cached_property
    def label(self) -> str:
        """What marks a pod as made by us: the account of gcloud, as two people may both be called root."""
        if self.dry:
            return "YOUR-ACCOUNT"
        result = self.runner.run(["gcloud", "config", "get-value", "account"], ASK)
        if result.code or not result.stdout.strip():
            raise PodError("gcloud isn't logged in: gcloud auth login.")
        return label_of(result.stdout.strip())

    def create(self) -> None:
        """Asks for the pod; it need not be there when this returns. Raises PodError("exists") if it was there."""
        settings = self.settings
        flags = [flag for flag in settings.create_flags if not flag.startswith("--labels=")]
        labels = [
            flag.removeprefix("--labels=")
            for flag in settings.create_flags
            if flag.startswith("--labels=")
        ]
        # gcloud takes the last --labels alone
        labels = ",".join([f"{LABEL}={self.label}", *labels])
        flags += [f"--labels={labels}", f"--accelerator-type={settings.accelerator_type}"]
        if settings.spot:
            flags.append("--spot")
            if settings.queued and settings.track == "alpha":  # it would ask for STANDARD beside it
                flags.append("--provisioning-model=spot")
        if settings.network:
            flags.append(f"--network={settings.network}")
        if settings.queued:
            flags += [f"--node-id={settings.name}", f"--runtime-version={settings.runtime}"]
        else:
            flags.append(f"--version={settings.runtime}")
        group = "queued-resources" if settings.queued else "tpu-vm"
        self._gcloud(group, "create", settings.name, *flags, timeout=CHANGE)

    def start(self) -> None:
        """Starts the pod again, if it is STOPPED."""
        self._gcloud("tpu-vm", "start", self.settings.name, timeout=CHANGE)

    def delete(self, pod: Pod) -> None:
        """Deletes a pod, by the queued resource that it came by, whatever its name. Nothing there is no error."""
        if pod.request and self._deleted("queued-resources", pod.request, "--force"):
            return
        if pod.state != backend.ABSENT:
            self._deleted("tpu-vm", pod.name)

    def _deleted(self, group: str, name: str, *flags: str) -> bool:
        """Deletes, and says so once the API has; returns whether there was something."""
        try:
            self._gcloud(group, "delete", name, "--quiet", *flags, timeout=CHANGE)
        except PodError as error:
            if error.kind != "absent":
                raise
            return False
        if not self.dry:
            say(f"deleted {'TPU VM' if group == 'tpu-vm' else 'queued resource'} {name}")
        return True

    def describe(self) -> Pod:
        """Returns the pod, in state ABSENT if there is none; hosts in the order of their workers once it is READY."""
        name = self.settings.name
        # the TPU VM first: it is there or not, whoever made it, and in whichever way
        node = self._ask("tpu-vm", "describe", name)
        if self.dry:
            hosts = tuple(
                Host(i, f"ADDRESS-OF-WORKER-{i}") for i in range(self.settings.host_count)
            )
            return Pod(
                name, backend.READY, hosts, name if self.settings.queued else "", label=self.label
            )
        if node:
            return self._node(node)
        request = self._ask("queued-resources", "describe", name)
        if not request:
            return Pod(name, backend.ABSENT)
        if (called := _spec(request).get("nodeId", name)) != name:
            raise SettingsError(
                f"{name} is a queued resource whose TPU VM is called {called}: set name to that."
            )
        pod = self._request(request)
        if pod.state != "ACTIVE":
            return pod
        node = self._ask("tpu-vm", "describe", name)  # it may have come in between
        return (
            self._node(node)
            if node
            else dataclasses.replace(pod, state="FAILED", reason="its TPU VM is gone")
        )

    def requests(self) -> list[Pod]:
        """Returns all queued resources of the project and zone, without their hosts."""
        return [self._request(request) for request in self._ask("queued-resources", "list") or ()]

    def connect(self, pod: Pod) -> None:
        """Finds how ssh reaches the hosts of a pod that is READY. Raises PodError if the first one can't be reached.

        gcloud says it once for each pod; where we can't take apart what it says, its own ssh goes.
        """
        self.routes = []
        if self.dry:
            return
        saved = host_setup.read(self._routes_file) or {}
        words = self._ssh_words()
        if saved.get("key") != [pod.identity, *words]:
            say(f"connecting to {len(pod.hosts)} hosts of {pod.name}")
            self._connect_first(words)
            answer = self.runner.run([*words, "--command=true", "--worker=all", "--dry-run"], ASK)
            saved = {
                "key": [pod.identity, *words],
                "lines": [] if answer.code else answer.stdout.splitlines(),
            }
            # a full disk, a folder of somebody else's: it is asked again
            with contextlib.suppress(OSError):
                self._routes_file.parent.mkdir(parents=True, exist_ok=True)
                host_setup.write(self._routes_file, saved)
        flags = [
            word.removeprefix("--ssh-flag=") for word in words if word.startswith("--ssh-flag=")
        ]
        routes = [parse_route(line, " ".join(flags).split()) for line in saved["lines"]]
        if None not in routes and len(routes) == len(pod.hosts):
            self.routes = routes

    def _connect_first(self, words: Sequence[str]) -> None:
        """Connects to the first host alone, before all others: this makes the keys, and gives them to the pod."""
        first = self.runner.run([*words, "--command=true", "--worker=0"], CONNECT)
        if first.code in (None, 255):
            said = first.stderr
            # of which ssh says nothing, if it can't ask
            if "Permission denied" in said and self._has_passphrase():
                said += "passphrase"
            advice = answers.advice(said, self.settings)
            raise PodError(
                f"host 0 can't be reached by ssh: {answers.reason(first.stderr)}. {advice}".rstrip(),
                "hosts",
            )
        if first.code != 0:
            raise self._explain("ssh", first, f"nodes/{self.settings.name}")

    def _has_passphrase(self) -> bool:
        """Returns whether the key can't be read without one."""
        key = pathlib.Path(answers.key_of(self.settings)).expanduser()
        return (
            key.exists()
            and self.runner.run(["ssh-keygen", "-y", "-P", "", "-f", str(key)], ASK).code != 0
        )

    def ssh(self, worker: int, argv: Sequence[str]) -> Sequence[str]:
        """Returns the local call that runs argv on a worker: ssh itself, or gcloud."""
        command = shlex.join(argv)
        if self.routes:
            return [*self.routes[worker], command]
        return self._ssh_words(f"--worker={worker}", f"--command={command}")

    def forget(self) -> None:
        """Forgets the routes, since one of them led nowhere: the next `connect` asks for new ones."""
        with contextlib.suppress(OSError):
            self._routes_file.unlink()

    def _ssh_words(self, *words: str) -> list[str]:
        settings = self.settings
        target = f"{settings.user}@{settings.name}" if settings.user else settings.name
        # of two, ssh takes the first
        return self._argv("tpu-vm", "ssh", target, *words, *settings.ssh_flags, PATIENCE)

    def _node(self, node: dict) -> Pod:
        ends = node.get("networkEndpoints") or []
        # of each host's interfaces the first
        primary = ends[:: max(1, len(node.get("networkConfigs") or []))]
        return Pod(
            self.settings.name,
            node.get("state", "without a state"),
            tuple(Host(i, end.get("ipAddress", "")) for i, end in enumerate(primary)),
            node.get("queuedResource", "").rpartition("/")[2],
            reason=_health(node),
            accelerator_type=node.get("acceleratorType", ""),
            label=node.get("labels", {}).get(LABEL, ""),
            identity=json.dumps([node.get("id"), ends]),
        )

    def _request(self, request: dict) -> Pod:
        name = request.get("name", "").rpartition("/")[2]
        state = request.get("state", {})
        label = _spec(request).get("node", {}).get("labels", {}).get(LABEL, "")
        word = state.get("state", "without a state")
        reason = ""
        if error := state.get("failedData", {}).get("error"):
            reason = str(answers.explain(answers.refusal_of(error), self.settings))
        elif word.startswith("SUSPEND"):
            reason = INITIATORS.get(state.get("stateInitiator"), "")
        return Pod(name, word, request=name, reason=reason, label=label)

    def _argv(self, *words: str) -> list[str]:
        track = [self.settings.track] if self.settings.track else []
        place = (f"--project={self.settings.project}", f"--zone={self.settings.zone}")
        return ["gcloud", *track, "compute", "tpus", *words, *place]

    def _ask(self, *words: str) -> list | dict | None:
        """Returns gcloud's answer, {} in a dry run, or None if there is no such thing."""
        try:
            text = self._gcloud(*words, "--format=json")
        except PodError as error:
            if error.kind == "absent":
                return None
            raise
        if self.dry:
            return {}
        with contextlib.suppress(json.JSONDecodeError):
            if isinstance(answer := json.loads(text), list if words[1] == "list" else dict):
                return answer
        what = f"gcloud's answer is not what {' '.join(words[:2])} says in JSON"
        raise PodError(f"{what}: {text[:200]!r}; try `gcloud components update`.")

    def _gcloud(self, *words: str, timeout: float = ASK) -> str:
        """Runs gcloud and returns what it printed. Raises PodError in clear words."""
        result = self.runner.run(self._argv(*words), timeout)
        if result.code == 0:
            return result.stdout
        group, verb = words[:2]
        asked_of = (
            f"{COLLECTION[group]}/{words[2]}" if verb in ("describe", "start", "delete") else ""
        )
        raise self._explain(f"{group} {verb}", result, asked_of, timeout)

    def _explain(
        self, what: str, result: backend.Result, asked_of: str = "", timeout: float = ASK
    ) -> PodError:
        """Returns why gcloud failed; asked_of: as in `answers.explain`."""
        if result.code is None:
            return PodError(
                f"gcloud {what} gave no answer within {timeout:.0f} s: try again.", "network"
            )
        if result.code < 0:
            return PodError(f"gcloud {what} was killed by signal {-result.code}: try again.")
        refusal = answers.refusal(result.stderr)
        if result.code == 2:  # its parser's: the same words are refused again
            where = "see create_flags, ssh_flags and track in pod.toml"
            return SettingsError(
                f"gcloud refuses the flags of {what}: {answers.first_line(refusal)} ({where})."
            )
        return answers.explain(refusal, self.settings, asked_of)


def label_of(account: str) -> str:
    """Returns a label's value for an account, which no label can hold as it is: with its hash."""
    label = re.sub("[^a-z0-9_-]", "-", account.lower())
    return f"{label[:54]}-{hashlib.sha256(account.encode()).hexdigest()[:8]}"


def _spec(request: dict) -> dict:
    return next(iter(request.get("tpu", {}).get("nodeSpec") or []), {})


def _health(node: dict) -> str:
    """Returns what the cloud says is wrong with a TPU VM: its health, and its last three symptoms."""
    health = node.get("health", "HEALTHY")
    is_well = health in ("HEALTHY", "HEALTH_UNSPECIFIED")
    sentences = [] if is_well else [f"{health} {node.get('healthDescription', '')}".strip()]
    for symptom in sorted(
        node.get("symptoms") or [], key=lambda symptom: symptom.get("createTime", "")
    )[-3:]:
        worker = symptom.get("workerId", "?")
        sentences.append(
            f"{symptom.get('symptomType')} on worker {worker} {symptom.get('details', '')}".strip()
        )
    return "; ".join(sentences)


def parse_route(line: str, flags: Sequence[str]) -> list[str] | None:
    """Returns the ssh command of a line that gcloud printed, unquoted, with our flags; None if it is no such line."""
    start, _, target = line.removesuffix(" -- true").rpartition(" ")
    ours = "".join(f" {flag}" for flag in flags)
    program, *options = re.split(" -o (?=[A-Z])", start.removesuffix(ours))
    match = re.fullmatch("(/.*/ssh) -T(?: -i (/.+))?", program)
    if not match or not start.endswith(ours) or not re.fullmatch("[^@ ]+@[^@ ]+", target):
        return None
    options += _shared(line)
    key = ["-i", match[2]] if match[2] else []
    return [
        match[1],
        "-T",
        *key,
        *(word for option in options for word in ("-o", option)),
        *flags,
        target,
        "--",
    ]


def _shared(line: str) -> list[str]:
    """Returns the options by which all commands with the same route have one connection."""
    folder = pathlib.Path.home() / ".ssh"
    if len(str(folder)) > LONGEST:
        folder = pathlib.Path(f"/tmp/mlm-ssh-{os.getuid()}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        if folder.stat().st_uid != os.getuid():  # somebody else's
            return ["BatchMode=yes"]
    socket = f"{folder}/mlm-{hashlib.sha256(line.encode()).hexdigest()[:16]}".replace("%", "%%")
    return [*SHARED, f'ControlPath="{socket}"']  # in quotes of ssh's, for a home with spaces
