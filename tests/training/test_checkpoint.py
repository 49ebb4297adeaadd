"""Checkpoints in their folder: what kills leave goes when a later one is complete, and nothing else does."""

import pathlib
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mlm import cluster
from mlm.errors import DamageError, InputError
from mlm.paths import UPath, children, write_text
from mlm.pretrained import checkpoint_files
from mlm.training import checkpoint, sharding, xla_metrics
from mlm.workdir import Workdir


def test_what_kills_leave_goes_when_a_later_step_is_complete(tmp_path, monkeypatch):
    """Each between orbax's commit and the hashes: it is set aside at the next start, and never taken for complete."""

    def killed(folder, step):
        raise SystemExit

    def names() -> set[str]:
        return {path.name for path in tmp_path.iterdir()}

    folder = UPath(tmp_path)
    save(folder, 5)
    for aside in (set(), {"incomplete.10"}, {"incomplete.10", "incomplete.10.2"}):
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(checkpoint, "write_hashes", killed)
            save(folder, 10)
        assert names() == {"5", "10"} | aside and checkpoint_files.complete_steps(folder) == [5]
    save(folder, 20)
    assert names() == {"5", "20"}
    assert [checkpoint_files.find_damage(folder, step) for step in (5, 20)] == [None] * 2


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> UPath:
    save(UPath(tmp_path), 10)
    return UPath(tmp_path)


def save(folder: UPath, step: int) -> None:
    with checkpoint.Checkpoints(folder, keep=3) as checkpoints:
        checkpoints.save(step, {"weight": jnp.zeros(3)}, {"step": step}, None)


def test_other_hosts_go_on_when_all_is_complete(tmp_path, monkeypatch):
    """`run` reads the newest checkpoint on every host, and the first host alone writes its hashes."""
    met: dict[str, list[int]] = {}
    monkeypatch.setattr(
        cluster, "barrier", lambda name: met.update({name: checkpoint_files.complete_steps(folder)})
    )
    folder = UPath(tmp_path)
    save(folder, 10)
    assert met == {"checkpoints opened": [], "checkpoints complete": [10]}


def test_nothing_else_is_removed(saved, tmp_path):
    elsewhere = tmp_path.with_name(f"{tmp_path.name} elsewhere")
    shutil.copytree(saved / "10", elsewhere)
    for name in (
        "damaged.10",
        "incomplete.21",
        "incomplete.10.copy",
        "notes.incomplete.10",
        "incomplete.9",
    ):
        shutil.copytree(saved / "10", saved / name)
    (saved / "incomplete.8").mkdir()
    (saved / "incomplete.8" / "notes.txt").write_text("a person's")
    (saved / "incomplete.7").symlink_to(elsewhere)
    (saved / "incomplete.6").write_text("a file")
    save(saved, 20)
    kept = {"damaged.10", "incomplete.21", "incomplete.10.copy", "notes.incomplete.10"}
    assert {path.name for path in saved.iterdir()} == {
        "10",
        "20",
        "incomplete.6",
        "incomplete.7",
        "incomplete.8",
    } | kept
    assert (elsewhere / "state").is_dir() and (saved / "incomplete.8" / "notes.txt").is_file()


def test_a_removal_that_was_cut_short_is_taken_up_again(saved, monkeypatch):
    left = saved / "incomplete.5"
    shutil.copytree(saved / "10", left)
    (left / "busy").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "remove", refuse)
        save(saved, 20)
    assert left.is_dir()
    save(saved, 30)
    assert not left.exists()


def refuse(path):
    raise OSError(f"{path} is in use")


def test_in_a_bucket_what_orbax_has_not_committed_goes_at_once():
    """Moving it would copy it; what is committed and has no hashes is kept until a later step is complete."""
    folder = UPath(f"memory://bucket/{time.time_ns()}")
    for step, files in {
        5: ["state/d", checkpoint.COMMITTED],
        10: ["state/d"],
        15: [checkpoint.COMMITTED],
    }.items():
        for name in files:
            write_text(folder / str(step) / name, "x")
    checkpoint_files.write_hashes(folder, 5)
    checkpoint.hide_incomplete(folder)
    assert sorted(path.name for path in children(folder)) == ["5", "incomplete.15"]


