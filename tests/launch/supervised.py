"""A run of the fake cloud that counts steps, and its supervisor."""

# What `python -m mlm` does here: counts steps, one file a process in the workdir, which outlives the pod; its second
# argument, config.do, says how many, and how it ends: "9", or "4 then 1" (with code 1 at step 4).
TRAINING = """
import itertools
words = dict(word.partition("=")[::2] for word in sys.argv)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
work = pathlib.Path(words["--workdir"])
work.mkdir(parents=True, exist_ok=True)
place = work / f"step-{words['--process-id']}"
last, _, code = words["--config.do"].partition(" then ")
begin = int(place.read_text()) if place.exists() else 0
with (work / "starts").open("a") as file:
    file.write(f"{folder.name} {words['--process-id']} from {begin}\\n")
for step in range(begin + 1, int(last) + 1):
    new = folder / "new"
    new.write_text(json.dumps({"step": step, "phase": "step", "time": time.time(), "process": 0}))
    new.rename(folder / "progress.json")
    place.write_text(str(step))
    time.sleep(0.05)
    while (work / "hold").exists():
        time.sleep(0.05)
sys.exit(int(code or 0))
"""


class Supervised:
    """A pod, a run of TRAINING, and its supervisor."""

    def __init__(self, pod, folder):
        self.pod, self.work = pod, folder / "work"
        pod.cloud.settings(env={"STUB": TRAINING, "PATH": f"{pod.bin}:/usr/bin:/bin"})

    def __call__(self, do, *flags, code=0, kind="v4-8"):
        return self.pod.tpu(
            "supervise", "configs/a.py", "--id=a", f"--workdir={self.work}", f"--config.do={do}", "--every=0.1",
            f"--accelerator-type={kind}", "--price=3.5", *flags, code=code,
        )  # fmt: skip

    def has_seen_it(self):
        """Whether the supervisor has seen the first attempt alive on a host that has made a step."""
        record = self.pod.repository / "runs" / "pods" / "a" / "supervise.json"
        return '"watched": 1,' in record.read_text() and '"step": -1,' not in record.read_text()

    def starts(self):
        return (self.work / "starts").read_text().splitlines() if (self.work / "starts").exists() else []

    def cloud_calls(self):
        words = [call for call in self.pod.cloud.calls() if call[3] not in ("ssh", "describe")]
        return [f"{call[2]} {call[3]}{' --force' if '--force' in call else ''}" for call in words]
