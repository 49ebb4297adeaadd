"""What a command refuses, and that it leaves everything as it was."""

import pathlib

import numpy as np
import pytest

from mlm import __main__
from mlm.data import tfrecord


def refuse(arguments: list[str], code: int, *words: str, capsys: pytest.CaptureFixture) -> str:
    """Runs the command here, and asserts its exit code and one sentence on stderr with all `words` in it."""
    capsys.readouterr()
    assert __main__.main(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    sentence = next(line for line in err.splitlines() if line.startswith(f"mlm {arguments[0]}: "))
    assert "Traceback" not in err
    for word in words:
        assert word in sentence, f"{word!r} is not in: {sentence}"
    return err


def snapshot(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def foreign(folder: pathlib.Path, shards: int = 4, **splits: np.ndarray) -> None:
    """Shards as the TF-TPU example writes them: no manifest, so nothing but reading them tells what they hold."""
    for split, ids in splits.items():
        (folder / split).mkdir(parents=True)
        for shard, part in enumerate(np.array_split(ids, shards)):
            file = folder / split / f"dataset-{shard}-{len(part)}.tfrecord"
            file.write_bytes(b"".join(tfrecord.encode(part)))
