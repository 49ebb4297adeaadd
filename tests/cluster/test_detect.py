"""Which process of a run this is: jax's own detection on each platform's own variables, flags, and what is refused."""

import os
import sys
import types

import pytest
from jax._src import cloud_tpu_init
from jax._src.clusters import cloud_tpu_cluster

from mlm import platforms
from mlm.cluster import detect
from mlm.cluster.detect import Cluster
from mlm.errors import InputError
from tests.support.metadata_server import PLATFORM, MetadataServer, tpu_vm

SLURM = {
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "tpu[007-010],gpu2",
    "SLURM_PROCID": "5",
}
SLURM |= {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
SLURM |= {"SLURM_JOB_NUM_NODES": "5"}
# of a batch script
SHELL = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}
SALLOC = SHELL | {
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NODELIST": "node1",
    "SLURM_STEP_NUM_TASKS": "1",
}
MPI_5 = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
MPI_4 = MPI_5 | {
    "OMPI_MCA_orte_hnp_uri": "1287979008.0;tcp://10.0.0.7,172.17.0.1:33363;tcp6://[fd00::2]:43429"
}
# jax waits until the first one has an address
HOSTS = [f"127.0.0.{number}" for number in range(2, 6)]
GKE = {"TPU_WORKER_HOSTNAMES": ",".join(HOSTS), "TPU_WORKER_ID": "2", "TPU_SKIP_MDS_QUERY": "true"}
SLICES = {
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "127.0.0.9:8080",
}
MPICH = {"PMI_SIZE": "4", "PMI_RANK": "3"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1"}
SAGEMAKER = {"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-2"}
VERTEX = {
    "CLUSTER_SPEC": '{"cluster": {"workerpool0": ["a-0:2222"], "workerpool1": ["b-0:2222"]}, "task": {}}'
}


@pytest.fixture(autouse=True)
def nowhere(monkeypatch):
    """No platform but the one that a test sets up, and no TPU."""
    for name in list(os.environ):
        if name.startswith(PLATFORM):
            monkeypatch.delenv(name)
    monkeypatch.setitem(platforms.DEVICES, "tpu", ())


@pytest.fixture
def platform(monkeypatch):
    return lambda variables: [monkeypatch.setenv(*item) for item in variables.items()]


@pytest.fixture
def tpu(monkeypatch, tmp_path):
    """A TPU's device, for us and for jax."""
    (tmp_path / "accel0").touch()
    monkeypatch.setitem(platforms.DEVICES, "tpu", (str(tmp_path / "accel*"),))
    monkeypatch.setattr(cloud_tpu_init, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)


@pytest.fixture
def slice_of_four(tpu, platform):
    """Worker 1 of four, by the metadata server, which is busy at first."""
    with MetadataServer(tpu_vm(HOSTS, 1), failures=2) as server:
        platform({"GCE_METADATA_IP": server.address})
        yield


def refused(**flags) -> str:
    with pytest.raises(InputError) as caught:
        detect.detect(**flags)
    return str(caught.value)


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        (SLURM, Cluster("Slurm", "tpu007", 8, 5)),
        # srun --mpi=pmi2
        (SLURM | {"PMI_SIZE": "8", "PMI_RANK": "5"}, Cluster("Slurm", "tpu007", 8, 5)),
        # as scripts for torch have it
        (SLURM | {"WORLD_SIZE": "8", "RANK": "5"}, Cluster("Slurm", "tpu007", 8, 5)),
        (MPI_4, Cluster("Open MPI", "10.0.0.7", 4, 3)),
        # mpirun in a job: its daemon's variables
        (SLURM | MPI_4, Cluster("Open MPI", "10.0.0.7", 4, 3)),
    ],
)
def test_a_platform_of_jax(platform, variables, found):
    platform(variables)
    assert detect.detect() == found


