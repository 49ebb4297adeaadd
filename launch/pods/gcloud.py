"""TPU VMs and queued resources through gcloud: its argument lists, its answers, its errors in clear words.

`gcloud compute tpus tpu-vm` and `gcloud compute tpus queued-resources`, as their reference pages have them. A queued
resource and its TPU VM have the same name. Hosts are asked one by one (--worker=i): with --worker=all, gcloud gives one
code for all of them, and runs the command again by itself when a connection drops.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from pods import backend
from pods.backend import ABSENT, CREATING, DELETING, FAILED, PREEMPTED, READY, SUSPENDED, WAITING, Call, Host, Pod
from pods.errors import PodError
from pods.settings import Settings

QUEUED_STATES = {
    "ACCEPTED": WAITING,
    "WAITING_FOR_RESOURCES": WAITING,
    "CREATING": WAITING,
    "PROVISIONING": CREATING,
    "FAILED": FAILED,
    "SUSPENDING": SUSPENDED,
    "SUSPENDED": SUSPENDED,
    "DELETING": DELETING,
}
NODE_STATES = {
    "READY": READY,
    "PREEMPTED": PREEMPTED,
    "TERMINATED": PREEMPTED,
    "STOPPING": FAILED,
    "STOPPED": FAILED,
    "DELETING": DELETING,
}
ASK, CHANGE = 120.0, 1800.0  # seconds that gcloud may take to answer, and to create or delete

# the first that gcloud's words hold decides: (words, kind, what a person reads)
ERRORS = (
    (
        ("no more capacity", "not enough resources", "stockout", "resource_pool_exhausted", "insufficient capacity"),
        "stockout",
        "{zone} has no {type} to give right now: try another zone, set queued = true to wait in line, or try later",
    ),
    (
        ("quota",),
        "quota",
        "the quota of {project} for {type} in {zone} is used up: delete what you don't need (`down`, `clean`), or ask "
        "for more at https://console.cloud.google.com/iam-admin/quotas",
    ),
    (
        ("has not been used in project", "service_disabled", "api is not enabled", "api not enabled"),
        "api",
        "the Cloud TPU API is off in {project}: gcloud services enable tpu.googleapis.com --project={project}",
    ),
    (
        (
            "auth login",
            "unauthenticated",
            "not currently have an active account",
            "refreshing your current auth",
            "reauthentication",
        ),
        "login",
        "gcloud isn't logged in: gcloud auth login",
    ),
    (
        ("permission_denied", "permission denied", "does not have permission", "forbidden"),
        "permission",
        "your account may not do this in {project}: ask its owner for the role roles/tpu.admin",
    ),
    (("not_found", "was not found", "not found"), "absent", "{project} has no {name} in {zone}"),
    (("already_exists", "already exists"), "exists", "{name} is there already in {zone}"),
    (
        (
            "unable to find the server",
            "network is unreachable",
            "could not resolve",
            "unavailable",
            "deadline_exceeded",
        ),
        "network",
        "Google Cloud can't be reached: try again",
    ),
)


class TpuVm:
    """The TPU VM backend; see backend.Backend for what its methods promise."""

    def __init__(self, settings: Settings, runner: backend.Runner):
        self.settings, self.runner, self.dry = settings, runner, runner.dry
        self.place = (f"--project={settings.project}", f"--zone={settings.zone}")

    def create(self) -> None:
        """See backend.Backend."""
        chosen = self.settings
        version = chosen.runtime_version or chosen.accelerator.generation.runtime
        options = ["--spot"] if chosen.spot else []
        if chosen.network:
            options.append(f"--network={chosen.network}")
        type_flag = f"--accelerator-type={chosen.accelerator_type}"
        if chosen.queued:
            words = [f"--node-id={chosen.name}", type_flag, f"--runtime-version={version}", *options]
            self._gcloud("queued-resources", "create", chosen.name, *words, timeout=CHANGE)
        else:
            self._gcloud("tpu-vm", "create", chosen.name, type_flag, f"--version={version}", *options, timeout=CHANGE)

    def delete(self, pod: Pod | None = None) -> None:
        """See backend.Backend. A queued resource takes its TPU VM along."""
        name = pod.name if pod else self.settings.name
        queued = pod.kind == "queued" if pod else self.settings.queued
        kind, options = ("queued-resources", ("--quiet", "--force")) if queued else ("tpu-vm", ("--quiet",))
        try:
            self._gcloud(kind, "delete", name, *options, timeout=CHANGE)
        except PodError as error:
            if error.kind != "absent":
                raise

    def describe(self) -> Pod:
        """See backend.Backend."""
        name = self.settings.name
        kind = "queued" if self.settings.queued else "tpu-vm"
        if self.settings.queued:
            answer = self._describe("queued-resources")
            if answer is None:
                return Pod(name, ABSENT, kind=kind)
            detail = answer.get("state", {}).get("state", "")
            if not self.dry and detail != "ACTIVE":
                return Pod(name, QUEUED_STATES.get(detail, WAITING), kind=kind, detail=detail)
        answer = self._describe("tpu-vm")
        if self.dry:
            hosts = range(self.settings.host_count)
            return Pod(name, READY, tuple(Host(i, f"ADDRESS-OF-WORKER-{i}") for i in hosts), kind)
        if answer is None:  # of an active queued resource: it was deleted behind the queue's back
            return Pod(name, FAILED if self.settings.queued else ABSENT, kind=kind, detail="no TPU VM")
        detail = answer.get("state", "")
        ends = answer.get("networkEndpoints") or []
        hosts = tuple(Host(i, end.get("ipAddress", "")) for i, end in enumerate(ends))
        return Pod(name, NODE_STATES.get(detail, CREATING), hosts, kind, detail, answer.get("acceleratorType", ""))

    def list(self) -> list[Pod]:
        """See backend.Backend."""
        pods = []
        for command, kind in (("queued-resources", "queued"), ("tpu-vm", "tpu-vm")):
            for entry in self._json(self._gcloud(command, "list", "--format=json")) or []:
                name = entry.get("name", "").rpartition("/")[2]
                queued = kind == "queued"
                detail = entry.get("state", {}).get("state", "") if queued else entry.get("state", "")
                state = QUEUED_STATES.get(detail, READY) if queued else NODE_STATES.get(detail, CREATING)
                pods.append(Pod(name, state, kind=kind, detail=detail))
        return pods

    def ssh(self, worker: int, argv: Sequence[str], stdin: bytes = b"", flags: Sequence[str] = ()) -> Call:
        """See backend.Backend."""
        options = [f"--worker={worker}", f"--command={backend.remote(argv)}", *(f"--ssh-flag={flag}" for flag in flags)]
        return Call(self._argv("tpu-vm", "ssh", self.settings.name, *options), stdin)

    def copy(self, worker: int, file: str, target: str) -> Call:
        """See backend.Backend. target: a plain path, without what a shell would take apart."""
        return Call(self._argv("tpu-vm", "scp", file, f"{self.settings.name}:{target}", f"--worker={worker}"))

    def _argv(self, *words: str) -> tuple[str, ...]:
        return ("gcloud", "compute", "tpus", *words, *self.place)

    def _describe(self, command: str) -> dict | None:
        """Returns what gcloud says of our pod, {} in a dry run, or None if there is none."""
        try:
            return self._json(self._gcloud(command, "describe", self.settings.name, "--format=json")) or {}
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
        chosen = self.settings
        names = {"project": chosen.project, "zone": chosen.zone, "name": chosen.name, "type": chosen.accelerator_type}
        said = result.stderr[max(result.stderr.rfind("ERROR:"), 0) :]  # warnings before it name quotas too
        said = re.sub(r"This command is authenticated as .* property\.", "", said).strip()  # true of every error
        message = re.search(r'"message": *("(?:[^"\\]|\\.)*")', said)
        first = (
            json.loads(message[1]) if message else re.sub(r"^ERROR: (\([^)]*\) )?", "", said).partition("\n")[0].strip()
        )
        for words, kind, sentence in ERRORS:
            if any(word in said.lower() for word in words):
                return PodError(f"{sentence.format(**names)}. (gcloud: {first})", kind)
        return PodError(f"gcloud {what} failed with code {result.code}: {said or 'it said nothing'}", "other")

    @staticmethod
    def _json(text: str) -> object:
        if not text.strip():
            return None
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise PodError(
                f"gcloud's answer is no JSON: {text.strip()[:200]!r}; try `gcloud components update`."
            ) from error
