"""A TPU VM's metadata server, which jax's own detection takes for Google's (tests/cluster/test_detect.py)."""

import http.server
import threading

# the beginnings of what says where a process is: a test sets its own
PLATFORM = (
    "TPU_",
    "MEGASCALE_",
    "SLURM_",
    "OMPI_",
    "PMI_",
    "MPI_LOCAL",
    "JAX_FORCE_TPU",
    "GCE_METADATA_IP",
    "CUDA_VISIBLE_DEVICES",
    "JAX_PLATFORMS",
    "JAX_COORDINATOR",
    "RANK",
    "WORLD_SIZE",
    "FLUX_",
    "PALS_",
    "SM_",
    "CLUSTER_SPEC",
)


class MetadataServer:
    """The attributes of one TPU VM, as Google's metadata server gives them: what is not there is 404, and a request
    without its header 403."""

    def __init__(self, attributes: dict[str, str], *, failures: int = 0, at: str = "127.0.0.1"):
        outer = self
        self.asked: list[str] = []
        self.failures = failures

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                key = self.path.removeprefix("/computeMetadata/v1/instance/attributes/")
                outer.asked.append(key)
                if self.headers.get("Metadata-Flavor") != "Google":
                    return self.answer(403, "Missing Metadata-Flavor:Google header.")
                if outer.failures:
                    outer.failures -= 1
                    return self.answer(503, "")
                return (
                    self.answer(200, attributes[key]) if key in attributes else self.answer(404, "")
                )

            def answer(self, code: int, text: str) -> None:
                self.send_response(code)
                self.send_header("Metadata-Flavor", "Google")
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer((at, 0), Handler)
        self.address = f"{at}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self) -> "MetadataServer":
        return self

    def __exit__(self, *exception) -> None:
        self._server.shutdown()
        self._server.server_close()


def tpu_vm(
    addresses: list[str], worker: int, *, old: bool = True, **tpu_env: str
) -> dict[str, str]:
    """The attributes of a worker of a slice; `old`: the endpoints as triples."""
    endpoints = [f"unknown:8470:{address}" if old else address for address in addresses]
    lines = [f"{key}: '{value}'" for key, value in tpu_env.items()]
    return {
        "worker-network-endpoints": ",".join(endpoints),
        "agent-worker-number": str(worker),
        "tpu-env": "\n".join(["ACCELERATOR_TYPE: 'v4-32'", *lines]),
    }
