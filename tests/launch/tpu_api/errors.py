"""What the TPU API says when it refuses, as Google words it, under short names. What stands in braces is filled in."""

# name: (code, status, message) of the answer to a request
REFUSED = {
    "absent": (404, "NOT_FOUND", "Resource '{resource}' was not found"),
    "exists": (409, "ALREADY_EXISTS", "Resource '{resource}' already exists."),
    "quota": (
        429,
        "RESOURCE_EXHAUSTED",
        "Quota limit 'TPUPerZone' has been exceeded. Limit: 32 in zone {zone}.",
    ),
    "permission": (
        403,
        "PERMISSION_DENIED",
        "Permission denied on 'locations/{zone}' (or it may not exist).",
    ),
    "unavailable": (503, "UNAVAILABLE", "The service is currently unavailable."),
}
# name: message of an operation's error, and of a queued resource's failedData
FAILED = {
    "stockout": 'There is no more capacity in the zone "{zone}"; you can try in another zone.',
    "failed": "Insufficient reserved capacity. Contact customer support to increase your reservation.",
}


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(self, error: dict) -> None:
        super().__init__(error["message"])
        self.error = error


def named(kind: str, resource: str) -> dict:
    """Returns an error of REFUSED or FAILED about a resource, projects/P/locations/ZONE/..."""
    texts = {"resource": resource, "zone": resource.split("/")[3]}
    if kind in FAILED:
        return {"code": 8, "message": FAILED[kind].format_map(texts)}
    code, status, message = REFUSED[kind]
    return {"code": code, "message": message.format_map(texts), "status": status}
