"""Checkpoints in their folder: what kills leave goes when a later one is complete, and nothing else does."""

import pathlib
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from mlm import cluster
from mlm.errors import DamageError, InputError
from mlm.paths import UPath, children, write_text
from mlm.pretrained import checkpoint_files
from mlm.training import checkpoint, xla_metrics
from mlm.workdir import Workdir


def test_what_kills_leave_goes_when_a_later_step_is_complete(tmp_path, monkeypatch):
    """Each between orbax's commit and the hashes: it is set aside at the next start, and never taken for complete."""

    def killed(folder, step):
        raise SystemExit

    def names() -> set[str]:
        return {path.name for path in tmp_path.iterdir()}

    folder = UPath(tmp_path)
    save(folder, 5)
    for aside in (set(), {"incomplete.10"}):
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(checkpoint, "write_hashes", killed)
            save(folder, 10)
        assert names() == {"5", "10"} | aside and checkpoint_files.complete_steps(folder) == [5]
    save(folder, 20)
    assert names() == {"5", "20"}
    assert [checkpoint_files.find_damage(folder, step) for step in (5, 20)] == [None] * 2


def test_nothing_else_is_removed(saved, tmp_path):
    elsewhere = tmp_path.with_name(f"{tmp_path.name} elsewhere")
    shutil.copytree(saved / "10", elsewhere)
    kept = {"damaged.10", "incomplete.21", "incomplete.10.copy", "notes.incomplete.10"}
    for name in (*kept, "incomplete.9"):
        shutil.copytree(saved / "10", saved / name)
    (saved / "incomplete.8").mkdir()
    (saved / "incomplete.8" / "notes.txt").write_text("a person's")
    (saved / "incomplete.7").symlink_to(elsewhere)
    (saved / "incomplete.6").write_text("a file")
    save(saved, 20)
    kept |= {"10", "20", "incomplete.6", "incomplete.7", "incomplete.8"}
    assert {path.name for path in saved.iterdir()} == kept
    assert (elsewhere / "state").is_dir() and (saved / "incomplete.8" / "notes.txt").is_file()


def test_an_incomplete_step_that_cant_be_removed_is_a_warning(saved, monkeypatch, caplog):
    def fail(path):
        raise OSError("the bucket does not answer")

    shutil.copytree(saved / "10", saved / "incomplete.9")
    monkeypatch.setattr(checkpoint, "remove", fail)
    save(saved, 20)
    assert f"{saved / 'incomplete.9'} can't be removed" in caplog.text
    assert checkpoint_files.complete_steps(saved) == [10, 20]


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> UPath:
    save(UPath(tmp_path), 10)
    return UPath(tmp_path)


STATE = {"weight": jnp.zeros(3)}


def save(folder: UPath, step: int, state=STATE, score: float | None = None, **settings) -> None:
    with checkpoint.Checkpoints(folder, **{"keep": 3} | settings) as checkpoints:
        checkpoints.save(step, state, {"step": step}, score)


def test_other_hosts_go_on_when_all_is_complete(tmp_path, monkeypatch):
    """They read the newest checkpoint next, whose hashes the first host alone writes."""
    folder = UPath(tmp_path)
    met: list[tuple[str, list[int]]] = []
    monkeypatch.setattr(
        cluster, "barrier", lambda name: met.append((name, checkpoint_files.complete_steps(folder)))
    )
    save(folder, 10)
    assert met == [("checkpoints opened", []), ("checkpoints complete", [10])]


def test_in_a_bucket_what_orbax_has_not_committed_goes_at_once(monkeypatch):
    """To move it would be to copy it; what is committed and has no hashes is set aside."""
    monkeypatch.setattr(ocp, "CheckpointManager", lambda *args, **kwargs: None)
    folder = UPath(f"memory://bucket/{time.time_ns()}")
    for step, files in (
        (5, ["state/d", checkpoint.COMMITTED]),
        (10, ["state/d"]),
        (15, [checkpoint.COMMITTED]),
    ):
        for name in files:
            write_text(folder / str(step) / name, "x")
    checkpoint_files.write_hashes(folder, 5)
    checkpoint.Checkpoints(folder, keep=3)
    assert sorted(path.name for path in children(folder)) == ["5", "incomplete.15"]


def test_small_arrays_of_several_devices_are_saved_without_a_compilation(tmp_path):
    whole = jax.NamedSharding(jax.make_mesh((8,), ("data",)), jax.P())
    state = {"weight": jax.device_put(np.arange(1024.0, dtype=np.float32), whole)}
    with xla_metrics.Compilations() as compilations:
        save(UPath(tmp_path), 1, state)
        assert compilations.counts["programs"] == 0
    restored = checkpoint.restore(UPath(tmp_path), 1, state)
    assert restored["weight"].tolist() == state["weight"].tolist()


