"""A program that prints, as JSON, which files of pirl run on the way of the data; it writes to the DIRECTORY it is given.

Updates are traced by JAX and not compiled: that runs the Python of every file, as an update does.
"""

import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pirl
from pirl.cli.main import main
from pirl.config import get_config, override_config
from pirl.interop import NormStats, write_norm_stats
from pirl.training import streams, train

SOURCES = Path(pirl.__file__).parent
DIRECTORY = Path(sys.argv[1])
ran: dict[str, set[str]] = {"offline": set(), "online": set()}


@contextlib.contextmanager
def watched(walk: str) -> Iterator[None]:
    def watch(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_flags & 1 and code.co_filename.startswith(str(SOURCES)):  # 1: not a class body
            ran[walk].add(Path(code.co_filename).relative_to(SOURCES).as_posix())

    before = sys.getprofile()
    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(before)
        threading.setprofile(before)


def train_watched(walk: str, preset: str, **fields: Any) -> None:
    def trace_updates(setup: Any) -> Any:
        def update(agent: Any, batch: Any, key: Any) -> Any:
            with watched(walk):
                _, metrics = jax.eval_shape(compiled, agent, batch, key)
            return agent, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), metrics)

        compiled, *others = compile_updates(setup)
        return update, *others

    train.compile_updates = trace_updates
    places = {"runs_dir": str(DIRECTORY), "data.norm_stats": str(DIRECTORY / "norm_stats.json")}
    few = {"batch_size": 2, "evaluation.every": 0, "checkpoints.every": 1, "from_scratch": True}
    named = {name.replace("__", "."): value for name, value in fields.items()}
    config = override_config(get_config(preset), {**places, **few, **named})
    with watched(walk) if walk == "offline" else contextlib.nullcontext():
        train.train(config, exp_name=walk)


def next_online(stream: Any, state: Any) -> Any:
    with watched("online"):
        return next_batch(stream, state)


compile_updates, next_batch = train.compile_updates, streams.OnlineStream.next
data, episodes = str(DIRECTORY / "data"), ("--episodes", "2", "--env.max-steps", "9")
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(sys.stderr):
    main(["collect", "--policy", "expert", *episodes, "--out", data])
train_watched("offline", "demo_bc", steps=1, env=None, data__repo_id=data, data__norm_stats="dataset")

streams.OnlineStream.next = next_online  # type: ignore[method-assign]
sizes = {"state": 8, "actions": 3}
stats = {name: NormStats(np.zeros(size), np.ones(size), -np.ones(size), np.ones(size)) for name, size in sizes.items()}
write_norm_stats(DIRECTORY / "norm_stats.json", stats)
train_watched(
    "online",
    "demo_state",
    data__repo_id=None,
    steps=0,
    online__env_steps=8,
    online__utd_ratio=0.25,
    online__updates_per_scan=1,
    online__episodes_per_round=1,
    online__prior_ratio=0,
    env__max_steps=8,
    agent__critic_warmup_steps=0,
    validation_every=0,
    data__validation_fraction=0,
)
print(json.dumps({walk: sorted(files) for walk, files in ran.items()}))
