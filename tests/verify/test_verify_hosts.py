"""verify on several hosts: the same line on each, one file, and a host that is wrong is named."""

import json
import re

import local_pod
import pytest

from tests import ROOT
from tests.support.tiny import TINY


def verified(folder, processes: int, program=("-m", "mlm"), *overrides: str) -> tuple[int, dict]:
    """The exit code of a pod of two devices a process, and what verify.json has."""
    config = [f"--config.{text}" for text in (*TINY, "tokenizer.vocab_size=500", "data.lanes=4", *overrides)]
    arguments = ["verify", "--config=configs/base.py", f"--workdir={folder}", "--quick", *config]
    pod = local_pod.Pod(processes, arguments, folder / "hosts", devices=2, program=program)
    pod.start()
    cause = pod.wait()
    return 0 if cause is None else cause.code, json.loads((folder / "verify.json").read_text())


def right(content: dict, *names: str) -> list[bool]:
    return [content["checks"][name]["status"] == "pass" for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_several_hosts(tmp_path, processes):
    code, content = verified(tmp_path / "run", processes)
    assert (code, content["hosts"], content["devices"]) == (0, processes, 2 * processes)
    assert all(right(content, "kernels", "step", "rows", "storage"))
    checksums = [line["values"]["checksums"] for line in content["checks"]["rows"]["results"][:3]]
    assert all(len(of_hosts) == processes for of_hosts in checksums)
    assert content["checks"]["storage"]["results"][0]["expected"] == f"ones add up to {2 * processes}"
    assert content["checks"]["verdict"]["results"][-1]["what"] == "settings to use"


@pytest.mark.slow
def test_the_wrong_host_is_named(tmp_path):
    """Its clock, and the order of its rows; their sum is the same, so the step is."""
    code, content = verified(tmp_path / "run", 2, (str(ROOT / "tests/programs/late_clock.py"),))
    assert code == 4 and right(content, "kernels", "rows", "step") == [True, False, True]
    wrong = {
        line["what"]: line["measured"] for line in content["checks"]["rows"]["results"] if line["is_right"] is False
    }
    assert list(wrong) == ["rows of a batch", "masks", "dropout's bits", "clocks of the hosts"]
    assert "host 1" in wrong["rows of a batch"] and "host 0" not in wrong["rows of a batch"]
    assert re.fullmatch(r"(59|60)\.\d s apart, host 1 ahead of host 0", wrong["clocks of the hosts"])
