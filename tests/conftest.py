"""All strictness in one place: eight CPU devices, our own warnings are errors, one cache of compiled programs."""

import os
import pathlib
import signal
import sys
import tempfile

from tests import QUICK_COMPILE

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "launch"))  # its `pods` are imported as its programs do
CACHE = pathlib.Path(tempfile.gettempdir()) / "mlm-tests-xla"
os.environ["JAX_PLATFORMS"] = "cpu"
DEVICES = "--xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] = f"{QUICK_COMPILE} {DEVICES}"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)  # subprocesses of the tests inherit it
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["FSSPEC_GCS_TOKEN"] = "anon"  # for the emulator of Google Cloud Storage, which speaks no gRPC either
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

# Where it is ignored, as in a shell's background job, the processes of the tests would ignore it too.
signal.signal(signal.SIGINT, signal.default_int_handler)

import jax
import pytest

jax.devices()  # reads XLA_FLAGS
os.environ["XLA_FLAGS"] = DEVICES  # libtpu, loaded later, aborts on a flag of the CPU that it does not know

pytest_plugins = [
    "tests.fixtures",
    "tests.fixtures_bucket",
    "tests.fixtures_data",
    "tests.fixtures_pods",
    "tests.trained_family",
    "tests.trained_model",
    "tests.trained_classifier",
]


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more worker than cores, since tests wait for clocks and sockets, if there are 4 GB for each."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min((os.cpu_count() or 1) + 1, memory // (4 << 30)))


# The longest files, the longest first: begun last, one would keep a single worker busy while the others are done.
LONGEST = """
    resume pod step classification torch hosts roberta bench export metrics_hooks evaluate masking attention batches
    bad_input supervise optimizer tpu_runs warm_start priming build evaluation export_classifier run_engine dask_engine
    mixture_runs gcs numbers
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {f"test_{name}": place for place, name in enumerate(LONGEST.split())}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: a proof that takes minutes; bash tests/run.sh --slow runs these")
    config.addinivalue_line("markers", "hosts: a proof on hosts of its own; bash tests/pod.sh runs these, as root")
    config.addinivalue_line("filterwarnings", "error:::mlm")
    config.addinivalue_line("filterwarnings", "error:::tests")


@pytest.fixture(autouse=True, scope="session")
def eight_devices() -> None:
    assert jax.device_count() == 8, "the tests need eight CPU devices: something imported jax before tests/conftest.py"
