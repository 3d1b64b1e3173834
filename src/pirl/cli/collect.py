"""`pirl collect`: collects a LeRobot dataset in an environment."""

import math
import time
from dataclasses import MISSING, asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pirl.cli.console import facts, progress, show
from pirl.cli.options import EXPERT, ActingInMany
from pirl.cli.parser import option
from pirl.errors import UserError

if TYPE_CHECKING:
    from pirl.envs.collect import CollectionLog


@dataclass(frozen=True, kw_only=True)
class Collect(ActingInMany):
    """Collect a LeRobot dataset with the scripted expert or a policy.

    The dataset includes rewards, success, and whether each episode terminated or timed out. --resume continues a stopped
    collection and gives the same data as an uninterrupted one; with more --episodes or --env-steps, it adds episodes.
    """

    policy: str = option("expert|CHECKPOINT", default=MISSING)
    """The policy: the word expert, a checkpoint directory, or a run (its newest policy)."""
    out: Path = option("DIR", default=MISSING)
    """Directory of the dataset."""
    episodes: int | None = None
    """Total number of episodes; with --env-steps, the maximum."""
    env_steps: int | None = None
    """Total environment steps; the episode that reaches them is the last."""
    version: Literal["v3.0", "v2.1"] = "v3.0"
    """Version of the LeRobot format."""
    storage: Literal["video", "image"] = "video"
    """Store images as video, or as PNG inside the data files."""
    codec: Literal["h264", "libsvtav1"] = "h264"
    """Video codec."""
    seed: int = 1000
    """Random seed: determines the initial states and everything random after them.
    `pirl eval` starts at 0, so that a policy is not evaluated on the states it was trained on."""
    resume: bool = False
    """Continue the dataset in the directory."""

    @property
    def policies(self) -> list[str]:
        """The one policy."""
        return [self.policy]

    def run(self) -> int:
        if self.episodes is None and self.env_steps is None:
            raise UserError("pirl collect needs --episodes or --env-steps.")
        self.check(**{"episodes": self.episodes, "env-steps": self.env_steps})
        from pirl.envs.collect import DatasetFormat, collect_dataset, open_log
        from pirl.envs.pool import open_pool
        from pirl.envs.rollout import make_starts

        self.print_notes()
        envs = self.num_envs()
        dataset_format = DatasetFormat(self.version, self.storage, self.codec)
        settings = self.describe(self.policy) | asdict(dataset_format)
        if self.policy != EXPERT:
            settings["envs"] = envs  # the batch size decides how a policy rounds
        log = open_log(self.out, settings, resume=self.resume)
        episodes = self.episodes or self.env_steps or 0  # every episode has at least one step
        if log.complete and (len(log.episodes) >= episodes or log.frames >= (self.env_steps or math.inf)):
            wanted = f"{self.episodes} episodes" if self.episodes else f"{self.env_steps} environment steps"
            print(f"all {wanted} are in {self.out} already")
            self._report(log, seconds=0.0)
            return 0
        done, begun = len(log.episodes), time.monotonic()
        with open_pool(self.env_config(), min(envs, episodes), timeout=self.timeout) as pool:
            starts = make_starts(pool.description, episodes, self.seed, self.task)
            actor = self.load_policy(self.policy, pool.description, math.ceil(envs / pool.groups))
            if done:
                print(f"{done} {f'of {self.episodes} ' if self.episodes else ''}episodes exist; continuing")
            total = max(0, self.episodes - done) if self.episodes else None
            with progress(total, f"collecting in {self.env_config().id}") as advance:
                log = collect_dataset(
                    pool,
                    actor,
                    starts,
                    self.out,
                    execute_steps=self.resolved_execute_steps,
                    settings=settings,
                    dataset_format=dataset_format,
                    env_steps=self.env_steps,
                    resume=self.resume,
                    on_episode=advance,
                )
        self._report(log, time.monotonic() - begun)
        return 0

    def _report(self, log: "CollectionLog", seconds: float) -> None:
        from pirl.envs.evaluation import Summary

        rows = [
            ("dataset", str(self.out)),
            ("episodes", f"{log.written:,} of {self.policy} in {self.env_config().id}"),
            ("outcome", str(Summary.of(log.episodes))),
            ("frames", f"{log.frames:,}"),
        ]
        rows += [("lost", f"start {one.index} (seed {one.seed}): {one.lost}") for one in log.episodes if one.lost][:5]
        if seconds:
            rows.append(("time", f"{seconds:.1f} s"))
        rows += [("next", f"pirl data check {self.out}"), ("", f"pirl data info {self.out}")]
        show(facts(rows))
