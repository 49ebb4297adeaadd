"""Which of jax's platforms this machine has, before jax is imported."""

import glob
import importlib.util
import os

from mlm.errors import InputError

DEVICES = {  # files of the platforms' devices; /dev/dxg is a GPU in WSL
    "cpu": ("/",),
    "tpu": ("/dev/accel*", "/dev/vfio/[0-9]*"),
    "cuda": ("/dev/nvidiactl", "/dev/dxg"),
    "rocm": ("/dev/kfd",),
}
PLUGINS = {
    "cuda": ("jax_cuda12_plugin", "jax_cuda13_plugin"),
    "rocm": ("jax_rocm7_plugin", "jax_rocm60_plugin"),
}


def is_here(platform: str) -> bool:
    """Returns whether this machine has a device of a platform, and the package that jax needs for it."""
    has_plugin = platform not in PLUGINS or any(map(importlib.util.find_spec, PLUGINS[platform]))
    return has_plugin and any(glob.glob(pattern) for pattern in DEVICES[platform])


def default() -> str:
    """Returns the value for JAX_PLATFORMS where the user has set none, "" to let jax look.

    libtpu is installed everywhere, for `plan`. Without a TPU, jax would ask the metadata server for one, for a minute.
    """
    if is_here("tpu"):
        return ""
    return "cuda,cpu" if is_here("cuda") else "cpu"


def check() -> None:
    """Raises InputError if the user's environment names a platform that this machine has not."""
    from importlib import metadata  # takes as long as all else that --help imports

    for variable in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME"):
        value = os.environ.get(variable, "")
        for name in filter(None, value.lower().split(",")):
            known = PLUGINS if name == "gpu" else {name} & DEVICES.keys()
            if any(map(is_here, known)) or name in metadata.entry_points(group="jax_plugins").names:
                continue
            raise InputError(
                f"{variable}={value} in the environment: this machine has no {name} that jax could use; unset it, or "
                f"set it to {default() or 'tpu'}."
            )
