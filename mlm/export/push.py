"""`export --push NAME`: upload an export to the Hugging Face Hub. Nothing here imports jax.

huggingface_hub sends the large files first, and one commit with all files last: until then nobody
sees anything of it. The Hub knows a large file by its SHA-256, so what has arrived is not sent
again.
"""

import email.utils
import itertools
import re
import threading
import time
from collections.abc import Callable

from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id
from requests import RequestException

from mlm.errors import InputError, PreemptedError, StopError
from mlm.paths import ANSWER, UPath, local_folder
from mlm.text import say

PATIENCE = 1800.0  # seconds to try again
# seconds before the next try where the Hub names none; the last repeats
PAUSES = (
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
)
# answers that may be another one later, beside all from 500 up; 412: of two commits at once
BUSY = (
    408,
    412,
    425,
    429,
)


class HubBusyError(StopError):
    """The Hub did not answer, or said that it can't now."""

    code = PreemptedError.code  # start the same command again

    def __init__(self, message: str, retry_after: float = 0):
        super().__init__(message)
        self.retry_after = retry_after  # seconds; 0 if the Hub named none


def check(name: str, revision: str = "") -> str:
    """Returns the user's token; raises InputError if there is none, or if the name of repository or branch is wrong."""
    if revision and not re.fullmatch(r"[A-Za-z0-9]([\w.-]*[\w-])?", revision, re.ASCII):
        raise InputError(
            f"--revision={revision}: must be letters, digits, '_', '-' and '.', such as step-1000."
        )
    try:
        validate_repo_id(name)
        _, _ = name.split("/")
    except ValueError:
        raise InputError(
            f"--push={name}: is no name on the Hub; name the repository with its user or organisation, as in "
            "--push=me/my-model."
        ) from None
    token = get_token()
    if not token:
        raise InputError(
            "--push: there is no token of the Hugging Face Hub; run `hf auth login`, or set HF_TOKEN."
        )
    return token


def try_out(name: str) -> None:
    """Raises InputError, within seconds, if the Hub refuses pushes to hub.name; creates the repository if need be.

    A Hub that is busy, or does not answer in time, is a warning: the pushes will try again.
    """
    outcome: list[StopError] = [
        HubBusyError(f"--push={name}: the Hub gives no answer in {ANSWER:g} s")
    ]

    def ask() -> None:
        try:
            _send(None, name, public=False)
            outcome.clear()
        except StopError as error:
            outcome[:] = [error]

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER)
    for error in outcome:
        message = str(error).replace("--push", "config.hub.name")
        if isinstance(error, InputError):
            raise InputError(message)
        say(f"warning: {message}; the run starts, and its pushes will try again")


def push(
    folder: UPath,
    name: str,
    *,
    public: bool,
    revision: str = "",
    message: str = "Export of mlm",
    patience: float = PATIENCE,
    stopped: threading.Event | None = None,
    report: Callable[[str], None] = say,
) -> str:
    """Uploads an export to the repository "user/model" and its branch `revision` (main if empty); returns the address.

    Both are created if they are missing. `public` makes it public when all has arrived; otherwise
    it must be private. While the Hub is busy it is tried again, for `patience` seconds, or until
    `stopped`; then a HubBusyError.
    """
    deadline = time.monotonic() + patience
    stopped = stopped or threading.Event()
    own_pauses = itertools.chain(PAUSES, itertools.repeat(PAUSES[-1]))
    while True:
        try:
            return _send(folder, name, public=public, revision=revision, message=message)
        except HubBusyError as error:
            pause = error.retry_after or next(own_pauses)
            if stopped.is_set() or time.monotonic() + pause > deadline:
                raise
            report(f"push: warning: {error}; the next try is in {pause:.0f} s")
            stopped.wait(pause)


def _send(
    folder: UPath | None, name: str, *, public: bool, revision: str = "", message: str = ""
) -> str:
    """Tries once to do as `push`; without a folder, only asks whether the Hub would take one."""
    token = check(name)
    api = HfApi(token=token)
    try:
        url = api.create_repo(name, private=True, exist_ok=True)
        private = api.model_info(name).private
        if not private and not public:
            fix = "name another, make it private, or `export` with --public"
            raise InputError(f"--push={name}: that repository is public; {fix}.")
        if folder is None:
            # sends its name, not the file
            api.preupload_lfs_files(name, [CommitOperationAdd("config.json", b"{}")])
            return str(url)
        if revision:
            api.create_branch(name, branch=revision, exist_ok=True)
        api.upload_folder(
            repo_id=name,
            folder_path=local_folder(str(folder)),
            commit_message=message,
            revision=revision or None,
            ignore_patterns=".*",
        )
        if public and private:
            api.update_repo_settings(name, private=False)
    except OfflineModeIsEnabled:
        raise InputError("--push: HF_HUB_OFFLINE is set; unset it to reach the Hub.") from None
    except (RequestException, RuntimeError, ValueError) as error:
        raise _explained(
            error, f"--push={name}: {api.endpoint}", lambda text: text.replace(token, "(the token)")
        ) from None
    return f"{url}/tree/{revision}" if revision else str(url)


def _explained(error: BaseException, where: str, redact: Callable[[str], str]) -> StopError:
    """Returns what went wrong, on one line and in the Hub's own words if it gave any: busy, or a refusal."""
    while error.__cause__ is not None and getattr(error, "response", None) is None:
        error = error.__cause__  # huggingface_hub wraps what broke an upload
    response = getattr(error, "response", None)
    if response is not None:
        words = getattr(error, "server_message", None) or response.reason or ""
        shown = redact(" ".join(words.split()))[:200]
        code = response.status_code
        if code in BUSY or code >= 500:
            pause = _seconds(response.headers.get("Retry-After", ""))
            return HubBusyError(f"{where} answers {code} ({shown})", pause)
        hints = {401: ": the token is not valid there", 403: ": the token may not write there"}
        return InputError(f"{where} refused with {code}{hints.get(code, '')} ({shown}).")
    if isinstance(error, RequestException) and not isinstance(error, ValueError):
        return HubBusyError(f"{where} can't be reached ({type(error).__name__})")
    return InputError(f"{where} can't be used ({redact(' '.join(str(error).split()))[:200]}).")


def _seconds(retry_after: str) -> float:
    """Returns the pause that a Retry-After header asks for: seconds, or until a date; 0 without one."""
    if retry_after.strip().isdecimal():
        return float(retry_after)
    date = email.utils.parsedate_tz(retry_after)
    return max(0.0, email.utils.mktime_tz(date) - time.time()) if date else 0.0
