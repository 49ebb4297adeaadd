"""`export --push NAME`: upload an export to the Hugging Face Hub. Nothing here imports jax.

Large files go first, and one commit with all files last: until then nobody sees anything of it. The Hub knows a large
file by its SHA-256, so what has arrived is not sent again when the command is started again, anywhere.
(`upload_large_folder` of huggingface_hub keeps notes in the folder, commits in pieces, and tries forever when refused.)
"""

import re
import sys
import threading
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id
from requests import RequestException

from mlm.errors import InputError
from mlm.paths import ANSWER, UPath, local_folder
from mlm.text import say


def check(name: str, revision: str = "") -> str:
    """Returns the user's token; raises InputError if there is none, or if the name of repository or branch is wrong."""
    if revision and not re.fullmatch(r"[A-Za-z0-9]([\w.-]*[\w-])?", revision, re.ASCII):
        raise InputError(f"--revision={revision}: must be letters, digits, '_', '-' and '.', such as step-1000.")
    try:
        validate_repo_id(name)
        is_name = name.count("/") == 1
    except HFValidationError:
        is_name = False
    if not is_name:
        fix = "name the repository with its user or organisation, as in --push=me/my-model"
        raise InputError(f"--push={name}: is no name on the Hub; {fix}.")
    token = get_token()
    if not token:
        raise InputError("--push: there is no token of the Hugging Face Hub; run `hf auth login`, or set HF_TOKEN.")
    return token


def try_out(name: str) -> None:
    """Raises InputError, within seconds, unless the Hub would take pushes to hub.name; creates it if it is missing."""
    outcome = [InputError(f"--push={name}: the Hub gives no answer in {ANSWER:g} s; check the network.")]

    def ask() -> None:
        try:
            push(None, name, public=False)
            outcome.clear()
        except InputError as error:
            outcome[:] = [error]

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER)
    for error in outcome:
        raise InputError(str(error).replace("--push", "config.hub.name"))


def push(folder: UPath | None, name: str, *, public: bool, revision: str = "", message: str = "Export of mlm") -> str:
    """Uploads an export to the repository "user/model" and its branch `revision` (main if empty); returns the address.

    Both are created if they are missing. `public` makes it public when all has arrived; otherwise it must be private.
    Without a folder, only asks whether the Hub would take one.
    """
    token = check(name)
    api = HfApi(token=token)
    try:
        url = api.create_repo(name, private=True, exist_ok=True)
        private = api.model_info(name).private
        if not private and not public:
            fix = "name another, make it private, or `export` with --public"
            raise InputError(f"--push={name}: that repository is public; {fix}.")
        if folder is None:
            api.preupload_lfs_files(name, [CommitOperationAdd("config.json", b"{}")])  # sends its name, not the file
            return str(url)
        if revision:
            api.create_branch(name, branch=revision, exist_ok=True)
        local = Path(local_folder(str(folder)))
        files = sorted(path for path in local.iterdir() if path.is_file() and not path.name.startswith("."))
        operations = [CommitOperationAdd(path.name, path) for path in files]
        for number, (path, operation) in enumerate(zip(files, operations, strict=True), 1):
            say(f"push: {number} of {len(files)}: {path.name}, {path.stat().st_size / 1e6:,.1f} MB")
            api.preupload_lfs_files(name, [operation], free_memory=False, revision=revision or None)
        api.create_commit(name, operations, commit_message=message, revision=revision or None)
        if public and private:
            api.update_repo_settings(name, private=False)
    except OfflineModeIsEnabled:
        raise InputError("--push: HF_HUB_OFFLINE is set; unset it to reach the Hub.") from None
    except (HfHubHTTPError, RequestException, RuntimeError, ValueError) as error:
        reason = _reason(error).replace(token, "(the token)")
        hint = "start the same command again: what has arrived is not sent again."
        raise InputError(f"--push={name}: {api.endpoint} {reason}; {hint}") from None
    say(f"push: {url}, {'public' if public else 'private'}")
    return f"{url}/tree/{revision}" if revision else str(url)


def _reason(error: BaseException) -> str:
    """Returns what went wrong, on one line: in the Hub's own words if it gave any."""
    while error.__cause__ is not None and not isinstance(error, HfHubHTTPError):
        error = error.__cause__  # huggingface_hub wraps what broke an upload
    if isinstance(error, HfHubHTTPError):
        code, message = error.response.status_code, error.server_message or error.response.reason or ""
        hint = {401: ": the token is not valid there", 403: ": the token may not write there"}.get(code, "")
        return f"refused with {code}{hint} ({' '.join(message.split())[:200]})"
    if isinstance(error, RequestException) and not isinstance(error, ValueError):
        return f"can't be reached ({type(error).__name__})"
    return f"can't be used ({' '.join(str(error).split())[:200]})"


if __name__ == "__main__":  # see mlm/export/hub.py
    try:
        push(UPath(sys.argv[1]), sys.argv[2], public=False, message=sys.argv[3])
    except InputError as error:
        sys.exit(str(error))
