"""Data sets of the Hugging Face Hub and of TensorFlow Datasets: finding them, their splits and the roles of these.

Nothing that a data set's folder holds is executed: no script beside its files, and no class that its metadata names.
"""

import contextlib
import functools
import re
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

from mlm.data import batches
from mlm.errors import InputError
from mlm.memory import of_a_command
from mlm.paths import UPath, children, os_errors
from mlm.workdir import NO_LOCKS

# Words in the names of held-out splits, such as test_matched, testA and dev; much as `datasets` reads names of files.
ROLES = {
    "test": re.compile(r"test(s|ing|set)?|eval(uation|s|set)?|held|heldout|holdout"),
    "validation": re.compile(r"valid(s|ation)?|val(set)?|dev(el|elopment|set)?"),
}
LISTED = 5  # folders in a message


@contextlib.contextmanager
def readable(source: str, key: str) -> Iterator[None]:
    """Turns what a reader raises into an InputError that names the key of the config and the source."""
    try:
        with os_errors():
            yield
    except (OSError, ValueError, KeyError, ImportError, EOFError, zlib.error) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{key}: {source} can't be read: {reason[:400].rstrip('.')}.") from error


def named_split(rest: str) -> tuple[str, str]:
    """Returns (data set, split) of NAME[#SPLIT]; the path of a folder may hold a # itself."""
    name, mark, split = rest.rpartition("#")
    if not mark or UPath(rest).is_dir():
        return rest, ""
    if not name or not split:
        raise ValueError("must be NAME#SPLIT, with a split after the #")
    return name, split


def role_of(split: str) -> str:
    """Returns the role of a split by the words of its name; training, if none says that it is held out."""
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", split)]
    return next((role for role, names in ROLES.items() if any(map(names.fullmatch, words))), "train")


def splits_to_read(rows: Mapping[str, int], spec: str) -> list[tuple[str, int, int, str]]:
    """Returns (split, first row, last row + 1, role) of all splits, validation first, or of `spec` (as "train[:90%]").

    The splits have so many `rows`; a role is "train", "validation" or "test".
    """
    import datasets

    if not spec:
        splits = sorted(rows, key=lambda split: (role_of(split) != "validation", split))
        return [(split, 0, rows[split], role_of(split)) for split in splits]
    to_read = []
    for slice_ in datasets.ReadInstruction.from_spec(spec).to_absolute(dict(rows)):
        split, size = slice_.splitname, rows[slice_.splitname]
        stop = size if slice_.to is None else min(slice_.to, size)
        to_read.append((split, slice_.from_ or 0, stop, role_of(split)))
    roles = {role for *_, role in to_read}
    if len(roles) > 1:
        raise ValueError(f"{spec} joins splits for {' and '.join(sorted(roles))}; name them in sources of their own")
    return to_read


def load_hf(name: str, *, split: str | None = None, streaming: bool = False) -> Any:
    """Returns what `datasets.load_dataset` does for NAME[:CONFIG]; raises ValueError for a bad data set."""
    import datasets

    name, config = hf_name(name)
    with hf_errors():
        return datasets.load_dataset(name, config, split=split, streaming=streaming, trust_remote_code=False)


@contextlib.contextmanager
def hf_errors() -> Iterator[None]:
    """Turns an error of `datasets` into a ValueError of one line that names the file and its columns."""
    import datasets

    try:
        yield
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        cache = f"the cache {datasets.config.HF_CACHE_HOME} can't be locked ({error.strerror})"
        raise ValueError(f"{cache}; set HF_HOME to a folder on a local disk") from error
    except (datasets.exceptions.DatasetsError, ValueError) as error:
        cause = error if isinstance(error, ValueError) else error.__cause__ or error
        if isinstance(error.__context__, datasets.table.CastError):
            cause = error.__context__
        frames = (frame for frame, _ in traceback.walk_tb(cause.__traceback__))  # most errors name no file
        files = [frame.f_locals.get("file", "") for frame in frames if frame.f_code.co_name == "_generate_tables"]
        files += re.findall(r"generating data using\s+([^,\s]+)", str(error))
        reason = str(cause)
        if isinstance(cause, datasets.table.CastError):
            columns, others = (", ".join(names) for names in (cause.table_column_names, cause.requested_column_names))
            reason = f"has the columns {columns}, where the files before it have {others}; give all files the same"
        raise ValueError(" ".join((f"{files[0]}: {reason}" if files and files[0] else reason).split())) from error


def hf_name(name: str) -> tuple[str, str | None]:
    """Returns the name and the configuration (None for the default) of NAME[:CONFIG]."""
    if UPath(name).is_file():
        raise ValueError("it is a file; name its folder, all of whose files are then read")
    folder, _, config = (name, "", "") if UPath(name).is_dir() else name.rpartition(":")  # a path may hold a colon
    if not folder or not UPath(folder).is_dir():
        folder, _, config = name.partition(":")
    elif re.search(r"[*?[]|::", str(UPath(folder).absolute())):
        raise ValueError(f"the library `datasets` takes *, ?, [ and :: in {folder} for a pattern; rename the folder")
    elif (UPath(folder) / "state.json").is_file():  # so load_dataset refuses it, too, but late
        fix = "write it into another one by to_parquet, or by save_to_disk of a DatasetDict"
        raise ValueError(f"the folder is one of Dataset.save_to_disk, which load_dataset can't read; {fix}")
    return folder, config or None


