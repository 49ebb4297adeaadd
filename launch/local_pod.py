"""A pod on this machine: N processes of `python -m mlm`, started, watched and ended as those of N hosts are.

    python launch/local_pod.py 4 configs/quickstart.py --workdir=runs/pod --config.train.steps=200

Each process has CPU devices of its own (--devices) and a folder, WORKDIR/hosts/I, with its log, its progress and the
cause of its end. Ctrl-C (or SIGTERM) asks all to save and to end, a second one kills them. When one is killed or
stopped, the others miss it after the config's pod.heartbeat, and end. The last line names the first cause; its exit
code is the exit code. Python's standard library alone; the processes run in .venv where there is one.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import host
import host_setup
from pods.causes import Cause, HostReport, first_cause

ROOT = Path(__file__).resolve().parents[1]
# seconds for the others to end, after one has failed or was aborted by jax: one that SIGSTOP has stopped can't
GRACE = 15.0
STOPPED = 75  # the code of those that were asked to end, and saved
TICK = 0.5


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
        """folder: holds one for each process, named by its number; devices: of each, CPUs.

        A test makes hosts that differ by what it puts in `arguments` and `environments`.
        """
        self.arguments = [arguments] * processes
        self.environments: list[dict[str, str]] = [{}] * processes
        self.folders = [folder / str(index) for index in range(processes)]
        self.children: list[subprocess.Popen] = []
        self._devices = devices
        self._program = program
        self._exits: dict[int, dict] = {}
        # which each has printed: a full disk keeps no other reason
        self._last_lines: dict[int, str] = {}
        self._killed: set[int] = set()  # by us
        self._readers: list[threading.Thread] = []
        self._is_asked = False

    def start(self) -> None:
        """Starts all processes."""
        with socket.create_server(("127.0.0.1", 0)) as free:  # several pods may run on this machine
            coordinator = f"--coordinator=127.0.0.1:{free.getsockname()[1]}"
        venv = ROOT / ".venv" / "bin" / "python"
        python = str(venv) if venv.exists() else sys.executable
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={self._devices}"
        everywhere = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
        everywhere["PYTHONUNBUFFERED"] = "1"
        for index, folder in enumerate(self.folders):
            folder.mkdir(parents=True, exist_ok=True)
            for name in ("progress.json", "cause.json"):
                (folder / name).unlink(missing_ok=True)
            place = [coordinator, f"--processes={len(self.folders)}", f"--process-id={index}"]
            variables = {"MLM_HOST_DIR": str(folder)} | self.environments[index]
            child = subprocess.Popen(
                [python, *self._program, *self.arguments[index], *place],
                cwd=ROOT,
                env=os.environ | everywhere | variables,
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
        while self.poll():
            time.sleep(TICK)
            failed = [
                end["ended"]
                for end in self._exits.values()
                if end["signal"] == signal.SIGABRT or end["code"] not in (None, 0, STOPPED)
            ]
            if failed and time.time() > min(failed) + GRACE:
                self.kill()
        for reader in self._readers:
            reader.join(GRACE)
        return first_cause(self.reports())

    def poll(self) -> bool:
        """Notes who has ended; returns whether any process is still there."""
        for index, child in enumerate(self.children):
            if child.poll() is not None:
                self._exits.setdefault(index, host.how_it_ended(child.returncode))
        return len(self._exits) < len(self.children)

    def reports(self) -> list[HostReport]:
        """Returns what each process has left."""
        return [
            HostReport(
                process=i,
                host=socket.gethostname(),
                state="exited" if i in self._exits else "running",
                exit=self._exits.get(i),
                progress=host_setup.read(folder / "progress.json"),
                cause=host_setup.read(folder / "cause.json"),
                ended_by_us=i in self._killed,
                last_line=self._last_lines.get(i, ""),
            )
            for i, folder in enumerate(self.folders)
        ]

    def kill(self) -> None:
        """Kills what is left, with the children of each."""
        self._signal(signal.SIGKILL)

    def ask(self, *_: object) -> None:
        """Asks all to save and to end; the second time, kills them. Can be a signal's handler."""
        if not self._is_asked:
            said = "local_pod: asking all to save and to end; once more kills them"
            print(said, file=sys.stderr, flush=True)
        self._signal(signal.SIGKILL if self._is_asked else signal.SIGTERM)
        self._is_asked = True

    def _signal(self, number: int) -> None:
        """Sends a signal to what is left, with the children of each."""
        for index, child in enumerate(self.children):
            if index in self._exits:
                continue
            if number == signal.SIGKILL:
                self._killed.add(index)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)

    def _copy(self, index: int) -> None:
        """Shows and keeps what a process says."""
        log = self.folders[index] / "log"
        with self.children[index].stdout as lines:
            for line in lines:
                self._last_lines[index] = line.strip() or self._last_lines.get(index, "")
                # a full disk
                with contextlib.suppress(OSError), log.open("a", encoding="utf-8") as file:
                    file.write(line)
                print(f"{index}| {line}", end="", flush=True)


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
    args, rest = parser.parse_known_args(host_setup.join_overrides(argv))
    name = args.workdir or f"runs/{Path(args.config).stem}-pod"
    if "://" in name:
        parser.error(f"--workdir={name}: the logs lie in it: give a folder of this machine")
    try:
        config, file, workdir = (
            host_setup.expand(path).absolute() for path in (args.config, args.program, name)
        )
    except host_setup.HostError as error:
        parser.error(str(error))
    arguments = [args.command, f"--config={config}", f"--workdir={workdir}", *rest]
    program = (str(file),) if args.program else ("-m", "mlm")
    pod = Pod(args.processes, arguments, workdir / "hosts", devices=args.devices, program=program)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pod.ask)
    try:
        pod.start()
    except OSError as error:
        pod.kill()
        parser.error(f"--workdir={workdir}: {error.filename}: {error.strerror}")
    cause = pod.wait()
    if cause is None:
        return 0
    print(f"local_pod: {cause.sentence}", file=sys.stderr)
    return cause.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
