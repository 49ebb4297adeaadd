"""A pod's life: asked for, waited for, given back. Nothing here knows of runs."""

from __future__ import annotations

import time

from pods import backend
from pods.backend import GONE, READY, Backend, Pod, say
from pods.errors import PodError, SettingsError
from pods.settings import Settings

PHRASES = {
    backend.WAITING: "waits in the queue",
    backend.CREATING: "is being created",
    backend.BUSY: "is not ready yet",
    backend.DELETING: "is being deleted",
}


def up(settings: Settings, cloud: Backend, *, every: float = 15.0, recreate: bool = False) -> Pod | None:
    """Returns the pod once it is ready (None in a dry run); creates it if there is none; idempotent.

    every: seconds between two polls; recreate: one that won't come back is deleted and created again. Raises PodError
    for what won't become ready by waiting.
    """
    pod = cloud.describe()
    if cloud.dry:
        cloud.create()
        cloud.describe()
        return None
    begin, said = time.monotonic(), ("", 0.0)
    while pod.state != READY:
        if pod.state == backend.ABSENT:
            create(settings, cloud)
        elif pod.state == backend.STOPPED:
            say(f"{settings.name} is stopped; starting it")
            cloud.start()
        elif pod.state in GONE and recreate:
            say(f"{settings.name} is {pod.state}; deleting it")
            cloud.delete(pod)
        elif pod.state in GONE:
            raise PodError(
                f"{settings.name} is {pod.state} and won't come back, but counts against the quota: launch/tpu.py up "
                "--recreate deletes it and creates another one, as launch/tpu.py supervise does.",
                "absent",
            )
        else:
            minutes = (time.monotonic() - begin) / 60
            if said[0] != pod.state or minutes - said[1] >= 1:
                said = (pod.state, minutes)
                detail = f" ({pod.detail})" if pod.detail else ""
                say(f"{settings.name} {PHRASES[pod.state]}{detail}, {minutes:.0f} min so far")
            time.sleep(every)
        pod = cloud.describe()
    if pod.accelerator_type and pod.accelerator_type != settings.accelerator_type:
        raise SettingsError(
            f"{pod.name} is there, but it is a {pod.accelerator_type}, and pod.toml says {settings.accelerator_type}: "
            "choose another name, or launch/tpu.py down first."
        )
    price = f", {settings.dollars_per_hour:.2f} dollars an hour" if settings.price else ""
    chips = settings.accelerator.chips
    say(f"{settings.name} is ready: {settings.accelerator_type}, {chips} chips on {len(pod.hosts)} hosts{price}")
    return pod


def create(settings: Settings, cloud: Backend) -> None:
    """Asks for the pod; one that is there already is no error. Raises PodError."""
    how = ("spot" if settings.spot else "on demand") + (", queued" if settings.queued else "")
    say(f"creating {settings.name}: {settings.accelerator_type} in {settings.zone}, {how}")
    try:
        cloud.create()
    except PodError as error:
        if error.kind != "exists":  # somebody else was faster: it is waited for all the same
            raise


def down(settings: Settings, cloud: Backend) -> None:
    """Deletes the pod, with its request. Raises PodError for one that our `up` has not made."""
    pod = cloud.describe()
    if pod.state == backend.ABSENT:
        say(f"there is nothing named {settings.name} in {settings.zone}")
    elif not pod.ours:
        delete = "queued-resources delete --force" if pod.kind == "queued" else "tpu-vm delete"
        raise PodError(
            f"{pod.name} was not made by your `up`, so it is left as it is; to delete it all the same: gcloud compute "
            f"tpus {delete} {pod.name} --project={settings.project} --zone={settings.zone}.",
            "permission",
        )
    else:
        _delete(cloud, pod)


def clean(settings: Settings, cloud: Backend) -> None:
    """Deletes queued resources of ours that will never become a pod, and names those of others."""
    stale = [pod for pod in cloud.requests() if pod.state in (backend.SUSPENDED, backend.FAILED)]
    if cloud.dry and settings.queued:
        stale = [Pod(settings.name, backend.SUSPENDED, kind="queued", ours=True)]
    for pod in stale:
        if pod.ours:
            _delete(cloud, pod)
        else:
            say(f"{pod.name} is {pod.state} and only uses up quota, but your `up` has not made it: it is left as it is")


def _delete(cloud: Backend, pod: Pod) -> None:
    cloud.delete(pod)
    if not cloud.dry:
        say(f"deleted {'queued resource' if pod.kind == 'queued' else 'TPU VM'} {pod.name}")
