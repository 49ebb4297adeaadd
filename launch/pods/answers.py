"""What gcloud says when it fails: Google's sentence first, as it is, and advice where it is sure. It decides nothing.

gcloud has five ways to say it (Google Cloud SDK 528): "STATUS: message" with lines of details, the JSON of an operation
that failed, the JSON of an HTTP error within a sentence, "gcloud crashed", and a refusal of its own.
"""

import json
import re

from pods.backend import PodError
from pods.settings import Settings

STATUS = {  # of an operation's "code": google.rpc.Code
    4: "DEADLINE_EXCEEDED", 7: "PERMISSION_DENIED", 8: "RESOURCE_EXHAUSTED", 13: "INTERNAL", 14: "UNAVAILABLE",
}  # fmt: skip
GRANT = "gcloud projects add-iam-policy-binding {project} --member=user:YOU --role="
QUOTAS = "https://console.cloud.google.com/iam-admin/quotas?project={project}"
NETWORK = (
    r"gcloud crashed .\w*(connect|timeout|ssl|protocol|transport|socket|oserror(?!.*errno (13|28|30|122)\b)|"
    r"servernotfound|proxy|gaierror|incomplete|chunked|maxretry)|failed to resolve|nameresolution|timed out|"
    r"max retries exceeded|connection (refused|reset|aborted)|network is unreachable|unable to find the server"
)
STOCKOUT = (
    r"(no more|not enough|insufficient|sufficient|out of|no available)( \w+)? (capacity|resources)|stockout|"
    r"does not have enough resources|(?<!service is )currently unavailable|resource_pool_exhausted|"
    r"reservation.* (no|not).*resources"
)
# (kind of PodError, pattern of Google's sentence, advice): the first that matches
ADVICE = (
    ("network", NETWORK, "check this machine's network, and try again"),
    ("other", r"^UNAUTHENTICATED|active account selected|current auth tokens|auth login|reauthentication",
     "gcloud auth login"),
    ("other", r"^gcloud crashed", "try again; if it stays so, gcloud components update"),
    ("network", r"rate.?limit|per minute|too many requests", "wait a minute, and try again"),
    ("billing", "billing",
     "link an account that pays: https://console.cloud.google.com/billing/linkedaccount?project={project}"),
    ("other", r"constraints?/[\w.]+|organi[sz]ation policy",
     "an organization policy forbids it: whoever administers the organization can make an exception"),
    ("other", r"has not been used in project|service_disabled|api (is )?not enabled",
     "gcloud services enable tpu.googleapis.com compute.googleapis.com --project={project}"),
    ("other", r"state (PREEMPTED|TERMINATED|SUSPENDED)", "the pod is gone: up, or supervise, gets another"),
    ("other", r"permission.* for accelerator.type|limit: 0\b", "you have no quota for {accelerator_type} in {zone}: "
     f"ask for it at {QUOTAS}, or choose a zone where you have some"),
    ("other", STOCKOUT,
     "{zone} has none to give right now: try another zone, set queued = true to wait in line, or try later"),
    ("other", r"in_use_addresses",
     "the hosts' external addresses: ask for more, or create_flags = [\"--internal-ips\"] (launch/README.md)"),
    ("other", r"quota|^RESOURCE_EXHAUSTED", f"delete what you don't need (down), or ask for more: {QUOTAS}"),
    ("other", r"serviceaccountuser|actas|access to service account", f"{GRANT}roles/iam.serviceAccountUser"),
    ("other", r"permission denied on '?locations/|location_(access|policy)|invalid (zone|location)",
     "zone is misspelt, or closed to you: gcloud compute tpus locations list --project={project}"),
    ("other", r"^PERMISSION_DENIED.*\bcompute\.|required 'compute\.", f"{GRANT}roles/compute.viewer"),
    ("other", r"^PERMISSION_DENIED|does not have permission|forbidden",
     f"if there is such a project: {GRANT}roles/tpu.admin"),
    ("network", r"^(DEADLINE_EXCEEDED|UNAVAILABLE)|'status': 5\d\d|server unavailable",
     "that is Google's side: try again"),
    ("other", r"^INTERNAL|internal error",
     "that is Google's side: try again in some minutes; if it stays so, the TPU service agent may be missing: "
     "gcloud compute tpus tpu-vm service-identity create --project={project} --zone={zone}"),
    ("other", r"accelerator.*(not found|not be found|not available)",
     "gcloud compute tpus accelerator-types list --project={project} --zone={zone}"),
    ("other", r"(runtime|software).version|runtimeversion",
     "gcloud compute tpus versions list --project={project} --zone={zone}"),
    ("other", r"network", "see create_flags in pod.toml, and gcloud compute networks list"),
    ("other", r"", ""),
)  # fmt: skip
# what gcloud's ssh says of itself, between ssh's own lines
CHATTER = re.compile(
    r"^\.+$|SSH: |Retrying: SSH|Using ssh batch|Propagating SSH|WARNING: |\.*done\.|Warning: Permanently added|"
    r"Updating project ssh metadata|@@@|\s+File |Traceback "
)
EXITED = re.compile(r"\[\S+\] exited with return code")
SSH_ADVICE = (  # (pattern of all that ssh said, what to do): the first that matches
    (r"Propagating SSH(?!.*done)", "gcloud is still bringing your key to the hosts: try again in a minute"),
    (r"HOST IDENTIFICATION HAS CHANGED|Host key verification failed",
     "Another machine has this address now: ssh-keygen -R ADDRESS -f ~/.ssh/google_compute_known_hosts"),
    (r"iap|4003|4033|tunnel", "Through IAP: open port 22 to 35.235.240.0/20, and have roles/iap.tunnelResourceAccessor "
     '(launch/README.md, "A network of your own")'),
    (r"port \d+:? .*(timed out|refused|no route|unreachable)",
     "Port 22 is closed from here: gcloud compute firewall-rules create allow-ssh --project={project} "
     "--network=default --allow=tcp:22 --source-ranges=YOUR_ADDRESS/32; from a machine in that network, ssh_flags = "
     '["--internal-ip"]; without outside addresses, track = "alpha" and ssh_flags = ["--tunnel-through-iap"]'),
    (r"Permission denied \(publickey",
     "The key has a passphrase that nobody can be asked for: ssh-add ~/.ssh/google_compute_engine; or the host does "
     "not know it yet: try again in a minute; or, with OS Login, set user, and have roles/compute.osAdminLogin"),
)  # fmt: skip


