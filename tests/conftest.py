"""All strictness in one place: eight CPU devices, our own warnings are errors, one cache of compiled programs."""

import gc
import multiprocessing.process
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import uuid

from tests import QUICK_COMPILE, ROOT

sys.path.insert(0, str(ROOT / "launch"))  # its `pods` are imported as its programs do
CACHE = pathlib.Path(tempfile.gettempdir()) / f"mlm-tests-xla-{os.getuid()}"
os.environ["JAX_PLATFORMS"] = "cpu"
DEVICES = "--xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] = f"{QUICK_COMPILE} {DEVICES}"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)  # subprocesses of the tests inherit it
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"
# for the emulator of Google Cloud Storage, which speaks no gRPC either
os.environ["FSSPEC_GCS_TOKEN"] = "anon"
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

# Where it is ignored, as in a shell's background job, the processes of the tests would ignore it too.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup

import jax
import pytest

jax.devices()  # reads XLA_FLAGS
# libtpu, loaded later, aborts on a flag of the CPU that it does not know
os.environ["XLA_FLAGS"] = DEVICES


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A worker for each core with 4 GB, and one more for tests that wait for clocks and sockets."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    waiting = 0 if "not standard" in config.option.markexpr else 1
    return max(1, min((os.cpu_count() or 1) + waiting, memory // (4 << 30)))


def pytest_configure(config: pytest.Config) -> None:
    CACHE.mkdir(exist_ok=True)
    config.addinivalue_line(
        "markers", "standard: needs PyTorch, a process, a cloud or Dask, or more than a few seconds"
    )
    config.addinivalue_line(
        "markers", "slow: a proof that takes minutes; bash tests/run.sh --slow runs these"
    )
    config.addinivalue_line(
        "markers", "longest: a test that starts before the others, which then don't wait for it"
    )
    config.addinivalue_line(
        "markers", "hosts: a proof on hosts of its own; bash tests/pod.sh runs these, as root"
    )
    config.addinivalue_line("filterwarnings", "error:::mlm")
    config.addinivalue_line("filterwarnings", "error:::tests")
    # jaxlib 0.12's own
    config.addinivalue_line("filterwarnings", "ignore:builtin type:DeprecationWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts what is marked `longest` first; all else stays in its order."""
    items.sort(key=lambda item: item.get_closest_marker("longest") is None)


@pytest.fixture(autouse=True)
def quick_tests_start_no_process(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are to be waited for: what starts a process is marked `standard`."""
    if not any(request.node.get_closest_marker(name) for name in ("standard", "slow", "hosts")):
        start = subprocess.Popen.__init__

        def refuse(self, args=None, *more, **kwargs):
            # milliseconds: a run's commit, and TensorFlow's import
            if not args or args[0] not in ("git", "uname"):
                pytest.fail(f"a quick test starts a process, {args or self}: mark it `standard`")
            start(self, args, *more, **kwargs)

        monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
        monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)


@pytest.fixture(autouse=True, scope="session")
def eight_devices() -> None:
    assert jax.device_count() == 8, (
        "the tests need eight CPU devices: something imported jax before tests/conftest.py"
    )
    # what is imported by now stays: a twentieth of the time went into looking through it for garbage
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


# What several rooms test with, made once a session: real text, what is made of it, and small models.


@pytest.fixture(scope="session")
def texts() -> list[str]:
    from tests.support import corpora

    return corpora.real_texts()


@pytest.fixture(scope="session")
def tokenizer_folder(texts, tmp_path_factory) -> str:
    from tests.support import corpora

    return corpora.train_tokenizer(texts, tmp_path_factory.mktemp("tokenizer") / "unigram")


@pytest.fixture(scope="session")
def manifest(texts, tokenizer_folder, tmp_path_factory):
    """Of shards that are there to be read; a test that damages them copies the folder first."""
    from tests.support import corpora

    return corpora.write_shards(
        texts[:400], tmp_path_factory.mktemp("data") / "shards", tokenizer_folder
    )


@pytest.fixture(scope="session")
def web(texts, tokenizer_folder, tmp_path_factory):
    """A second folder of shards for mixtures, smaller than that of `manifest`."""
    from tests.support import corpora

    folder = tmp_path_factory.mktemp("web") / "shards"
    counts = {"train": 2, "validation": 1}
    return corpora.write_shards(texts[400:520], folder, tokenizer_folder, counts=counts)


@pytest.fixture(scope="session")
def family(manifest, tokenizer_folder, tmp_path_factory):
    """The workdir of a run with milestones."""
    from tests.support import trained_family

    return trained_family.train_family(
        tmp_path_factory.mktemp("family") / "run", manifest, tokenizer_folder
    )


@pytest.fixture(scope="session")
def trained_workdir(tmp_path_factory):
    """The workdir of `model`."""
    from tests.support import trained_model

    return trained_model.write_workdir(tmp_path_factory.mktemp("trained") / "small")


@pytest.fixture(scope="session")
def model(trained_workdir):
    """A small masked language model, loaded."""
    from mlm.pretrained import load

    return load.from_workdir(trained_workdir, head=load.LM_HEAD)


@pytest.fixture(scope="session")
def modernbert_folder(model, tmp_path_factory) -> str:
    """A transformers folder of a ModernBERT with the same tokenizer, and rotary bases of its own."""
    from tests.support import trained_model

    return trained_model.write_modernbert(model, tmp_path_factory.mktemp("modernbert") / "model")


@pytest.fixture(scope="session")
def trained_classifier(tmp_path_factory):
    """A small classifier, loaded."""
    from tests.support import trained_classifier

    return trained_classifier.make(tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="session")
def emulator(tmp_path_factory):
    """The address of a stand-in for Google Cloud Storage."""
    from tests.support.bucket import emulating

    with emulating(tmp_path_factory.mktemp("buckets")) as url:
        yield url


@pytest.fixture
def bucket(emulator) -> str:
    """A folder of its own in the bucket."""
    return f"gs://bucket/{uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def one_device():
    """Trainings in this process have one device, and so take a fraction of the time."""
    from tests.support.tiny import meshes_of

    with meshes_of(1):
        yield


@pytest.fixture
def batch():
    """Rows of a tiny model, on the host."""
    from tests.support.tiny import random_batch

    return random_batch()
