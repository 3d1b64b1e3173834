"""What it costs to write the checksums of a saved state, and to look at them: CPU time, beside that of the save itself.

The state is one of random arrays, which do not compress. Both happen in the background of a run, the look when it is
resumed. The median of several rounds is compared.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from pirl.files import check_files, read_record, write_record
from pirl.interop.orbax import quiet_orbax
from pirl.models.pi0 import nest
from pirl.training.sharding import named_leaves


def main() -> None:
    """Time the three and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state (default: 1)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is timed (default: 5)")
    options = parser.parse_args()
    keys = jax.random.split(jax.random.key(0), 16)
    width = int((options.gib * 2**30 / 4 / len(keys)) ** 0.5)
    leaves = named_leaves({f"part_{index}": jax.random.normal(key, (width, width)) for index, key in enumerate(keys)})
    seconds: dict[str, list[float]] = {"save": [], "write": [], "check": []}
    with tempfile.TemporaryDirectory() as place, quiet_orbax(), ocp.PyTreeCheckpointer() as checkpointer:
        directory = Path(place) / "5"
        record = directory / "state.json"
        for _ in range(options.rounds):
            shutil.rmtree(directory, ignore_errors=True)
            steps: dict[str, Callable[[], object]] = {
                "save": lambda: checkpointer.save(directory / "train_state", nest(leaves)),
                "write": lambda: write_record(record, {}),
                "check": lambda: check_files(directory, read_record(record)),
            }
            for name, step in steps.items():
                began = time.process_time()
                step()
                seconds[name].append(time.process_time() - began)
    medians = {name: round(statistics.median(values), 3) for name, values in seconds.items()}
    result = {
        "name": "checksums",
        "ratio": round(medians["write"] / medians["save"], 3),
        "target": 0.25,
        "compared": "CPU time to write the checksums of a state, against saving its arrays",
        "cpu_seconds": medians,
        "rounds": seconds,
        "gib": options.gib,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
