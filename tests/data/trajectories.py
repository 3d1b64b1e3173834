"""Random episodes for the tests of batches, and a policy without cameras and prompts to prepare them for."""

import numpy as np
from hypothesis import strategies as st

from pirl.data.chunks import Trajectories
from pirl.data.policy_io import PolicyIO
from pirl.data.robots import Robot
from pirl.models import get_model_config

ROBOT = Robot("arm", cameras={}, state=("state",), actions=("action",), state_dim=3, action_dim=2)
MODEL = get_model_config("tiny_state")
IO = PolicyIO(ROBOT, MODEL, None, None)


class Painted:
    """Pictures that say which row they are of."""

    def __init__(self, size=(2, 2)):
        self.size, self.gathered, self.released = size, [], 0

    def gather(self, rows):
        self.gathered.append(rows)
        picture = np.stack([rows // 65536, rows // 256 % 256, rows % 256], axis=-1).astype(np.uint8)
        return np.broadcast_to(picture[:, None, None], (len(rows), *self.size, 3)).copy()

    def release(self):
        self.released += 1


@st.composite
def episodes(draw, max_episodes=6, max_length=12):
    """Lengths, ends cut short, true ends and time-outs."""
    lengths = draw(st.lists(st.integers(1, max_length), min_size=1, max_size=max_episodes))
    ends = [draw(st.integers(1, length)) for length in lengths]
    terminal = [draw(st.booleans()) for _ in lengths]
    return build(lengths, ends, terminal, seed=draw(st.integers(0, 2**16)))


def build(lengths, ends=None, terminal=None, *, seed=0, frames=None):
    rng = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    rows = int(starts[-1])
    stops = starts[:-1] + np.asarray(lengths if ends is None else ends)
    terminals = np.zeros(rows, bool)
    terminals[stops - 1] = [True] * len(lengths) if terminal is None else terminal
    return Trajectories(
        states=rng.standard_normal((rows, 3)).astype(np.float32),
        actions=rng.standard_normal((rows, 2)).astype(np.float32),
        rewards=rng.standard_normal(rows).astype(np.float32),
        terminals=terminals,
        starts=starts[:-1],
        ends=stops,
        success=rng.integers(-1, 2, len(lengths)).astype(np.int8),
        prompts=["do it"],
        prompt_of_row=np.zeros(rows, np.int64),
        frames=frames or {},
    )
