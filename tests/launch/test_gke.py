"""launch/gke.yaml: a JobSet by the rules of Kubernetes and JobSet, and what its pods run."""

import re
import subprocess

import pytest
import yaml

from mlm.__main__ import parser
from tests.launch import LAUNCH


@pytest.fixture
def manifest() -> dict:
    return yaml.safe_load((LAUNCH / "gke.yaml").read_text())


def job_of(manifest: dict) -> dict:
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]


def container_of(manifest: dict) -> dict:
    return job_of(manifest)["template"]["spec"]["containers"][0]


def test_what_an_api_server_asks_beyond_the_schema(manifest):
    """Kubernetes' rules for an indexed Job with a podFailurePolicy, and JobSet's for its names."""
    job = job_of(manifest)
    pod = job["template"]["spec"]
    name = manifest["metadata"]["name"]
    assert job["completionMode"] == "Indexed" and job["completions"] == job["parallelism"]
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy needs it
    (rule,) = job["podFailurePolicy"]["rules"]
    codes = rule["onExitCodes"]
    assert (rule["action"], codes["operator"], codes["values"]) == ("FailJob", "In", [2, 3, 4])
    assert codes["containerName"] in [container["name"] for container in pod["containers"]]
    (rule,) = manifest["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert job["backoffLimit"] == 0 and manifest["spec"]["failurePolicy"]["maxRestarts"] > 0
    (replicated,) = manifest["spec"]["replicatedJobs"]
    assert manifest["spec"]["coordinator"]["replicatedJob"] == replicated["name"]
    assert len(f"{'x' * 26}-{replicated['name']}-0-0.{'x' * 26}") <= 63 and len(name) <= 26
    resources = container_of(manifest)["resources"]
    assert resources["limits"] == resources["requests"]


def expanded(word: str, variables: dict[str, str]) -> str:
    """What Kubernetes makes of a word of a command: $(NAME) is replaced if it is known, and $$ is a $."""

    def value(match: re.Match) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, word)


HOSTILE = [
    "--config.a=$(touch pwned)",
    "--config.b=`touch pwned`; touch pwned",
    "--config.c=a\"b'c d",
    "--config.d=$1",
]


@pytest.mark.standard
def test_every_pod_is_another_process(manifest, tmp_path):
    """Each pod's command, run by a real shell with what the controllers set, gives flags that `run` takes."""
    slices = 3
    hosts = 2
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\0" "$word"; done\n')
    program.chmod(0o755)
    container = container_of(manifest)
    name = manifest["metadata"]["name"]
    labels = {"jobset.sigs.k8s.io/replicatedjob-replicas": str(slices)}
    annotations = {"jobset.sigs.k8s.io/coordinator": f"{name}-hosts-0-0.{name}"}
    seen = []
    for slice_ in range(slices):
        for index in range(hosts):
            known = {
                "labels": labels | {"jobset.sigs.k8s.io/job-index": str(slice_)},
                "annotations": annotations,
            }
            variables = {"JOB_COMPLETION_INDEX": str(index)}  # Kubernetes sets it in an indexed Job
            for entry in container["env"]:
                field = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
                kind, key = (
                    re.fullmatch(r"metadata\.(\w+)\['(.+)'\]", field).groups()
                    if field
                    else ("", "")
                )
                variables[entry["name"]] = known[kind][key] if field else entry["value"]
            variables["HOSTS"] = str(hosts)
            argv = [
                expanded(word, variables)
                for word in [*container["command"], *container["args"], *HOSTILE]
            ]
            environment = variables | {"PATH": f"{tmp_path}:/usr/bin:/bin"}
            done = subprocess.run(
                argv, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
            )
            module, package, *rest = done.stdout.split("\0")[:-1]
            assert (module, package, rest[0]) == ("-m", "mlm", "run")
            assert [word for word in rest if word.startswith("--config.")] == [
                expanded(w, {}) for w in HOSTILE
            ]
            args = parser("run").parse_args(
                [word for word in rest if not word.startswith("--config.")]
            )
            assert (args.coordinator, args.processes) == (
                f"{name}-hosts-0-0.{name}",
                slices * hosts,
            )
            seen.append(args.process_id)
    assert seen == list(range(slices * hosts)) and not list(tmp_path.glob("pwned"))
