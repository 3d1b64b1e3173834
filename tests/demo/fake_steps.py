"""Steps that stand in for those of the demo: small programs that note what happens to them. Imports little."""

import json
import shlex
import sys

from pirl.demo.steps import Step, run_steps
from pirl.jobs import lock_directory

# Writes when it began and ended, and on which cores; then its result. Ctrl-C leaves a mark, and ends it.
WORK = """
import json, os, sys, time
from pathlib import Path
place, name, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
with (place / "calls").open("a") as calls:
    calls.write(f"{name}{' resumed' * ('--resume' in sys.argv)}\\n")
begun = time.time()
(place / f"{name}.pid").write_text(str(os.getpid()))
print(f"{name} at work", flush=True)
try:
    time.sleep(seconds)
except KeyboardInterrupt:
    (place / f"{name}.saved").touch()
    sys.exit(130)
cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
(place / f"{name}.result").write_text(json.dumps({"begun": begun, "ended": time.time(), "cores": cores}))
"""


def work(place, name, seconds=0.0, program=WORK):
    place.mkdir(parents=True, exist_ok=True)
    text = shlex.join(("-c", program, str(place), name, str(seconds)))
    return Step(name, f"do {name}", text, (place / f"{name}.result").exists, begun=place / f"{name}.pid")


def go(stages, out, **options):
    out.mkdir(parents=True, exist_ok=True)
    with lock_directory(out, "pirl demo") as lock:
        return run_steps(
            stages if callable(stages) else lambda: iter(stages), out, lock, program=(sys.executable,), **options
        )


def record(out, name):
    return json.loads((out / "steps.json").read_text())[name]
