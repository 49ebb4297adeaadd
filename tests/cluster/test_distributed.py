"""What all hosts must have in common, and how a process is asked to stop."""

import re
import signal

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from mlm import config as configs
from mlm.cluster import distributed, fingerprints, watch
from mlm.cluster.detect import Cluster
from mlm.errors import InputError
from mlm.workdir import Workdir
from tests.support.tiny import tiny_config


def fingerprint(*overrides: str, **data: str) -> dict:
    return fingerprints.host_fingerprint(
        tiny_config(*overrides), "train", "runs/x", {"shards": "s", "tokenizer": "t"} | data
    )


def test_fingerprint_names_all_that_decides_a_run():
    found = fingerprint()
    assert found["config.model.layers"] == 1
    assert found["shards"] == "s"
    assert len(found["code mlm/training/train.py"]) == 16
    assert found["code mlm/__main__.py"] != found["code mlm/commands/run.py"]
    assert {"jax", "jaxlib", "Python", "$XLA_FLAGS", "--workdir", "command"} <= found.keys()


def test_time_outs_may_change_in_the_middle_of_a_run():
    old, new = (tiny_config(*overrides) for overrides in ((), ("pod.hang=3", "pod.heartbeat=5")))
    assert old != new
    assert configs.diff(old, new) == []


def test_a_difference():
    usual = fingerprint()
    assert fingerprints.difference(fingerprint(), usual) == ""
    how = fingerprints.difference(fingerprint("train.seed=5", shards="other"), usual)
    assert how == "config.train.seed (5, not 0); shards ('other', not 's')"
    many = fingerprints.difference(dict.fromkeys(usual, 0), usual)
    assert many.count(" not ") == fingerprints.SHOWN and re.search(r"; \d\d+ more$", many)


def test_the_code_is_read_from_the_files(tmp_path, monkeypatch):
    (tmp_path / "mlm").mkdir()
    (tmp_path / "mlm" / "x.py").write_text("a")
    (tmp_path / "mlm" / "x.md.j2").write_text("a template")
    (tmp_path / "mlm" / "README.md").write_text("not code")
    monkeypatch.setattr(fingerprints, "ROOT", tmp_path)
    before = fingerprints.code()
    (tmp_path / "mlm" / "x.py").write_text("b")
    assert before.keys() == fingerprints.code().keys() == {"code mlm/x.py", "code mlm/x.md.j2"}
    assert before != fingerprints.code()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_is_noticed_at_the_next_step(number):
    before = signal.getsignal(number)
    with distributed.StopSignal() as stop:
        assert not stop.requested(1)
        signal.raise_signal(number)
        assert stop.requested(2)
    assert signal.getsignal(number) is before


def test_each_run_of_a_program_caches_its_programs_in_its_own_folder(tmp_path, monkeypatch):
    """And none in that of a run which is over, or where the user has named another."""
    monkeypatch.setattr(watch, "current", watch.Watch("train", None))
    shortest = jax.config.jax_persistent_cache_min_compile_time_secs
    named = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        for number, name in enumerate(("first", "second", "", "user")):
            if name == "user":
                jax.config.update("jax_compilation_cache_dir", str(tmp_path / "user"))
            workdir = Workdir(str(tmp_path / (name or "read")))
            distributed.initialize(tiny_config(), workdir, saves=bool(name))
            jax.jit(lambda x, number=number: x + number)(1.0).block_until_ready()
        filled = {path.parent for path in tmp_path.rglob("*-cache")}
        assert filled == {
            tmp_path / "first/xla_cache",
            tmp_path / "second/xla_cache",
            tmp_path / "user",
        }
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", shortest)
        jax.config.update("jax_compilation_cache_dir", named)
        compilation_cache.reset_cache()


def test_another_order_than_jax_has_is_refused(monkeypatch):
    """The devices of this process are those of process 0 of 1, whatever the flags say."""
    watching = watch.Watch("train", None)
    watching.cluster = Cluster("flags", "10.0.0.2", 2, 1)
    monkeypatch.setattr(watch, "current", watching)
    with pytest.raises(
        InputError,
        match=r"this is process 1 of 2, .* but its devices are those of process 0 of 1; st",
    ):
        distributed.initialize(tiny_config(), None, saves=False)
