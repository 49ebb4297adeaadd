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
METADATA_TIMEOUT = 2.0  # seconds of each try


@dataclasses.dataclass(frozen=True)
class Cluster:
    """One process among those of a run."""

    source: str = ""  # which platform said so; "" for a single process
    coordinator: str = ""  # HOST or HOST:PORT of process 0
    processes: int = 1
    process_id: int = 0
    hosts: tuple[str, ...] = ()  # of all processes, in their order, if the platform names them

    @property
    def sentence(self) -> str:
        """What was found, for a person."""
        where = f", process 0 at {self.coordinator}" if self.coordinator else ""
        return f"process {self.process_id} of {self.processes}{where} (from {self.source})"


def detect(*, coordinator: str = "", processes: int | None = None, process_id: int | None = None) -> Cluster:
    """Returns what the flags of these names and the platform say about this process; raises InputError."""
    missing = [flag for flag, value in (("--processes", processes), ("--process-id", process_id)) if value is None]
    has_flags, is_alone = bool(coordinator) or len(missing) < 2, processes == 1
    base = Cluster() if is_alone or (coordinator and not missing) else _platform(os.environ) or Cluster()
    if has_flags and missing and not is_alone and not base.source:
        raise InputError(f"{' and '.join(missing)}: nothing else says which process this is; give them too.")
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
        why = f"{base.source} does not say where that is" if base.source else "several processes need it to meet"
        raise InputError(f"--coordinator=HOST: give the address of process 0; {why}.")
    return cluster


def refuse_part_of_a_slice() -> None:
    """Refuses a single process on one host of a larger slice: its TPU would wait for the others. Raises InputError."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if (platforms and "tpu" not in platforms) or not tpu_is_attached():
        return
    bounds = os.environ.get("TPU_PROCESS_BOUNDS") or os.environ.get("TPU_HOST_BOUNDS") or _tpu_env().get("HOST_BOUNDS")
    hosts = math.prod(map(int, re.findall(r"\d+", bounds or "")))
    if hosts > 1:
        raise InputError(
            f"this is one of the {hosts} hosts of a TPU slice (bounds {bounds}), and only one process was found: its "
            "TPU would wait for the others. Start the same command on every host (gcloud ... ssh --worker=all); for "
            "this host's chips alone set TPU_PROCESS_BOUNDS=1,1,1, TPU_CHIPS_PER_PROCESS_BOUNDS and TPU_VISIBLE_CHIPS."
        )


def tpu_is_attached() -> bool:
    """Returns whether a TPU is on this machine's PCI bus."""
    return any(
        vendor.read_text().strip() == GOOGLE_PCI and vendor.with_name("device").read_text().strip() in TPU_PCI
        for vendor in PCI_DEVICES.glob("*/vendor")
    )


def _platform(environment: Mapping[str, str]) -> Cluster | None:
    """Returns what the first platform that answers says; None for a single process."""
    # Where libtpu finds no TPU, it writes such a text into the variables of its process and so of the children.
    environment = {name: value for name, value in environment.items() if not value.startswith("WARNING: ")}
    platforms = (_gke, _open_mpi, _slurm, _mpich, _tpu_vm)
    cluster = next(filter(None, (ask(environment) for ask in platforms)), None)
    return cluster if cluster and cluster.processes > 1 else None


