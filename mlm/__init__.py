"""Pretraining of RoBERTa-class masked language models in JAX: from text to a model that is proven equal in PyTorch."""

import os
import sys

from mlm import platforms

# transformers imports every framework that it finds: it needs Flax alone here, and TensorFlow and PyTorch must not meet
# in one process. The other variables keep irrelevant log lines away.
os.environ.setdefault("USE_TORCH", "0")
os.environ.setdefault("USE_TF", "0")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

# TensorFlow would import Keras 3, and with it pandas and matplotlib: more than a second of every start, for nothing.
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

# orbax and jax's compilation cache use etils, which would import TensorFlow for gs://; with this it uses gcsfs.
os.environ.setdefault("EPATH_USE_TF", "false")

if chosen := platforms.default():
    os.environ.setdefault("JAX_PLATFORMS", chosen)
    if "jax" in sys.modules:  # a file that imports jax before mlm: it has read the variable
        sys.modules["jax"].config.update("jax_platforms", os.environ["JAX_PLATFORMS"])

# A user without a home, as of `docker run --user 54321`: libraries would make a folder named ~ in the current one.
if os.path.expanduser("~").startswith("~"):  # noqa: PTH111
    import atexit
    import shutil
    import tempfile

    os.environ["HOME"] = tempfile.mkdtemp(prefix="mlm-home-")
    atexit.register(shutil.rmtree, os.environ["HOME"], ignore_errors=True)
