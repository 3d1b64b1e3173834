"""Sweeps of the fake trainer. Run as a program, it makes one in the directory it is given, or continues it."""

import sys
from pathlib import Path

from optuna.distributions import CategoricalDistribution, FloatDistribution

from pirl.config import get_config
from pirl.sweep.plan import SweepPlan

RATES = ("1e-5", "1e-4", "1e-3", "1e-2", "1e-1", "3e-3")
FAKE = (sys.executable, str(Path(__file__).with_name("fake_trainer.py")))


def plan_in(runs, *rates, **changes):
    runs.mkdir(exist_ok=True)
    values = {
        "name": "some/sweep",
        "directory": runs / "some" / "sweep",
        "base": get_config("demo_state_bc"),
        "train": ("demo_state_bc",),
        "given": {"runs_dir": str(runs)},
        "length_field": "steps",
        "space": {"agent.optimizer.peak_lr": CategoricalDistribution(rates or RATES)},
        "rungs": (2, 4, 8),
        "reduction": 3,
        "trials": 6,
        "metric": "eval/success",
        "mode": "max",
        "seed": 0,
        "program": FAKE,
    }
    return SweepPlan(**{**values, **changes})


def with_range(runs, trials, **changes):
    rates, sizes = FloatDistribution(1e-5, 1e-1, log=True), CategoricalDistribution(("8", "16"))
    return plan_in(runs, space={"agent.optimizer.peak_lr": rates, "batch_size": sizes}, trials=trials, **changes)


if __name__ == "__main__":
    from pirl.sweep.run import run_sweep

    run_sweep(plan_in(Path(sys.argv[1])), resume="--resume" in sys.argv)
