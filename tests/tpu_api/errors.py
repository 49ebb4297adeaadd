"""What the TPU API says when it refuses, as Google words it, under short names. A text in braces is filled in."""

TYPE = "type.googleapis.com/google.rpc."
EID = "[EID: 0x1bc8f9d790be9142]"
CODES = {
    "INVALID_ARGUMENT": 400, "FAILED_PRECONDITION": 400, "PERMISSION_DENIED": 403, "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409, "RESOURCE_EXHAUSTED": 429, "INTERNAL": 500, "UNAVAILABLE": 503,
}  # fmt: skip
RESOURCE = [{"@type": f"{TYPE}ResourceInfo", "resourceName": "{resource}"}]


def info(reason: str, domain: str = "googleapis.com", **metadata: str) -> dict:
    """Returns the detail of an error that programs are to read."""
    metadata = {"consumer": "projects/{project}", "service": "tpu.googleapis.com"} | metadata
    return {"@type": f"{TYPE}ErrorInfo", "domain": domain, "reason": reason, "metadata": metadata}


def localized(message: str) -> dict:
    """Returns the detail of an error that people are to read."""
    return {"@type": f"{TYPE}LocalizedMessage", "locale": "en-US", "message": message}


ZONE = "Permission denied on 'locations/{zone}' (or it may not exist)."
API_OFF = (
    "Cloud TPU API has not been used in project {project} before or it is disabled. Enable it by visiting "
    "https://console.developers.google.com/apis/api/tpu.googleapis.com/overview?project={project} then retry. If you "
    "enabled this API recently, wait a few minutes for the action to propagate to our systems and retry."
)
BILLING = (
    "This API method requires billing to be enabled. Please enable billing on project #{project} by visiting "
    "https://console.developers.google.com/billing/enable?project={project} then retry."
)
# name: (status, message, details) of the answer to a request
REFUSED = {
    "absent": ("NOT_FOUND", "Resource '{resource}' was not found", RESOURCE),
    "exists": ("ALREADY_EXISTS", "Resource '{resource}' already exists.", RESOURCE),
    "name": ("INVALID_ARGUMENT", f"Cloud TPU received a bad request. Invalid id '{{name}}' {EID}", []),
    "accelerator": (
        "INVALID_ARGUMENT",
        "Cloud TPU received a bad request. The requested accelerator configuration for accelerator type, "
        '"{type}", could not be found in the zonal accelerator configurations for "{zone}".; the accelerator {type} '
        f"was not found in zone {{zone}} {EID}",
        [],
    ),
    "runtime": (
        "INVALID_ARGUMENT",
        f'Cloud TPU received an invalid argument. The field "RuntimeVersion" cannot be "{{version}}". {EID}',
        [],
    ),
    "network": ("INVALID_ARGUMENT", f"The network projects/{{project}}/global/networks/{{network}} was not found {EID}",
                []),
    "reservation": ("NOT_FOUND", f"Reservation projects/{{project}}/locations/{{zone}}/reservations/- was not found "
                    f"{EID}", []),
    "in_use": ("FAILED_PRECONDITION", "Queued resource '{resource}' is in use: delete its nodes first, or force it. "
               f"{EID}", []),
    "quota": (
        "RESOURCE_EXHAUSTED",
        "Quota limit '{metric}' has been exceeded. Limit: {limit} in zone {zone}.",
        [{"@type": f"{TYPE}QuotaFailure", "violations": [
            {"subject": "project:{project}",
             "description": "Quota '{metric}' exhausted. Limit {limit} in zone {zone}"}]}],
    ),
    "rate": (
        "RESOURCE_EXHAUSTED",
        "Quota exceeded for quota metric 'Mutate requests' and limit 'Mutate requests per minute' of service "
        "'tpu.googleapis.com' for consumer 'project_number:{project}'.",
        [info("RATE_LIMIT_EXCEEDED", quota_limit="MutateRequestsPerMinutePerProject")],
    ),
    "permission": ("PERMISSION_DENIED", ZONE, [localized(ZONE), info("LOCATION_POLICY_VIOLATED", location="{zone}")]),
    "role": (
        "PERMISSION_DENIED",
        "Permission 'tpu.nodes.create' denied on 'projects/{project}/locations/{zone}' (or it may not exist).",
        [info("IAM_PERMISSION_DENIED", "tpu.googleapis.com", permission="tpu.nodes.create")],
    ),
    "act_as": (
        "PERMISSION_DENIED",
        "The principal (user or service account) lacks IAM permission \"iam.serviceAccounts.actAs\" for the resource "
        "\"1-compute@developer.gserviceaccount.com\" (or the resource may not exist).",
        [],
    ),
    "api": ("PERMISSION_DENIED", API_OFF, [localized(API_OFF), info("SERVICE_DISABLED")]),
    "billing": ("PERMISSION_DENIED", BILLING, [localized(BILLING), info("BILLING_DISABLED")]),
    "unavailable": ("UNAVAILABLE", "The service is currently unavailable.", []),
}  # fmt: skip
# name: (code, message) of an operation's error, and of a queued resource's failedData
FAILED = {
    "stockout": (8, 'There is no more capacity in the zone "{zone}"; you can try in another zone where Cloud TPU Nodes '
                 f"are offered (see https://cloud.google.com/tpu/docs/regions) {EID}"),
    "internal": (13, "an internal error has occurred"),
    "taken": (3, f"Cloud TPU received a bad request. update is not supported while in state PREEMPTED {EID}"),
    "failed": (9, f"Insufficient reserved capacity. Contact customer support to increase your reservation. {EID}"),
}  # fmt: skip


class ApiError(Exception):
    """An answer that is an error. body: as it is sent."""

    def __init__(self, error: dict) -> None:
        super().__init__(error["message"])
        self.error = error

    @classmethod
    def named(cls, kind: str, **texts: object) -> "ApiError":
        """Returns an error of REFUSED, filled in."""
        status, message, details = REFUSED[kind]
        error = {"code": CODES[status], "message": message, "status": status} | (
            {"details": details} if details else {}
        )
        return cls(filled(error, texts))


def failure(kind: str, **texts: object) -> dict:
    """Returns an error of FAILED, filled in."""
    code, message = FAILED[kind]
    return filled({"code": code, "message": message}, texts)


def filled(value: object, texts: dict[str, object]) -> object:
    """Returns a value with all texts in it filled in."""
    if isinstance(value, dict):
        return {key: filled(one, texts) for key, one in value.items()}
    if isinstance(value, list):
        return [filled(one, texts) for one in value]
    return value.format_map(texts) if isinstance(value, str) else value