def check_columns(required: Iterable[str], columns: Iterable[str]) -> None:
    """Raises ValueError for a required column that is not among the columns."""
    for column in required:
        if column not in columns:
            raise ValueError(f"there is no column {column!r} among {', '.join(map(repr, columns)) or 'none'}")


def check_first_row(library: str, name: str, split: str, required: Iterable[str]) -> None:
    """Raises ValueError if the first row of a split of a data set lacks a required column; prepares nothing.

    Args:
        library: "hf", whose columns are in its description or else its first row, or "tfds".
        split: as in "train[:90%]"; "" for the first one.
    """
    if library == "tfds":
        batches.import_tensorflow()
        with _only_known_features():
            row = _builder(name, prepare=False).info.features
    else:
        import datasets

        with hf_errors():
            builder = datasets.load_dataset_builder(*hf_name(name))
            is_described = bool(builder.info.splits and builder.info.features)
            splits = builder.info.splits if is_described else builder.as_streaming_dataset()
            first = re.split(r"[\[+]", split)[0] if split != "all" else ""
            if first and first not in splits:
                raise ValueError(f"there is no split {first!r} among {', '.join(map(repr, splits)) or 'none'}")
            row = builder.info.features if is_described else next(iter(splits[first or next(iter(splits))]), {})
    check_columns(required, list(row))


@of_a_command
@functools.lru_cache(1)
def load_tfds(name: str) -> tuple[Any, Callable[[str], Iterator[dict[str, Any]]]]:
    """Returns a data set of TensorFlow Datasets: its `info`, and a function from a split to its rows, in order.

    It is a prepared folder (of a version, or of a data set that has one), or a name: of a data set in TFDS_DATA_DIR, or
    of one that TensorFlow Datasets itself can prepare there.
    """
    tf = batches.import_tensorflow()
    import tensorflow_datasets as tfds

    with _only_known_features():
        builder = _builder(name)
        info = builder.info
    files = {file.name for file in children(UPath(builder.data_dir))}
    listed = (getattr(path, "name", path) for split in info.splits.values() for path in split.filepaths)
    if missing := next((file for file in listed if file not in files), None):
        raise ValueError(f"{builder.data_dir} lacks {missing}; prepare the data set again, or copy all of its files")

    def rows(split: str) -> Iterator[dict[str, Any]]:
        try:
            yield from tfds.as_numpy(builder.as_dataset(split=split, shuffle_files=False))
        except tf.errors.OpError as error:
            raise ValueError(f"{builder.data_dir}, {split}: {error.message}") from error
        except NotImplementedError as error:  # of files that tf.data can't read
            raise ValueError(f"{builder.data_dir}: its files are {info.file_format}; prepare it as tfrecord") from error

    return info, rows


def _builder(name: str, *, prepare: bool = True) -> Any:
    """Returns the builder of a data set, its files prepared if it can be."""
    import tensorflow_datasets as tfds

    folder, prepared = _prepared_folder(name)
    if prepared is not None:
        return tfds.builder_from_directory(str(prepared))
    if re.match(r"[/.~]|\w+://", name):
        raise ValueError(_reason_not_prepared(folder))
    if tfds.core.naming.parse_builder_name_kwargs(name)[0].namespace:
        raise ValueError(f"the code of {name} would be downloaded and run; prepare it yourself, and name its folder")
    try:
        builder = tfds.builder(name)
    except tfds.core.DatasetNotFoundError as error:
        root = UPath(tfds.core.constants.DATA_DIR).expanduser()
        where = f"TensorFlow Datasets or {root} (TFDS_DATA_DIR)"
        raise ValueError(f"{name} is not in {where}, and {_reason_not_prepared(folder)}") from error
    if prepare:
        builder.download_and_prepare()
    return builder


def _prepared_folder(name: str) -> tuple[UPath, UPath | None]:
    """Returns the folder that a path names, which may end in :VERSION, and that of the version to read in it."""
    folder = UPath(name)
    if not folder.is_dir() and (match := re.fullmatch("(.+):([0-9]+[.][0-9]+[.][0-9]+)", name)):
        folder = UPath(match[1]) / match[2]
    files = (file for depth in range(4) for file in folder.glob("*/" * depth + "dataset_info.json"))
    versions = [file.parent for file in files if "incomplete" not in file.parent.name]
    if len({version.parent for version in versions}) > 1:
        names = ", ".join(sorted({str(version.parent) for version in versions})[:LISTED])
        raise ValueError(f"{folder} holds several data sets or configurations; name one of them: {names}")
    newest = max(versions, key=lambda version: [int(n) for n in re.findall("[0-9]+", version.name)], default=None)
    return folder, newest


def _reason_not_prepared(folder: UPath) -> str:
    if not folder.is_dir():
        return f"there is no folder {folder}"
    names = ", ".join(path.name for path in children(folder)[:LISTED]) or "nothing"
    return f"{folder} holds no data set that was prepared to its end (no dataset_info.json, but {names})"


@contextlib.contextmanager
def _only_known_features() -> Iterator[None]:
    """Refuses the classes of features.json that are not of TensorFlow Datasets: to read them, it would import them."""
    from tensorflow_datasets import features

    known = features.FeatureConnector.cls_from_name

    def class_of(name: str) -> Any:
        if not name.startswith("tensorflow_datasets."):
            raise ValueError(f"its features.json names the class {name!r:.80}, which is not of TensorFlow Datasets")
        return known(name)

    with mock.patch.object(features.FeatureConnector, "cls_from_name", staticmethod(class_of)):
        yield
