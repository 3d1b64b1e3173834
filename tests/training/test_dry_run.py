"""`--dry-run` says what a run would take, and leaves nothing behind."""

import dataclasses
import os

import jax
import numpy as np
import pytest

from pirl.training.dry_run import dry_run, peak_bytes, state_bytes
from pirl.training.setup import agent_shapes, set_up

# A learner of shapes does not fit the signatures of one of arrays.
pytestmark = pytest.mark.usefixtures("unchecked_signatures")


def listing(directory):
    return sorted((str(path), path.stat().st_mtime_ns) for path in directory.rglob("*"))


@pytest.mark.usefixtures("toy")
def test_everything_is_built_and_tried_and_nothing_but_caches_is_written(
    configure, data, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    before = listing(data)
    assert dry_run(configure()) == 0
    out, err = capsys.readouterr()
    facts = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert [*facts] == ["policy", "state", "data", "batch", "acting", "memory", "compiling", "update", "loss"]
    assert facts["data"].startswith("20 episodes (5 of 20 succeeded), ")
    assert "held out" in facts["data"]
    assert facts["batch"] == "state 8×8, actions 8×4×8, rewards 8×4"
    assert "a chunk of 4×3 in pirl/Tabletop-v0" in facts["acting"]
    assert "samples per second" in facts["update"]
    assert "compiling the update …" in err
    assert os.listdir(tmp_path) == []
    assert listing(data) == before


@pytest.mark.usefixtures("toy")
def test_without_a_dataset_the_learner_acts_an_episode_to_learn_from(configure, tmp_path, capsys):
    from pirl.training.train import train

    changes = {"online__env_steps": 0, "evaluation__every": 0, "checkpoints__best_metric": None}
    changes |= {"validation_every": 0, "data__validation_fraction": 0.0}
    train(configure(**changes, steps=1), exp_name="before")
    before = listing(tmp_path)
    online = {"online__env_steps": 40, "online__prior_ratio": 0.0, "steps": 0, "data__repo_id": None}
    start = {"checkpoint": str(tmp_path / "before"), "from_scratch": False, "data__norm_stats": "checkpoint"}
    assert dry_run(configure(**changes | online | start)) == 0
    assert "none; learned online" in capsys.readouterr().out
    assert listing(tmp_path) == before


def test_bytes_are_those_of_every_array_by_what_it_is_for(configure):
    config = configure()
    agent = agent_shapes(set_up(config))
    found = state_bytes(agent)
    trainable = 4 * agent.parameter_counts()["policy_trainable"]
    critic = 4 * agent.parameter_counts()["critic"]
    assert found["parameters"] == found["average"] == trainable
    assert 2 * trainable <= found["optimizer"] <= 2 * trainable + 100, "two moments of each, and counts"
    assert 5 * critic <= found["critics"] <= 5 * critic + 100, "critics, two slow copies and two moments"
    assert sum(found.values()) == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(agent))
    frozen = dataclasses.replace(config, agent=dataclasses.replace(config.agent, freeze=("language",)))
    split = state_bytes(agent_shapes(set_up(frozen)))
    assert split["frozen"] * 2 + split["parameters"] == trainable, "what is frozen is kept in bfloat16"


def test_the_peak_counts_what_a_program_takes_gives_and_holds_in_between():
    size = 1 << 20
    grow = jax.jit(lambda x: x + 1.0)
    big = jax.ShapeDtypeStruct((size,), np.float32)
    assert peak_bytes(grow.lower(big).compile()) == pytest.approx(8 * size, rel=0.01)
    donated = jax.jit(lambda x: x + 1.0, donate_argnums=0)
    assert peak_bytes(donated.lower(big).compile()) == pytest.approx(4 * size, rel=0.01)
