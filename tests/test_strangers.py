"""A training run of two real processes whose port a stranger has found."""

import pathlib
import re

import local_pod
import pytest

from tests import strangers
from tests.processes import logged_step
from tests.test_hosts import causes, complete, paced, pod, until

RUN = ("train.steps=30", "checkpoint.every=10")


def coordinator_of(one: local_pod.Pod) -> tuple[str, int]:
    """Returns where the run's coordinator listens, as its processes were told."""
    words = " ".join(one.children[0].args)
    port = re.search(r"--config\.pod\.port=(\d+)", words) or re.search(r"--coordinator=127\.0\.0\.1:(\d+)", words)
    return "127.0.0.1", int(port[1])


@pytest.mark.slow
def test_a_run_goes_on_to_the_same_bits(manifest, tmp_path):
    """Everything that a stranger can send, while it trains, changes no figure and writes nothing to a terminal."""
    quiet, disturbed = tmp_path / "quiet", tmp_path / "disturbed"
    complete(pod(quiet, manifest.folder, 2, *RUN))
    one = pod(disturbed, manifest.folder, 2, *RUN)
    one.start(environment=paced(2, 0.3))
    until(one, lambda: logged_step(disturbed) >= 3)
    begin, taken = logged_step(disturbed), 0
    while logged_step(disturbed) < 20:
        taken += strangers.all_of_it(coordinator_of(one), 2)
    assert begin < 10, "it was to be disturbed in its middle"
    assert taken > 500
    cause = one.wait()
    assert cause is None, (cause.sentence, causes(one))
    assert (quiet / "metrics.jsonl").read_bytes() == (disturbed / "metrics.jsonl").read_bytes()
    logs = [pathlib.Path(folder, "log").read_text() for folder in one.folders]
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]|pwned|Traceback", "".join(logs))
