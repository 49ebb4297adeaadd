"""Whether tests notice faults whose like was made once without a test that noticed it: each of KNOWN, one at a time.

    python -m tests.mutations              against the quick tests of the rooms around it
    python -m tests.mutations --standard   those that these don't notice against the standard tests, too

Prints a line for each, and the share noticed.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests import ROOT

ROOMS = {  # of tests that look at a room, where they are not its own alone
    "model": ["model", "training"],
    "training": ["training", "tasks"],
    "tasks": ["tasks", "training"],
}
KNOWN = (  # file, what stands there, what stands there instead
    ("mlm/model/module.py", "rows.noise.seed_of(self)", "rows.noise.seed"),
    (
        "mlm/model/masking.py",
        "special_ids=info.all_special_ids",
        "special_ids=tuple(info.special_ids.values())",
    ),
    ("mlm/model/masking.py", "(attention_L > 0) & ~jnp", "~jnp"),
    ("mlm/model/roberta.py", "return self.config.pad_token_id + 1", "return 2"),
    ("mlm/model/attention.py", 'if padding == "none" and not isolated:', "if not isolated:"),
    ("mlm/model/flax_classes.py", "if strict and wrong:", "if False:"),
    (
        "mlm/training/evaluation.py",
        "masked.attention_BxL, masked.positions_BxK",
        'masked.attention_BxL, masked.positions_BxK, make_key(0), batch["record_id"]',
    ),
    (
        "mlm/tasks/pretraining.py",
        "return evaluation.make_eval_step(",
        "evaluation.MASK_SEED = self.config.masking.seed\n        return evaluation.make_eval_step(",
    ),
    (
        "mlm/tasks/classification.py",
        'module.logits(params, batch["input_ids"], batch["attention_mask"])',
        'module.logits(params, batch["input_ids"], batch["attention_mask"], None, '
        "jax.random.key(0), jnp.arange(len(batch['label']), dtype=jnp.uint32))",
    ),
    ("mlm/tasks/classification.py", "np.mean(loss_N[known_N], dtype", "np.mean(loss_N, dtype"),
    ("mlm/inference/comparison.py", "len(string.encode())", "len(string)"),
    ("mlm/inference/minimal_pairs.py", "-nats_P * is_counted", "-nats_P"),
    ("mlm/inference/spans.py", "(place_L < stop_Bx1)", "(place_L <= stop_Bx1)"),
    (
        "mlm/pretrained/locate.py",
        "(SAFETENSORS, SAFETENSORS_INDEX, *PICKLES",
        "(SAFETENSORS_INDEX, SAFETENSORS, *PICKLES",
    ),
    ("mlm/pretrained/load.py", "tok.pad_token_id != config.pad_token_id", "False"),
    ("mlm/export/push.py", "error.retry_after or next(own_pauses)", "next(own_pauses)"),
    ("mlm/export/push.py", "code in BUSY or code >= 500", "code >= 500"),
    ("mlm/export/hub.py", "[self._step] if self._thread.is_alive() else []", "[]"),
    ("mlm/glue/glue.py", "TASKS[name].validation[1:])", "())"),
    ("mlm/report/page.py", 'os.environ.pop("MPLBACKEND", "")', '""'),
    ("mlm/report/plots.py", '["default", ', "["),
    ("mlm/report/sessions.py", 'last.get("elapsed", ', 'last.get("", '),
    ("mlm/sweep/table.py", 'values.get("split") == "test"', "values == 0"),
    ("mlm/plan/cost_model.py", "max(0.0, end - self.total)", "end - self.total"),
    ("mlm/plan/topology.py", "int(number) / ACCELERATOR_TYPES[prefix]", "int(number)"),
    (
        "mlm/plan/plan.py",
        "seconds_of_length[length] * rows / config.data.global_batch",
        "seconds_of_length[length]",
    ),
    (
        "mlm/verify/compare.py",
        "np.flatnonzero(~(error_P <= limit))",
        "np.flatnonzero(error_P > 10 * limit)",
    ),
    ("mlm/verify/kernels.py", "ROUNDINGS * rounding", "1.0"),
)
LONGEST = 1800  # seconds of a room's tests
# of the tests that a fault is shown to, those of --standard if the quick ones do not notice it
MARKERS = {
    "quick": "not standard and not slow and not hosts",
    "standard": "standard and not slow and not hosts",
}


def first_failure(root: Path, marker: str, file: Path) -> str:
    """Returns the first test that fails in a copy of the repository with a fault in a file, "" where none does."""
    # which most likely notices it
    folder = file.parts[1]
    module = f"{file.parts[1]}/test_{file.name}"
    for room in ([module] if (root / "tests" / module).exists() else []) + ROOMS.get(
        folder, [folder]
    ):
        command = [sys.executable, "-m", "pytest", f"tests/{room}", "-m", marker]
        command += ["-x", "-q", "-p", "no:cacheprovider"]
        try:
            done = subprocess.run(
                command, cwd=root, capture_output=True, text=True, timeout=LONGEST
            )
        except subprocess.TimeoutExpired:  # a loop that the fault leaves without end
            return f"tests/{room} take more than {LONGEST} s"
        if done.returncode not in (0, 5):  # 5: there was no such test
            failed = [
                line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))
            ]
            return (failed or ["the tests don't start"])[0].split(" - ")[0]
    return ""


def main() -> None:
    """Prints a line for each fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--standard", action="store_true", help="also against the standard tests")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of faults; default: all")
    args = parser.parse_args()
    numbers = args.only or range(len(KNOWN))
    markers = [MARKERS[name] for name in MARKERS if args.standard or name == "quick"]
    noticed = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "mlm"
        ignored = shutil.ignore_patterns(".git", "runs", "__pycache__", ".venv*")
        shutil.copytree(ROOT, root, symlinks=True, ignore=ignored)
        for environment in ROOT.glob(".venv*"):
            (root / environment.name).symlink_to(environment)
        for number in numbers:
            name, old, new = KNOWN[number]
            right = (ROOT / name).read_text()
            (root / name).write_text(right.replace(old, new))
            failures = (first_failure(root, marker, Path(name)) for marker in markers)
            failure = next(filter(None, failures), "")
            (root / name).write_text(right)
            noticed += failure != ""
            print(f"{number} {name}: {old} -> {new}: {failure or 'NOT NOTICED'}", flush=True)
    print(f"{noticed} of {len(numbers)} noticed")


if __name__ == "__main__":
    main()
