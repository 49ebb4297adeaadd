"""How many faults the tests notice: breaks the code in a hundred places, one at a time, and runs the tests on each.

    python -m tests.mutations              a hundred faults against the quick tests, about half an hour
    python -m tests.mutations --standard   those that these don't notice against the standard tests, too

The KNOWN ones come first, whose like was made once without a test that noticed it. Any other fault is a sign, a bound,
a condition, a number or a statement that is left out, in mlm/model, mlm/training and mlm/data/order.py. The choice
depends on the code and --seed alone. Prints a line for each, and the share noticed.
"""

import argparse
import ast
import concurrent.futures
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests import ROOT

FILES = ("mlm/model/*.py", "mlm/training/*.py", "mlm/data/order.py")
ROOMS = {  # of tests that look at a room
    "model": ["model", "training"],
    "training": ["training", "tasks"],
    "tasks": ["tasks", "training"],
    "data": ["data"],
    "inference": ["inference"],
    "pretrained": ["pretrained"],
    "export": ["export"],
    "glue": ["glue"],
    "report": ["report"],
    "sweep": ["sweep"],
    "plan": ["plan"],
    "verify": ["verify"],
}
KNOWN = (  # file, what stands there, what stands there instead
    ("mlm/model/module.py", "rows.noise.seed_of(self)", "rows.noise.seed"),
    (
        "mlm/model/masking.py",
        "special_ids=info.all_special_ids",
        "special_ids=tuple(info.special_ids.values())",
    ),
    ("mlm/model/roberta.py", "return self.config.pad_token_id + 1", "return 2"),
    ("mlm/model/attention.py", 'if padding == "none" and not isolated:', "if not isolated:"),
    ("mlm/model/flax_classes.py", "if strict and wrong:", "if False:"),
    (
        "mlm/training/evaluation.py",
        "masked.attention_BxL, masked.positions_BxK",
        'masked.attention_BxL, masked.positions_BxK, make_key(0), batch["record_id"]',
    ),
    ("mlm/tasks/pretraining.py", "evaluation.MASK_SEED,", "self.config.masking.seed,"),
    (
        "mlm/tasks/classification.py",
        'module.logits(params, batch["input_ids"], batch["attention_mask"])',
        'module.logits(params, batch["input_ids"], batch["attention_mask"], None, '
        "jax.random.key(0), jnp.arange(len(batch['label']), dtype=jnp.uint32))",
    ),
    ("mlm/inference/comparison.py", "len(string.encode())", "len(string)"),
    ("mlm/inference/minimal_pairs.py", "-nats_P * is_counted", "-nats_P"),
    ("mlm/inference/pseudo_perplexity.py", "(place_L < stop_Bx1)", "(place_L <= stop_Bx1)"),
    (
        "mlm/pretrained/locate.py",
        "(SAFETENSORS, SAFETENSORS_INDEX, *PICKLES",
        "(SAFETENSORS_INDEX, SAFETENSORS, *PICKLES",
    ),
    ("mlm/pretrained/load.py", "tok.pad_token_id != config.pad_token_id", "False"),
    ("mlm/export/push.py", "error.retry_after or next(own_pauses)", "next(own_pauses)"),
    ("mlm/export/push.py", "code in BUSY or code >= 500", "code >= 500"),
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
SWAPS = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*",
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.And: "or", ast.Or: "and",
}  # fmt: skip
LONGEST = 1800  # seconds of a room's tests
# of the tests that a fault is shown to, those of --standard if the quick ones do not notice it
MARKERS = {
    "quick": "not standard and not slow and not hosts",
    "standard": "standard and not slow and not hosts",
}


class Fault(NamedTuple):
    """The bytes of a file between two offsets, and what stands there instead."""

    file: str
    line: int
    kind: str
    start: int
    end: int
    text: str

    def apply(self, root: Path) -> str:
        """Writes the file with the fault below root; returns the line as it was and as it is."""
        source = (ROOT / self.file).read_bytes()
        old = source[self.start : self.end].decode()
        new = self.text
        (root / self.file).write_bytes(source[: self.start] + new.encode() + source[self.end :])
        return f"{' '.join(old.split())[:60]} -> {' '.join(new.split())[:60]}"


