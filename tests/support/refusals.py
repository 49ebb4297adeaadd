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


def foreign(folder: pathlib.Path, ids: np.ndarray) -> None:
    """Shards as the TF-TPU example writes them: no manifest, so nothing but reading them tells what they hold."""
    for split in ("train", "validation"):
        (folder / split).mkdir(parents=True)
        for shard in range(4):
            records = tfrecord.encode(ids[shard::4])
            (folder / split / f"dataset-{shard}-{len(records)}.tfrecord").write_bytes(
                b"".join(records)
            )