LETTERS = ["{a,b}", "#1 50%", "c:d a::b@5", "~", "é 'x\" end~", "-x", "a\nb"]


@pytest.mark.parametrize("letters", LETTERS)
def test_any_letters_of_a_path(tmp_path, letters):
    folder = UPath(tmp_path / letters / "checkpoints")
    state = {"weight": jnp.arange(3.0), "step": jnp.int32(7)}
    with checkpoint.Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(7, state, {"step": 7}, None)
    assert checkpoint_files.choose(folder, on_damage="stop") == 7
    restored = checkpoint.restore(folder, 7, jax.eval_shape(lambda: state))
    assert restored["weight"].tolist() == [0.0, 1.0, 2.0] and restored["step"] == 7
    assert [path.name for path in tmp_path.iterdir()] == [letters]


@pytest.mark.parametrize("path", ["a\\b", "/gs/x", "/hf"])
def test_paths_that_orbax_takes_for_others_are_refused_before_anything_is_written(
    tmp_path, monkeypatch, path
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="--workdir="):
        Workdir(path)
    assert not list(tmp_path.iterdir())


def lose_the_parts(step: pathlib.Path) -> None:
    shutil.rmtree(step / "state" / "ocdbt.process_0")


def lose_the_tree(step: pathlib.Path) -> None:
    (step / "state" / "manifest.ocdbt").unlink()


def cut_the_data(step: pathlib.Path) -> None:
    largest = max(
        (step / "state" / "ocdbt.process_0" / "d").iterdir(), key=lambda file: file.stat().st_size
    )
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])


def change_the_metadata(step: pathlib.Path) -> None:
    (step / "meta" / "metadata").write_text('{"step": 19}')


def change_the_shape(step: pathlib.Path) -> None:
    other = step.parent.parent / "other"
    with checkpoint.Checkpoints(UPath(other), keep=1) as checkpoints:
        checkpoints.save(20, {"weight": jnp.zeros((100, 200))}, {"step": 20}, None)
    shutil.rmtree(step / "state")
    shutil.copytree(other / "20" / "state", step / "state")


@pytest.mark.parametrize(
    "damage", [lose_the_parts, lose_the_tree, cut_the_data, change_the_metadata, change_the_shape]
)
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


def test_a_large_state_is_read_back_in_groups(tmp_path, monkeypatch):
    """Each array once, by where it ends in units of READ_BACK_BYTES."""
    groups = []
    handler = ocp.PyTreeCheckpointHandler

    class Recorded(handler):
        def restore(self, path, args):
            read = super().restore(path, args=args)
            groups.append(
                sorted(name for name, leaf in read.items() if leaf is not ocp.PLACEHOLDER)
            )
            return read

    monkeypatch.setattr(ocp, "PyTreeCheckpointHandler", Recorded)
    monkeypatch.setattr(checkpoint, "READ_BACK_BYTES", 100)
    state = {
        name: jnp.zeros(size)
        for name, size in (("a", 10), ("b", 10), ("c", 50), ("d", 3), ("e", 3))
    }
    with checkpoint.Checkpoints(UPath(tmp_path), keep=1) as checkpoints:
        checkpoints.save(1, state, {}, None)
    assert groups == [["a", "b"], ["c", "d"], ["e"]]