def faults_of(file: Path) -> Iterator[Fault]:
    """Yields every fault that this script can make in a file."""
    source = file.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def fault(kind: str, node: ast.AST, text: str, end: ast.AST | None = None) -> Fault:
        begin = starts[node.lineno - 1] + node.col_offset
        stop = starts[(end or node).end_lineno - 1] + (end or node).end_col_offset
        return Fault(str(file.relative_to(ROOT)), node.lineno, kind, begin, stop, text)

    def between(left: ast.AST, right: ast.AST, kind: str, operator: ast.AST) -> Iterator[Fault]:
        """Of an operator, which has no place of its own: what stands between its operands is rewritten."""
        begin = starts[left.end_lineno - 1] + left.end_col_offset
        stop = starts[right.lineno - 1] + right.col_offset
        symbols = {
            ast.Mult: "*",
            ast.FloorDiv: "//",
            ast.Mod: "%",
            ast.Add: "+",
            ast.Sub: "-",
            ast.Div: "/",
        }
        symbols |= {
            ast.Lt: "<",
            ast.LtE: "<=",
            ast.Gt: ">",
            ast.GtE: ">=",
            ast.Eq: "==",
            ast.NotEq: "!=",
        }
        symbols |= {ast.And: "and", ast.Or: "or"}
        old = symbols.get(type(operator))
        gap = source[begin:stop].decode()
        if old and gap.count(old) == 1:
            text = gap.replace(old, SWAPS[type(operator)])
            yield Fault(str(file.relative_to(ROOT)), left.end_lineno, kind, begin, stop, text)

    for node in relevant(ast.parse(source)):
        if isinstance(node, ast.BinOp):
            yield from between(node.left, node.right, "arithmetic", node.op)
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from between(node.left, node.comparators[0], "bound", node.ops[0])
        elif isinstance(node, ast.BoolOp):
            yield from between(node.values[0], node.values[1], "condition", node.op)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
            yield fault("sign", node, f"({ast.unparse(node.operand)})")
        elif isinstance(node, ast.If | ast.IfExp):
            yield fault("condition", node.test, f"(not ({ast.unparse(node.test)}))")
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield fault("number", node, str(node.value + 1))
        elif isinstance(node, ast.AugAssign) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        ):
            yield fault("left out", node, "pass")


def relevant(node: ast.AST) -> Iterator[ast.AST]:
    """Yields what can be wrong of a tree: no annotations, no texts, and no refusals' sentences."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list") or isinstance(
            node, ast.JoinedStr | ast.Raise
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child
                yield from relevant(child)


def known() -> Iterator[Fault]:
    """Yields the faults of KNOWN."""
    for name, old, new in KNOWN:
        source = (ROOT / name).read_bytes()
        begin = source.index(old.encode())
        yield Fault(
            name, source.count(b"\n", 0, begin) + 1, "known", begin, begin + len(old.encode()), new
        )


def choose(count: int, seed: int) -> list[Fault]:
    """Returns as many faults of each kind as there are, from all files."""
    files = sorted(path for pattern in FILES for path in ROOT.glob(pattern))
    kinds: dict[str, list[Fault]] = {}
    for fault in (fault for file in files for fault in faults_of(file)):
        kinds.setdefault(fault.kind, []).append(fault)
    draw = random.Random(seed)
    for faults in kinds.values():
        draw.shuffle(faults)
    chosen: list[Fault] = []
    while len(chosen) < count:
        chosen += [faults.pop() for faults in kinds.values() if faults]
    return chosen[:count]


def first_failure(root: Path, marker: str, file: Path) -> str:
    """Returns the first test that fails in a copy of the repository with a fault in a file, "" where none does."""
    # which most likely notices it
    folder = file.parts[1]
    module = f"{file.parts[1]}/test_{file.name}"
    for room in ([module] if (root / "tests" / module).exists() else []) + ROOMS[folder]:
        command = [
            sys.executable,
            "-m",
            "pytest",
            f"tests/{room}",
            "-m",
            marker,
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
        ]
        try:
            done = subprocess.run(
                command,
                cwd=root,
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                timeout=LONGEST,
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
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--standard", action="store_true", help="and, if need be, against the standard tests"
    )
    parser.add_argument(
        "--only", type=int, nargs="*", help="the numbers of the faults, all by default"
    )
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    faults = dict(enumerate([*known(), *choose(args.count, args.seed)]))
    faults = {number: faults[number] for number in args.only or faults}

    markers = {name: MARKERS[name] for name in MARKERS if args.standard or name == "quick"}

    def attempt(number: int) -> tuple[int, str, dict[str, str]]:
        """Returns the number, the fault as text, and the first test to fail of those that it was shown to."""
        fault = faults[number]
        failures = {}
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder) / "mlm"
            shutil.copytree(
                ROOT,
                root,
                symlinks=True,
                ignore=shutil.ignore_patterns(".git", "runs", "__pycache__", ".venv*"),
            )
            for environment in ROOT.glob(".venv*"):
                (root / environment.name).symlink_to(environment)
            change = fault.apply(root)
            for name, marker in markers.items():
                failures[name] = first_failure(root, marker, Path(fault.file))
                if failures[name]:
                    break
            return number, change, failures

    noticed = dict.fromkeys(markers, 0)
    with concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
        for number, change, failures in pool.map(attempt, faults):
            for name in markers:  # the standard tests contain the quick ones
                noticed[name] += (
                    any(failures.values()) if name == "standard" else bool(failures["quick"])
                )
            shown = next(
                (f"{name}: {test}" for name, test in failures.items() if test), "NOT NOTICED"
            )
            fault = faults[number]
            print(f"{number} {fault.file}:{fault.line} {fault.kind}: {change}: {shown}", flush=True)
    for name, count in noticed.items():
        print(f"{count} of {len(faults)} noticed by the {name} tests")


if __name__ == "__main__":
    main()