def _gke(environment: Mapping[str, str]) -> Cluster | None:
    name = next((n for n in ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES") if environment.get(n)), "")
    if not name:
        return None
    addresses = [address.strip() for address in environment[name].split(",")]
    hosts = list(map(_without_port, addresses))
    if not all(hosts):
        raise InputError(f"${name} is {environment[name]!r}: a host in it has no name.")
    if len(hosts) > 1 and not (tpu_is_attached() or environment.get("JAX_FORCE_TPU_INIT")):
        problem = f"${name} names {len(hosts)} hosts of a TPU, and this machine has no TPU chip"
        raise InputError(f"{problem}; unset it, or give --processes=1 to run here alone.")
    worker = _number(environment, "TPU_WORKER_ID", "0" if len(hosts) == 1 else "")
    return _of_slices(f"${name}", hosts, worker, environment)


def _open_mpi(environment: Mapping[str, str]) -> Cluster | None:
    # Such as 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911;tcp6://[fe80::b9b]:43370. Version 5 sets none.
    match = re.search(r"tcp://([^,:;]+)|tcp6://\[([^,\]]+)", environment.get("OMPI_MCA_orte_hnp_uri", ""))
    address = (match[1] or match[2]) if match else ""
    return _launched("Open MPI", address, environment, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")


def _slurm(environment: Mapping[str, str]) -> Cluster | None:
    by_slurm, by_mpi = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"), ("PMI_SIZE", "PMI_RANK")
    is_of_srun = [environment.get(name) for name in by_mpi] == [environment.get(name) for name in by_slurm]
    if "PMI_RANK" in environment and not is_of_srun:  # mpiexec in a Slurm job leaves the variables of its daemon
        return None
    nodes = environment.get("SLURM_STEP_NODELIST", "")
    if not nodes and (count := environment.get("SLURM_JOB_NUM_NODES", "1")) != "1":
        problem = f"this is a Slurm job of {count} nodes, and the command was started on one of them"
        raise InputError(f"{problem}; start it with srun, or give --processes=1 to run here alone.")
    is_listed = "arbitrary" not in environment.get("SLURM_DISTRIBUTION", "")  # then process 0 is on the first node
    return _launched("Slurm", first_node(nodes) if is_listed else "", environment, *by_slurm) if nodes else None


def first_node(nodes: str) -> str:
    """Returns the first name of a Slurm node list such as node[001,007-015]-ib,host2."""
    first = re.match(r"(?:[^,\[\]]|\[[^\],-]+[^\]]*\])+(?=,|$)", nodes)
    if first is None:
        raise InputError(f"$SLURM_STEP_NODELIST is {nodes!r}: not a list of nodes.")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group())


def _mpich(environment: Mapping[str, str]) -> Cluster | None:
    """MPICH and Intel MPI, which do not say where process 0 is."""
    return _launched("MPICH", "", environment, "PMI_SIZE", "PMI_RANK")


def _tpu_vm(environment: Mapping[str, str]) -> Cluster | None:
    if "TPU_SKIP_MDS_QUERY" in environment or not (tpu_is_attached() or environment.get("GCE_METADATA_IP")):
        return None
    key = "worker-network-endpoints"
    endpoints, worker = _metadata(key), _metadata("agent-worker-number")
    if not endpoints or worker is None:
        return None
    hosts = []
    for endpoint in endpoints.strip().split(","):  # "id:port:address", or on newer VMs the address; it may be of IPv6
        host = endpoint if is_ip(endpoint) else re.sub("^[^:]*:[^:]*:", "", endpoint).strip("[]")
        if not host or (":" in host and not is_ip(host)):
            raise InputError(f"the metadata server's {key} holds {endpoint!r}: not an address.")
        hosts.append(host)
    number = _number({"agent-worker-number": worker}, "agent-worker-number")
    return _of_slices("the TPU VM's metadata", hosts, number, {**_tpu_env(), **environment})


def _launched(source: str, first: str, environment: Mapping[str, str], size: str, rank: str) -> Cluster | None:
    """Returns what a launcher's variables say, whose process 0 is on the host `first`; None where it sets none."""
    if rank not in environment:
        return None
    return Cluster(source, _bracketed(first), _number(environment, size), _number(environment, rank))


def _of_slices(source: str, hosts: list[str], worker: int, variables: Mapping[str, str]) -> Cluster:
    """Returns the process of a worker of a slice, which may be one of several slices."""
    slices = _number(variables, "MEGASCALE_NUM_SLICES", "1")
    if slices == 1:
        return Cluster(source, _bracketed(hosts[0]), len(hosts), worker, tuple(hosts))
    process_id = _number(variables, "MEGASCALE_SLICE_ID") * len(hosts) + worker
    first = _without_port(variables.get("MEGASCALE_COORDINATOR_ADDRESS", ""))
    return Cluster(f"{source}, {slices} slices", _bracketed(first), slices * len(hosts), process_id)


def _without_port(address: str) -> str:
    """Returns the host of "HOST", "HOST:PORT", "[IPV6]:PORT" or a bare IPv6 address."""
    return address if is_ip(address) else re.sub(r":\d+$", "", address).strip("[]")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _number(variables: Mapping[str, str], name: str, default: str = "") -> int:
    text = variables.get(name) or default
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
    url, headers = f"http://{server}/computeMetadata/v1/instance/attributes/{key}", {"Metadata-Flavor": "Google"}
    retries = urllib3.Retry(2, backoff_factor=0.5, status_forcelist=range(500, 600))
    try:
        answer = urllib3.request("GET", url, headers=headers, timeout=METADATA_TIMEOUT, retries=retries)
    except urllib3.exceptions.HTTPError:
        return None
    is_google = answer.status == 200 and answer.headers.get("Metadata-Flavor") == "Google"
    return answer.data.decode(errors="replace") if is_google else None
