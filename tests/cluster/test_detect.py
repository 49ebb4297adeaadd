"""Which process of a run this is: each platform's own variables, and jax's own detection on the same ones."""

import os

import pytest
from jax._src import clusters, hardware_utils
from jax._src.clusters import cloud_tpu_cluster
from pods import notebook

from mlm.cluster import detect
from mlm.cluster.detect import Cluster
from mlm.errors import InputError
from tests.support.metadata_server import PLATFORM, MetadataServer, tpu_vm

SLURM = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NODELIST": "tpu[007-010],gpu2", "SLURM_PROCID": "5"}
SLURM |= {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}  # which jax reads
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}  # version 5
OPEN_MPI_4 = OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "1287979008.0;tcp://10.0.0.7,172.17.0.1:33363;tcp6://[fd00::2]:43429"}
HOSTS = ("run-0-0.run", "run-0-1.run", "run-0-2.run", "run-0-3.run")
FORCED = {"JAX_FORCE_TPU_INIT": "1"}  # as on a machine with a TPU, for jax too
GKE = FORCED | {"TPU_WORKER_HOSTNAMES": ",".join(HOSTS), "TPU_WORKER_ID": "2"}
MPICH = {"PMI_SIZE": "4", "PMI_RANK": "3"}
ADDRESSES = FORCED | {"TPU_PROCESS_ADDRESSES": "10.0.0.5:8478,10.0.0.6:8478", "TPU_WORKER_ID": "1"}
ADDRESSES |= {"TPU_PROCESS_PORT": "8478"}
IPV6 = {"TPU_PROCESS_ADDRESSES": "[fd00::5]:8478,[fd00::6]:8478", "TPU_WORKER_ID": "1"}
BARE = {"TPU_PROCESS_ADDRESSES": "fd00::5,fd00::6"}
SLICES = {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1"}
SLICES |= {"MEGASCALE_COORDINATOR_ADDRESS": "run-0-0.run:8080"}
# Where libtpu finds no TPU it sets such texts for its process, and so for the children of that.
UNKNOWN = "WARNING: could not determine TPU worker number, please set env var `TPU_WORKER_ID` manually"


@pytest.fixture(autouse=True)
def nowhere(monkeypatch, tmp_path):
    """No platform but the one that a test sets up, and no TPU."""
    for name in list(os.environ):
        if name.startswith(PLATFORM):
            monkeypatch.delenv(name)
    monkeypatch.setattr(detect, "PCI_DEVICES", tmp_path / "pci")


@pytest.fixture
def platform(monkeypatch):
    return lambda variables: [monkeypatch.setenv(*item) for item in variables.items()]


@pytest.fixture
def tpu(tmp_path, monkeypatch):
    """Four chips of a v4 on the PCI bus, beside another vendor's device and Google's own network card."""
    for slot, (vendor, device) in enumerate([("0x1ae0", "0x005e")] * 4 + [("0x8086", "0x1237"), ("0x1ae0", "0x0042")]):
        folder = tmp_path / "pci" / f"0000:00:0{slot}.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "device").write_text(device + "\n")


def refused(**flags) -> str:
    with pytest.raises(InputError) as caught:
        detect.detect(**flags)
    return str(caught.value)


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        (SLURM, Cluster("Slurm", "tpu007", 8, 5)),
        (OPEN_MPI_4, Cluster("Open MPI", "10.0.0.7", 4, 3)),
        (GKE, Cluster("$TPU_WORKER_HOSTNAMES", "run-0-0.run", 4, 2, hosts=HOSTS)),
        (GKE | SLICES, Cluster("$TPU_WORKER_HOSTNAMES, 2 slices", "run-0-0.run", 8, 6)),
        (GKE | ADDRESSES, Cluster("$TPU_PROCESS_ADDRESSES", "10.0.0.5", 2, 1, hosts=("10.0.0.5", "10.0.0.6"))),
        (GKE | IPV6, Cluster("$TPU_PROCESS_ADDRESSES", "[fd00::5]", 2, 1, hosts=("fd00::5", "fd00::6"))),
        (GKE | IPV6 | BARE, Cluster("$TPU_PROCESS_ADDRESSES", "[fd00::5]", 2, 1, hosts=("fd00::5", "fd00::6"))),
        (GKE | SLURM, Cluster("$TPU_WORKER_HOSTNAMES", "run-0-0.run", 4, 2, hosts=HOSTS)),
        (SLURM | OPEN_MPI_4, Cluster("Open MPI", "10.0.0.7", 4, 3)),  # mpirun in a job: its daemon's variables
    ],
)
def test_a_platform(platform, variables, found):
    platform(variables)
    assert detect.detect() == found


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"TPU_WORKER_HOSTNAMES": "localhost"},
        {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": UNKNOWN},
        {"TPU_WORKER_HOSTNAMES": UNKNOWN},
        SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {key: value for key, value in SLURM.items() if "_STEP_" not in key},  # the shell of a batch script
    ],
)
def test_a_single_process_is_alone(platform, variables):
    platform(variables)
    assert detect.detect() == Cluster()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node001", "node001"), ("node[001,007-015],host2", "node001"), ("rack[3-4]node[08-09]-ib,x", "rack3node08-ib")],
)
def test_first_node_of_a_slurm_list(nodes, first):
    assert detect.first_node(nodes) == first


