"""Learners in environments: when they are guided by their prompt."""

from types import SimpleNamespace

import numpy as np
import pytest

from pirl.agents.config import RIPTConfig
from pirl.agents.ript import RIPTAgent
from pirl.training import acting


@pytest.mark.usefixtures("unchecked_signatures")
@pytest.mark.parametrize(
    ("weighting", "weight", "updates", "expected"),
    [("guidance", 1.0, 0, False), ("guidance", 1.0, 1, True), ("positive", 1.0, 9, False)],
)
def test_rollouts_are_guided_once_the_policy_has_learned_what_by(monkeypatch, weighting, weight, updates, expected):
    planned = []
    monkeypatch.setattr(acting, "ChunkPolicy", lambda act, policy_io, **options: planned.append(options["guided"]))
    config = RIPTConfig(weighting=weighting, rollout_guidance=weight)
    agent = RIPTAgent(step=np.int32(updates), actor=None, config=config, real_action_dim=1)
    acting.rollout_policy(agent, None, SimpleNamespace(size=2, groups=1))
    assert planned == [expected]
