"""A pod's life: asked for, waited for, given back. Nothing here knows of runs."""

import time

from pods import backend
from pods.backend import GONE, READY, Pod, PodError, SettingsError, say
from pods.gcloud import TpuVm

LONGEST = 900.0  # seconds between two tries, at most


def up(cloud: TpuVm, every: float, recreate: bool) -> None:
    """Returns once the pod is ready; creates it if need be. Raises PodError for what waiting does not make ready."""
    pod = cloud.describe()
    settings = cloud.settings
    if cloud.dry:
        cloud.create()
        cloud.describe()
        return
    begin = time.monotonic()
    said = ""
    is_created = False
    pause = every
    while pod.state != READY:
        if pod.state in GONE and (is_created or not recreate):
            raise PodError(
                f"{pod.name} is {pod.condition}; it won't come back, but counts against the quota: launch/tpu.py up "
                "--recreate deletes it and creates another one, as launch/tpu.py supervise does.",
                "absent",
            )
        try:
            if step := backend.STEPS.get(pod.state):
                say(f"{pod.name} is {pod.condition}; {step}")
                take(step, cloud, pod)
                is_created = step == backend.CREATE
            else:
                line = f"{pod.name} is {pod.condition}, {(time.monotonic() - begin) // 60:.0f} min so far"
                if line != said:
                    said = line
                    say(line)
                time.sleep(every)
            before = pod.state
            pod = cloud.describe()
            if pod.state == before and pod.state in GONE:  # what was deleted is still there
                time.sleep(pause)
                pause = min(2 * pause, LONGEST)
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
    size = f"{settings.accelerator_type}, {settings.chips} chips on {len(pod.hosts)} hosts"
    say(f"{pod.name} is ready: {size}{price(cloud)}")
    if pod.reason:
        say(f"but Google Cloud says of it: {pod.condition}")


def price(cloud: TpuVm) -> str:
    """Returns what the pod costs, "" if nobody has said."""
    dollars = cloud.settings.dollars_per_hour
    return f", {dollars:.2f} dollars an hour" if dollars else ""


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
    pod = cloud.describe()
    settings = cloud.settings
    if pod.state == backend.ABSENT:
        say(f"there is nothing named {pod.name} in {settings.zone}")
    elif pod.label == cloud.label:
        cloud.delete(pod)
    else:
        what = (
            f"queued-resources delete --force {pod.request}"
            if pod.request
            else f"tpu-vm delete {pod.name}"
        )
        raise PodError(
            f"{pod.name} was not made by your `up` (but by {pod.label or 'another way'}), so it is left as it is; to "
            f"delete it all the same: gcloud compute tpus {what} --project={settings.project} --zone={settings.zone}."
        )


def clean(cloud: TpuVm) -> None:
    """Deletes queued resources of ours that will never become a pod, and names those of others."""
    for pod in cloud.requests():
        if pod.state in GONE and pod.label == cloud.label:
            cloud.delete(pod)
        elif pod.state in GONE:
            say(
                f"{pod.name} is {pod.state} and only uses up quota, but your `up` has not made it: it is left as it is"
            )