@pytest.mark.parametrize("nodes", ["[", "node[001", ",node1", "node[]", "node]"])
def test_a_slurm_list_that_is_none(nodes):
    with pytest.raises(InputError, match="SLURM_STEP_NODELIST"):
        detect.first_node(nodes)


def test_flags_replace_what_is_found(platform):
    platform(SLURM)
    assert detect.detect(coordinator="a:1", processes=2, process_id=1) == Cluster("flags", "a:1", 2, 1)
    assert detect.detect(coordinator="a").coordinator == "a"
    assert detect.detect(coordinator="a").sentence == "process 5 of 8, process 0 at a (from Slurm and flags)"
    assert detect.detect(processes=1) == Cluster()


@pytest.mark.parametrize("variables", [{}, {"TPU_SKIP_MDS_QUERY": "1"}])
def test_metadata_that_nobody_shall_ask(platform, request, monkeypatch, variables):
    """Without a TPU, or with one and jax's own variable."""
    monkeypatch.setattr(detect, "_metadata", lambda key: pytest.fail("asked"))
    if variables:
        request.getfixturevalue("tpu")
        assert detect.tpu_is_attached()
    platform(variables)
    assert detect.detect() == Cluster()


def test_mpiexec_in_a_slurm_job(platform):
    """Slurm's variables are those of a batch script's shell, or of the daemon that mpiexec has started on this node."""
    platform(MPICH | {"PMI_RANK": "0", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "2"})
    assert detect.detect(coordinator="a") == Cluster("MPICH and flags", "a", 4, 0)
    platform(MPICH | SLURM)
    assert detect.detect(coordinator="10.0.0.7").source == "MPICH and flags"
    platform({"PMI_RANK": SLURM["SLURM_PROCID"], "PMI_SIZE": "16"})  # by chance the number of its daemon
    assert detect.detect(coordinator="10.0.0.7").processes == 16
    platform({"PMI_SIZE": SLURM["SLURM_STEP_NUM_TASKS"]})  # srun --mpi=pmi2
    assert detect.detect().source == "Slurm"


@pytest.mark.parametrize(
    ("variables", "source"),
    [(SLURM | {"SLURM_DISTRIBUTION": "arbitrary"}, "Slurm"), (OPEN_MPI, "Open MPI"), (MPICH, "MPICH")],
)
def test_where_process_0_is_has_to_be_said(platform, variables, source):
    platform(variables)
    assert "--coordinator=HOST" in refused() and f"{source} does not say" in refused()
    found = detect.detect(coordinator="10.0.0.7")
    assert (found.source, found.coordinator) == (f"{source} and flags", "10.0.0.7")
    assert (found.processes, found.process_id) == ((8, 5) if source == "Slurm" else (4, 3))


@pytest.mark.parametrize(
    ("variables", "flags", "named"),
    [
        ({}, {"coordinator": "a"}, "--processes and --process-id"),
        ({}, {"processes": 2, "process_id": 0}, "--coordinator=HOST"),
        ({}, {"coordinator": "a", "processes": 2, "process_id": 2}, "--process-id=2: must be from 0 to 1"),
        (GKE, {"processes": 2}, "--process-id=2: must be from 0 to 1 (--processes=2, from $TPU_WORKER_HOSTNAMES and"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, {}, "$TPU_WORKER_HOSTNAMES names 2 hosts"),  # and there is no chip
        ({"SLURM_JOB_NUM_NODES": "4", "SLURM_NODEID": "0"}, {}, "a Slurm job of 4 nodes"),
        (GKE | {"TPU_WORKER_ID": "x"}, {}, "$TPU_WORKER_ID is 'x'"),
        (GKE | {"TPU_WORKER_HOSTNAMES": "a,b,"}, {}, "$TPU_WORKER_HOSTNAMES is 'a,b,'"),
        (GKE | SLICES | {"MEGASCALE_SLICE_ID": "2"}, {}, "--process-id=10: must be from 0 to 7"),
        (GKE | SLICES | {"MEGASCALE_COORDINATOR_ADDRESS": ""}, {}, "$TPU_WORKER_HOSTNAMES, 2 slices does not say"),
    ],
)
def test_what_contradicts_itself_is_refused(platform, variables, flags, named):
    platform(variables)
    assert named in refused(**flags)


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize(
    ("addresses", "first"), [(("10.0.0.2", "10.0.0.3"), "10.0.0.2"), (("fd00::2", "fd00::3"), "[fd00::2]")]
)
def test_metadata_of_a_tpu_vm(platform, old, addresses, first):
    with MetadataServer(tpu_vm(addresses, 1, old=old)) as server:
        platform({"GCE_METADATA_IP": server.address})
        assert detect.detect() == Cluster("the TPU VM's metadata", first, 2, 1, hosts=addresses)


