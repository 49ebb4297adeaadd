"""A small TPU API: nodes and queued resources that take time, operations, and errors.

Time is counted in looks: whoever gets a resource brings it to its next state.
"""

import os
import re
import threading
import time

HOSTS = {"v4-8": 1, "v4-16": 2, "v4-32": 4}
VERBS = {"GET": "describe", "POST": "create", "DELETE": "delete", "PATCH": "update"}
PATH = re.compile(
    r"/(?:v2|v2alpha1)/(projects/[^/]+/locations/[^/]+)/(nodes|queuedResources|operations)(?:/([^/:]+))?(?::(\w+))?"
)
# what it says when it refuses, as Google words it: (code, status, message)
REFUSED = {
    "absent": (404, "NOT_FOUND", "Resource '{resource}' was not found"),
    "exists": (409, "ALREADY_EXISTS", "Resource '{resource}' already exists."),
    "busy": (
        400,
        "FAILED_PRECONDITION",
        "Resource '{resource}' still has its node; delete that first, or use force.",
    ),
    "quota": (429, "RESOURCE_EXHAUSTED", "Quota limit 'TPUPerZone' has been exceeded. Limit: 32."),
    "unavailable": (503, "UNAVAILABLE", "The service is currently unavailable."),
}
# the error of an operation, and of a queued resource that fails
FAILED = {
    "stockout": {"code": 8, "message": "There is no more capacity in the zone; try another one."},
    "failed": {"code": 8, "message": "Insufficient reserved capacity. Contact customer support."},
}


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(self, kind: str, resource: str) -> None:
        code, status, message = REFUSED[kind]
        message = message.format(resource=resource)
        super().__init__(message)
        self.error = {"code": code, "status": status, "message": message}


