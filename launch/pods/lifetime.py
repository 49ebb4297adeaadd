"""A pod's life: asked for, waited for, given back. Nothing here knows of runs."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pods.backend import ABSENT, CREATING, DELETING, FAILED, GONE, READY, SUSPENDED, WAITING, Backend, Pod, say
from pods.errors import PodError, SettingsError
from pods.settings import Settings

WORDS = {WAITING: "waits in the queue", CREATING: "is being created", DELETING: "is being deleted"}


def up(settings: Settings, cloud: Backend, *, every: float = 15.0) -> Pod | None:
    """Returns the pod once it is ready (None in a dry run); creates it if there is none; idempotent.

    every: seconds between two looks. Raises PodError for what won't become ready by waiting.
    """
    pod = cloud.describe()
    if cloud.dry:
        cloud.create()
        cloud.describe()
        return None
    begin, said = time.monotonic(), ("", 0.0)
    while pod.state != READY:
        if pod.state == ABSENT:
            create(settings, cloud)
        elif pod.state in GONE:
            raise PodError(
                f"{settings.name} is {pod.state} and won't come back, but counts against the quota: "
                "launch/tpu.py down, then up; or launch/tpu.py supervise, which does that.",
                "absent",
            )
        else:
            minutes = (time.monotonic() - begin) / 60
            if said[0] != pod.state or minutes - said[1] >= 1:
                said = (pod.state, minutes)
                detail = f" ({pod.detail})" if pod.detail else ""
                say(f"{settings.name} {WORDS[pod.state]}{detail}, {minutes:.0f} min so far")
            time.sleep(every)
        pod = cloud.describe()
    _check(settings, pod)
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


def _check(settings: Settings, pod: Pod) -> None:
    if pod.accelerator_type and pod.accelerator_type != settings.accelerator_type:
        raise SettingsError(
            f"{pod.name} is there, but it is a {pod.accelerator_type}, and pod.toml says {settings.accelerator_type}: "
            "choose another name, or launch/tpu.py down first."
        )


def down(settings: Settings, cloud: Backend) -> list[str]:
    """Deletes all that has the pod's name, the queued resource first; returns what it was."""
    found = [pod for pod in cloud.list() if pod.name == settings.name]
    if cloud.dry:
        kind = "queued" if settings.queued else "tpu-vm"
        found = [Pod(settings.name, READY, kind=kind)]
    return _delete(cloud, sorted(found, key=lambda pod: pod.kind != "queued"))


def clean(settings: Settings, cloud: Backend, also: Sequence[str]) -> list[str]:
    """Deletes queued resources that will never become a pod: ours by name, and those of `also`; returns what it was."""
    stale = [pod for pod in cloud.list() if pod.kind == "queued" and pod.state in (SUSPENDED, FAILED)]
    if cloud.dry:
        names = (settings.name, *also) if settings.queued else also
        stale = [Pod(name, SUSPENDED, kind="queued") for name in names]
    ours = [pod for pod in stale if pod.name in (settings.name, *also)]
    others = [pod.name for pod in stale if pod not in ours]
    if others:  # they may be a colleague's
        say(f"other requests that only use up quota: {', '.join(others)}; delete with --also NAME")
    return _delete(cloud, ours)


def _delete(cloud: Backend, pods: Sequence[Pod]) -> list[str]:
    deleted, kinds = [], {"queued": "queued resource", "tpu-vm": "TPU VM"}
    for pod in pods:
        if pod.kind == "tpu-vm" and any(other.kind == "queued" and other.name == pod.name for other in pods):
            continue  # it went with its queued resource
        cloud.delete(pod)
        deleted.append(f"{kinds.get(pod.kind, pod.kind)} {pod.name}")
    return [] if cloud.dry else deleted
