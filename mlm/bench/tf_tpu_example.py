"""The yardstick of `bench` for data: how transformers' TF-TPU example writes its shards, and how it reads them.

What examples/tensorflow/language-modeling-tpu of transformers 4 does, written anew: prepare_tfrecord_shards.py, from a
split that `datasets` has on disk to its files; and the input of run_mlm.py, but for the masks that it draws there (ours
are drawn inside the step), and with a smaller shuffle buffer, which takes less memory and the same work a row.

Dimensions: B rows, L tokens in a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from mlm.data import tokenizer
from mlm.data.corpus import Document
from mlm.errors import InputError

PROCESSES = 4  # forked for each of the two passes over the rows
ROWS_A_SHARD = 1000
SHUFFLED = 2**14  # rows in the shuffle buffer; the example has 2^18

Columns = dict[str, list[list[int]]]


def prepare(documents: Iterable[Document], folder: str) -> None:
    """Writes the documents as `datasets` keeps them, {folder}/{split}, and imports what `write_shards` will need.

    Raises:
      InputError: TensorFlow is not installed.
    """
    try:
        import tensorflow  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise InputError(f"the TF-TPU example needs TensorFlow ({error}); install tensorflow-cpu.") from error
    import datasets

    datasets.disable_progress_bars()
    texts: dict[str, list[str]] = {}
    for document in documents:
        texts.setdefault(document.split, []).append(document.text)
    for split, column in texts.items():
        datasets.Dataset.from_dict({"text": column}).save_to_disk(f"{folder}/{split}")


def write_shards(folder: str, target: str, *, tokenizer_folder: str, length: int) -> int:
    """Writes {target}/{split}/dataset-{shard}-{records}.tfrecord of what `prepare` wrote; returns the rows.

    Tokenizes 1,000 documents at a time, puts the documents of each 1,000 end to end, cuts them into rows and drops the
    rest of them; then a tf.train.Example for each row. Runs in a process of its own, since it forks.

    Args:
      folder: of `prepare`.
      target: to be made; local.
      tokenizer_folder: local.
      length: tokens in a row.
    """
    import datasets

    tok = tokenizer.load(tokenizer_folder)

    def tokenize(columns: dict[str, list[str]]) -> Columns:
        return tok(columns["text"])

    def group(columns: Columns) -> Columns:
        joined = {name: sum(lists, []) for name, lists in columns.items()}  # noqa: RUF017 (so it does)
        whole = len(joined["input_ids"]) // length * length
        return {name: [ids[i : i + length] for i in range(0, whole, length)] for name, ids in joined.items()}

    settings = {"batched": True, "num_proc": PROCESSES, "load_from_cache_file": False}
    rows = 0
    for split in Path(folder).iterdir():
        tokenized = datasets.load_from_disk(str(split)).map(tokenize, remove_columns=["text"], **settings)
        grouped = tokenized.map(group, **settings)
        place = Path(target, split.name)
        place.mkdir(parents=True)
        for shard, start in enumerate(range(0, len(grouped), ROWS_A_SHARD)):
            rows += _write_shard(grouped[start : start + ROWS_A_SHARD], place, shard)
    return rows


def _write_shard(columns: Columns, folder: Path, shard: int) -> int:
    import tensorflow as tf

    def feature(values: list[int]) -> tf.train.Feature:
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))

    records = []
    for ids, attention in zip(columns["input_ids"], columns["attention_mask"], strict=True):
        features = {"input_ids": feature(ids), "attention_mask": feature(attention)}
        records.append(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
    with tf.io.TFRecordWriter(str(folder / f"dataset-{shard}-{len(records)}.tfrecord")) as file:
        for record in records:
            file.write(record)
    return len(records)


def batches(files: list[str], *, length: int, rows: int) -> Iterator[dict]:
    """Yields batches of shards again and again: {"input_ids", "attention_mask"}, int64 [B, L] tensors of TensorFlow.

    Args:
      files: the shards.
      length: tokens in a row.
      rows: of a batch.
    """
    import tensorflow as tf

    def decode(record: tf.Tensor) -> dict[str, tf.Tensor]:
        feature = tf.io.FixedLenFeature((length,), tf.int64)
        return tf.io.parse_single_example(record, {"input_ids": feature, "attention_mask": feature})

    shards = tf.data.Dataset.from_tensor_slices(files).shuffle(len(files)).repeat()
    records = tf.data.TFRecordDataset(shards, num_parallel_reads=tf.data.AUTOTUNE)
    decoded = records.map(tf.autograph.experimental.do_not_convert(decode), num_parallel_calls=tf.data.AUTOTUNE)
    yield from decoded.shuffle(SHUFFLED).batch(rows, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