@pytest.mark.parametrize("letters", ["{a,b}", "c:d a::b@5", "é 'x\" end~", "-#\n%"])
def test_any_letters_of_a_path(tmp_path, letters):
    folder = UPath(tmp_path / letters / "checkpoints")
    save(folder, 7, {"weight": jnp.arange(3.0)})
    assert checkpoint_files.choose(folder, on_damage="stop") == 7
    assert checkpoint.restore(folder, 7, STATE)["weight"].tolist() == [0.0, 1.0, 2.0]
    assert [path.name for path in tmp_path.iterdir()] == [letters]


@pytest.mark.parametrize("path", ["a\\b", "/gs/x", "/hf"])
def test_paths_that_orbax_takes_for_others_are_refused_before_anything_is_written(
    tmp_path, monkeypatch, path
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="--workdir="):
        Workdir(path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "[]", '{"meta/metadata": 1}'])
def test_hashes_that_can_not_be_read_are_damage(saved, text):
    (saved / "10" / checkpoint_files.HASHES).write_text(text)
    with pytest.raises(DamageError, match=r"10: hashes.json can't be read"):
        checkpoint_files.choose(saved, on_damage="stop")


def cut_the_data(step: pathlib.Path) -> None:
    files = (step / "state" / "ocdbt.process_0" / "d").iterdir()
    largest = max(files, key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])


def change_the_metadata(step: pathlib.Path) -> None:
    (step / "meta" / "metadata").write_text('{"step": 19}')


@pytest.mark.parametrize("damage", [cut_the_data, change_the_metadata])
def test_what_cant_be_read_back_has_no_hashes_and_leaves_the_checkpoint_before(
    tmp_path, monkeypatch, damage
):
    folder = UPath(tmp_path / "run")
    read_back = checkpoint._read_back
    state = {"weight": jax.random.normal(jax.random.key(0), (200, 200))}

    def damaged(folder, step, *rest):
        if step == 20:
            monkeypatch.setattr(checkpoint, "_read_back", read_back)
            damage(pathlib.Path(folder, "20"))
        read_back(folder, step, *rest)

    monkeypatch.setattr(checkpoint, "_read_back", damaged)
    refused = pytest.raises(DamageError, match=r"run/20: can't be read back.*; the earlier")
    with refused, checkpoint.Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(10, state, {"step": 10}, None)
        checkpoints.save(20, state, {"step": 20}, None)
    assert checkpoint_files.complete_steps(folder) == [10]
    assert checkpoint_files.find_damage(folder, 10) is None


@pytest.mark.parametrize(
    "other", [{"weight": jnp.zeros(4)}, {"weight": jnp.zeros(3, int)}, {"size": jnp.zeros(3)}]
)
def test_a_state_of_another_model_is_refused(saved, other):
    """An array is named, with both shapes; orbax would cast a dtype."""
    with pytest.raises(
        InputError, match=rf"{saved}/10 .*(weight is float32\[3\] there|size is absent there)"
    ):
        checkpoint.restore(saved, 10, jax.eval_shape(lambda: other))


def test_a_full_disk_is_one_sentence_and_leaves_the_checkpoint_before(saved, monkeypatch):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(ocp.CheckpointManager, "save", fail)
    for error in (OSError("disk quota"), ValueError("RESOURCE_EXHAUSTED: x")):
        with pytest.raises(InputError, match=f"{saved}: .*{error}.*make room"):
            save(saved, 20)
    error = ValueError("something else")
    with pytest.raises(ValueError, match="something else"):
        save(saved, 20)
    monkeypatch.setattr(ocp.CheckpointManager, "save", lambda *args, **kwargs: True)
    with pytest.raises(InputError, match=r"step 20 was not committed"):
        save(saved, 20)
    assert checkpoint_files.complete_steps(saved) == [10]


@pytest.mark.parametrize(
    ("scores", "kept", "best"),
    [
        ([3.0, 1.0, 2.0, None, None], [10, 20, 40, 50], 20),
        ([1.0, None, 1.0, 2.0, 3.0], [10, 30, 40, 50], 30),
        ([None, float("nan"), None, None, None], [10, 40, 50], 50),
    ],
)
def test_the_newest_two_the_best_one_and_the_milestone_are_kept(tmp_path, scores, kept, best):
    folder = UPath(tmp_path)
    for step, score in zip(range(10, 60, 10), scores, strict=True):  # each in a start of its own
        save(folder, step, score=score, keep=2, milestones=[10])
    assert checkpoint_files.complete_steps(folder) == kept
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(map(str, kept))
    assert checkpoint_files.choose(folder, on_damage="stop", best=True) == best
    assert checkpoint_files.choose(folder, on_damage="stop") == 50


def test_a_random_key_in_the_state_is_kept(tmp_path):
    """As of an optimizer that draws (optax.add_noise); a checkpoint with one seemed to be damaged."""
    state = {
        "key": jax.random.fold_in(jax.random.key(3), 1),
        "others": jax.random.split(jax.random.key(4, impl="rbg")),
    }
    save(UPath(tmp_path), 5, state)
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.tree.map(
        lambda key: jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=where), state
    )
    restored = checkpoint.restore(UPath(tmp_path), 5, shapes)
    for name, key in state.items():
        assert restored[name].dtype == key.dtype and (restored[name] == key).all()
