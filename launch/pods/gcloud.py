"""TPU VMs and queued resources through gcloud: its argument lists, its answers, its errors in clear words.

What `up` creates carries the label LABEL=user, on the TPU VM and in the request for it: nothing else is ever deleted
unasked. Hosts are reached one by one (--worker=i): with --worker=all, gcloud gives one code for all of them, and runs
the command again by itself when a connection drops.
"""

from __future__ import annotations

import dataclasses
import getpass
import json
import re
import shlex
from collections.abc import Sequence

from pods import backend, route
from pods.backend import Call, Host, Pod
from pods.errors import PodError
from pods.route import Route
from pods.settings import Settings

LABEL = "mlm-made-by"
# gcloud's own names of states; all other requests wait, and all other TPU VMs, such as STARTING ones, are BUSY
STATES = {"PROVISIONING": backend.CREATING, "SUSPENDING": backend.SUSPENDED, "TERMINATED": backend.PREEMPTED} | {
    name: name for name in (*backend.GONE, backend.CREATING, backend.READY, backend.STOPPED, backend.DELETING)
}
ASK, CHANGE = 120.0, 1800.0  # seconds that gcloud may take to answer, and to create or delete

# (kind, pattern, what a person reads): the first whose pattern gcloud's message matches
ERRORS = (
    ("stockout", "no more capacity|not enough resources|stockout|resource_pool_exhausted|insufficient capacity",
     "{zone} has no {accelerator_type} to give right now: try another zone, set queued = true to wait in line, or "
     "try later"),
    ("quota", "quota",
     "the quota of {project} for {accelerator_type} in {zone} is used up: delete what you don't need (`down`, "
     "`clean`), or ask for more at https://console.cloud.google.com/iam-admin/quotas"),
    ("api", "has not been used in project|service_disabled|api is not enabled|api not enabled",
     "the Cloud TPU API is off in {project}: gcloud services enable tpu.googleapis.com --project={project}"),
    ("login", "auth login|unauthenticated|active account selected|current auth tokens|reauthentication",
     "gcloud isn't logged in: gcloud auth login"),
    ("permission", "permission_denied|permission denied|does not have permission|forbidden",
     "your account may not do this in {project}: ask its owner for the role roles/tpu.admin"),
    ("absent", "not_found|not found", "{project} has no {name} in {zone}"),
    ("exists", "already_exists|already exists", "{name} is there already in {zone}"),
    ("internal", '"code": 13\\b|internal error|internal: ',
     "Google Cloud failed internally (code 13): try again in some minutes; if it stays so, the TPU service agent may "
     "be missing: gcloud compute tpus tpu-vm service-identity create --project={project} --zone={zone}"),
    ("network", "unable to find the server|network is unreachable|could not resolve|unavailable|deadline_exceeded",
     "Google Cloud can't be reached: try again"),
)  # fmt: skip


