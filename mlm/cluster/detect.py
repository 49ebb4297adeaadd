"""Which process this is, of how many, and where process 0 is: asked of the platform, once (see launch/README.md)."""

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

from mlm.cluster.ports import is_ip
from mlm.errors import InputError

# Variables and metadata keys are those of jax's own detection (jax/_src/clusters).
GOOGLE_PCI = "0x1ae0"
TPU_PCI = {"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"}  # jax/_src/hardware_utils.py
PCI_DEVICES = Path("/sys/bus/pci/devices")
LIBTPU_PORT = 8471  # between the hosts of a slice
METADATA_TIMEOUT = 2.0  # seconds of each try
METADATA_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Cluster:
    """One process among those of a run."""

    source: str = ""  # which platform said so; "" for a single process
    coordinator: str = ""  # HOST or HOST:PORT of process 0
    processes: int = 1
    process_id: int = 0
    local_processes: int = 1  # on this machine, as far as the platform says it
    local_id: int = 0
    hosts: tuple[str, ...] = ()  # of all processes, in their order, if the platform names them

    @property
    def sentence(self) -> str:
        """What was found, for a person."""
        where = f", process 0 at {self.coordinator}" if self.coordinator else ""
        return f"process {self.process_id} of {self.processes}{where} (from {self.source})"


def detect(*, coordinator: str = "", processes: int | None = None, process_id: int | None = None) -> Cluster:
    """Returns what the flags of these names and the platform say about this process; raises InputError."""
    flags = {"coordinator": coordinator or None, "processes": processes, "process_id": process_id}
    missing = [f"--{name.replace('_', '-')}" for name in ("processes", "process_id") if flags[name] is None]
    has_flags, is_alone = any(value is not None for value in flags.values()), processes == 1 and not process_id
    platform = None if is_alone or None not in flags.values() else _platform(os.environ)
    if has_flags and missing and not is_alone and not platform:
        raise InputError(f"{' and '.join(missing)}: nothing else says which process this is; give them too.")
    base = platform or Cluster()
    cluster = dataclasses.replace(
        base,
        coordinator=coordinator or base.coordinator,
        processes=base.processes if processes is None else processes,
        process_id=base.process_id if process_id is None else process_id,
        source=" and ".join(filter(None, (base.source, "flags" if has_flags else ""))),
    )
    if not 0 <= cluster.process_id < cluster.processes:
        origin = f"(--processes={cluster.processes}, from {cluster.source})"
        raise InputError(f"--process-id={cluster.process_id}: must be from 0 to {cluster.processes - 1} {origin}.")
    if cluster.processes == 1:
        refuse_part_of_a_slice()
        return Cluster()
    if not cluster.coordinator:
        why = f"{base.source} does not say where that is" if platform else "several processes need it to meet"
        raise InputError(f"--coordinator=HOST: give the address of process 0; {why}.")
    return cluster


def refuse_part_of_a_slice() -> None:
    """Refuses a single process on one host of a larger slice: its TPU would wait for the others. Raises InputError."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if (platforms and "tpu" not in platforms) or not tpu_is_attached():
        return
    name = next((n for n in ("TPU_PROCESS_BOUNDS", "TPU_HOST_BOUNDS") if os.environ.get(n)), "")
    bounds = os.environ[name] if name else _tpu_env().get("HOST_BOUNDS", "")
    hosts = math.prod(int(part) for part in bounds.split(",") if part.strip().isdecimal())
    if hosts > 1:
        raise InputError(
            f"this is one of the {hosts} hosts of a TPU slice ({name or 'HOST_BOUNDS'} = {bounds}), and only one "
            "process was found: its TPU would wait for the others. Start the same command on every host (gcloud ... "
            "ssh --worker=all); for the chips of this host alone set TPU_PROCESS_BOUNDS=1,1,1, "
            "TPU_CHIPS_PER_PROCESS_BOUNDS and TPU_VISIBLE_CHIPS."
        )


def tpu_is_attached() -> bool:
    """Returns whether a TPU is on this machine's PCI bus."""
    return any(
        vendor.read_text().strip() == GOOGLE_PCI and vendor.with_name("device").read_text().strip() in TPU_PCI
        for vendor in PCI_DEVICES.glob("*/vendor")
    )


