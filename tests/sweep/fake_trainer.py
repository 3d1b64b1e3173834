"""Stands in for `pirl train`: writes the metrics of a run whose success follows from its options. Imports little.

Success grows with the updates and is highest at a learning rate of 1e-3. A rate below 1e-6 fails at once, one above 0.5
beyond the fourth update. Each call is noted in `calls`; while there is a file `slow`, runs do not get beyond update 2.
"""

import fcntl
import json
import os
import sys
import time
from math import log10
from pathlib import Path

options = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv if "=" in argument)
name = sys.argv[sys.argv.index("--exp-name") + 1]
runs = Path(options["runs-dir"])
run, resume = runs / name, "--resume" in sys.argv
steps, rate = int(options["steps"]), float(options["agent.optimizer.peak-lr"])
with (runs / "calls").open("a") as calls:
    calls.write(f"{Path(name).name} to {steps}{' resumed' * resume}\n")
(runs / f"{Path(name).name}.devices").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
run.mkdir(parents=True, exist_ok=True)
lock = os.open(run / "lock", os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
print(f"training {name} to {steps}", flush=True)
if rate < 1e-6 or (rate > 0.5 and steps > 4):
    sys.exit("error: the loss is not finite.")
plain = {"name": name, "agent": {"learner": "bc", "lr": rate}, "steps": steps, "online": {"env_steps": 0}}
(run / "config.yaml").write_text(json.dumps(plain | {"evaluation": {"best_of_n": False}}))
about = {"begun": "2026-01-02T10:00:00+00:00", "command": f"pirl train --exp-name {name}", "resumed": []}
(run / "metadata.json").write_text(json.dumps({**about, "versions": {}, "config": plain}))
metrics = run / "metrics.jsonl"
done = len(metrics.read_text().splitlines()) if resume and metrics.exists() else 0
try:
    with metrics.open("a" if resume else "w") as file:
        for step in range(done + 1, steps + 1):
            while (runs / "slow").exists() and step > 2:
                (runs / f"{Path(name).name}.waits").touch()
                time.sleep(0.02)
            success = (1 - 0.8**step) * max(0.05, 1 - 0.3 * abs(log10(rate) + 3))
            record = {"step": step, "eval/success": success, "eval/episodes": 20}
            record |= {"eval/success_low": max(0.0, success - 0.1), "eval/success_high": min(1.0, success + 0.1)}
            file.write(json.dumps(record) + "\n")
            file.flush()
except KeyboardInterrupt:
    (runs / f"{Path(name).name}.saved").touch()
    sys.exit(130)
