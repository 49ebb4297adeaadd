"""What gcloud says when it fails, in clear words, and whether it may pass: `explain`. `reason` is for its ssh.

gcloud has five ways to say it (Google Cloud SDK 528): "STATUS: message" with lines of details, the JSON of an operation
that failed, the JSON of an HTTP error within a sentence, "gcloud crashed", and a refusal of its own.
"""

import json
import re

from pods.backend import PodError, SettingsError
from pods.settings import Settings

STATUS = {  # of an operation's "code": google.rpc.Code
    3: "INVALID_ARGUMENT", 4: "DEADLINE_EXCEEDED", 5: "NOT_FOUND", 6: "ALREADY_EXISTS", 7: "PERMISSION_DENIED",
    8: "RESOURCE_EXHAUSTED", 9: "FAILED_PRECONDITION", 13: "INTERNAL", 14: "UNAVAILABLE", 16: "UNAUTHENTICATED",
}  # fmt: skip
GRANT = "gcloud projects add-iam-policy-binding {project} --member=user:YOU --role="
NETWORK = (
    r"^(UNAVAILABLE|DEADLINE_EXCEEDED)|gcloud crashed .\w*(connect|timeout|ssl|protocol|transport|socket|"
    r"oserror(?!.*errno (13|28|30|122)\b)|"  # not of a disk that is full, or that may not be written
    r"servernotfound|proxy|gaierror|incomplete|chunked|maxretry)|'status': 5\d\d|failed to resolve|nameresolution|"
    r"max retries exceeded|connection (refused|reset|aborted)|timed out|network (is unreachable|connectivity)|"
    r"unable to find the server|server unavailable"
)
CAPACITY = (
    "(no more|not enough|insufficient|sufficient|out of|no available)( [a-z]+)? (capacity|resources)|stockout|"
    "resource_pool_exhausted"
)
# (kind, pattern, what a person reads): the first whose pattern matches status and message
KINDS = (
    ("network", NETWORK, "Google Cloud can't be reached: check this machine's network, and try again"),
    ("network", "rate_limit_exceeded|rate limit|per minute|too many requests",
     "{project} asks Google Cloud too often: wait a minute, or poll less often (--every)"),
    ("login", "^UNAUTHENTICATED|auth login|active account selected|current auth tokens|reauthentication",
     "gcloud isn't logged in: gcloud auth login"),
    ("other", "^gcloud crashed", "gcloud itself has failed: try again; if it stays so, gcloud components update"),
    ("stockout", CAPACITY,
     "{zone} has no {accelerator_type} to give right now: try another zone, set queued = true to wait in line, or try "
     "later"),
    ("billing", "billing",
     "{project} has no billing account that pays: link one at "
     "https://console.cloud.google.com/billing/linkedaccount?project={project}"),
    ("api", "has not been used in project|service_disabled|api is not enabled|api not enabled",
     "{api} is off in {project}: gcloud services enable {api} --project={project}"),
    ("permission", "serviceaccountuser|actas|access to service account",
     f"your account may not act as the TPU's service account: {GRANT}roles/iam.serviceAccountUser"),
    ("settings", "permission denied on '?locations/|location_(access|policy)|invalid (zone|location)",
     "zone = {zone} is misspelt, or {project} may not use it: gcloud compute tpus locations list --project={project}"),
    ("permission", r"^PERMISSION_DENIED.*\bcompute\.|required 'compute\.",
     f"gcloud's ssh may not read {{project}}: {GRANT}roles/compute.viewer"),
    ("permission", "^PERMISSION_DENIED|permission denied on|does not have permission|forbidden",
     f"your account may not do this in {{project}}, or there is no such project: {GRANT}roles/tpu.admin"),
    ("quota", "^RESOURCE_EXHAUSTED|quota",
     "the quota of {project} for {accelerator_type} in {zone} is used up: delete what you don't need (`down`, "
     "`clean`), or ask for more at https://console.cloud.google.com/iam-admin/quotas?project={project}"),
    ("exists", "^ALREADY_EXISTS|already exists", "{name} is there already in {zone}"),
    ("internal", "^INTERNAL|internal error",
     "Google Cloud failed internally (code 13): try again in some minutes; if it stays so, the TPU service agent may "
     "be missing: gcloud compute tpus tpu-vm service-identity create --project={project} --zone={zone}"),
    ("settings", "accelerator.*(not found|not be found|not available)",
     "{zone} has no {accelerator_type}: gcloud compute tpus accelerator-types list --project={project} --zone={zone}"),
    ("settings", "(runtime|software).version|runtimeversion",
     "runtime_version is none of {zone}: gcloud compute tpus versions list --project={project} --zone={zone}"),
    ("settings", "reservation",
     "there is no such reservation, or it is not for {accelerator_type} in {zone}: see create_flags in pod.toml"),
    ("settings", "network",
     "the network of pod.toml is not in {project}: see network and create_flags, and gcloud compute networks list"),
    ("settings", "^(INVALID_ARGUMENT|NOT_FOUND|OUT_OF_RANGE|UNIMPLEMENTED):",  # the same request is refused again
     "Google Cloud refuses what pod.toml asks for"),
    ("other", "", "Google Cloud refused"),
)  # fmt: skip
AUTHENTICATED = re.compile(r"\s*This command is authenticated (as|with) .*? property\.?")  # true of every refusal
ENDING = re.compile(r"\n\s*(If you would like to report this issue|To search the help text).*", re.DOTALL)
# what gcloud's ssh says of itself, between ssh's own lines
CHATTER = re.compile(
    r"SSH: |Retrying: SSH|Using ssh batch|Propagating SSH|WARNING: |\.*done\.|Warning: Permanently added"
)
EXITED = re.compile(r"\[\S+\] exited with return code")
CLOSED = re.compile(r"port \d+:? .*(timed out|refused|no route|unreachable)", re.IGNORECASE)


