"""Tasks for the tests of the engine, in a module that is quick to import."""

import os
import pathlib
import signal
import sys
import time

from mlm.errors import DamageError


def square(number: int) -> int:
    return number * number


def process_of(_: int) -> tuple[int, str, list[str]]:
    heavy = [name for name in ("jax", "tensorflow") if name in sys.modules]
    return os.getpid(), os.environ["TOKENIZERS_PARALLELISM"], heavy


def fail(_: int) -> None:
    raise DamageError("bad, mend it.")


def die(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def mark(folder: pathlib.Path, seconds: float, number: int) -> int:
    time.sleep(seconds)
    (folder / str(number)).touch()
    return number


def run_slowly(folder: pathlib.Path, number: int) -> int:
    """Notes in a file that it has begun, and in which process."""
    with (folder / "begun").open("a") as file:
        file.write(f"{number} {os.getpid()}\n")
    time.sleep(0.5)
    return number
