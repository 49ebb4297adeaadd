"""TPU VMs and queued resources through gcloud: its argument lists, its answers, its errors in clear words.

What `up` creates carries the label LABEL=account, on the TPU VM and in the request for it: nothing else is ever deleted
unasked. Hosts are reached one by one (--worker=i): with --worker=all, gcloud gives one code for all of them, and runs
the command again by itself when a connection drops.
"""

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
ASK = 120.0  # seconds that gcloud may take to answer
CHANGE = 1800.0  # to create or delete
CONNECT = 180.0  # for the first connection, in which gcloud makes a key and brings it to the hosts
# one connection for all questions to a host; gcloud knows no such options
SHARED = ("ControlMaster=auto", "ControlPersist=600", "BatchMode=yes", "ServerAliveInterval=15")
# or a closed port takes ssh two minutes, and gcloud tries ten times
PATIENCE = "--ssh-flag=-o ConnectTimeout=10"
# of ssh's sockets: their whole path has 104 characters at most, and a home may have more
SOCKETS = pathlib.Path(f"/tmp/mlm-ssh-{os.getuid()}")


class TpuVm:
    """The TPU VM of the settings. What asks the cloud raises PodError."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.routes: list[list[str]] = []  # an ssh command for each host
        # what gcloud has said of them, under the folder we are in
        self.routes_file = pathlib.Path("runs/pods/ssh", f"{settings.name}.json")

    @functools.cached_property
    def label(self) -> str:
        """What marks a pod as made by us: the account of gcloud, as two people may both be called root."""
        result = backend.run(["gcloud", "config", "get-value", "account"], ASK)
        if result.code or not result.stdout.strip():
            raise PodError("gcloud isn't logged in: gcloud auth login.")
        return label_of(result.stdout.strip())

    def create(self) -> None:
        """Asks for the pod; it need not be there when this returns."""
        settings = self.settings
        flags = [
            *settings.create_flags,
            f"--labels={LABEL}={self.label}",
            f"--accelerator-type={settings.accelerator_type}",
        ]
        if settings.spot:
            flags.append("--spot")
            if settings.queued and settings.track == "alpha":  # it would ask for STANDARD beside it
                flags.append("--provisioning-model=spot")
        if settings.queued:
            flags += [f"--node-id={settings.name}", f"--runtime-version={settings.runtime}"]
        else:
            flags.append(f"--version={settings.runtime}")
        group = "queued-resources" if settings.queued else "tpu-vm"
        self._gcloud(group, "create", settings.name, *flags, timeout=CHANGE)

    def delete(self, pod: Pod) -> None:
        """Deletes a pod, by the queued resource that it came by, whatever its name. Nothing there is no error.

        Raises PodError for one that our `up` has not made.
        """
        if pod.label != self.label:
            what = f"tpu-vm delete {pod.name}"
            if pod.request:
                what = f"queued-resources delete --force {pod.request}"
            raise PodError(
                f"{pod.name} is {pod.condition}; your `up` has not made it (but {pod.label or 'another way'}), so it "
                f"stays; to delete it all the same: {shlex.join(self._argv(*what.split()))}."
            )
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
        say(f"deleted {'TPU VM' if group == 'tpu-vm' else 'queued resource'} {name}")
        return True

    def describe(self) -> Pod:
        """Returns the pod, in state ABSENT if there is none; hosts in the order of their workers once it is READY."""
        name = self.settings.name
        # the TPU VM first: it is there or not, whoever made it, and in whichever way
        node = self._ask("tpu-vm", "describe", name)
        if node:
            return self._node(node)
        request = self._ask("queued-resources", "describe", name)
        if not request:
            return Pod(name, backend.ABSENT)
        if (called := request["tpu"]["nodeSpec"][0]["nodeId"]) != name:
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

    def refuse_stopped(self, pod: Pod) -> None:
        """Raises PodError for one that a person has stopped: nobody else starts it again."""
        if pod.state == "STOPPED":
            start = shlex.join(self._argv("tpu-vm", "start", pod.name))
            raise PodError(f"{pod.name} is STOPPED; to start it: {start}.", "settings")

    def connect(self, pod: Pod) -> None:
        """Finds how ssh reaches the hosts of a pod that is READY: gcloud says it, once for each pod."""
        settings = self.settings
        target = f"{settings.user}@{settings.name}" if settings.user else settings.name
        # of two, ssh takes the first
        words = self._argv("tpu-vm", "ssh", target, *settings.ssh_flags, PATIENCE)
        key = [pod.identity, *words]
        saved = host_setup.read(self.routes_file) or {}
        if saved.get("key") != key:
            say(f"connecting to {len(pod.hosts)} hosts of {pod.name}")
            is_reached = self._connect_first(words)
            plain = [word for word in words if not word.startswith("--ssh-flag=")]
            asked = backend.run([*plain, "--command=true", "--worker=all", "--dry-run"], ASK)
            if asked.code != 0:
                raise self._explain("ssh", asked)
            saved = {"key": key, "lines": asked.stdout.splitlines()[-len(pod.hosts) :]}
            if is_reached:
                self.routes_file.parent.mkdir(parents=True, exist_ok=True)
                host_setup.write(self.routes_file, saved)
        flags = [word.partition("=")[2] for word in words if word.startswith("--ssh-flag=")]
        self.routes = [parse_route(line, " ".join(flags).split()) for line in saved["lines"]]

    def _connect_first(self, words: Sequence[str]) -> bool:
        """Connects to the first host alone, before all others: this makes the keys, and gives them to the pod.

        Returns whether it answers. Where it does not, the others may.
        """
        first = backend.run([*words, "--command=true", "--worker=0"], CONNECT)
        if first.code == 0:
            return True
        if first.code not in (None, 255):
            raise self._explain("ssh", first)
        advice = answers.advice(first.stderr, self.settings)
        say(f"host 0 can't be reached by ssh: {answers.reason(first.stderr)}. {advice}".rstrip())
        return False

    def ssh(self, worker: int, argv: Sequence[str]) -> list[str]:
        """Returns the ssh command that runs argv on a worker."""
        return [*self.routes[worker], shlex.join(argv)]

    def _node(self, node: dict) -> Pod:
        ends = node.get("networkEndpoints", [])  # none until it is READY
        # of each host's interfaces the first
        primary = ends[:: max(1, len(node.get("networkConfigs", [])))]
        return Pod(
            self.settings.name,
            node["state"],
            tuple(Host(i, end.get("ipAddress", "")) for i, end in enumerate(primary)),
            node.get("queuedResource", "").rpartition("/")[2],
            reason=_health(node),
            label=node.get("labels", {}).get(LABEL, ""),
            identity=json.dumps([node["id"], ends]),
        )

    def _request(self, request: dict) -> Pod:
        name = request["name"].rpartition("/")[2]
        state = request["state"]
        label = request["tpu"]["nodeSpec"][0]["node"].get("labels", {}).get(LABEL, "")
        error = state.get("failedData", {}).get("error")
        reason = str(answers.explain(answers.refusal_of(error), self.settings)) if error else ""
        return Pod(name, state["state"], request=name, reason=reason, label=label)

    def _argv(self, *words: str) -> list[str]:
        place = (f"--project={self.settings.project}", f"--zone={self.settings.zone}")
        return ["gcloud", *self.settings.track.split(), "compute", "tpus", *words, *place]

    def _ask(self, *words: str) -> dict | None:
        """Returns gcloud's answer, or None if there is no such thing."""
        try:
            return json.loads(self._gcloud(*words, "--format=json"))
        except ValueError as error:
            raise PodError(f"gcloud's answer is no JSON: {error}.") from error
        except PodError as error:
            if error.kind == "absent":
                return None
            raise

    def _gcloud(self, *words: str, timeout: float = ASK) -> str:
        """Runs gcloud and returns what it printed. Raises PodError in clear words."""
        result = backend.run(self._argv(*words), timeout)
        if result.code == 0:
            return result.stdout
        raise self._explain(" ".join(words[:2]), result)

    def _explain(self, what: str, result: backend.Result) -> PodError:
        """Returns why gcloud failed."""
        if result.code is None:
            return PodError(f"gcloud {what} gave no answer in time: try again.", "network")
        if result.code < 0:
            return PodError(f"gcloud {what} was killed by signal {-result.code}: try again.")
        refusal = answers.refusal(result.stderr)
        if result.code == 2:  # its parser's: the same words are refused again
            where = "see create_flags, ssh_flags and track in pod.toml"
            return SettingsError(
                f"gcloud refuses the flags of {what}: {answers.first_line(refusal)} ({where})."
            )
        if refusal.startswith("NOT_FOUND: ") and not what.endswith("create"):
            return PodError(f"{answers.first_line(refusal)}.", "absent")
        return answers.explain(refusal, self.settings)


