"""Each check on shards that have its fault: its level, and what it names."""

import dataclasses
import io

import jax.numpy as jnp
import numpy as np
import pytest

from mlm.data import batches, tokenizer
from mlm.data.manifest import load_manifest
from mlm.doctor import checks, first_batch, scan
from mlm.doctor.checks import Finding
from mlm.model.masking import Masked
from mlm.tasks.pretraining import Pretraining
from mlm.text import show
from mlm.workdir import Workdir
from tests.support.corpora import write_jsonl, write_shards, written_texts
from tests.support.doctored import case_of
from tests.support.refusals import foreign
from tests.support.tiny import tiny_config


def named(findings: list[Finding], check: str) -> Finding:
    (finding,) = (finding for finding in findings if finding.check == check)
    return finding


# The first batch ------------------------------------------------------------------------------------------------------


def test_the_batch_is_the_first_that_the_run_reads(healthy, workdir, tokenizer_folder):
    """Its rows, put together again, are those of the first batch that is not skipped."""
    case = case_of(healthy, workdir, "data.skip_batches=1:3")
    checks.masks(case)
    order = {"seed": 0, "global_batch": 16, "lanes": 2, "start_row": 48, "rows": (0, 16)}
    ids = next(batches.train_batches(healthy, split="train", **order))["input_ids"]
    tok = tokenizer.load_fast(tokenizer_folder)
    for row, ids_L in zip(case.batch, ids, strict=False):
        assert "".join(piece for piece, _, _ in row) == tok.decode(
            ids_L.tolist(), skip_special_tokens=False
        )


class EveryFourth(Pretraining):
    """Masks the tokens at every fourth place of a row, of 16."""

    def make_masking(self):
        def masking(key, ids_BxL, attention_BxL, record_B, epoch_B):
            positions_BxK = jnp.broadcast_to(jnp.arange(1, 16, 4), (len(ids_BxL), 4))
            labels_BxK = jnp.take_along_axis(ids_BxL, positions_BxK, 1)
            masked_BxL = ids_BxL.at[:, 1::4].set(self.info.special_ids["mask"])
            return Masked(
                masked_BxL, attention_BxL, positions_BxK, labels_BxK, jnp.ones(labels_BxK.shape)
            )

        return masking


def test_the_masks_are_those_of_the_short_rows_that_the_first_step_reads_and_of_the_class(
    healthy, workdir
):
    config = tiny_config("data.lanes=2", "data.short_length=16", "masking.rate=0.25")
    rows, read_BxL, kinds_BxL = first_batch.draw(
        config, healthy, Workdir(str(workdir)), EveryFourth
    )
    assert rows["input_ids"].shape == (32, 16) and (read_BxL[:, 1::4] == 4).all()
    assert (kinds_BxL[:, 1::4] == "mask").all() and (kinds_BxL == "").sum() == 32 * 12


def test_masks_that_predict_special_tokens(healthy, workdir):
    """The manifest has lost one of the special ids."""
    special = tuple(each for each in healthy.all_special_ids if each != healthy.special_ids["sep"])
    manifest = dataclasses.replace(healthy, all_special_ids=special)
    (found,) = checks.masks(case_of(manifest, workdir, "data.global_batch=128"))
    assert found.level == "error" and "special tokens are predicted" in found.what


@pytest.mark.parametrize(
    ("predicted", "kinds", "level", "of_own_masks"),
    [
        (6, ["mask"] * 8 + ["random", "kept"], "ok", "ok"),
        # of 30 tokens, where 6 were asked for
        (9, ["mask"] * 8 + ["random", "kept"], "error", "ok"),
        # nothing is masked, as with random bits of another width
        (6, ["random"] * 9 + ["kept"], "error", "ok"),
        (6, ["mask"], "error", "ok"),
        (0, ["mask"], "error", "error"),
    ],
)
def test_masks_at_another_rate_than_was_set_are_an_error(predicted, kinds, level, of_own_masks):
    """But those of a class that draws its own."""
    ids = random_rows(500)
    batch = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    kinds_BxL = np.full(ids.shape, "", "U6")
    kinds_BxL[:, 1 : 1 + predicted] = np.resize(kinds, (len(ids), predicted))
    read_BxL = np.where(kinds_BxL == "mask", 4, 9)
    for draws_as_set, expected in ((True, level), (False, of_own_masks)):
        found, *_ = first_batch.judge(
            tiny_config(), batch, read_BxL, kinds_BxL, (0, 1, 2, 3, 4), draws_as_set=draws_as_set
        )
        assert found == expected


def test_rows_are_shown_with_marks_and_nothing_of_the_corpus_is_obeyed():
    row = [
        (" the", "", ""),
        (" cat", "mask", "<mask>"),
        (" sat\n\x1b[2J", "", ""),
        (" on", "random", " off\x1b[0m"),
    ]
    out = io.StringIO()
    show(*first_batch.render([[*row, (" [red]it", "kept", " it")]]), out=out)
    assert (
        out.getvalue().splitlines()[-1]
        == r"   the [cat] sat \u001b[2J [on> off\u001b[0m] [[red]it=]"
    )