class TpuVm:
    """The TPU VM of the settings. What asks the cloud raises PodError, whose kind says why."""

    def __init__(self, settings: Settings, runner: backend.Runner):
        self.settings, self.runner, self.dry = settings, runner, runner.dry
        self.target = f"{settings.user}@{settings.name}" if settings.user else settings.name
        self.owner = re.sub("[^a-z0-9_-]", "-", getpass.getuser().lower())[:63]
        self.routes: dict[int, Route] = {}  # of the pod `routed`
        self.routed = ""

    def create(self) -> None:
        """Asks for the pod; it need not be there when this returns. Raises PodError("exists") if it was there."""
        chosen, labels, flags = self.settings, [f"{LABEL}={self.owner}"], []
        for flag in chosen.create_flags:  # gcloud takes the last --labels alone
            labels, flags = ([*labels, flag[9:]], flags) if flag.startswith("--labels=") else (labels, [*flags, flag])
        flags += ["--spot"] if chosen.spot else []
        flags += [f"--network={chosen.network}"] if chosen.network else []
        flags += [f"--labels={','.join(labels)}", f"--accelerator-type={chosen.accelerator_type}"]
        version = f"version={chosen.runtime_version or chosen.accelerator.runtime}"
        flags += [f"--node-id={chosen.name}", f"--runtime-{version}"] if chosen.queued else [f"--{version}"]
        self._gcloud("queued-resources" if chosen.queued else "tpu-vm", "create", chosen.name, *flags, timeout=CHANGE)

    def start(self) -> None:
        """Starts the pod again, if it is STOPPED."""
        self._gcloud("tpu-vm", "start", self.settings.name, timeout=CHANGE)

    def delete(self, pod: Pod) -> None:
        """Deletes a pod; one that is absent is no error. A queued resource takes force, and its TPU VM along."""
        kind, force = ("queued-resources", ["--force"]) if pod.kind == "queued" else ("tpu-vm", [])
        try:
            self._gcloud(kind, "delete", pod.name, "--quiet", *force, timeout=CHANGE)
        except PodError as error:
            if error.kind != "absent":
                raise

    def describe(self) -> Pod:
        """Returns the pod, in state ABSENT if there is none; hosts in the order of their workers once it is READY."""
        name = self.settings.name
        # the TPU VM first: it is there or not, whoever made it, and in whichever way
        node = self._ask("tpu-vm", "describe", name)
        if self.dry:
            hosts = tuple(Host(i, f"ADDRESS-OF-WORKER-{i}") for i in range(self.settings.host_count))
            return Pod(name, backend.READY, hosts, "queued" if self.settings.queued else "tpu-vm", ours=True)
        request = self._ask("queued-resources", "describe", name) if node is None else None
        pod = self._request(request) if request else Pod(name, backend.ABSENT)
        if pod.detail == "ACTIVE":
            if (called := _spec(request).get("nodeId", name)) != name:
                sentence = f"{name} is a queued resource whose TPU VM is called {called}: set name to that."
                raise PodError(sentence, "settings")
            node = self._ask("tpu-vm", "describe", name)  # it may have come in between
            if node is None:
                return dataclasses.replace(pod, state=backend.FAILED, detail="its TPU VM is gone")
        return self._node(node) if node else pod

    def requests(self) -> list[Pod]:
        """Returns all queued resources of the project and zone, without their hosts."""
        return [self._request(request) for request in self._ask("queued-resources", "list") or ()]

    def connect(self, pod: Pod) -> None:
        """Finds the routes of `ssh`, once for a pod that is READY; where none is, gcloud's own ssh goes."""
        if self.routed == pod.identity:
            return
        chosen, self.routed = self.settings, pod.identity
        flags = [word for flag in chosen.ssh_flags if flag.startswith("--ssh-flag=") for word in flag[11:].split()]
        key = [pod.identity, self.target, chosen.track, *chosen.ssh_flags]
        lines = route.load(chosen.name, key)
        if not lines and (lines := self._dry_ssh(len(pod.hosts))):
            route.save(chosen.name, key, lines)
        routes = [Route.parse(line, flags) for line in lines]
        self.routes = {} if None in routes else dict(enumerate(routes))

    def ssh(self, worker: int, argv: Sequence[str], stdin: bytes = b"") -> Call:
        """Returns the call that runs argv on a worker."""
        command, known = shlex.join(argv), self.routes.get(worker)
        flags = [f"--worker={worker}", f"--command={command}", *self.settings.ssh_flags]
        call = Call(self._argv("tpu-vm", "ssh", self.target, *flags), stdin)
        if known is None:
            return call
        words = (known.program, "-T", *known.shared(), known.target, "--", command)
        return Call(words, stdin, instead=lambda: self._forget(worker, call))

    def _dry_ssh(self, hosts: int) -> list[str]:
        """Returns a line of `ssh --dry-run` for each host, [] if there are none."""
        # the first connection makes the keys and gives them to the pod: it is made alone, before all others
        words = ["tpu-vm", "ssh", self.target, "--command=true", *self.settings.ssh_flags]
        if self.runner.run(Call(self._argv(*words, "--worker=0")), ASK).code != 0:
            return []
        result = self.runner.run(Call(self._argv(*words, "--worker=all", "--dry-run")), ASK)
        lines = result.stdout.splitlines()
        return lines if result.code == 0 and len(lines) == hosts else []

    def _forget(self, worker: int, call: Call) -> Call:
        """Returns gcloud's own call, for a route that leads nowhere any more; the next command finds a new one."""
        self.routes.pop(worker, None)
        route.forget(self.settings.name)
        return call

    def _node(self, node: dict) -> Pod:
        ends, state = node.get("networkEndpoints") or [], node.get("state", "UNKNOWN")
        return Pod(
            self.settings.name,
            STATES.get(state, backend.BUSY),
            tuple(Host(i, end.get("ipAddress", "")) for i, end in enumerate(ends)),
            "queued" if node.get("queuedResource") else "tpu-vm",
            detail=state,
            accelerator_type=node.get("acceleratorType", ""),
            ours=node.get("labels", {}).get(LABEL) == self.owner,
            identity=json.dumps([node.get("id"), ends]),
        )

    def _request(self, request: dict) -> Pod:
        name, state = request.get("name", "").rpartition("/")[2], request.get("state", {}).get("state", "UNKNOWN")
        ours = _spec(request).get("node", {}).get("labels", {}).get(LABEL) == self.owner
        return Pod(name, STATES.get(state, backend.WAITING), kind="queued", detail=state, ours=ours)

    def _argv(self, *words: str) -> tuple[str, ...]:
        track = [self.settings.track] if self.settings.track else []
        place = (f"--project={self.settings.project}", f"--zone={self.settings.zone}")
        return ("gcloud", *track, "compute", "tpus", *words, *place)

    def _ask(self, *words: str) -> list | dict | None:
        """Returns gcloud's answer, {} in a dry run, or None if there is no such thing."""
        try:
            text = self._gcloud(*words, "--format=json").strip()
            return json.loads(text or "{}")
        except json.JSONDecodeError as error:
            sentence = f"gcloud's answer is no JSON: {text[:200]!r}; try `gcloud components update`."
            raise PodError(sentence) from error
        except PodError as error:
            if error.kind == "absent":
                return None
            raise

    def _gcloud(self, *words: str, timeout: float = ASK) -> str:
        """Runs gcloud and returns what it printed. Raises PodError in clear words."""
        result = self.runner.run(Call(self._argv(*words)), timeout)
        if result.code == 0:
            return result.stdout
        what = " ".join(words[:2])
        if result.code is None:
            raise PodError(f"gcloud {what} gave no answer within {timeout:.0f} s: try again.", "network")
        raise self._explain(what, result)

    def _explain(self, what: str, result: backend.Result) -> PodError:
        said = result.stderr[max(result.stderr.rfind("ERROR:"), 0) :]  # warnings before it name quotas too
        said = re.sub(r"This command is authenticated as .* property\.", "", said).strip()  # true of every error
        message = re.search(r'"message": *("(?:[^"\\]|\\.)*")', said)
        first = json.loads(message[1]) if message else re.sub(r"^ERROR: (\([^)]*\) )?", "", said).partition("\n")[0]
        for kind, pattern, sentence in ERRORS:
            if re.search(pattern, said.lower()):
                return PodError(f"{sentence.format_map(vars(self.settings))}. (gcloud: {first.strip()})", kind)
        return PodError(f"gcloud {what} failed with code {result.code}: {said or 'it said nothing'}", "other")


def _spec(request: dict) -> dict:
    return next(iter(request.get("tpu", {}).get("nodeSpec") or []), {})
