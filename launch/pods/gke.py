"""A second cloud behind the seam: GKE, for TPU7x, which has no TPU VM. As far as the manifest of a JobSet.

`run --dry-run` prints the manifest; everything that would change or ask a cluster is refused. The manifest is JSON,
which is YAML, so that no string can break out of it; `kubectl apply -f -` takes it. In it there is no shell: the
command is a list, and a "$" of ours is written "$$", since Kubernetes replaces $(NAME) by a variable, and $$ by $.

Sources (read in November 2026): JobSet v1alpha2, kubernetes-sigs/jobset (examples/ and its API reference);
cloud.google.com/kubernetes-engine/docs: "Plan TPUs in GKE" (names of accelerators, chips of a machine, topologies),
"Deploy TPU Multislices in GKE", "About Ironwood (TPU7x) in GKE", "Spot VMs"; kubernetes.io: Job (completionMode,
podFailurePolicy), "Define a Command and Arguments" (replacement of variables).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence

from pods import backend
from pods.backend import READY, Call, Host, Pod
from pods.errors import PodError, SettingsError
from pods.runs import Job
from pods.settings import Settings

LABELS = {  # of nodes, by generation
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}
PLANE = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}  # v5e, v6e
CUBE = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4"}  # the others; from 64 on of cubes of 4x4x4
FINAL = (2, 3, 4)  # exit codes that no restart mends: see the README
JOB, CONTAINER = "hosts", "mlm"
WHY_NOT = (
    "backend gke goes as far as the manifest of a JobSet: run CONFIG --dry-run prints it, and "
    "kubectl apply -f - takes it."
)


def topology(generation: str, chips: int) -> str:
    """Returns the shape of a slice, such as 4x4 or 2x2x4: the one nearest to a square or a cube, as Google sells them.

    Raises ValueError if there is none of that many chips.
    """
    known = PLANE if generation in ("v5e", "v6e") else CUBE
    if chips in known:
        return known[chips]
    if known is PLANE or chips % 64:
        raise ValueError(f"there is no slice of {chips} chips of {generation}")
    units = chips // 64
    cubes = [
        (a, b, units // (a * b))
        for a in range(1, round(units ** (1 / 3)) + 1)
        for b in range(a, math.isqrt(units // a) + 1)
        if units % (a * b) == 0
    ]
    return "x".join(str(4 * side) for side in min(cubes, key=lambda sides: max(sides) - min(sides)))


def literal(word: str) -> str:
    """Returns a word of a command such that Kubernetes hands it on as it was: see the module's text."""
    return word.replace("$", "$$")


def name_of(run: str) -> str:
    """Returns a JobSet's name for any run id: 40 letters, digits and dashes, and as unlike as the ids are.

    Pods are called NAME-hosts-0-INDEX, and none of it may have more than 63 letters.
    """
    plain = re.sub("[^a-z0-9]+", "-", run.lower()).strip("-")
    digest = hashlib.sha256(run.encode(errors="surrogateescape")).hexdigest()[:8]
    return f"mlm-{plain[:26].strip('-') or 'run'}-{digest}"


