"""A notebook: launch/notebook_server.py as a run, `notebook`, on host 0 alone, and a tunnel to it from this machine."""

import argparse
import dataclasses
import socket
import time

from pods import code as codes
from pods import runs
from pods.backend import PodError, SettingsError, say
from pods.hosts import Hosts, connect

RUN, PROGRAM = "notebook", "launch/notebook_server.py"


def command(args: argparse.Namespace) -> None:
    """Starts the server unless it is alive, and forwards the port until Ctrl-C. Raises PodError."""
    if args.port == 0:  # any that is free
        raise SettingsError("--port=0: this machine can't open it for a browser; choose another one.")
    try:
        socket.create_server(("127.0.0.1", args.port)).close()
    except (OSError, OverflowError) as error:
        raise SettingsError(f"--port={args.port}: this machine can't open it ({error}); choose another one.") from None
    hosts = connect(args.cloud, args.timeout)
    server = _serve(hosts, args.every)
    print(f"http://127.0.0.1:{args.port}/lab?token={server['token']}", flush=True)
    say(f"open until Ctrl-C; then it goes on, and holds the chips of host 0: launch/tpu.py stop {RUN} ends it")
    why = args.cloud.tunnel(0, args.port, server["port"])
    if not hosts.dry:
        raise PodError(f"the tunnel has ended ({why}), the notebook goes on: launch/tpu.py notebook opens it again.")


def _serve(hosts: Hosts, every: float) -> dict:
    """Returns {"port", "token"} of the server on host 0, once it serves. Raises PodError."""
    code, chips = codes.pack(), hosts.cloud.settings.accelerator.chips
    job = runs.Job(RUN, (), environment(chips, len(hosts.all)), code, code.path_of(str(code.root / PROGRAM)))
    first = dataclasses.replace(hosts, pod=dataclasses.replace(hosts.pod, hosts=hosts.all[:1]))
    attempt, _ = runs.start(first, job, runs.status_of(first, job))
    if hosts.dry:
        return {"port": "...", "token": "..."}
    say(f"waiting for JupyterLab, which is installed first if it is missing: launch/tpu.py logs {RUN}")
    while True:
        (status,) = first.require(first.ask(["status", RUN, str(attempt)]), "status")
        if status["state"] != "running":
            ended = runs.how_it_is(status["state"], status["exit"])
            raise PodError(f"JupyterLab does not run on host 0 ({ended}): launch/tpu.py logs {RUN} says why.")
        if status["server"]:
            return status["server"]
        time.sleep(every)


def environment(chips: int, hosts: int) -> dict[str, str]:
    """Returns the variables that make a slice of one process of a host's chips; none where it has all."""
    if hosts == 1:
        return {}
    count = chips // hosts  # 4, two by two, or 8, two by four
    return {
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": f"2,{count // 2},1",
        "TPU_VISIBLE_CHIPS": ",".join(map(str, range(count))),
        # mlm asks these before the metadata server (mlm/cluster/detect.py); jax.distributed.initialize() does not
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
    }
