"""The data baseline of `bench`: how transformers' TF-TPU example writes its shards, and how it reads them.

Rewritten from prepare_tfrecord_shards.py and run_mlm.py of
examples/tensorflow/language-modeling-tpu in transformers 4: without masks (ours are drawn inside
the step) and with a smaller shuffle buffer, which is the same work per row.
"""

from collections.abc import Iterator
from pathlib import Path

from mlm.data import tokenizer

PROCESSES = 4  # forked for each of the two passes over the rows
SHARD_ROWS = 1000
SHUFFLE_BUFFER = 2**14  # rows; the example has 2^18

Columns = dict[str, list[list[int]]]


def prepare(texts: dict[str, list[str]], folder: str) -> None:
    """Writes {split: texts} as `datasets` keeps them, {folder}/{split}, and imports what `write_shards` will need."""
    import datasets
    import tensorflow  # noqa: F401

    datasets.disable_progress_bars()
    for split, column in texts.items():
        datasets.Dataset.from_dict({"text": column}).save_to_disk(f"{folder}/{split}")


def write_shards(folder: str, target: str, *, tokenizer_folder: str, length: int) -> int:
    """Writes {target}/{split}/dataset-{shard}-{records}.tfrecord of what `prepare` wrote; returns the rows.

    Of each 1,000 documents, joined, it drops what fills no row. Call it in a process of its own:
    it forks.
    """
    import datasets

    tok = tokenizer.load(tokenizer_folder)

    def group(columns: Columns) -> Columns:
        joined = {name: sum(lists, []) for name, lists in columns.items()}  # noqa: RUF017 (so it does)
        whole = len(joined["input_ids"]) // length * length
        return {
            name: [ids[i : i + length] for i in range(0, whole, length)]
            for name, ids in joined.items()
        }

    def tokenize(columns: Columns) -> Columns:
        return tok(columns["text"])

    rows = 0
    for split in Path(folder).iterdir():
        grouped = datasets.load_from_disk(str(split))
        for function, removed in ((tokenize, ["text"]), (group, [])):
            grouped = grouped.map(
                function,
                batched=True,
                remove_columns=removed,
                num_proc=PROCESSES,
                load_from_cache_file=False,
            )
        split_folder = Path(target, split.name)
        split_folder.mkdir(parents=True)
        for shard, start in enumerate(range(0, len(grouped), SHARD_ROWS)):
            rows += _write_shard(grouped[start : start + SHARD_ROWS], split_folder, shard)
    return rows


def _write_shard(columns: Columns, folder: Path, shard: int) -> int:
    import tensorflow as tf

    rows = len(columns["input_ids"])
    with tf.io.TFRecordWriter(str(folder / f"dataset-{shard}-{rows}.tfrecord")) as file:
        for row in range(rows):
            features = tf.train.Features()
            for name in ("input_ids", "attention_mask"):
                features.feature[name].int64_list.value.extend(columns[name][row])
            file.write(tf.train.Example(features=features).SerializeToString())
    return rows


def batches(files: list[str], *, length: int, rows: int) -> Iterator[dict]:
    """Yields batches of shards forever: {"input_ids", "attention_mask"}, int64 TensorFlow tensors [rows, length]."""
    import tensorflow as tf

    def decode(record: tf.Tensor) -> dict[str, tf.Tensor]:
        feature = tf.io.FixedLenFeature((length,), tf.int64)
        return tf.io.parse_single_example(record, {"input_ids": feature, "attention_mask": feature})

    shards = tf.data.Dataset.from_tensor_slices(files).shuffle(len(files)).repeat()
    records = tf.data.TFRecordDataset(shards, num_parallel_reads=tf.data.AUTOTUNE)
    decoded = records.map(
        tf.autograph.experimental.do_not_convert(decode), num_parallel_calls=tf.data.AUTOTUNE
    )
    yield from (
        decoded.shuffle(SHUFFLE_BUFFER).batch(rows, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
    )
