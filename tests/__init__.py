import os
import pathlib

ROOT = pathlib.Path(__file__).parents[1]

# Compiling takes most of the tests' time: with these flags a quarter of it, of the same programs.
# With --slow, tests/run.sh asks for the defaults, which users train with.
QUICK_COMPILE = os.environ.get(
    "MLM_TEST_XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
)