@pytest.mark.usefixtures("tpu")
@pytest.mark.parametrize(
    ("variables", "found"),
    [
        (GKE, Cluster("GKE's variables", HOSTS[0], 4, 2)),
        (GKE | SLICES, Cluster("GKE's variables", "127.0.0.9", 8, 6)),
        (GKE | {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, Cluster()),
    ],
)
def test_a_pod_of_gke(platform, variables, found):
    with MetadataServer(tpu_vm([], 0)) as server:
        platform(variables | {"GCE_METADATA_IP": server.address})
        assert detect.detect() == found


@pytest.mark.usefixtures("slice_of_four")
def test_a_tpu_vm(platform):
    assert detect.detect() == Cluster("the TPU VM's metadata", HOSTS[0], 4, 1)
    assert detect.detect(coordinator="a", processes=8).sentence == (
        "process 1 of 8, process 0 at a (from the TPU VM's metadata and flags)"
    )


@pytest.mark.usefixtures("slice_of_four")
def test_one_host_of_a_slice_is_alone_only_with_bounds_of_its_own(platform):
    """Else its TPU would wait for the others."""
    assert "one of the 4 hosts of a TPU slice" in refused(processes=1)
    with pytest.raises(InputError, match="one of the 4 hosts"):
        detect.refuse_part_of_a_slice()
    platform({"TPU_PROCESS_BOUNDS": "1,1,1"})
    assert detect.detect() == detect.detect(processes=1) == Cluster()
    platform({"TPU_PROCESS_BOUNDS": "2,2,1", "JAX_PLATFORMS": "cpu"})
    assert detect.detect(processes=1) == Cluster()


@pytest.mark.parametrize(
    "variables",
    [
        {},
        SHELL,
        SALLOC,
        SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"},
        {"RANK": "16"},  # somebody's own
        {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"},
        {"CLUSTER_SPEC": '{"cluster": {"workerpool0": ["a-0:2222"]}}'},
    ],
)
def test_a_single_process_is_alone(platform, variables):
    platform(variables)
    assert detect.detect() == Cluster()


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        (SHELL | {"SLURM_JOB_NUM_NODES": "2"}, "Slurm job of 2 nodes"),
        (SALLOC | {"SLURM_JOB_NUM_NODES": "2"}, "Slurm job of 2 nodes"),
        (TORCHRUN, "torchrun"),
        (SAGEMAKER, "SageMaker"),
        (VERTEX, "Vertex AI"),
        ({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2"} | MPICH, "Flux"),
        ({"PALS_RANKID": "1"}, "PALS"),
        (MPI_5, "Open MPI 5"),
        (MPICH, "mpiexec"),
        (MPICH | SLURM, "mpiexec"),  # in a Slurm job it leaves the variables of its daemon
    ],
)
def test_a_launcher_that_jax_does_not_know_is_refused_unless_flags_say_all(
    platform, variables, named
):
    platform(variables)
    said = refused()
    assert named in said and "--coordinator" in said and "--process" in said
    assert detect.detect(coordinator="a", processes=2, process_id=1) == Cluster("flags", "a", 2, 1)
    assert detect.detect(processes=1) == Cluster()


def test_mpi4py_tells_where_it_is_installed(platform, monkeypatch):
    world = types.SimpleNamespace(
        Get_rank=lambda: 3, Get_size=lambda: 4, bcast=lambda text, root: "node1:64000"
    )
    module = types.ModuleType("mpi4py")
    module.MPI = types.SimpleNamespace(COMM_WORLD=world)
    module.__spec__ = object()
    monkeypatch.setitem(sys.modules, "mpi4py", module)
    platform(MPICH)
    assert detect.detect() == Cluster("mpi4py", "node1", 4, 3)


def test_jax_s_variable_is_the_coordinator(platform):
    platform({"JAX_COORDINATOR_ADDRESS": "10.0.0.2:1234"})
    assert detect.detect(processes=2, process_id=1) == Cluster("flags", "10.0.0.2:1234", 2, 1)
    said = refused()
    assert "JAX_COORDINATOR_ADDRESS" in said and "--processes" in said and "--process-id" in said


@pytest.mark.parametrize(
    ("variables", "flags", "named"),
    [
        ({}, {"coordinator": "a", "processes": 2}, "--process-id"),
        ({}, {"processes": 2, "process_id": 0}, "--coordinator"),
        (
            {},
            {"coordinator": "a", "processes": 2, "process_id": 2},
            "--process-id=2: must be from 0 to 1",
        ),
        (
            SLURM,
            {"processes": 2},
            "--process-id=5: must be from 0 to 1 (--processes=2, from Slurm and flags)",
        ),
        (SLURM | {"SLURM_PROCID": "x"}, {}, "jax can't tell which process this is (ValueError"),
    ],
)
def test_what_contradicts_itself_is_refused(platform, variables, flags, named):
    platform(variables)
    assert named in refused(**flags)