def refusal(stderr: str) -> str:
    """Returns the last error of what gcloud printed, its first line: warnings before it name quotas too."""
    text = stderr[max(stderr.rfind("ERROR: "), 0) :]
    text = re.sub(r"^ERROR: (\(\S+\) )?", "", text).strip()
    if body := re.search(r'\{\s*"(?:code|error)".*\}', text, re.DOTALL):
        try:
            error = json.loads(body[0])
            return refusal_of(error.get("error", error))
        except (json.JSONDecodeError, AttributeError):
            pass
    return text


def refusal_of(error: dict) -> str:
    """Returns "STATUS: message" of an error as the API has it: {"code", "message", "status"?}."""
    status = error.get("status") or STATUS.get(error.get("code"), "")
    message = str(error.get("message", "")).strip() or "no reason given"
    return f"{status}: {message}" if status else message


def first_line(message: str) -> str:
    """Returns what a refusal begins with, without its full stop."""
    lines = [line.strip() for line in message.splitlines()] or ["gcloud failed, and said nothing"]
    return " ".join(lines[:2] if lines[0].endswith(":") else lines[:1]).rstrip(". ")


def explain(message: str, settings: Settings) -> PodError:
    """Returns the error for a person; message: a `refusal`."""
    said = first_line(message)
    # a project may be called nlp-billing, and a pod my-quota
    nameless = re.sub(r"\b(projects|nodes|queuedResources)/[^/\s'\"]+", r"\1/-", message)
    kind, _, advice = next(
        row for row in ADVICE if re.search(row[1], nameless, re.IGNORECASE | re.DOTALL)
    )
    return PodError(f"{said}{'; ' if advice else ''}{advice.format_map(vars(settings))}.", kind)


def reason(stderr: str) -> str:
    """Returns why ssh failed, or gcloud that runs it: gcloud's last error, or what ssh said before it ended."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    lines = [line for line in lines if not EXITED.search(line)]
    if any(line.startswith("ERROR: ") for line in lines):
        return first_line(refusal("\n".join(lines)))
    said = [line for line in lines if not CHATTER.search(line)]
    return said[-1].rstrip(".") if said else "it said nothing"


def advice(said: str, settings: Settings) -> str:
    """Returns what to do where ssh can't connect, "" where nothing is known; said: by ssh and gcloud."""
    for pattern, sentence in SSH_ADVICE:
        if re.search(pattern, said, re.IGNORECASE | re.DOTALL):
            return sentence.format(project=settings.project)
    return ""
