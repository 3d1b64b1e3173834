"""Records the numbers of five small runs, or checks that they are still the same: what a refactoring must not move.

    python scripts/record_runs.py --out runs/recorded --write tests/recorded_runs.json
    python scripts/record_runs.py --out runs/recorded --check tests/recorded_runs.json

The runs: `debug`, both quick demos, `debug` on eight simulated devices, and BC in two processes of four devices each.
Kept of each training run: the last value of every metric, a digest of all of them, and a digest of the policy. Values
are equal to the last bit on the same kind of CPU only; elsewhere, `--rtol` compares the last values.
"""

import argparse
import hashlib
import json
import math
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
BC = "--agent bc --agent.ema-decay 0.9 --data.validation-fraction 0 --validation-every 0 --evaluation.every 0"
BC += " --online.env-steps 0 --checkpoints.best-metric none --steps 6 --checkpoints.every 3"


def main() -> int:
    """Run everything, then write or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--check", type=Path)
    parser.add_argument("--rtol", type=float, default=0.0)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    data = options.out / "data"
    pirl(f"collect --env tabletop --env.observation state --policy expert --episodes 20 --out {data}")
    found = {}
    for name in options.only:
        RUNS[name](options.out / name, data)
        for metrics in sorted((options.out / name).rglob("metrics.jsonl")):
            found[str(metrics.parent.relative_to(options.out))] = describe(metrics.parent)
    if options.write:
        options.write.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    if options.check:
        expected = json.loads(options.check.read_text())
        differences = compare(
            {k: v for k, v in expected.items() if k.split("/")[0] in options.only}, found, options.rtol
        )
        print("\n".join(differences) or f"{len(found)} runs: no differences")
        return 1 if differences else 0
    return 0


def describe(run: Path) -> dict[str, Any]:
    """What a training run computed."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last: dict[str, Any] = {}
    for line in lines:
        last |= line
    text = "\n".join(json.dumps(line, sort_keys=True) for line in lines)
    return {"metrics": last, "all_metrics": digest(text.encode()), "policy": policy_digest(run)}


def policy_digest(run: Path) -> str:
    """Of every parameter of the newest exported policy."""
    from pirl.interop import load_policy
    from pirl.models.pi0 import get_parameters

    newest = max(run.rglob("params"), key=lambda path: int(path.parent.name)).parent
    parameters = get_parameters(load_policy(newest))
    return digest(*(name.encode() + np.asarray(leaf).tobytes() for name, leaf in sorted(parameters.items())))


def digest(*parts: bytes) -> str:
    """A short name for some bytes."""
    return hashlib.blake2b(b"\0".join(parts), digest_size=8).hexdigest()


def compare(expected: dict[str, Any], found: dict[str, Any], rtol: float) -> list[str]:
    """One line for each difference."""
    lines = [f"{name}: missing" for name in expected.keys() - found.keys()]
    lines += [f"{name}: not recorded" for name in found.keys() - expected.keys()]
    for name in expected.keys() & found.keys():
        before, now = expected[name], found[name]
        if not rtol:
            lines += [f"{name}: another {what}" for what in ("all_metrics", "policy") if before[what] != now[what]]
        for metric in sorted(before["metrics"].keys() | now["metrics"].keys()):
            one, other = (part["metrics"].get(metric) for part in (before, now))
            if one != other and (one is None or other is None or not math.isclose(one, other, rel_tol=rtol)):
                lines.append(f"{name}: {metric} was {one}, is {other}")
    return lines


def pirl(command: str, *, wait: bool = True, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """A command of pirl, on one thread."""
    settings = {"XLA_FLAGS": ONE_THREAD, "OMP_NUM_THREADS": "1", **(environment or {})}
    print("pirl", command, file=sys.stderr, flush=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "pirl.cli.main", *command.split()], env={**os.environ, **settings}, stdout=sys.stderr
    )
    if wait and process.wait():
        raise SystemExit(f"pirl {command} failed with {process.returncode}")
    return process


def debug(out: Path, data: Path, more: str = "", environment: Mapping[str, str] | None = None) -> None:
    """The preset that does everything once."""
    pirl(f"train debug --exp-name debug --runs-dir {out} --data.repo-id {data} {more}", environment=environment)


def eight_devices(out: Path, data: Path) -> None:
    """The same with eight devices, four of which share the parameters."""
    flags = f"--xla_force_host_platform_device_count=8 {ONE_THREAD}"
    debug(out, data, "--fsdp-devices 4", {"XLA_FLAGS": flags, "NPROC": "16"})


def two_processes(out: Path, data: Path) -> None:
    """BC in two processes with four devices each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count=4 {ONE_THREAD}"
    command = f"train debug {BC} --exp-name bc --runs-dir {out} --data.repo-id {data} --fsdp-devices 8"
    command += f" --hosts.coordinator 127.0.0.1:{port} --hosts.processes 2 --hosts.process-id"
    environment = {"XLA_FLAGS": flags, "NPROC": "16"}
    started = [pirl(f"{command} {index}", wait=False, environment=environment) for index in range(2)]
    if codes := [code for process in started if (code := process.wait())]:
        raise SystemExit(f"a process ended with {codes}")


RUNS: dict[str, Callable[[Path, Path], Any]] = {
    "debug": debug,
    "demo": lambda out, data: pirl(f"demo --quick --out {out}"),
    "demo_state": lambda out, data: pirl(f"demo --quick --observation state --out {out}"),
    "demo_ript": lambda out, data: pirl(f"demo ript --quick --out {out}"),
    "eight_devices": eight_devices,
    "two_processes": two_processes,
}

if __name__ == "__main__":
    sys.exit(main())
