"""A pod's life: asked for, waited for, given back. Nothing here knows of runs."""

import time

from pods import backend
from pods.backend import GONE, READY, Pod, PodError, SettingsError, say
from pods.gcloud import TpuVm


def up(cloud: TpuVm, every: float, recreate: bool) -> None:
    """Returns once the pod is ready; creates it if need be. Raises PodError for what waiting does not make ready."""
    pod, settings = cloud.describe(), cloud.settings
    if cloud.dry:
        cloud.create()
        cloud.describe()
        return
    begin, said, created = time.monotonic(), "", False
    while pod.state != READY:
        if created and pod.permanent:
            raise PodError(f"{pod.name} is {pod.condition}; another one would fail too: change pod.toml.")
        if pod.state in GONE and not recreate:
            raise PodError(
                f"{pod.name} is {pod.condition}; it won't come back, but counts against the quota: launch/tpu.py up "
                "--recreate deletes it and creates another one, as launch/tpu.py supervise does.",
                "absent",
            )
        try:
            if step := backend.STEPS.get(pod.state):
                say(f"{pod.name} is {pod.condition}; {step}")
                take(step, cloud, pod)
                created = created or step == backend.CREATE
            else:
                line = f"{pod.name} is {pod.condition}, {(time.monotonic() - begin) // 60:.0f} min so far"
                if line != said:
                    say(said := line)
                time.sleep(every)
            pod = cloud.describe()
        except PodError as error:
            if error.kind != "network":
                raise
            say(f"{error} It is asked again in {every:g} s.")
            time.sleep(every)
    if pod.accelerator_type not in ("", settings.accelerator_type):
        raise SettingsError(
            f"{pod.name} is there, but it is a {pod.accelerator_type}, and pod.toml says {settings.accelerator_type}: "
            "choose another name, or launch/tpu.py down first."
        )
    price = f", {settings.dollars_per_hour:.2f} dollars an hour" if settings.price else ""
    chips = settings.accelerator.chips
    say(f"{pod.name} is ready: {settings.accelerator_type}, {chips} chips on {len(pod.hosts)} hosts{price}")
    if pod.reason:
        say(f"but Google Cloud says of it: {pod.reason}")


def take(step: str, cloud: TpuVm, pod: Pod) -> None:
    """Takes one of backend.STEPS. Raises PodError."""
    settings = cloud.settings
    if step == backend.RESUME:
        cloud.start()
    elif step == backend.DELETE:
        cloud.delete(pod)
    else:
        how = ("spot" if settings.spot else "on demand") + (", queued" if settings.queued else "")
        say(f"creating {settings.name}: {settings.accelerator_type} in {settings.zone}, {how}")
        try:
            cloud.create()
        except PodError as error:
            if error.kind != "exists":  # somebody else was faster: it is waited for all the same
                raise


def down(cloud: TpuVm) -> None:
    """Deletes the pod, with its request. Raises PodError for one that our `up` has not made."""
    pod, settings = cloud.describe(), cloud.settings
    if pod.state == backend.ABSENT:
        say(f"there is nothing named {pod.name} in {settings.zone}")
    elif pod.ours:
        cloud.delete(pod)
    else:
        delete = "queued-resources delete --force" if pod.queued else "tpu-vm delete"
        raise PodError(
            f"{pod.name} was not made by your `up`, so it is left as it is; to delete it all the same: gcloud compute "
            f"tpus {delete} {pod.name} --project={settings.project} --zone={settings.zone}.",
            "permission",
        )


def clean(cloud: TpuVm) -> None:
    """Deletes queued resources of ours that will never become a pod, and names those of others."""
    for pod in cloud.requests():
        if pod.state in GONE and pod.ours:
            cloud.delete(pod)
        elif pod.state in GONE:
            say(f"{pod.name} is {pod.state} and only uses up quota, but your `up` has not made it: it is left as it is")
