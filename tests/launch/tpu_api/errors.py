"""What the TPU API says when it refuses, as Google words it, under short names. What stands in braces is filled in."""

TYPE = "type.googleapis.com/google.rpc."
EID = "[EID: 0x1bc8f9d790be9142]"
CODES = {
    "INVALID_ARGUMENT": 400, "FAILED_PRECONDITION": 400, "PERMISSION_DENIED": 403, "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409, "RESOURCE_EXHAUSTED": 429, "UNAVAILABLE": 503,
}  # fmt: skip
BAD = "Cloud TPU received a bad request."
CONFIGURATION = "The requested accelerator configuration for accelerator type"
ZONE = "Permission denied on 'locations/{zone}' (or it may not exist)."
RESOURCE = {"@type": f"{TYPE}ResourceInfo", "resourceName": "{resource}"}
VIOLATION = {"subject": "project:{project}", "description": "Quota '{metric}' exhausted. Limit 32 in zone {zone}"}
LOCATION = {"consumer": "projects/{project}", "location": "{zone}", "service": "tpu.googleapis.com"}
# name: (status, message, details) of the answer to a request
REFUSED = {
    "absent": ("NOT_FOUND", "Resource '{resource}' was not found", [RESOURCE]),
    "exists": ("ALREADY_EXISTS", "Resource '{resource}' already exists.", [RESOURCE]),
    "name": ("INVALID_ARGUMENT", f"{BAD} Invalid id '{{name}}' {EID}", []),
    "accelerator": (
        "INVALID_ARGUMENT",
        f'{BAD} {CONFIGURATION}, "{{type}}", could not be found in the zonal accelerator configurations for '
        f'"{{zone}}".; the accelerator {{type}} was not found in zone {{zone}} {EID}',
        [],
    ),
    "in_use": ("FAILED_PRECONDITION", "Queued resource '{resource}' has nodes, or may still get them.", []),
    "quota": (
        "RESOURCE_EXHAUSTED",
        "Quota limit '{metric}' has been exceeded. Limit: 32 in zone {zone}.",
        [{"@type": f"{TYPE}QuotaFailure", "violations": [VIOLATION]}],
    ),
    "permission": (
        "PERMISSION_DENIED",
        ZONE,
        [
            {"@type": f"{TYPE}LocalizedMessage", "locale": "en-US", "message": ZONE},
            {"@type": f"{TYPE}ErrorInfo", "domain": "googleapis.com", "reason": "LOCATION_POLICY_VIOLATED",
             "metadata": LOCATION},
        ],
    ),
    "unavailable": ("UNAVAILABLE", "The service is currently unavailable.", []),
}  # fmt: skip
# name: (code, message) of an operation's error, and of a queued resource's failedData
FAILED = {
    "stockout": (8, 'There is no more capacity in the zone "{zone}"; you can try in another zone where Cloud TPU Nodes '
                 f"are offered (see https://cloud.google.com/tpu/docs/regions) {EID}"),
    "internal": (13, "an internal error has occurred"),
    "failed": (8, f"Insufficient reserved capacity. Contact customer support to increase your reservation. {EID}"),
}  # fmt: skip


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(self, error: dict) -> None:
        super().__init__(error["message"])
        self.error = error


def named(kind: str, **texts: object) -> dict:
    """Returns an error of REFUSED or FAILED, filled in."""
    if kind in FAILED:
        code, message = FAILED[kind]
        return {"code": code, "message": message.format_map(texts)}
    status, message, details = REFUSED[kind]
    error = {"code": CODES[status], "message": message, "status": status} | ({"details": details} if details else {})
    return _filled(error, texts)


def _filled(value: object, texts: dict[str, object]) -> object:
    if isinstance(value, dict):
        return {key: _filled(one, texts) for key, one in value.items()}
    if isinstance(value, list):
        return [_filled(one, texts) for one in value]
    return value.format_map(texts) if isinstance(value, str) else value
