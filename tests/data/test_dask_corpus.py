"""A corpus on a Dask cluster of four workers, one of which is killed twice: the bytes that the pool writes.

MLM_TEST_MEGABYTES=1000 bash tests/run.sh --slow -k dask_corpus  takes a gigabyte.
"""

import json
import os
import shutil
import signal

import psutil
import pytest

from mlm.data import docstrings
from mlm.data.sources import part_bytes
from tests.support import processes
from tests.support.corpora import contents
from tests.support.dask_cluster import Cluster, until, written

BYTES = int(os.environ.get("MLM_TEST_MEGABYTES", "40")) * 10**6


@pytest.fixture
def source(tmp_path) -> str:
    """The docstrings again and again, each time with another number in front."""
    texts, size, again = [text for part in docstrings.parts() for _, text in docstrings.read(part)], 0, 0
    with (tmp_path / "texts.jsonl").open("w") as file:
        while size < BYTES:
            again += 1
            size += file.write("".join(json.dumps({"text": f"{again} {text}"}) + "\n" for text in texts))
    return f"jsonl:{tmp_path}/texts.jsonl"


@pytest.mark.slow
def test_a_worker_killed_twice_and_the_same_bytes(source, tokenizer_folder, tmp_path):
    settings = (f"corpus.sources='{source}'", f"tokenizer.path={tokenizer_folder}", "shards.count=32")
    flags = ["--config=configs/base.py", *(f"--config.{each}" for each in settings)]
    workdir, seen, killed = tmp_path / "cluster", {}, []
    (tmp_path / "dask").mkdir()
    with Cluster(tmp_path / "dask") as cluster:
        parent = psutil.Process(cluster.add(workers=4).pid)

        def workers() -> set[int]:
            return {each.pid for each in parent.children(recursive=True) if "spawn_main" in " ".join(each.cmdline())}

        until(lambda: len(workers()) == 4)
        before = workers()
        line = [f"--engine={cluster.address}", f"--engine-certificates={cluster.certificates}"]
        process = processes.start(["shards", *flags, f"--workdir={workdir}", *line])
        parts = BYTES // part_bytes(BYTES)
        for share in (0.2, 0.5):
            until(lambda share=share: len(written(workdir)) >= share * parts)
            until(lambda: len(workers()) == 4)
            seen |= written(workdir)
            killed.append(min(before) if not killed else min(workers() - before))
            os.kill(killed[-1], signal.SIGKILL)
        until(lambda: len(written(workdir)) >= 0.8 * parts)
        later = written(workdir)
        processes.finish(process, timeout=1800)
    assert len(killed) == 2 and len(seen) >= 0.5 * parts
    again = [name for name, when in seen.items() if later[name] != when]
    assert len(again) <= 2, "a task was done again, and not for want of the answer of a worker that was killed"
    shutil.rmtree(tmp_path / "dask")
    processes.finish(processes.start(["shards", *flags, f"--workdir={tmp_path}/pool"]), timeout=1800)
    assert contents(workdir / "shards") == contents(tmp_path / "pool" / "shards")
