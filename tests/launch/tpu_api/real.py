"""The real gcloud, where it is installed: many commands in one process, which loads it once.

As a program (real.py SDK): answers each line, ["parse" or "execute", arguments], with [exit code, stdout, stderr].
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

SDK = pathlib.Path(shutil.which("gcloud") or "/nowhere/bin/gcloud").resolve().parents[1]
INSTALLED = (SDK / "lib" / "googlecloudsdk").is_dir()
NAME = "real_gcloud" if INSTALLED else "no_gcloud_here"  # for the names of tests


class Gcloud:
    """A context manager."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment

    def __enter__(self) -> "Gcloud":
        program = [sys._base_executable, "-S", "-E", __file__, str(SDK)]
        self.process = subprocess.Popen(
            program, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *error: object) -> None:
        self.process.communicate()

    def __call__(self, argv: list[str], what: str = "execute") -> tuple[int, str, str]:
        """Returns exit code, stdout and stderr of a command, or of parsing it alone."""
        self.process.stdin.write(json.dumps([what, argv]) + "\n")
        self.process.stdin.flush()
        return tuple(json.loads(self.process.stdout.readline()))


def main(sdk: str) -> None:
    sys.path[:0] = [f"{sdk}/lib", f"{sdk}/lib/third_party"]
    answers = os.fdopen(os.dup(1), "w")
    said = [os.memfd_create("out"), os.memfd_create("err")]
    for number, file in enumerate(said, 1):
        os.dup2(file, number)
    # between two looks at an operation
    sleep, time.sleep = time.sleep, lambda seconds: sleep(seconds / 50)
    from googlecloudsdk import gcloud_main

    cli = gcloud_main.CreateCLI([])
    for line in sys.stdin:
        what, argv = json.loads(line)
        code = 0
        try:
            cli.Execute(argv) if what == "execute" else cli._CLI__parser.parse_args(argv)
        except SystemExit as error:
            code = error.code
        except Exception as error:  # of the parser alone, for which Execute has words
            code = 1
            print(repr(error), file=sys.stderr)
        texts = []
        for stream, file in zip((sys.stdout, sys.stderr), said, strict=True):
            stream.flush()
            texts.append(os.pread(file, 1 << 24, 0).decode())
            os.truncate(file, 0)
            os.lseek(file, 0, os.SEEK_SET)
        print(json.dumps([code or 0, *texts]), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
