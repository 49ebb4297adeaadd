"""What `verify` measured on real devices, by which `plan` scales its estimate."""

import datetime
import importlib.metadata
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from mlm import config as configs
from mlm.cluster.fingerprints import PACKAGES

FILE, FORMAT = "verify.json", 1


def header(config: ConfigDict, devices: Sequence[Any]) -> dict[str, Any]:
    """Returns the first entries of verify.json: where, when and of which config and packages its figures are."""
    installed = {package.metadata["Name"].lower() for package in importlib.metadata.distributions()}
    return {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device_kind": devices[0].device_kind,
        "devices": len(devices),
        "hosts": len({device.process_index for device in devices}),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES if name in installed},
        "config": configs.flatten(config),
    }
