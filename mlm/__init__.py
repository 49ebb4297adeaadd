"""Pretraining of RoBERTa-class masked language models in JAX: from text to a model that is proven equal in PyTorch."""

import glob
import importlib.util
import os

# transformers looks for every framework it knows when it is imported: here it needs Flax alone, and TensorFlow must
# not meet PyTorch in one process. The others keep start-up free of lines that are no one's concern.
os.environ.setdefault("USE_TORCH", "0")
os.environ.setdefault("USE_TF", "0")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

# etils, under orbax and jax's compilation cache, takes TensorFlow's client for gs:// unless it is told not to: with
# this, everything but tf.data's reading of shards goes through gcsfs, and TensorFlow is not imported to save a state.
os.environ.setdefault("EPATH_USE_TF", "false")

# libtpu is installed everywhere, for `plan`. Where there is no TPU, jax would ask the cloud's metadata server for one,
# for a minute.
if not glob.glob("/dev/accel*") and not glob.glob("/dev/vfio/[0-9]*"):
    has_cuda = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
    os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu" if has_cuda and glob.glob("/dev/nvidiactl") else "cpu")