def test_of_what_all_devices_hold_large_arrays_alone_are_saved_in_slices(tmp_path):
    """To cut each slice is a program: eight for an array, however small."""
    everywhere = NamedSharding(sharding.make_mesh(data=8, fsdp=1, tensor=1), PartitionSpec())
    numbers = {f"small {size}": np.arange(size, dtype=np.float32) for size in (1, 8, 64, 800)}
    numbers["large"] = np.arange(8 * checkpoint.SMALLEST_SLICE_BYTES // 4, dtype=np.float32)
    state = jax.device_put(numbers, everywhere)
    with (
        xla_metrics.Programs() as programs,
        checkpoint.Checkpoints(UPath(tmp_path), keep=1) as checkpoints,
    ):
        checkpoints.save(1, state, {}, None)
    assert programs.counts["all programs"]["compilations"] == 8
    restored = checkpoint.restore(UPath(tmp_path), 1, jax.eval_shape(lambda: state))
    assert all(np.array_equal(restored[name], numbers[name]) for name in numbers)


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

    for error in (
        OSError("disk quota"),
        ValueError("RESOURCE_EXHAUSTED: x"),
        ValueError("No space left on it"),
    ):
        with (
            monkeypatch.context() as patch,
            pytest.raises(InputError, match=f"{saved}: .*{error}.*make room"),
        ):
            patch.setattr(ocp.CheckpointManager, "save", fail)
            save(saved, 20)
    error = ValueError("something else")
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="something else"):
        patch.setattr(ocp.CheckpointManager, "save", fail)
        save(saved, 20)
    with (
        monkeypatch.context() as patch,
        pytest.raises(InputError, match=r"step 20 was not committed"),
    ):
        patch.setattr(ocp.CheckpointManager, "save", lambda *args, **kwargs: True)
        save(saved, 20)
    assert checkpoint_files.complete_steps(saved) == [10]


def test_it_is_hashed_when_it_is_written_and_not_before(tmp_path, monkeypatch):
    """By another thread, so that training goes on; while orbax writes, a poll does nothing."""
    folder = UPath(tmp_path)
    writing = [True]
    with checkpoint.Checkpoints(folder, keep=3) as checkpoints:
        monkeypatch.setattr(checkpoints._manager, "is_saving_in_progress", lambda: writing[0])
        checkpoints.save(10, {"weight": jnp.zeros(3)}, {"step": 10}, None)
        checkpoints.poll()
        assert checkpoints._hashing is None
        writing[0] = False
        checkpoints.poll()
        checkpoints._hashing.result()
        assert checkpoint_files.complete_steps(folder) == [10]
        checkpoints.poll()
        checkpoints.finish()


@pytest.mark.parametrize(
    ("scores", "kept"),
    [
        ([3.0, 1.0, 2.0, None, None], [10, 20, 40, 50]),
        ([1.0, None, 1.0, 2.0, 3.0], [10, 30, 40, 50]),
        ([None, float("nan"), None, None, None], [10, 40, 50]),
    ],
)
def test_the_newest_two_the_best_one_and_the_milestone_are_kept(tmp_path, scores, kept):
    folder = UPath(tmp_path)
    for part in (slice(3), slice(3, 5)):  # started again after three
        with checkpoint.Checkpoints(folder, keep=2, milestones=[10]) as checkpoints:
            for step, score in list(zip(range(10, 60, 10), scores, strict=True))[part]:
                checkpoints.save(step, {"weight": jnp.zeros(3)}, {"step": step}, score)
    assert checkpoint_files.complete_steps(folder) == kept
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(map(str, kept))


def test_a_random_key_in_the_state_is_kept(tmp_path):
    """As of an optimizer that draws (optax.add_noise); a checkpoint with one seemed to be damaged."""
    state = {
        "key": jax.random.fold_in(jax.random.key(3), 1),
        "others": jax.random.split(jax.random.key(4, impl="rbg")),
    }
    with checkpoint.Checkpoints(UPath(tmp_path), keep=1) as checkpoints:
        checkpoints.save(5, state, {"step": 5}, None)
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.tree.map(
        lambda key: jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=where), state
    )
    restored = checkpoint.restore(UPath(tmp_path), 5, shapes)
    assert jax.tree.all(
        jax.tree.map(lambda a, b: a.dtype == b.dtype and (a == b).all(), restored, state)
    )
