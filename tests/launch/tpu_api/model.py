"""A small TPU API: nodes and queued resources that take time, operations, and errors.

Time is counted in looks: whoever gets a resource brings it nearer to its next state.
"""

import os
import re
import time

from tests.launch.tpu_api.errors import FAILED, REFUSED, ApiError, named
from tests.launch.tpu_api.folder import Folder

HOSTS = {"v4-8": 1, "v4-16": 2, "v4-32": 4}
QUEUE = ("ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE")
# What a queued request comes to when its creation meets a fault.
ENDS = {"failed": "FAILED", "stockout": "WAITING_FOR_RESOURCES"}
# folders, gcloud's groups
KINDS = {"nodes": ("nodes", "tpu-vm"), "queuedResources": ("queued", "queued-resources")}
VERBS = {"GET": "describe", "POST": "create", "DELETE": "delete", "PATCH": "update"}
PATH = re.compile(
    r"/(?:v2|v2alpha1)/(projects/[^/]+/locations/[^/]+)/(nodes|queuedResources|operations)(?:/([^/:]+))?(?::(\w+))?"
)


class Request:
    """One request of REST, taken apart."""

    def __init__(self, method: str, path: str, query: dict[str, str], body: dict | None) -> None:
        self.parent, self.kind, name, verb = PATH.fullmatch(path).groups()
        self.name = name or query.get("nodeId") or query.get("queuedResourceId") or ""
        self.verb = verb or (VERBS[method] if self.name else "list")
        self.query = query
        self.body = body or {}
        self.resource = f"{self.parent}/{self.kind}/{self.name}"


