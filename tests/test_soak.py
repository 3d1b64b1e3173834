"""The soak finds a difference of one bit, its damage is damage, and its learners exist."""

import json
import random
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from soak.faults import damage  # noqa: E402
from soak.runs import LEARNERS, Place, differences, flags  # noqa: E402

from pirl.cli.main import parse  # noqa: E402


def make_run(directory: Path, metrics: str = '{"step": 8}\n', step: int = 8, **arrays: np.ndarray) -> Path:
    """What is looked at in a finished run."""
    checkpoint = directory / "checkpoints" / str(step)
    with ocp.PyTreeCheckpointer() as writer:
        writer.save(checkpoint / "train_state", {"a": jnp.zeros(3), **arrays})
        writer.save(checkpoint / "params", {"params": {"b": jnp.ones(2)}})
    host = {"parts": {"log": {"metrics": {"metrics": 1, "timing": len(directory.name)}}}}
    (checkpoint / "state.json").write_text(json.dumps({"host": host}))
    (directory / "metrics.jsonl").write_text(metrics)
    return directory


def test_one_bit_is_a_difference_and_the_clock_is_none(tmp_path):
    one = np.array([0.0, np.nan, 1.0], np.float32)
    reference = make_run(tmp_path / "reference", c=jnp.asarray(one))
    assert differences(make_run(tmp_path / "same", c=jnp.asarray(one)), reference) == []
    one[0] = -0.0
    assert differences(make_run(tmp_path / "signed", c=jnp.asarray(one)), reference) == ["['c']"]
    assert differences(make_run(tmp_path / "more", c=jnp.asarray(one[1:])), reference) == ["['c']"]
    assert differences(make_run(tmp_path / "fewer"), reference) == ["['c']"]
    assert differences(make_run(tmp_path / "other", '{"step": 9}\n'), reference) == ["metrics.jsonl"]
    assert "step 7" in differences(make_run(tmp_path / "early", step=7), reference)[0]


def test_damage_changes_a_file_and_never_makes_it_longer(tmp_path):
    for seed in range(40):
        file, chance = tmp_path / "file", random.Random(seed)
        before = chance.randbytes(chance.choice([1, 2, 50, 5000]))
        file.write_bytes(before)
        damage(file, chance)
        assert file.read_bytes() != before
        assert len(file.read_bytes()) <= len(before)


def test_the_options_of_every_learner_exist(tmp_path):
    for learner in LEARNERS.values():
        for endless in ((), flags(learner.without_end)):
            words = Place(tmp_path).command(learner, tmp_path / "run", *endless)
            config = parse(words[words.index("pirl.cli.main") + 1 :]).resolve()
            assert config.name == learner.preset
            assert config.checkpoints.max_to_keep >= 2, "one may be damaged"
            if endless:
                assert max(config.steps, config.online.env_steps, config.rollout.iterations) >= 10**6
