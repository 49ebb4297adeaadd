"""Which process this is, of how many, and where process 0 is: flags say so, or jax's own detection.

jax knows GKE's variables and a TPU VM's metadata server, Slurm and Open MPI 4, and mpi4py where another MPI started the
processes. Its port and its local devices are not taken: pod.port is the one that firewalls let through, and jax gives
every task of Slurm one GPU, whatever its node has (jax-ml/jax#16788; see `Service`).
"""

import dataclasses
import json
import os

from mlm import platforms
from mlm.errors import InputError

# Importing jax takes a second, so it is asked only where its detection has something to go by.
HINTS = ("TPU_WORKER_ID", "SLURM_", "OMPI_", "GCE_METADATA_IP")
SOURCES = {  # jax's name of a platform: ours
    "gketpu": "GKE's variables",
    "gcetpu": "the TPU VM's metadata",
    "ompi": "Open MPI",
    "slurm": "Slurm",
    "mpi4py": "mpi4py",
}
MPI = ("Open MPI 5", "mpiexec")
# that jax does not know: their variables of a process's number, and of the number of processes
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "Flux": ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    "PALS": ("PALS_RANKID", "PMI_SIZE"),
    "Open MPI 5": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE"),
    "SageMaker": ("SM_CURRENT_HOST", "SM_HOSTS"),
    "Vertex AI": ("CLUSTER_SPEC", "CLUSTER_SPEC"),
}
INTERACTIVE_STEP = "4294967290"  # the id of Slurm's step that is the shell of salloc
WAIT = 600  # seconds that jax waits for the name of process 0's host to resolve


@dataclasses.dataclass(frozen=True)
class Cluster:
    """One process among those of a run."""

    source: str = ""  # which platform said so; "" for a single process
    coordinator: str = ""  # HOST or HOST:PORT of process 0
    processes: int = 1
    process_id: int = 0

    @property
    def sentence(self) -> str:
        """What was found, for a person."""
        where = f", process 0 at {self.coordinator}" if self.coordinator else ""
        return f"process {self.process_id} of {self.processes}{where} (from {self.source})"


def detect(
    *, coordinator: str = "", processes: int | None = None, process_id: int | None = None
) -> Cluster:
    """Returns what the flags of these names and the platform say of this process. Raises InputError."""
    if processes == 1:
        refuse_part_of_a_slice()
        return Cluster()
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS", "")
    is_complete = coordinator and None not in (processes, process_id)
    platform = Cluster() if is_complete else _of_platform(coordinator)
    if not coordinator and processes is None and process_id is None:
        return platform
    if not (is_complete or platform.source):
        raise InputError(
            "--coordinator (or $JAX_COORDINATOR_ADDRESS), --processes and --process-id: the platform does not say "
            "which process this is; give all three, or --processes=1 to run here alone."
        )
    cluster = Cluster(
        source=f"{platform.source} and flags" if platform.source else "flags",
        coordinator=coordinator or platform.coordinator,
        processes=platform.processes if processes is None else processes,
        process_id=platform.process_id if process_id is None else process_id,
    )
    if not 0 <= cluster.process_id < cluster.processes:
        origin = f"(--processes={cluster.processes}, from {cluster.source})"
        last = cluster.processes - 1
        raise InputError(f"--process-id={cluster.process_id}: must be from 0 to {last} {origin}.")
    return cluster


def refuse_part_of_a_slice() -> None:
    """Refuses to be alone on one host of a larger slice: its TPU would wait for the others. Raises InputError."""
    if not platforms.is_here("tpu") or "tpu" not in (os.environ.get("JAX_PLATFORMS") or "tpu"):
        return
    try:
        hosts = _of_jax("not asked for").processes
    except InputError:  # no metadata server, as in a notebook of Colab
        return
    if hosts > 1:
        raise InputError(
            f"this is one of the {hosts} hosts of a TPU slice, and its TPU would wait for the others. Start the same "
            "command on every host (gcloud ... ssh --worker=all); for this host's chips alone set "
            "TPU_PROCESS_BOUNDS=1,1,1, TPU_CHIPS_PER_PROCESS_BOUNDS and TPU_VISIBLE_CHIPS."
        )