class Cloud:
    """The resources, and the answers to requests."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.tables = {"nodes": {}, "queuedResources": {}, "operations": {}}
        self.nodes = self.tables["nodes"]
        self.queued = self.tables["queuedResources"]
        self.faults: list[list[str]] = []  # [verb, what the next such request meets]
        self.addresses = [f"127.0.0.{number}" for number in range(1, 5)]

    def begin_hosts(self, name: str, count: int) -> None:
        """Starts the hosts of a node; for who has some."""

    def end_hosts(self, name: str) -> None:
        """Ends the hosts of a node at once."""

    def add_fault(self, verb: str, fault: str, times: int = 1) -> None:
        self.faults += [[verb, fault]] * times

    def request(
        self, method: str, path: str, query: dict[str, str] | None = None, body: dict | None = None
    ) -> dict:
        """Returns the answer to a request. Raises ApiError."""
        if path.startswith("/compute/v1/projects/"):  # before it goes by ssh
            project = path.rpartition("/")[2]
            return {"name": project, "commonInstanceMetadata": {"fingerprint": "eA=="}}
        parent, kind, name, verb = PATH.fullmatch(path).groups()
        query = query or {}
        name = name or query.get("nodeId") or query.get("queuedResourceId")
        verb = verb or VERBS[method]
        with self.lock:
            if kind == "operations":
                return self.tables[kind][name]
            resource = f"{parent}/{kind}/{name}"
            fault = self._fault(verb)
            if fault in REFUSED:
                raise ApiError(fault, resource)
            if verb == "create":
                error = self._create(kind, name, resource, body, fault)
                return self._operation(kind, name, resource, error)
            self._look(kind, name)
            found = self.tables[kind].get(name)
            if found is None:
                raise ApiError("absent", resource)
            if verb == "describe":
                return _public(found)
            if verb == "getGuestAttributes":
                ids = [worker for worker in body.get("workerIds", []) if worker]
                ids = ids or range(HOSTS[found["acceleratorType"]])
                return {"guestAttributes": [_guest(found["id"], worker) for worker in ids]}
            if verb == "update":
                self.nodes[name] |= {key: body[key] for key in query["updateMask"].split(",")}
            else:
                is_forced = query.get("force", "").lower() == "true"
                if kind != "nodes" and not is_forced and found["_node"]["_name"] in self.nodes:
                    raise ApiError("busy", resource)
                del self.tables[kind][name]
                node = name if kind == "nodes" else found["_node"]["_name"]
                self.nodes.pop(node, None)
                self.end_hosts(node)
            return self._operation(kind, name, resource)

    def preempt(self, name: str) -> None:
        """Takes a node away: its hosts are gone at once, its queued resource is SUSPENDED."""
        with self.lock:
            self.nodes[name]["state"] = "PREEMPTED"
            if request := self.queued.get(
                self.nodes[name].get("queuedResource", "").rpartition("/")[2]
            ):
                request["state"] = {"state": "SUSPENDED", "stateInitiator": "SERVICE"}
            self.end_hosts(name)

    def _fault(self, verb: str) -> str | None:
        for fault in self.faults:
            if fault[0] == verb:
                self.faults.remove(fault)
                return fault[1]
        return None

    def _create(
        self, kind: str, name: str, resource: str, body: dict, fault: str | None
    ) -> dict | None:
        """Creates a resource, unless an error comes of it, which is returned."""
        if name in self.tables[kind]:
            raise ApiError("exists", resource)
        if kind == "nodes":
            if fault:
                return FAILED[fault]
            self.nodes[name] = _node(body, name, resource) | {"_next": ["CREATING", "READY"]}
            return None
        (spec,) = body["tpu"]["nodeSpec"]
        parent = resource.partition("/queuedResources")[0]
        node = _node(spec["node"], spec["nodeId"], f"{parent}/nodes/{spec['nodeId']}")
        self.queued[name] = body | {
            "name": resource,
            "state": {"state": "ACCEPTED"},
            "_next": ["WAITING_FOR_RESOURCES", "FAILED" if fault else "PROVISIONING", "ACTIVE"],
            "_node": node | {"queuedResource": resource},
        }
        return None

    def _look(self, kind: str, name: str) -> None:
        """Lets time pass for a resource that somebody looks at."""
        resource = self.tables[kind].get(name, {})
        if "queuedResource" in resource:  # it becomes ready with its request
            self._look("queuedResources", resource["queuedResource"].rpartition("/")[2])
            return
        if not resource.get("_next"):
            return
        state = resource["_next"].pop(0)
        if kind == "nodes":
            resource["state"] = state
            if state == "READY":
                self._make_ready(resource)
            return
        resource["state"] = {"state": state}
        node = resource["_node"]
        if state == "FAILED":
            resource["state"]["failedData"] = {"error": FAILED["failed"]}
            resource["_next"] = []
        elif state in ("PROVISIONING", "ACTIVE"):
            self.nodes[node["_name"]] = node
        if state == "ACTIVE":
            self._make_ready(node)

    def _make_ready(self, node: dict) -> None:
        count = HOSTS[node["acceleratorType"]]
        node["networkEndpoints"] = [
            {"accessConfig": {"externalIp": address}, "ipAddress": address, "port": 8470}
            for address in self.addresses[:count]
        ]
        self.begin_hosts(node["_name"], count)
        node["state"] = "READY"

    def _operation(self, kind: str, name: str, resource: str, error: dict | None = None) -> dict:
        """Returns an operation, which is done once it is looked at, whatever then becomes of its resource."""
        number = f"operation-{time.time_ns()}-{os.urandom(4).hex()}"
        parent = resource.partition(f"/{kind}")[0]
        operation = {"name": f"{parent}/operations/{number}", "metadata": {"target": resource}}
        node = self.nodes.get(name) if kind == "nodes" else None
        message = "cloud.tpu.v2.Node" if node else "protobuf.Empty"
        response = {"@type": f"type.googleapis.com/google.{message}", **_public(node or {})}
        result = {"error": error} if error else {"response": response}
        self.tables["operations"][number] = operation | result | {"done": True}
        return operation


def _node(body: dict, name: str, resource: str) -> dict:
    number = str(time.time_ns())
    return body | {"name": resource, "id": number, "state": "CREATING", "_name": name}


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
