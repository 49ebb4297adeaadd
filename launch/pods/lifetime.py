"""A pod's life: asked for, waited for, given back. Nothing here knows of runs."""

import time

from pods import backend
from pods.backend import GONE, READY, Pod, PodError, say
from pods.gcloud import TpuVm

EVERY = 15.0  # seconds between two polls


def up(cloud: TpuVm) -> None:
    """Returns once the pod is ready; creates it if need be. Raises PodError for what waiting does not make ready."""
    begin = time.monotonic()
    is_created = False
    while True:
        try:
            pod = cloud.describe()  # after trouble, too: what seemed to fail may have been done
            if pod.state == READY:
                break
            cloud.refuse_stopped(pod)
            if pod.state in GONE and is_created:
                raise PodError(
                    f"{pod.name} is {pod.condition}; it won't come back: launch/tpu.py up creates another one, as "
                    "launch/tpu.py supervise does.",
                    "absent",
                )
            step = backend.STEPS.get(pod.state)
            minutes = f"{(time.monotonic() - begin) // 60:.0f} min so far"
            say(f"{pod.name} is {pod.condition}; {step or minutes}")
            if step:
                is_created = step == backend.CREATE
                take(step, cloud, pod)
            if step == backend.CREATE:  # one that is deleted may still be seen for a while
                continue
        except PodError as error:
            if error.kind != "network":
                raise
            say(f"{error} It is asked again in {EVERY:g} s.")
        time.sleep(EVERY)
    settings = cloud.settings
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
    if step == backend.DELETE:
        cloud.delete(pod)
    else:
        say(f"creating {settings.name}: {settings.accelerator_type} in {settings.zone}")
        cloud.create()


def down(cloud: TpuVm) -> None:
    """Deletes the pod, with its request. Raises PodError for one that our `up` has not made."""
    pod = cloud.describe()
    if pod.state == backend.ABSENT:
        say(f"there is nothing named {pod.name} in {cloud.settings.zone}")
    else:
        cloud.delete(pod)