def _of_platform(coordinator: str) -> Cluster:
    """Returns what the platform says, a single process where it says nothing. Raises InputError."""
    cluster = Cluster()
    if platforms.is_here("tpu") or any(name.startswith(HINTS) for name in os.environ):
        cluster = _of_jax(coordinator)
    slurm = (os.environ.get("SLURM_PROCID"), os.environ.get("SLURM_STEP_NUM_TASKS"))
    for launcher, (rank, size) in LAUNCHERS.items():
        values = (os.environ.get(rank), os.environ.get(size, "1" if rank == "RANK" else ""))
        # `srun --mpi` sets PMI's variables too, and scripts copy Slurm's into torch's
        is_known = values == slurm or cluster.source == "Open MPI"
        if is_known or values[0] is None or _count(values[1]) == 1:
            continue
        if launcher in MPI and (by_mpi4py := _of_jax(coordinator, "mpi4py")).source:
            return by_mpi4py
        raise InputError(
            f"{launcher} has started this as one of several processes, and jax does not detect that: give "
            f"--coordinator=HOST (of process 0), --processes=N and --process-id=I (here ${size} and ${rank}); "
            "--processes=1 runs it alone."
        )
    return cluster


def _of_jax(coordinator: str, name: str = "") -> Cluster:
    """Returns what the first platform of jax that is there says, or that of a name. Raises InputError.

    coordinator: of process 0, if it is known; jax waits until the name of the one that it finds resolves.
    """
    from jax._src.clusters import ClusterEnv

    # With these bounds libtpu takes this host's chips for a whole slice; jax does not look at them.
    is_own_slice = "1,1,1" in (
        os.environ.get("TPU_PROCESS_BOUNDS"),
        os.environ.get("TPU_HOST_BOUNDS"),
    )
    try:
        for platform in ClusterEnv._cluster_types:
            is_asked = platform.name == name if name else not platform.opt_in_only_method
            if (
                not is_asked
                or platform.name not in SOURCES
                or ("tpu" in platform.name and is_own_slice)
            ):
                continue
            if (platform.name == "slurm" and not _is_slurm_task()) or not platform.is_env_present():
                continue
            processes = platform.get_process_count()
            if processes == 1:
                break
            host = coordinator or platform.get_coordinator_address(WAIT, None).rpartition(":")[0]
            return Cluster(SOURCES[platform.name], host, processes, platform.get_process_id())
    except (ValueError, KeyError, RuntimeError, OSError) as error:
        raise InputError(
            f"jax can't tell which process this is ({type(error).__name__}: {error}); give --coordinator, "
            "--processes and --process-id, or --processes=1 to run here alone."
        ) from None
    return Cluster()


def _is_slurm_task() -> bool:
    """Returns whether srun has started this. Raises InputError in a shell of a job of several nodes."""
    step = os.environ.get("SLURM_STEP_ID", INTERACTIVE_STEP)
    is_task = "SLURM_STEP_NODELIST" in os.environ and step != INTERACTIVE_STEP
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if not is_task and nodes != "1":
        raise InputError(
            f"this is a Slurm job of {nodes} nodes, and the command was started in a shell on one of them; start it "
            "with srun, or give --coordinator, --processes and --process-id, or --processes=1 to run here alone."
        )
    return is_task


def _count(text: str) -> int:
    """Returns how many processes a launcher's variable says: a number, or a list of hosts in JSON."""
    try:
        value = json.loads(text)
        if isinstance(value, dict):
            value = [host for pool in value["cluster"].values() for host in pool]
        return value if isinstance(value, int) else len(value)
    except (ValueError, KeyError, TypeError, AttributeError):
        return 0  # nobody knows