def label_of(account: str) -> str:
    """Returns a label's value for an account, which no label can hold as it is: with its hash."""
    label = re.sub("[^a-z0-9_-]", "-", account.lower())
    return f"{label[:54]}-{hashlib.sha256(account.encode()).hexdigest()[:8]}"


def _health(node: dict) -> str:
    """Returns what the cloud says is wrong with a TPU VM: its health, and its last three symptoms."""
    health = node.get("health", "HEALTHY")
    is_well = health in ("HEALTHY", "HEALTH_UNSPECIFIED")
    sentences = [] if is_well else [f"{health} {node.get('healthDescription', '')}".strip()]
    for symptom in (node.get("symptoms") or [])[-3:]:
        worker = symptom.get("workerId", "?")
        sentences.append(
            f"{symptom.get('symptomType')} on worker {worker} {symptom.get('details', '')}".strip()
        )
    return "; ".join(sentences)


def parse_route(line: str, flags: Sequence[str]) -> list[str]:
    """Returns the ssh command of a line that gcloud printed, unquoted, with our flags. Raises PodError."""
    match = re.fullmatch(r"(/.*/ssh) -T( -i .+?)?(?: -o (.+))? ([^@ ]+@[^@ ]+) -- true", line)
    if not match:
        raise PodError(f"gcloud goes to the hosts in a way that is not known here: {line}")
    program, key, options, target = match.groups()
    words = ["-i", key.removeprefix(" -i ")] if key else []
    for option in [*re.split(" -o (?=[A-Z])", options or ""), *_shared(line)]:
        words += ["-o", option]
    return [program, "-T", *words, *flags, target, "--"]


def _shared(line: str) -> list[str]:
    """Returns the options by which all commands with the same route have one connection."""
    SOCKETS.mkdir(mode=0o700, exist_ok=True)
    if SOCKETS.stat().st_uid != os.getuid():
        raise PodError(f"{SOCKETS} belongs to somebody else: remove it.")
    return [*SHARED, f"ControlPath={SOCKETS}/{hashlib.sha256(line.encode()).hexdigest()[:16]}"]
