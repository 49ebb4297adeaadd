"""What `verify` measured on real devices, by which `plan` scales its estimates.

calibrations/KIND.json, beside this file, are such files that were sent from real devices; there may be none.
"""

import datetime
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from mlm import config as configs
from mlm import logs
from mlm.cluster.fingerprints import PACKAGES, version
from mlm.errors import InputError
from mlm.paths import UPath
from mlm.plan.topology import LIBTPU_KINDS, Topology
from mlm.text import printable

FILE, FORMAT, FOLDER = "verify.json", 1, Path(__file__).parent / "calibrations"
OTHER_KEYS = ("shards.length", "optimizer.name")  # besides those of the model, which decide the time of a step


class Calibration(NamedTuple):
    """How many times as long a step took as `plan` said, on devices of a kind."""

    factor: float
    kind: str  # in libtpu's words; "" for any
    date: str
    source: str
    config: dict[str, Any]  # that was measured, flattened

    def difference(self, config: ConfigDict) -> str:
        """Returns what decides the time of a step and is not as it was measured, in words; "" for nothing."""
        for key, value in configs.flatten(config).items():
            if (key.startswith("model.") or key in OTHER_KEYS) and self.config.get(key) != value:
                return f"{key} = {self.config.get(key)!r}, and this config has {value!r}"
        return ""

    def sentence(self, config: ConfigDict) -> str:
        """Returns what was done to the estimates for a config; "" for nothing."""
        if not self.kind:
            return ""
        layers, hidden, family = (self.config.get(f"model.{key}") for key in ("layers", "hidden_size", "family"))
        what = f"as measured for {layers} layers of {hidden} ({family}) on {self.date} ({self.kind}; {self.source})"
        other = ", though this is another config, whose factor may be another" if self.difference(config) else ""
        return printable(f"Estimates are multiplied by {self.factor:.2f}, {what}{other}.")


NONE = Calibration(1.0, "", "", "", {})


def header(config: ConfigDict, devices: Sequence[Any]) -> dict[str, Any]:
    """Returns the first entries of verify.json: where, when and of which config and packages its figures are."""
    return {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device_kind": devices[0].device_kind,
        "devices": len(devices),
        "hosts": len({device.process_index for device in devices}),
        "packages": {name: version(name) for name in PACKAGES},
        "config": configs.flatten(config),
    }


def read(file: str) -> Calibration:
    """Returns the calibration in a verify.json; raises InputError if it has none."""
    if not UPath(file).is_file():
        raise InputError(f"--calibration={file}: there is no such file; name the {FILE} that verify wrote.")
    content = logs.read_object(UPath(file))
    try:
        kind, date, config = str(content["device_kind"]), content["date"][:10], dict(content["config"])
        factor = float(content["checks"]["plan"]["results"][0]["values"]["times_plan"])
        if content["format"] != FORMAT or not 0 < factor < math.inf:
            raise ValueError
    except (KeyError, IndexError, TypeError, ValueError, OverflowError):
        fix = f"run verify on a device that plan has, and name its {FILE}"
        raise InputError(
            f"--calibration={file}: is no {FILE} of format {FORMAT} with a step beside plan's estimate; {fix}."
        ) from None
    source = Path(file).name if UPath(file).parent == UPath(FOLDER) else file
    return Calibration(factor, LIBTPU_KINDS.get(kind, kind), date, source, config)


def find(place: Topology, named: Calibration | None) -> Calibration:
    """Returns the calibration that is named, or that of the folder for the devices of a topology."""
    if named is None:
        files = (read(str(file)) for file in sorted(FOLDER.glob("*.json")))
        return next((one for one in files if one.kind == place.family.kind), NONE)
    if named.kind not in ("", place.family.kind):
        what = f"was measured on a {named.kind}, and {place.name} has a {place.family.kind}"
        raise InputError(f"--calibration={named.source}: {what}; name one of that device, or leave it out.")
    return named
