"""A data set of TensorFlow Datasets, prepared in a folder by code that the readers do not have."""

import pathlib
from collections.abc import Mapping, Sequence

import tensorflow_datasets as tfds


def prepare(
    folder: pathlib.Path,
    splits: Mapping[str, Sequence[dict[str, str]]],
    *,
    config: str = "",
    version: str = "1.0.0",
) -> pathlib.Path:
    """Prepares my_rows[/CONFIG]/VERSION below the folder, of rows of texts, and returns the folder of the version."""

    class MyRows(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        """Some rows."""

        VERSION = tfds.core.Version(version)
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=config, version=version)] if config else []

        def _info(self):
            features = {name: tfds.features.Text() for name in next(iter(splits.values()))[0]}
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, dl_manager):
            return {split: enumerate(rows) for split, rows in splits.items()}

        def _generate_examples(self, rows):
            yield from rows

    builder = MyRows(data_dir=folder)
    builder.download_and_prepare()
    return pathlib.Path(builder.data_dir)