def manifest(settings: Settings, run: str, argv: Sequence[str], env: Sequence[str] = ()) -> dict:
    """Returns the JobSet that runs `python -m mlm` and argv on all hosts of one slice.

    env: names of variables, of which Kubernetes takes the values from the secret "{name}-env": they are not in here.
    Raises SettingsError.
    """
    chosen = settings.accelerator
    generation = chosen.generation.name
    if generation not in LABELS:
        raise SettingsError(f"{settings.accelerator_type} is not on GKE as a TPU; there are {', '.join(LABELS)}.")
    if not settings.image:
        raise SettingsError("there is no image: set image in pod.toml, a container with this code and its packages.")
    try:
        shape = topology(generation, chosen.chips)
    except ValueError as error:
        raise SettingsError(f"{settings.accelerator_type}: {error}.") from error
    hosts, name = settings.host_count, name_of(run)
    if hosts != chosen.hosts:
        raise SettingsError(f"hosts = {hosts}: a slice of {settings.accelerator_type} has {chosen.hosts} in GKE.")
    selector = {"cloud.google.com/gke-tpu-accelerator": LABELS[generation], "cloud.google.com/gke-tpu-topology": shape}
    tolerations = [{"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}]
    if settings.spot:
        selector["cloud.google.com/gke-spot"] = "true"
        tolerations.append({"key": "cloud.google.com/gke-spot", "operator": "Exists", "effect": "NoSchedule"})
    # JOB_COMPLETION_INDEX is set by Kubernetes in every pod of an indexed Job; $(...) of what is set before it is
    # replaced in env and in command alike
    place = [
        f"--coordinator={name}-{JOB}-0-0.{name}:{settings.port}",
        f"--processes={hosts}",
        "--process-id=$(JOB_COMPLETION_INDEX)",
    ]
    tpus = {"google.com/tpu": str(chosen.chips // hosts)}
    container = {
        "name": CONTAINER,
        "image": settings.image,
        "command": ["python", "-m", "mlm", *map(literal, argv), *place],
        "env": [*_environment(), *(_secret(name, variable) for variable in env)],
        "ports": [{"containerPort": settings.port}],
        "resources": {"requests": tpus, "limits": tpus},
        "volumeMounts": [{"name": "host-dir", "mountPath": "/mlm-host"}],
    }
    pod = {
        "restartPolicy": "Never",
        "nodeSelector": selector,
        "tolerations": tolerations,
        "terminationGracePeriodSeconds": 300,
        "containers": [container],
        "volumes": [{"name": "host-dir", "emptyDir": {}}],
    }
    return _jobset(name, run, hosts, pod)


def _environment() -> list[dict]:
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    return [
        {"name": "JOB_COMPLETION_INDEX", "valueFrom": index},
        {"name": "MLM_HOST_DIR", "value": "/mlm-host"},
        {"name": "PYTHONUNBUFFERED", "value": "1"},
    ]


def _secret(name: str, variable: str) -> dict:
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": f"{name}-env", "key": variable}}}


def _jobset(name: str, run: str, hosts: int, pod: dict) -> dict:
    """Returns the JobSet: what no restart mends fails it, everything else starts all hosts again."""
    job = {
        "completionMode": "Indexed",
        "completions": hosts,
        "parallelism": hosts,
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": list(FINAL)},
                }
            ]
        },
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": name,
            "annotations": {
                "mlm/run": run,
                "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool",
            },
        },
        "spec": {
            "coordinator": {"replicatedJob": JOB, "jobIndex": 0, "podIndex": 0},
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All"},
            "failurePolicy": {
                "maxRestarts": 10,
                "rules": [{"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "replicatedJobs": [{"name": JOB, "replicas": 1, "template": {"spec": job}}],
        },
    }


def text(manifest: dict) -> str:
    """Returns a manifest as kubectl takes it: JSON that YAML reads alike.

    YAML would take JSON's two escapes of a character beyond U+FFFF for two characters, and some others for the end of a
    line: the former stand as they are, all others that are not ASCII are escaped.
    """
    plain = json.dumps(manifest, indent=2, ensure_ascii=False)
    return re.sub(r"[\x7f-\uffff]", lambda match: f"\\u{ord(match[0]):04x}", plain)


class Gke:
    """The GKE backend; see backend.Backend. It plans, and does nothing."""

    def __init__(self, settings: Settings, runner: backend.Runner):
        if not runner.dry:
            raise PodError(WHY_NOT, "settings")
        self.settings, self.runner, self.dry = settings, runner, True

    def plan(self, job: Job) -> int:
        """Prints the manifest of a run; returns the exit code."""
        print(text(manifest(self.settings, job.id, job.argv, env=job.env)))
        return 0

    def create(self) -> None:
        """See backend.Backend. The cluster's node pools are not ours to make."""
        raise PodError(WHY_NOT, "settings")

    def delete(self, pod: Pod | None = None) -> None:
        """See backend.Backend."""
        raise PodError(WHY_NOT, "settings")

    def describe(self) -> Pod:
        """See backend.Backend. In a plan all hosts are there, by the names that JobSet will give them."""
        name = self.settings.name
        hosts = (Host(i, f"{name}-{JOB}-0-{i}.{name}") for i in range(self.settings.host_count))
        return Pod(name, READY, tuple(hosts), "gke")

    def list(self) -> list[Pod]:
        """See backend.Backend."""
        raise PodError(WHY_NOT, "settings")

    def ssh(self, worker: int, argv: Sequence[str], stdin: bytes = b"", flags: Sequence[str] = ()) -> Call:
        """See backend.Backend. A container is entered by kubectl exec, if at all."""
        raise PodError(WHY_NOT, "settings")

    def copy(self, worker: int, file: str, target: str) -> Call:
        """See backend.Backend. The code is in the image."""
        raise PodError(WHY_NOT, "settings")
