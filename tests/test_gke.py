"""The manifest of a JobSet for GKE: a golden one, every generation, and strings that would like to break out of it."""

import json
import pathlib
import re

import pytest
import yaml

from pods import gke  # isort: skip
from pods.backend import Runner  # isort: skip
from pods.errors import PodError, SettingsError  # isort: skip
from pods.settings import Settings  # isort: skip

GOLDEN = pathlib.Path(__file__).parent / "golden" / "gke_tpu7x-32.json"
HOSTILE = [
    "a\"b'c",
    "$(id)",
    "$$(JOB_COMPLETION_INDEX)",
    "$",
    "`id`",
    "x\n- y: z",
    "é\u2028\u0085\U0001f600",
    "\\u0041",
    "#",
    ": {",
]
FIELDS = {
    "name": "pod",
    "project": "p",
    "zone": "us-central1-c",
    "backend": "gke",
    "image": "registry/mlm:1",
    "cluster": "c",
}


def settings(accelerator_type="tpu7x-32", **more):
    return Settings(accelerator_type=accelerator_type, **FIELDS | more)


def job_of(manifest):
    (replicated,) = manifest["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


def pod_of(manifest):
    return job_of(manifest)["template"]["spec"]


def expanded(word, variables):
    """What Kubernetes makes of a word of a command (its documentation, "Define a Command and Arguments")."""
    return re.sub(
        r"\$(\$|\((\w+)\))?",
        lambda match: "$" if match[1] == "$" else variables.get(match[2], match[0]) if match[2] else match[0],
        word,
    )


def test_the_manifest_is_the_golden_one():
    found = gke.text(gke.manifest(settings(spot=True), "first", ["train", "--config=configs/a.py"], env=["HF_TOKEN"]))
    assert found == GOLDEN.read_text().rstrip("\n"), "if it is meant to change, read the new one, and keep it"


@pytest.mark.parametrize(
    ("kind", "label", "shape", "hosts", "chips"),
    [
        ("v4-8", "tpu-v4-podslice", "2x2x1", 1, 4),
        ("v5litepod-1", "tpu-v5-lite-podslice", "1x1", 1, 1),
        ("v5litepod-8", "tpu-v5-lite-podslice", "2x4", 1, 8),
        ("v5litepod-16", "tpu-v5-lite-podslice", "4x4", 4, 4),
        ("v5litepod-256", "tpu-v5-lite-podslice", "16x16", 64, 4),
        ("v5p-8", "tpu-v5p-slice", "2x2x1", 1, 4),
        ("v5p-128", "tpu-v5p-slice", "4x4x4", 16, 4),
        ("v5p-512", "tpu-v5p-slice", "4x8x8", 64, 4),
        ("v5p-1536", "tpu-v5p-slice", "8x8x12", 192, 4),
        ("v6e-32", "tpu-v6e-slice", "4x8", 8, 4),
        ("tpu7x-8", "tpu7x", "2x2x1", 1, 4),
        ("tpu7x-128", "tpu7x", "4x4x4", 16, 4),
        ("tpu7x-256", "tpu7x", "4x4x8", 32, 4),
    ],
)
def test_every_generation(kind, label, shape, hosts, chips):
    manifest = gke.manifest(settings(kind), "a", ["train"])
    job, pod = job_of(manifest), pod_of(manifest)
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": label,
        "cloud.google.com/gke-tpu-topology": shape,
    }
    assert (job["completions"], job["parallelism"], job["backoffLimit"]) == (hosts, hosts, 0)
    assert job["completionMode"] == "Indexed"
    resources = pod["containers"][0]["resources"]
    assert resources["limits"] == resources["requests"] == {"google.com/tpu": str(chips)}
    assert f"--processes={hosts}" in pod["containers"][0]["command"]


def test_every_word_arrives_as_it_is_and_nothing_breaks_out():
    manifest = gke.manifest(settings(), "".join(HOSTILE), ["train", *HOSTILE])
    text = gke.text(manifest)
    assert json.loads(text) == yaml.safe_load(text) == manifest
    (container,) = pod_of(manifest)["containers"]
    command = [expanded(word, {"JOB_COMPLETION_INDEX": "3"}) for word in container["command"]]
    assert command[:4] == ["python", "-m", "mlm", "train"]
    assert command[4:-3] == HOSTILE
    name = manifest["metadata"]["name"]
    assert command[-3:] == [f"--coordinator={name}-hosts-0-0.{name}:8476", "--processes=4", "--process-id=3"]
    assert manifest["metadata"]["annotations"]["mlm/run"] == "".join(HOSTILE)


@pytest.mark.parametrize("run", ["a", "A run. With é", "-" * 200, "x" * 200, "".join(HOSTILE)])
def test_a_name_is_one_for_kubernetes(run):
    name = gke.name_of(run)
    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert len(f"{name}-hosts-0-9999-abcde") <= 63
    assert name != gke.name_of(run + "x")


def test_values_of_variables_are_in_a_secret_and_not_in_the_manifest(monkeypatch):
    monkeypatch.setenv("TOKEN", "canary")
    manifest = gke.manifest(settings(), "a", ["train"], env=["TOKEN"])
    assert "canary" not in gke.text(manifest)
    (entry,) = [entry for entry in pod_of(manifest)["containers"][0]["env"] if entry["name"] == "TOKEN"]
    assert entry["valueFrom"]["secretKeyRef"] == {"name": f"{gke.name_of('a')}-env", "key": "TOKEN"}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"image": ""}, "there is no image"),
        ({"accelerator_type": "v3-32"}, "v3-32 is not on GKE"),
        ({"accelerator_type": "v6e-2"}, "v6e-2: there is no slice of 2 chips of v6e"),
        ({"accelerator_type": "v5litepod-512"}, "there is no slice of 512 chips of v5e"),
        ({"accelerator_type": "v5p-80"}, "there is no slice of 40 chips of v5p"),
        ({"hosts": 3}, "hosts = 3: a slice of tpu7x-32 has 4 in GKE"),
    ],
)
def test_what_there_is_not(more, words):
    with pytest.raises(SettingsError, match=words):
        gke.manifest(settings(**more), "a", ["train"])


def test_nothing_but_a_dry_run():
    with pytest.raises(PodError, match=r"run CONFIG --dry-run prints it") as caught:
        gke.Gke(settings(), Runner())
    assert str(caught.value).count(". ") == 0
    cloud = gke.Gke(settings(), Runner(dry=True))
    assert [host.worker for host in cloud.describe().hosts] == [0, 1, 2, 3]
    for ask in (cloud.create, cloud.delete, cloud.list, lambda: cloud.ssh(0, ["ls"]), lambda: cloud.copy(0, "a", "b")):
        with pytest.raises(PodError, match="as far as the manifest"):
            ask()


def test_run_prints_it(pod):
    flags = ["--backend=gke", "--accelerator-type=tpu7x-32", "--image=registry/mlm:1"]
    found = json.loads(pod.tpu("run", "configs/a.py", "--id=x", "--config.a=$(id)", "--dry-run", *flags))
    assert pod_of(found)["containers"][0]["command"][3:7] == [
        "train", "--config=configs/a.py", "--workdir=gs://my-bucket/runs/x", "--config.a=$$(id)",
    ]  # fmt: skip
    assert "as far as the manifest" in pod.tpu("run", "configs/a.py", *flags, code=1)
    assert "as far as the manifest" in pod.tpu("up", "--dry-run", *flags, code=1)
    assert pod.calls() == []