@pytest.mark.parametrize(
    ("address", "first"),
    [("10.1.0.2:8080", "10.1.0.2"), ("[fd20::2]:8080", "[fd20::2]"), ("fd20::2", "[fd20::2]"), ("run-0:80", "run-0")],
)
def test_metadata_of_several_slices(platform, address, first):
    slices = {**SLICES, "MEGASCALE_COORDINATOR_ADDRESS": address}
    with MetadataServer(tpu_vm(["10.0.0.2", "10.0.0.3"], 1, **slices)) as server:
        platform({"GCE_METADATA_IP": server.address})
        assert detect.detect() == Cluster("the TPU VM's metadata, 2 slices", first, 4, 3)


def test_a_metadata_server_that_is_busy_is_asked_again(platform):
    with MetadataServer(tpu_vm(["10.0.0.2", "10.0.0.3"], 1), failures=2) as server:
        platform({"GCE_METADATA_IP": server.address})
        assert detect.detect().processes == 2
        assert server.asked[:3] == ["worker-network-endpoints"] * 3


def test_chips_of_jax():
    assert hardware_utils._TPU_PCI_DEVICE_IDS.keys() == detect.TPU_PCI
    assert hardware_utils._GOOGLE_PCI_VENDOR_ID == detect.GOOGLE_PCI


@pytest.mark.parametrize(
    ("variables", "tpu_env", "alone"),
    [
        ({}, {"HOST_BOUNDS": "1,1,4"}, False),
        ({}, {"HOST_BOUNDS": "1,1,1"}, True),
        ({}, {}, True),
        ({"TPU_PROCESS_BOUNDS": "1,1,1"}, {"HOST_BOUNDS": "1,1,4"}, True),
        ({"TPU_HOST_BOUNDS": "2,2,1"}, {}, False),
        ({"JAX_PLATFORMS": "cpu"}, {"HOST_BOUNDS": "1,1,4"}, True),
    ],
)
def test_one_process_on_a_host_of_several_is_refused(tpu, platform, variables, tpu_env, alone):
    """Whether nothing was found, or --processes=1 asks for it: the TPU would wait for the other hosts."""
    with MetadataServer({"tpu-env": tpu_vm([], 0, **tpu_env)["tpu-env"]}) as server:
        platform({"GCE_METADATA_IP": server.address} | variables)
        for flags in ({}, {"processes": 1}):
            if alone:
                assert detect.detect(**flags) == Cluster()
            else:
                assert "one of the 4 hosts of a TPU slice" in refused(**flags)


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("SlurmCluster", SLURM),
        ("OmpiCluster", OPEN_MPI_4),
        ("GkeTpuCluster", GKE),
        ("GkeTpuCluster", GKE | SLICES),
        ("GkeTpuCluster", ADDRESSES),
        ("GceTpuCluster", {}),
        ("GceTpuCluster", SLICES),
    ],
)
def test_jax_finds_the_same(platform, monkeypatch, name, variables):
    kind = next(kind for kind in clusters.ClusterEnv._cluster_types if kind.__name__ == name)
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(kind, "wait_for_coordinator", lambda *_: None, raising=False)  # the names do not resolve
    with MetadataServer(tpu_vm(["10.0.0.2", "10.0.0.3"], 1)) as server:
        platform(variables | ({"GCE_METADATA_IP": server.address} if "Tpu" in name else {}))
        found = detect.detect()
        assert kind.is_env_present()
        assert kind.get_coordinator_address(5, None).rpartition(":")[0] == found.coordinator
        assert (kind.get_process_count(), kind.get_process_id()) == (found.processes, found.process_id)


def test_a_notebook_on_a_host_of_several_is_alone(tpu, platform):
    """Its variables come before what the metadata server says."""
    with MetadataServer(tpu_vm([f"10.0.0.{n}" for n in range(4)], 0, HOST_BOUNDS="1,1,4")) as server:
        platform({"GCE_METADATA_IP": server.address})
        assert detect.detect().processes == 4
        platform(notebook.environment(chips=16, hosts=4))
        assert detect.detect() == Cluster()
