"""A pod on this machine: N processes of `python -m mlm`, started, watched and ended as those of N hosts are.

    python launch/local_pod.py 4 configs/quickstart.py --workdir=runs/pod --config.train.steps=200

Each process has CPU devices of its own (--devices) and a folder, WORKDIR/hosts/I, with its log, its progress and the
cause of its end. Ctrl-C (or SIGTERM) asks all to save and to end, a second one kills them. When one is killed or
stopped, the others miss it after the config's pod.heartbeat, and end. The last line names the first cause; its exit
code is the exit code. Python's standard library alone; the processes run in .venv where there is one.
"""

import argparse
import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

if not importlib.util.find_spec("tomllib"):
    sys.exit(
        f"local_pod: this is Python {sys.version.split()[0]}, and must be 3.11 or later, as .venv/bin/python is"
    )

import host
import host_setup
from pods.causes import Cause, HostReport, first_cause

ROOT = Path(__file__).resolve().parents[1]
# seconds after the first bad end, after which one that is stopped, and so can't end by itself, is killed
GRACE = 5.0
TICK = 0.1


class Pod:
    """The processes of one run; `start`, then `wait`."""

    def __init__(
        self,
        processes: int,
        arguments: list[str],
        folder: Path,
        *,
        devices: int,
        program=("-m", "mlm"),
    ):
        """arguments: of each process; folder: holds one for each, named by its number; devices: of each, CPUs."""
        self.arguments = arguments
        self.folders = [folder / str(index) for index in range(processes)]
        self.children: list[subprocess.Popen] = []
        self._devices = devices
        self._program = program
        self._exits: dict[int, dict] = {}
        # which each has printed: a full disk keeps no other reason
        self._last_lines: dict[int, str] = {}
        self._killed: set[int] = set()  # by us
        self._readers: list[threading.Thread] = []
        self._asked = 0

    def start(
        self,
        *,
        changes: dict[int, list[str]] | None = None,
        environment: dict[int, dict] | None = None,
    ) -> None:
        """Starts all processes; {process: further arguments or variables} make hosts that differ."""
        with socket.create_server(("127.0.0.1", 0)) as free:  # several pods may run on this machine
            coordinator = f"--coordinator=127.0.0.1:{free.getsockname()[1]}"
        venv = ROOT / ".venv" / "bin" / "python"
        python = str(venv) if venv.exists() else sys.executable
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={self._devices}"
        everywhere = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        everywhere |= {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
        for index, folder in enumerate(self.folders):
            folder.mkdir(parents=True, exist_ok=True)
            for name in ("progress.json", "cause.json", "stacks.txt"):
                (folder / name).unlink(missing_ok=True)
            place = [coordinator, f"--processes={len(self.folders)}", f"--process-id={index}"]
            child = subprocess.Popen(
                [python, *self._program, *self.arguments, *(changes or {}).get(index, []), *place],
                cwd=ROOT,
                env=everywhere | {"MLM_HOST_DIR": str(folder)} | (environment or {}).get(index, {}),
                start_new_session=True,  # a Ctrl-C at the terminal comes to us alone
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
            )
            self.children.append(child)
            self._readers.append(threading.Thread(target=self._copy, args=(index,), daemon=True))
            self._readers[-1].start()

    def wait(self) -> Cause | None:
        """Waits until all processes have ended, whatever it takes; returns why, None if all is well."""
        limit = None
        while self.poll():
            time.sleep(TICK)
            if any(end["code"] != 0 for end in self._exits.values()):
                limit = limit or time.monotonic() + GRACE
                if time.monotonic() > limit:
                    limit = None
                    self.kill(stopped=True)
        for reader in self._readers:
            reader.join(GRACE)
        return first_cause(self.reports())

    def poll(self) -> bool:
        """Notes who has ended; returns whether any process is still there."""
        for index, child in enumerate(self.children):
            if index not in self._exits and (code := child.poll()) is not None:
                self._exits[index] = host.how_it_ended(code)
        return len(self._exits) < len(self.children)

    def reports(self) -> list[HostReport]:
        """Returns what each process has left."""
        reports = []
        for i, folder in enumerate(self.folders):
            report = HostReport(
                process=i,
                host=socket.gethostname(),
                state="exited" if i in self._exits else "running",
                exit=self._exits.get(i),
                progress=host_setup.read(folder / "progress.json"),
                cause=host_setup.read(folder / "cause.json"),
                ended_by_us=i in self._killed,
                last_line=self._last_lines.get(i, ""),
            )
            reports.append(report)
        return reports

    def ask(self, *_: object) -> None:
        """Asks all to save and to end; the second time, kills them. Can be a signal's handler."""
        self._asked += 1
        if self._asked > 1:
            self.kill()
        else:
            print(
                "local_pod: asking all to save and to end; once more kills them",
                file=sys.stderr,
                flush=True,
            )
            self._signal(signal.SIGTERM, set(range(len(self.children))) - self._exits.keys())

    def kill(self, *, stopped: bool = False) -> None:
        """Kills what is left, with the children of each; or what is stopped alone."""
        left = set(range(len(self.children))) - self._exits.keys()
        if stopped:
            left = {index for index in left if _state(self.children[index].pid).startswith("T")}
        self._killed |= left
        self._signal(signal.SIGKILL, left)

    def _signal(self, number: int, processes: set[int]) -> None:
        for index in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.children[index].pid, number)

    def _copy(self, index: int) -> None:
        """Shows and keeps what a process says; where nobody reads it, its pipe is closed, and it ends by itself."""
        log = self.folders[index] / "log"
        with self.children[index].stdout as lines:
            for line in lines:
                self._last_lines[index] = line.strip() or self._last_lines.get(index, "")
                # a full disk
                with contextlib.suppress(OSError), log.open("a", encoding="utf-8") as file:
                    file.write(line)
                try:
                    print(f"{index}| {line}", end="", flush=True)
                except OSError as error:  # as in `| head`
                    why = f"the output of process {index} can't be shown: {error.strerror}"
                    print(f"local_pod: {why}", file=sys.stderr, flush=True)
                    return