def libtpu_ports(environment: Mapping[str, str] = os.environ) -> set[int]:
    """Returns the ports on which libtpu's own processes talk."""
    named = [environment.get("TPU_PROCESS_PORT", "")]
    named += [address.rpartition(":")[2] for address in environment.get("TPU_PROCESS_ADDRESSES", "").split(",")]
    return {LIBTPU_PORT} | {int(port) for port in named if port.isdecimal()}


def gpus_of(cluster: Cluster, environment: Mapping[str, str] = os.environ) -> list[int] | None:
    """Returns this process's part of the GPUs that it can see, None for all: processes on a machine divide them."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    count = len(visible.split(",")) if visible else len(list(Path("/dev").glob("nvidia[0-9]*")))
    per_process = count // cluster.local_processes
    if cluster.local_processes == 1 or not per_process or count == 1:
        return None
    return list(range(cluster.local_id * per_process, (cluster.local_id + 1) * per_process))


def _platform(environment: Mapping[str, str]) -> Cluster | None:
    """Returns what the first platform that answers says; None for a single process."""
    # Where libtpu finds no TPU, it writes such a text into the variables of its process and so of the children.
    environment = {name: value for name, value in environment.items() if not value.startswith("WARNING: ")}
    platforms = (_gke, _slurm, _open_mpi, _pmi, _tpu_vm)
    cluster = next(filter(None, (ask(environment) for ask in platforms)), None)
    return cluster if cluster and cluster.processes > 1 else None


def _gke(environment: Mapping[str, str]) -> Cluster | None:
    name = next((n for n in ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES") if environment.get(n)), "")
    if not name:
        return None
    hosts = [address.rpartition(":")[0] or address for address in environment[name].split(",")]
    if len(hosts) > 1 and "TPU_WORKER_ID" not in environment:
        raise InputError(f"${name} names {len(hosts)} hosts, and $TPU_WORKER_ID does not say which this is; set it.")
    if len(hosts) > 1 and not (tpu_is_attached() or environment.get("JAX_FORCE_TPU_INIT")):
        problem = f"${name} names {len(hosts)} hosts of a TPU, and this machine has no TPU chip"
        raise InputError(f"{problem}; unset it, or give --processes=1 to run here alone.")
    return _of_slices(f"${name}", hosts, _number(environment, "TPU_WORKER_ID", "0"), environment)


def _slurm(environment: Mapping[str, str]) -> Cluster | None:
    # Under mpirun in a Slurm job the variables are those of the daemon that mpirun has started.
    by_mpi, by_slurm = ("PMI_RANK", "PMI_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    is_of_srun = [environment.get(name) for name in by_mpi] == [environment.get(name) for name in by_slurm]
    if "OMPI_COMM_WORLD_RANK" in environment or ("PMI_RANK" in environment and not is_of_srun):
        return None
    if not environment.get("SLURM_STEP_NODELIST"):
        nodes = environment.get("SLURM_JOB_NUM_NODES", "1")
        if nodes != "1":
            problem = f"this is a Slurm job of {nodes} nodes, and the command was started on one of them"
            raise InputError(f"{problem}; start it with srun, or give --processes=1 to run here alone.")
        return None
    per_node: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):  # such as 2(x3),1
        tasks, repeat = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part).groups()
        per_node += [int(tasks)] * int(repeat or 1)
    node, names = _number(environment, "SLURM_NODEID", "0"), ("STEP_NUM_TASKS", "PROCID", "LOCALID")
    processes, process_id, local_id = (_number(environment, f"SLURM_{name}") for name in names)
    here = per_node[node] if node < len(per_node) else 1
    is_listed = "arbitrary" not in environment.get("SLURM_DISTRIBUTION", "")  # then process 0 is on the first node
    first = first_node(environment["SLURM_STEP_NODELIST"]) if is_listed else ""
    return Cluster("Slurm", first, processes, process_id, here, local_id)


def first_node(nodes: str) -> str:
    """Returns the first name of a Slurm node list such as node[001,007-015]-ib,host2."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes).group()
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def _open_mpi(environment: Mapping[str, str]) -> Cluster | None:
    if "OMPI_COMM_WORLD_RANK" not in environment:
        return None
    numbers = (_number(environment, f"OMPI_COMM_WORLD_{name}") for name in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK"))
    # Such as 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911;tcp6://[fe80::b9b]:43370. Version 5 sets none.
    uri = environment.get("OMPI_MCA_orte_hnp_uri", "")
    match = re.search(r"tcp://([^,:;]+)", uri) or re.search(r"tcp6://\[([^,\]]+)", uri)
    address = match[1] if match else ""
    return Cluster("Open MPI", f"[{address}]" if ":" in address else address, *numbers)


def _pmi(environment: Mapping[str, str]) -> Cluster | None:
    """MPICH and Intel MPI, which do not say where process 0 is."""
    if "PMI_RANK" not in environment:
        return None
    names = {"PMI_SIZE": "", "PMI_RANK": "", "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}
    return Cluster("MPICH", "", *(_number(environment, name, default) for name, default in names.items()))


def _tpu_vm(environment: Mapping[str, str]) -> Cluster | None:
    if "TPU_SKIP_MDS_QUERY" in environment or not (tpu_is_attached() or environment.get("GCE_METADATA_IP")):
        return None
    endpoints, worker = _metadata("worker-network-endpoints"), _metadata("agent-worker-number")
    if not endpoints or worker is None:
        return None
    hosts = [_address(endpoint) for endpoint in endpoints.strip().split(",")]
    number = _number({"agent-worker-number": worker}, "agent-worker-number")
    return _of_slices("the TPU VM's metadata", hosts, number, {**_tpu_env(), **environment})


def _address(endpoint: str) -> str:
    """Returns the host of "id:port:address", or of an address alone as on newer VMs; it may be one of IPv6."""
    parts = [endpoint] if is_ip(endpoint) else endpoint.split(":", 2)
    address = parts[-1].strip("[]")
    if len(parts) == 2 or not address or (":" in address and not is_ip(address)):
        raise InputError(f"the metadata server's worker-network-endpoints holds {endpoint!r}: not an address.")
    return address


def _of_slices(source: str, hosts: list[str], worker: int, variables: Mapping[str, str]) -> Cluster:
    """Returns the process of a worker of a slice, which may be one of several slices."""
    if not 0 <= worker < len(hosts):
        raise InputError(f"{source} names {len(hosts)} hosts, and this one is number {worker}: they contradict.")
    slices = _number(variables, "MEGASCALE_NUM_SLICES") if variables.get("MEGASCALE_NUM_SLICES") else 1
    if slices == 1:
        first = f"[{hosts[0]}]" if ":" in hosts[0] else hosts[0]
        return Cluster(source, first, len(hosts), worker, hosts=tuple(hosts))
    number, address = _number(variables, "MEGASCALE_SLICE_ID"), variables.get("MEGASCALE_COORDINATOR_ADDRESS", "")
    if not address or not number < slices:
        names = f"_NUM_SLICES = {slices}, MEGASCALE_SLICE_ID = {number}, MEGASCALE_COORDINATOR_ADDRESS = {address!r}"
        raise InputError(f"MEGASCALE{names}: they do not say which slice this is, and where the first one is.")
    source = f"{source}, {slices} slices"
    return Cluster(source, address.partition(":")[0], slices * len(hosts), number * len(hosts) + worker)


def _number(variables: Mapping[str, str], name: str, default: str = "") -> int:
    text = variables.get(name, default)
    if not text.strip().isdecimal():
        name = f"${name}" if name.isupper() else name
        raise InputError(f"{name} is {text!r}: it must be a whole number; it says which process of the run this is.")
    return int(text)


def _tpu_env() -> dict[str, str]:
    """Returns the VM's tpu-env, lines of `KEY: 'value'`."""
    if "TPU_SKIP_MDS_QUERY" in os.environ:
        return {}
    lines = (line.partition(":") for line in (_metadata("tpu-env") or "").splitlines())
    return {key.strip(): value.strip().strip("'") for key, _, value in lines}


def _metadata(key: str) -> str | None:
    """Returns an attribute of this VM; None if there is no such attribute, or no metadata server."""
    import urllib3  # only where there is a TPU

    server = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    url = f"http://{server}/computeMetadata/v1/instance/attributes/{key}"
    headers = {"Metadata-Flavor": "Google"}
    retries = urllib3.Retry(2, backoff_factor=0.5, status_forcelist=range(500, 600))
    try:
        with urllib3.request(
            "GET", url, preload_content=False, headers=headers, timeout=METADATA_TIMEOUT, retries=retries
        ) as answer:
            google = answer.status == 200 and answer.headers.get("Metadata-Flavor") == "Google"
            return answer.read(METADATA_BYTES).decode() if google else None
    except (urllib3.exceptions.HTTPError, ValueError):
        return None