def refusal(stderr: str) -> str:
    """Returns the last error of what gcloud printed, in one line: warnings before it name quotas too."""
    text = stderr[max(stderr.rfind("ERROR: "), 0) :]
    text = AUTHENTICATED.sub("", ENDING.sub("", re.sub(r"^ERROR: (\(\S+\) )?", "", text))).strip()
    if body := re.search(r'\{\s*"(?:code|error)".*\}', text, re.DOTALL):
        try:
            error = json.loads(body[0])
            return refusal_of(error.get("error", error))
        except (json.JSONDecodeError, AttributeError):
            pass
    return " ".join(re.sub(r"'@type': \S+|^\s*- ", "", text, flags=re.MULTILINE).split())


def refusal_of(error: dict) -> str:
    """Returns "STATUS: message" of an error as the API has it: {"code", "message", "status"?}."""
    status = error.get("status") or STATUS.get(error.get("code"), "")
    message = str(error.get("message", "")).strip() or "no reason given"
    return f"{status}: {message}" if status else message


def explain(message: str, settings: Settings, asked_of: str = "") -> PodError:
    """Returns the error for a person.

    message: a `refusal`; asked_of: "nodes/NAME" or "queuedResources/NAME" if that alone was asked for.
    """
    said = f"(gcloud: {message.rstrip('.') or 'it said nothing'})"
    if message.startswith("NOT_FOUND: ") and asked_of and re.search(rf"/{asked_of}(?![-\w])", message):
        return PodError(f"{settings.project} has no {settings.name} in {settings.zone}. {said}", "absent")
    api = re.search(r"\b(\w+\.googleapis\.com)", message.replace("type.googleapis.com", ""))
    words = vars(settings) | {"api": api[1] if api else "tpu.googleapis.com"}
    # a project may be called nlp-billing, and a pod my-quota
    nameless = re.sub(r"\b(projects|nodes|queuedResources)/[^/\s'\"]+", r"\1/-", message)
    kind, _, sentence = next(row for row in KINDS if re.search(row[1], nameless, re.IGNORECASE))
    sentence = f"{sentence.format_map(words)}. {said}"
    return SettingsError(sentence) if kind == "settings" else PodError(sentence, kind)


def reason(stderr: str) -> str:
    """Returns why ssh failed, or gcloud that runs it: gcloud's last error, or what ssh said before it ended."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [i for i, line in enumerate(lines) if line.startswith("ERROR: ") and not EXITED.search(line)]
    if errors:
        return refusal("\n".join(lines[errors[-1] :])).rstrip(".")
    said = [line for line in lines if not CHATTER.match(line) and not EXITED.search(line)]
    return said[-1].rstrip(".") if said else "it said nothing"


def advice(reasons: str, settings: Settings) -> str:
    """Returns what to do where ssh can't connect for these reasons, "" where nothing is known."""
    if CLOSED.search(reasons):
        network = settings.network or "default"
        return (
            f"Port 22 is closed from here: gcloud compute firewall-rules create allow-ssh --project={settings.project} "
            f"--network={network} --allow=tcp:22 --source-ranges=YOUR_ADDRESS/32; from a machine in that network, "
            'ssh_flags = ["--internal-ip"]; for hosts without outside addresses, track = "alpha" and ssh_flags = '
            '["--tunnel-through-iap"] (launch/README.md, "ssh").'
        )
    if "Permission denied (publickey" in reasons:
        return (
            "The host does not know the key yet, or not this user: try again in a minute; with OS Login, set user, and "
            "have the role roles/compute.osAdminLogin."
        )
    return ""
