"""verify on several hosts: the same line on each, one file, and a host that is wrong is named."""

import json
import re

import local_pod
import pytest

from tests import FAST, ROOT
from tests.support.tiny import TINY


def verified(folder, processes: int, program=("-m", "mlm"), *overrides: str) -> tuple[int, dict]:
    """The exit code of a pod of four devices, and what verify.json has."""
    config = [f"--config.{text}" for text in (*TINY, "tokenizer.vocab_size=500", "data.lanes=4", *overrides)]
    arguments = ["verify", "--config=configs/base.py", f"--workdir={folder}", "--quick", *config]
    pod = local_pod.Pod(processes, arguments, folder / "hosts", devices=4 // processes, program=program)
    pod.start()
    cause = pod.wait()
    return 0 if cause is None else cause.code, json.loads((folder / "verify.json").read_text())


def right(content: dict, *names: str) -> list[bool]:
    return [content["checks"][name]["status"] == "pass" for name in names]


def assert_whole(content: dict, processes: int) -> None:
    assert (content["hosts"], content["devices"]) == (processes, 4)
    assert all(right(content, "kernels", "step", "storage"))
    checksums = [line["values"]["checksums"] for line in content["checks"]["rows"]["results"][:3]]
    assert all(len(of_hosts) == processes for of_hosts in checksums)
    assert content["checks"]["storage"]["results"][0]["expected"] == "ones add up to 4"
    assert content["checks"]["verdict"]["results"][-1]["what"] == "settings to use"


@pytest.mark.slow
def test_four_hosts(tmp_path, monkeypatch):
    """Compiled in a quarter of the time, as four compile on one machine; two are compiled as users compile."""
    monkeypatch.setenv("XLA_FLAGS", FAST)
    code, content = verified(tmp_path / "run", 4)
    assert code == 0 and all(right(content, "rows"))
    assert_whole(content, 4)


@pytest.mark.slow
def test_the_wrong_host_is_named(tmp_path):
    """One of two: its clock, and the order of its rows; their sum is the same, so the step is."""
    code, content = verified(tmp_path / "run", 2, (str(ROOT / "tests/programs/wrong_host.py"),))
    assert code == 4 and right(content, "rows") == [False]
    assert_whole(content, 2)
    wrong = {
        line["what"]: line["measured"] for line in content["checks"]["rows"]["results"] if line["is_right"] is False
    }
    assert list(wrong) == ["rows of a batch", "masks", "dropout's bits", "clocks of the hosts"]
    assert "host 1" in wrong["rows of a batch"] and "host 0" not in wrong["rows of a batch"]
    assert re.fullmatch(r"(59|60)\.\d s apart, host 1 ahead of host 0", wrong["clocks of the hosts"])
