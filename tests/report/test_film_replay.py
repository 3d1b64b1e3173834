"""Episodes are played again as they were measured."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from pirl.envs.evaluation import Evaluation
from pirl.report import replay


@pytest.mark.usefixtures("unchecked_signatures")
@pytest.mark.parametrize(("told", "steps"), [({"denoising_steps": 3}, 3), ({}, 10)])
def test_a_policy_plans_again_as_when_it_was_measured(monkeypatch, told, steps):
    asked = []
    monkeypatch.setattr(replay, "load_planner", lambda policy, description, **how: asked.append(how))
    measured = Evaluation([], {"envs": 4, **told})
    replay.measured_planner(Path("policy"), measured, SimpleNamespace(describe=lambda: None))
    assert asked == [{"batch_size": 4, "num_steps": steps}]