def random_rows(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(5, 600, (count, 32))


def test_ids_that_the_vocabulary_lacks(workdir, tokenizer_folder, tmp_path):
    ids = random_rows(64)
    ids[13, 7] = 600
    foreign(tmp_path / "shards", train=ids, validation=ids)
    manifest = load_manifest(str(tmp_path / "shards"), tokenizer_folder=tokenizer_folder)
    (found,) = checks.run(checks.ids, case_of(manifest, workdir))
    assert found.level == "error" and "has the token id 600" in found.what


# Devices, hosts and lanes ---------------------------------------------------------------------------------------------


OF_8 = {"devices": 8, "hosts": 4}
# two hosts a slice, whatever --hosts and --devices say
OF_V5P = {"hosts": 3, "devices": 7, "topology": "v5p:2x2x2"}
MESH = "data 8 x fsdp 1 x tensor 1, 2 rows a device at once; "


@pytest.mark.parametrize(
    ("lanes", "batch", "flags", "level", "message"),
    [
        (2, 16, {"devices": 12}, "error", "16 rows can't be split over 12 devices"),
        (2, 16, {"hosts": 3}, "error", "--devices=8: must be a multiple of --hosts=3"),
        (4, 24, {"devices": 6, "hosts": 3}, "error", "a multiple or a divisor of 3"),
        (2, 16, OF_8, "ok", f"{MESH}hosts 4: 4 rows, 0.5 lanes each"),
        (8, 16, OF_8, "ok", f"{MESH}hosts 4: 4 rows, 2 lanes each"),
        (2, 16, OF_V5P | {"slices": 1}, "ok", "hosts 2: 8 rows"),
        (2, 16, OF_V5P | {"slices": 2}, "ok", "hosts 4: 4 rows"),
        (2, 16, OF_V5P | {"slices": 3}, "error", "24 devices"),
    ],
)
def test_devices_hosts_and_lanes_fit_or_not(healthy, workdir, lanes, batch, flags, level, message):
    settings = (f"data.lanes={lanes}", f"data.global_batch={batch}", f"evaluate.batch={batch}")
    (found,) = checks.run(checks.mesh, case_of(healthy, workdir, *settings, **flags))
    assert found.level == level and message in found.what
    assert bool(found.fix) == (level == "error")


def test_uneven_lanes_and_a_huge_batch_are_warnings(healthy, workdir):
    (found,) = checks.lanes(case_of(healthy, workdir, "data.lanes=4", "data.global_batch=6400"))
    assert found.level == "warning" and "their epochs drift apart" in found.what
    assert "a step reads rows twice" in found.what


# What comes twice -----------------------------------------------------------------------------------------------------


def test_documents_that_come_twice(texts, tokenizer_folder, workdir, tmp_path):
    """As a source's weight makes them; the example is in words."""
    short = [text for text in texts if 40 < len(text) < 70][:40]
    twice = dataclasses.replace(written_texts(short, tmp_path / "shards"), weights=(4.0,))
    # so that most of them lie in one row
    settings = {"counts": {"train": 2, "validation": 1}, "length": 64}
    made = write_shards(twice, tmp_path / "shards", tokenizer_folder, **settings)
    found = named(checks.ids(case_of(made, workdir)), "duplicates")
    assert found.level == "warning" and int(found.what.split()[0]) > 5
    assert any(" ".join(text.split())[:20] in found.what for text in short), found.what


def test_validation_that_training_has_seen(texts, tokenizer_folder, workdir, tmp_path):
    """All validation documents are in training too, on rows that are cut elsewhere."""
    words = sorted({word for text in texts for word in text.split()})
    rng = np.random.default_rng(1)
    long = [" ".join(rng.choice(words, 40)) for _ in range(200)]
    mixed = [f"{long[n + 1]} more" if n % 10 == 0 else long[n] for n in range(200)]
    made = write_shards(mixed, tmp_path / "shards", tokenizer_folder)
    found = named(checks.ids(case_of(made, workdir, "corpus.sources='text:x'")), "overlap")
    assert found.level == "error" and "; validation record " in found.what
    assert "set corpus.group to file" in found.fix


def test_an_overlap_is_a_warning_from_2_percent_and_an_error_from_half_of_the_rows_on(
    healthy, workdir
):
    case = case_of(healthy, workdir)
    rows = np.arange(100)
    overlaps = (scan.Overlap(rows, rows[:count], (0, 0)) for count in (1, 2, 49, 50))
    findings = [checks._overlap(case, "validation", overlap, "all") for overlap in overlaps]
    assert [found.level for found in findings] == ["ok", "warning", "warning", "error"]
    assert all("; validation record " in found.what for found in findings[1:])


def test_rows_too_short_to_compare_are_not_called_fine(texts, tokenizer_folder, workdir, tmp_path):
    lines = [f"{texts[n % 400][:8]} {n}" for n in range(4000)]
    made = write_shards(lines, tmp_path / "shards", tokenizer_folder)
    found = named(checks.ids(case_of(made, workdir)), "overlap")
    assert found.level == "warning" and "no validation row" in found.what


def test_a_benchmark_that_training_holds(healthy, workdir, texts, tmp_path):
    tok = tokenizer.load_fast(str(workdir / "tokenizer"))
    text = tok.decode(scan.row(healthy, "train", 7).tolist())
    held = write_jsonl(tmp_path / "held.jsonl", [text, "short"])
    backwards = [text[::-1] for text in texts if len(text) > 100]
    other = write_jsonl(tmp_path / "other.jsonl", backwards[:5])
    case = case_of(healthy, workdir)
    assert checks.against(case) == []
    case.flags.against = [held, other]
    (found,) = checks.against(case)
    assert found.level == "warning" and found.where == f"{held}, {other}"
    assert found.what.startswith("1 of 6 texts (16.7%) share a stretch of 13")
    assert "1 at least half of their stretches; 100% of the training rows were read" in found.what
    assert "corpus.keep_out" in found.fix
    case.flags.against = [other]
    assert checks.against(case)[0].level == "ok"
