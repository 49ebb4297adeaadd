"""verify on several hosts: the same line on each, one screen, and a host that is wrong is named."""

import local_pod
import pytest

from tests import FAST, ROOT
from tests.support.tiny import TINY


@pytest.mark.slow
def test_the_wrong_host_is_named(tmp_path, monkeypatch):
    """One of two: the order of its rows; their sum is the same, so the gradient is."""
    monkeypatch.setenv("XLA_FLAGS", FAST)
    config = [f"--config.{text}" for text in (*TINY, "tokenizer.vocab_size=500", "data.lanes=4")]
    arguments = ["verify", "--config=configs/base.py", f"--workdir={tmp_path}", *config]
    program = (str(ROOT / "tests/programs/wrong_host.py"),)
    pod = local_pod.Pod(2, arguments, tmp_path / "hosts", devices=2, program=program)
    pod.start()
    assert pod.wait().code == 4
    log = (tmp_path / "hosts" / "0" / "log").read_text()
    wrong = [line for line in log.splitlines() if line.startswith("verify: FAIL")]
    named = [line.removeprefix("verify: FAIL ").split(":")[0].split(",")[0] for line in wrong]
    assert named == ["rows of a batch", "masks", "dropout's bits", "logits in float32"], log
    assert all("host 1" in line and "host 0" not in line for line in wrong)
    assert "gradients in float32" in log and "30 steps of 16 rows" in log
    assert "verify: ok" not in (tmp_path / "hosts" / "1" / "log").read_text()
