"""The files of a run's checkpoints: which steps are complete and undamaged, and what they hold.

    checkpoints/{step}/            orbax's, with the state and what loading it needs ("meta")
    checkpoints/{step}/hashes.json {file: [bytes, SHA-256]}, written last: a step without it was never completed

orbax checks no payload on restore, and takes any folder with a number for a name as a step; so
steps are chosen here.
"""

import contextlib
import hashlib
import json
import logging
import math
from collections.abc import Iterable, Iterator
from typing import Any

from mlm import cluster, logs
from mlm import config as configs
from mlm.errors import DamageError, InputError
from mlm.files import files_below
from mlm.paths import UPath, children, move, remove, write_text

FORMAT = 3  # of the metadata
HASHES = "hashes.json"
logger = logging.getLogger(__name__)


def choose(folder: UPath, *, on_damage: str, best: bool = False) -> int | None:
    """Returns the newest complete step, verified; None if there is none.

    A damaged one is a DamageError, or with `on_damage` "fallback" it is set aside and the next one
    taken. `best` asks for the lowest score instead, of several the newest; a step that was not
    evaluated comes last.
    """
    steps = complete_steps(folder)[::-1]
    for step in sorted(steps, key=lambda step: score_of(folder, step)) if best else steps:
        with reading(folder, step):
            damage = find_damage(folder, step)
        if damage is None:
            return step
        path = folder / str(step)
        if on_damage != "fallback":
            raise DamageError(
                f"{path}: {damage}; restore that folder from a copy, name another checkpoint (WORKDIR@STEP), or "
                "continue from the newest good one with --config.checkpoint.on_damage=fallback."
            )
        logger.warning("%s: %s; falling back to the checkpoint before it.", path, damage)
        if cluster.is_primary():
            set_aside(folder, step, "damaged")
    return None


def check_step(folder: UPath, step: int, where: str, *, deep: bool = True) -> None:
    """Raises InputError for a step without a complete checkpoint, and DamageError for a damaged one."""
    steps = complete_steps(folder)
    if step not in steps:
        available = ", ".join(map(str, steps)) or "none"
        raise InputError(
            f"{where}: there is no complete checkpoint of step {step}; those that are there: {available}."
        )
    with reading(folder, step):
        if damage := find_damage(folder, step, deep=deep):
            raise DamageError(
                f"{folder / str(step)}: {damage}; restore that folder from a copy, or name another step."
            )


def score_of(folder: UPath, step: int) -> float:
    """Returns the score that a step was saved with, infinite if it has none."""
    file = folder / str(step) / "metrics" / "metrics"
    try:
        score = json.loads(file.read_text())["loss"] if file.is_file() else None
        return math.inf if score is None or math.isnan(score) else score
    except (ValueError, LookupError, TypeError):  # damaged, as its hash will say
        return -math.inf


def step_folders(folder: UPath) -> list[int]:
    """Returns the steps that have a folder, complete or not."""
    return [int(path.name) for path in children(folder) if path.name.isdecimal() and path.is_dir()]


def complete_steps(folder: UPath) -> list[int]:
    """Returns the steps whose hashes were written, in order; none if there is no such folder."""
    return sorted(step for step in step_folders(folder) if (folder / str(step) / HASHES).is_file())


def set_aside(folder: UPath, step: int, reason: str) -> None:
    """Renames a step's folder to "{reason}.{step}", where orbax does not see it."""
    target = folder / f"{reason}.{step}"
    number = 1
    while target.exists():
        number += 1
        target = folder / f"{reason}.{step}.{number}"
    logger.warning("%s is %s; it is moved to %s.", folder / str(step), reason, target.name)
    move(folder / str(step), target, first=HASHES)


def remove_steps(folder: UPath, *, keep: int, milestones: Iterable[int]) -> None:
    """Removes the complete steps but the newest `keep`, the one of lowest score, and `milestones`."""
    steps = complete_steps(folder)
    scores = {step: score for step in steps if abs(score := score_of(folder, step)) < math.inf}
    best = min(reversed(scores), key=scores.get, default=None)
    for step in set(steps[:-keep]) - {best, *milestones}:
        # first, so that an interrupted removal leaves no damaged step
        (folder / str(step) / HASHES).unlink()
        remove(folder / str(step))


def write_hashes(folder: UPath, step: int) -> None:
    """Writes hashes.json into a step's folder, whole or not at all."""
    root = folder / str(step)
    hashes = {
        name: [path.stat().st_size, _sha256(path)] for name, path in sorted(_files(root).items())
    }
    write_text(root / HASHES, json.dumps(hashes, indent=0))


@contextlib.contextmanager
def reading(folder: UPath, step: int) -> Iterator[None]:
    """Turns an error while a complete step is read into an InputError if a run has removed the step meanwhile."""
    try:
        yield
    except Exception:
        if step in complete_steps(folder):
            raise
        raise InputError(
            f"{folder / str(step)}: was removed while it was read, as a run that goes on removes its older "
            "checkpoints; start the same command again."
        ) from None


def find_damage(folder: UPath, step: int, *, deep: bool = True) -> str | None:
    """Returns what is wrong with a step's files, None if nothing is; without `deep`, only sizes are compared."""
    root = folder / str(step)
    try:
        hashes = json.loads((root / HASHES).read_text())
        files = _files(root)
        for name, (size, digest) in hashes.items():
            if name not in files:
                return f"the file {name} is missing"
            if (actual_size := files[name].stat().st_size) != size:
                return f"the file {name} has {actual_size} bytes where {size} were written"
            if deep and _sha256(files[name]) != digest:
                return f"the file {name} is not what was written (its SHA-256 differs)"
    except (ValueError, TypeError, AttributeError):
        return f"{HASHES} can't be read"
    return None


def read_meta(folder: UPath, step: int) -> dict[str, Any]:
    """Returns the metadata of a step: config, fingerprints, what is known of its data and its model."""
    with reading(folder, step):
        meta = logs.read_object(folder / str(step) / "meta" / "metadata")
    if meta.get("format") != FORMAT:
        raise InputError(
            f"{folder / str(step)}: its format is {meta.get('format')!r}, and this code reads {FORMAT}; use the code "
            "that wrote it."
        )
    return meta | {"config": configs.from_dict(meta["config"])}


def newest_meta(folder: UPath) -> dict[str, Any]:
    """Returns the metadata of the newest checkpoint that can be read, {} if there is none."""
    for step in reversed(complete_steps(folder)):
        with contextlib.suppress(OSError, DamageError):
            return read_meta(folder, step)
    return {}


def _files(root: UPath) -> dict[str, UPath]:
    """Returns {path within the step: path} of all files but the hashes."""
    return {
        name: path for name, path in files_below(root).items() if not path.name.startswith(HASHES)
    }


def _sha256(path: UPath) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