class Cloud(Folder):
    """The folder, and the answers to requests."""

    def begin_hosts(self, name: str, addresses: list[str]) -> None:
        """Starts the hosts of a node; for who has some."""

    def end_hosts(self, name: str, keep_disks: bool) -> None:
        """Ends the hosts of a node at once."""

    def request(
        self, method: str, path: str, query: dict[str, str] | None = None, body: dict | None = None
    ) -> dict:
        """Returns the answer to a request. Raises ApiError."""
        if path.startswith("/compute/v1/projects/"):  # before it goes by ssh
            return {
                "name": path.rpartition("/")[2],
                "commonInstanceMetadata": {"fingerprint": "eA=="},
            }
        request = Request(method, path, query or {}, body)
        with self.lock():
            if request.kind == "operations":
                return self.load("operations", request.name)
            kind, group = KINDS[request.kind]
            fault = self.fault(
                f"{group} {request.verb}", {*REFUSED, *FAILED}, request.resource
            ).get("fault")
            if fault in REFUSED:
                raise ApiError(named(fault, request.resource))
            if request.verb == "list":
                return {
                    request.kind: [_public(self._advance(kind, name)) for name in self.all(kind)]
                }
            return (
                self._create(request, fault)
                if request.verb == "create"
                else self._change(request, kind)
            )

    def preempt(self, name: str) -> None:
        """Takes a node away: its hosts are gone at once, its queued resource is SUSPENDED."""
        with self.lock():
            node = self.load("nodes", name) | {"state": "PREEMPTED"}
            self.save("nodes", name, node)
            queued = node.get("queuedResource", "").rpartition("/")[2]
            if request := self.load("queued", queued):
                state = {"state": "SUSPENDED", "stateInitiator": "SERVICE"}
                self.save("queued", queued, request | {"state": state})
            self.end_hosts(name, keep_disks=True)

    def remove_node(self, name: str) -> None:
        """Removes a node with its hosts and their disks."""
        self.end_hosts(name, keep_disks=False)
        self.save("nodes", name, None)

    def _create(self, request: Request, fault: str | None) -> dict:
        if self.load(KINDS[request.kind][0], request.name):
            raise ApiError(named("exists", request.resource))
        if fault and request.kind == "nodes":
            return self._operation(request, named(fault, request.resource))
        (spec,) = (
            request.body["tpu"]["nodeSpec"] if "tpu" in request.body else [{"node": request.body}]
        )
        node = spec["node"] | {
            "name": f"{request.parent}/nodes/{spec.get('nodeId', request.name)}",
            "id": str(time.time_ns()),
            "state": "CREATING",
            "_left": self.settings()["creating_describes"],
        }
        if request.kind == "nodes":
            self.save("nodes", request.name, node)
            return self._operation(request)
        queued = request.body | {
            "name": request.resource,
            "state": {"state": "ACCEPTED"},
            "_left": self.settings()["queue_describes"],
            "_end": ENDS.get(fault, "ACTIVE"),
            "_node": node | {"queuedResource": request.resource},
        }
        self.save("queued", request.name, queued)
        return self._operation(request)

    def _change(self, request: Request, kind: str) -> dict:
        """Answers whatever needs a resource that is there."""
        name = request.name
        resource = self._advance(kind, request.name)
        if resource is None:
            raise ApiError(named("absent", request.resource))
        if request.verb == "describe":
            return _public(resource)
        if request.verb == "getGuestAttributes":
            ids = [worker for worker in request.body.get("workerIds", []) if worker]
            ids = ids or range(HOSTS[resource["acceleratorType"]])
            return {"guestAttributes": [_guest(resource["id"], worker) for worker in ids]}
        if request.verb == "update":
            fields = request.query["updateMask"].split(",")
            self.save(kind, name, resource | {field: request.body[field] for field in fields})
        elif request.verb == "start":
            self.save(
                kind,
                name,
                resource | {"state": "STARTING", "_left": self.settings()["creating_describes"]},
            )
        elif kind == "nodes":
            self.remove_node(name)
        else:
            self.remove_node(resource["_node"]["name"].rpartition("/")[2])
            self.save("queued", name, None)
        return self._operation(request)

    def _operation(self, request: Request, error: dict | None = None) -> dict:
        """Returns an operation, which is done once it is looked at, whatever then becomes of its resource."""
        name = f"operation-{time.time_ns()}-{os.urandom(4).hex()}"
        operation = {
            "name": f"{request.parent}/operations/{name}",
            "metadata": {"target": request.resource, "verb": request.verb},
        }
        node = self.load("nodes", request.name) if request.kind == "nodes" else None
        message = "cloud.tpu.v2.Node" if node else "protobuf.Empty"
        response = {"@type": f"type.googleapis.com/google.{message}", **_public(node or {})}
        result = {"error": error} if error else {"response": response}
        self.save("operations", name, operation | result | {"done": True})
        return operation

    def _advance(self, kind: str, name: str) -> dict | None:
        """Lets time pass for a resource that somebody looks at, and returns it."""
        resource = self.load(kind, name)
        if resource is None:
            return None
        if kind == "queued":
            waits = (
                resource["state"]["state"] in QUEUE[:3]
                and resource["state"]["state"] != resource["_end"]
            )
        else:
            waits = resource["state"] in ("CREATING", "STARTING")
        if waits and "queuedResource" in resource:  # it becomes ready with its request
            self._advance("queued", resource["queuedResource"].rpartition("/")[2])
            return self.load(kind, name)
        if waits:
            resource["_left"] -= 1
            if resource["_left"] < 0:
                self._make_ready(resource) if kind == "nodes" else self._next_in_queue(resource)
            self.save(kind, name, resource)
        return resource

    def _make_ready(self, node: dict) -> None:
        hosts = HOSTS[node["acceleratorType"]]
        addresses = (self.settings()["addresses"] or [f"127.0.0.{i + 1}" for i in range(hosts)])[
            :hosts
        ]
        node["networkEndpoints"] = [
            {"accessConfig": {"externalIp": address}, "ipAddress": address, "port": 8470}
            for address in addresses
        ]
        self.begin_hosts(node["name"].rpartition("/")[2], addresses)
        node["state"] = "READY"

    def _next_in_queue(self, resource: dict) -> None:
        state = QUEUE[QUEUE.index(resource["state"]["state"]) + 1]
        node = resource["_node"]
        # what comes to nothing does so instead
        state = resource["_end"] if state == "ACTIVE" else state
        resource |= {"state": {"state": state}, "_left": self.settings()["queue_describes"]}
        if state == "ACTIVE":
            self._make_ready(node)
        if state in ("PROVISIONING", "ACTIVE"):
            self.save("nodes", node["name"].rpartition("/")[2], node)
        elif state == "FAILED":
            resource["state"]["failedData"] = {"error": named("failed", resource["name"])}
            self.remove_node(node["name"].rpartition("/")[2])


def _public(resource: dict) -> dict:
    return {key: value for key, value in resource.items() if not key.startswith("_")}


def _guest(node: str, worker: int | str) -> dict:
    key = {
        "namespace": "hostkeys",
        "key": "ssh-ed25519",
        "value": "AAAAC3NzaC1lZDI1NTE5AAAAI0+Sf9A",
    }
    host = {"namespace": "guestInventory", "key": "hostname", "value": f"t1v-n-{node}-w-{worker}"}
    return {"queryValue": {"items": [key, host]}}
