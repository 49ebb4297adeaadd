"""Data sets of the Hugging Face Hub and of TensorFlow Datasets: finding them, their splits and the roles of these.

Nothing that a data set's folder holds is executed: no script beside its files, and no class that its metadata names.
"""

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from mlm.data import batches
from mlm.errors import InputError
from mlm.paths import UPath, of_a_command, os_errors

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
    except (OSError, ValueError, KeyError, ImportError) as error:
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
    return next(
        (role for role, names in ROLES.items() if any(map(names.fullmatch, words))), "train"
    )


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
        split = slice_.splitname
        size = rows[slice_.splitname]
        stop = size if slice_.to is None else min(slice_.to, size)
        to_read.append((split, slice_.from_ or 0, stop, role_of(split)))
    roles = {role for *_, role in to_read}
    if len(roles) > 1:
        raise ValueError(
            f"{spec} joins splits for {' and '.join(sorted(roles))}; name them in sources of their own"
        )
    return to_read


def load_hf(name: str, *, split: str | None = None, streaming: bool = False) -> Any:
    """Returns what `datasets.load_dataset` does for NAME[:CONFIG]; raises ValueError for a bad data set."""
    import datasets

    name, config = hf_name(name)
    with hf_errors():
        return datasets.load_dataset(
            name, config, split=split, streaming=streaming, trust_remote_code=False
        )


@contextlib.contextmanager
def hf_errors() -> Iterator[None]:
    """Turns an error of `datasets` into a ValueError."""
    import datasets

    try:
        yield
    except datasets.exceptions.DatasetGenerationError as error:  # which says no more than that
        raise ValueError(str(error.__cause__ or error)) from error
    except datasets.exceptions.DatasetsError as error:
        raise ValueError(str(error)) from error


def hf_name(name: str) -> tuple[str, str | None]:
    """Returns the name and the configuration (None for the default) of NAME[:CONFIG]."""
    if UPath(name).is_file():
        raise ValueError("it is a file; name its folder, all of whose files are then read")
    if UPath(name).is_dir():  # whose path may hold a colon
        folder, config = name, ""
    else:
        folder, _, config = name.rpartition(":")
        if not (folder and UPath(folder).is_dir()):
            folder, _, config = name.partition(":")
    if UPath(folder).is_dir() and re.search(r"[*?[]|::", str(UPath(folder).absolute())):
        raise ValueError(
            f"the library `datasets` takes *, ?, [ and :: in {folder} for a pattern; rename the folder"
        )
    return folder, config or None


def check_columns(required: Iterable[str], columns: Iterable[str]) -> None:
    """Raises ValueError for a required column that is not among the columns."""
    for column in required:
        if column not in columns:
            raise ValueError(
                f"there is no column {column!r} among {', '.join(map(repr, columns)) or 'none'}"
            )


def check_first_row(library: str, name: str, split: str, required: Iterable[str]) -> None:
    """Raises ValueError if the first row of a split of a data set lacks a required column; prepares nothing.

    Args:
        library: "hf", whose columns are in its description or else its first row, or "tfds".
        split: as in "train[:90%]"; "" for the first one.
    """
    if library == "tfds":
        batches.import_tensorflow()
        row = _builder(name, prepare=False).info.features
    else:
        import datasets

        with hf_errors():
            builder = datasets.load_dataset_builder(*hf_name(name))
            is_described = bool(builder.info.splits and builder.info.features)
            splits = builder.info.splits if is_described else builder.as_streaming_dataset()
            first = re.split(r"[\[+]", split)[0] if split != "all" else ""
            if first and first not in splits:
                raise ValueError(
                    f"there is no split {first!r} among {', '.join(map(repr, splits)) or 'none'}"
                )
            row = (
                builder.info.features
                if is_described
                else next(iter(splits[first or next(iter(splits))]), {})
            )
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

    builder = _builder(name)

    def rows(split: str) -> Iterator[dict[str, Any]]:
        try:
            yield from tfds.as_numpy(builder.as_dataset(split=split, shuffle_files=False))
        # of files that tf.data can't read
        except (tf.errors.OpError, NotImplementedError) as error:
            reason = getattr(error, "message", error)
            raise ValueError(f"{builder.data_dir}, {split}: {reason}") from error

    return builder.info, rows


def _builder(name: str, *, prepare: bool = True) -> Any:
    """Returns the builder of a data set, its files prepared if it can be."""
    import tensorflow_datasets as tfds

    if prepared := _prepared_folder(name):
        _refuse_other_classes(prepared)
        return tfds.builder_from_directory(str(prepared))
    reason = f"there is no data set prepared to its end (dataset_info.json) in a folder {name}"
    if re.match(r"[/.~]|\w+://", name):
        raise ValueError(reason)
    parsed = tfds.core.naming.parse_builder_name_kwargs(name)[0]
    if parsed.namespace:
        raise ValueError(
            f"the code of {name} would be downloaded and run; prepare it yourself, and name its folder"
        )
    root = UPath(tfds.core.constants.DATA_DIR).expanduser()
    _refuse_other_classes(root / parsed.name)
    try:
        builder = tfds.builder(name)
    except tfds.core.DatasetNotFoundError as error:
        raise ValueError(
            f"{name} is not in TensorFlow Datasets or {root} (TFDS_DATA_DIR), and {reason}"
        ) from error
    if prepare:
        builder.download_and_prepare()
    return builder


def _prepared_folder(name: str) -> UPath | None:
    """Returns the folder of the newest version in a folder, or of the version of FOLDER:VERSION."""
    folder = UPath(name)
    if not folder.is_dir() and (match := re.fullmatch("(.+):([0-9]+[.][0-9]+[.][0-9]+)", name)):
        folder = UPath(match[1]) / match[2]
    versions = [file.parent for file in _files_of_versions(folder, "dataset_info.json")]
    # TensorFlow Datasets prepares a version in a folder such as 1.0.0.incomplete77XY9
    versions = [version for version in versions if "incomplete" not in version.name]
    if len({version.parent for version in versions}) > 1:
        names = ", ".join(sorted({str(version.parent) for version in versions})[:LISTED])
        raise ValueError(
            f"{folder} holds several data sets or configurations; name one of them: {names}"
        )
    return max(
        versions,
        key=lambda version: [int(n) for n in re.findall("[0-9]+", version.name)],
        default=None,
    )


def _files_of_versions(folder: UPath, name: str) -> Iterator[UPath]:
    """Yields the files of a name in the folder of a version, of a configuration, a data set, or several."""
    return (file for depth in range(4) for file in folder.glob("*/" * depth + name))


def _refuse_other_classes(folder: UPath) -> None:
    """Raises ValueError for classes in features.json that are not TensorFlow Datasets' own: it would import them."""

    def refuse(content: dict[str, Any]) -> None:
        for key, name in content.items():
            is_class = key.replace("_", "").lower() in ("pythonclassname", "type") and isinstance(
                name, str
            )
            if is_class and not name.startswith("tensorflow_datasets."):
                raise ValueError(
                    f"its features.json names the class {name!r:.80}, not one of TensorFlow Datasets"
                )

    for file in _files_of_versions(folder, "features.json"):
        json.loads(file.read_text(encoding="utf-8"), object_hook=refuse)