def _state(process: int) -> str:
    """Returns the state of a process in a letter of ps, such as T if it is stopped."""
    return subprocess.run(
        ["ps", "-o", "state=", "-p", str(process)], capture_output=True, text=True
    ).stdout.strip()


def main(argv: list[str]) -> int:
    """Runs the command in all processes; returns the exit code of the first cause, 0 if there is none."""
    parser = argparse.ArgumentParser(
        description="Runs N processes of `python -m mlm` on this machine, as a pod of N hosts would.",
        epilog="Everything else, such as --config.train.steps=100, goes to each `python -m mlm COMMAND`.",
    )
    parser.add_argument("processes", type=int, metavar="N")
    parser.add_argument("config", metavar="CONFIG", help="such as configs/quickstart.py")
    parser.add_argument(
        "--devices", type=int, default=2, help="CPU devices of each process (default: 2)"
    )
    parser.add_argument("--workdir", default="", help="folder of the run (default: runs/NAME-pod)")
    parser.add_argument("--command", default="run", help="of python -m mlm (default: run)")
    program = "Python file that calls mlm's main(pretraining=...), in the place of python -m mlm"
    parser.add_argument("--program", default="", metavar="FILE", help=program)
    host_setup.prepare_streams()
    words = iter(argv)  # --config.key value is --config.key=value
    argv = [
        f"{w}={next(words, '')}" if w.startswith("--config.") and "=" not in w else w for w in words
    ]
    args, rest = parser.parse_known_args(argv)
    if args.processes < 1 or args.devices < 1:
        parser.error("N and --devices must be at least 1")
    if "://" in args.workdir:
        parser.error(
            f"--workdir={args.workdir}: the logs of all processes lie in it: give a folder of this machine"
        )
    try:
        config, file = (host_setup.expand(path).absolute() for path in (args.config, args.program))
        workdir = host_setup.expand(args.workdir or f"runs/{config.stem}-pod").absolute()
    except host_setup.HostError as error:
        parser.error(str(error))
    arguments = [args.command, f"--config={config}", f"--workdir={workdir}", *rest]
    program = (str(file),) if args.program else ("-m", "mlm")
    pod = Pod(args.processes, arguments, workdir / "hosts", devices=args.devices, program=program)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pod.ask)
    busy = host_setup.HostError("another local_pod is using it; wait for it, or stop it")
    try:
        (workdir / "hosts").mkdir(parents=True, exist_ok=True)
        # the logs and causes of two would be mixed up
        with host_setup.alone(workdir / "hosts" / ".lock", busy, is_needed=False):
            pod.start()
            cause = pod.wait()
    except host_setup.HostError as error:
        parser.error(f"--workdir={workdir}: {error}")
    except OSError as error:
        pod.kill()
        parser.error(f"--workdir={workdir}: {error.filename}: {error.strerror}")
    if cause is None:
        return 0
    print(f"local_pod: {cause.sentence}", file=sys.stderr)
    return cause.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
