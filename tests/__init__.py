import importlib.metadata
import os
import pathlib

from packaging.version import Version

ROOT = pathlib.Path(__file__).parents[1]

# Compiling takes most of the tests' time: with these flags a quarter of it, of the same programs. jaxlib 0.12 knows
# the first alone, and aborts on another. With --slow, tests/run.sh asks for the defaults, which users train with.
FAST = "--xla_backend_optimization_level=0"
if Version(importlib.metadata.version("jaxlib")) < Version("0.12"):
    FAST += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
QUICK_COMPILE = os.environ.get("MLM_TEST_XLA_FLAGS", FAST)
