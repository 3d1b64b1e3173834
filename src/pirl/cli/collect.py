"""`pirl collect`: makes a LeRobot dataset by acting in an environment."""

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from pirl.cli.acting import EXPERT, ActingInMany, progress
from pirl.cli.console import facts, show

if TYPE_CHECKING:
    from pirl.envs.collecting import CollectionLog


@dataclass(frozen=True, kw_only=True)
class Collect(ActingInMany):
    """Let the scripted expert or a policy act, and write what happens as a LeRobot dataset.

    Rewards, success, and whether an episode ended or ran out of time are written with it. A run that was stopped goes
    on with --resume and gives the same data; with more --episodes, it adds to what is there.
    """

    policy: Annotated[str, tyro.conf.arg(metavar="expert|CHECKPOINT")]
    """Who acts: the word expert, or a checkpoint directory (the one that holds params/)."""
    episodes: int
    """Episodes in all."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Directory of the dataset."""
    version: Literal["v3.0", "v2.1"] = "v3.0"
    """LeRobot's format."""
    storage: Literal["video", "image"] = "video"
    """Pictures as video, or each as a PNG inside the data files."""
    codec: Literal["h264", "libsvtav1"] = "h264"
    """Of videos."""
    seed: int = 1000
    """Decides every start, and all that is random after it; `pirl eval` begins at 0, so that it measures elsewhere."""
    resume: bool = False
    """Go on with the dataset in the directory."""

    def run(self) -> int:
        """Do it; the return value is the exit code."""
        self.check([self.policy], episodes=self.episodes)
        from pirl.envs.collecting import DatasetFormat, collect, open_log
        from pirl.envs.pools import open_pool
        from pirl.envs.rollouts import make_starts

        envs = self.at_a_time()
        dataset_format = DatasetFormat(self.version, self.storage, self.codec)
        settings = self.settings(self.policy) | asdict(dataset_format)
        if self.policy != EXPERT:
            settings["envs"] = envs  # gives the size of batches, which decides how a policy rounds
        log = open_log(self.out, settings, resume=self.resume)
        if log.complete and len(log.episodes) >= self.episodes:
            print(f"all {self.episodes} episodes are in {self.out} already")
            self._report(log, seconds=0.0)
            return 0
        done, begun = len(log.episodes), time.monotonic()
        with open_pool(self.env_config(), min(envs, self.episodes), timeout=self.timeout) as pool:
            starts = make_starts(pool.description, self.episodes, self.seed, self.task)
            actor = self.actor(self.policy, pool.description, math.ceil(envs / pool.groups))
            if done:
                print(f"{done} of {self.episodes} episodes are there; going on")
            with progress(max(0, self.episodes - done), f"collecting in {self.env}") as advance:
                log = collect(
                    pool,
                    actor,
                    starts,
                    self.out,
                    execute_steps=self.execute_steps,
                    settings=settings,
                    dataset_format=dataset_format,
                    resume=self.resume,
                    on_episode=advance,
                )
        self._report(log, time.monotonic() - begun)
        return 0

    def _report(self, log: "CollectionLog", seconds: float) -> None:
        from pirl.envs.evaluation import Summary

        summary = Summary.of(log.episodes)
        frames = sum(episode.length for episode in log.episodes if episode.lost is None)
        rows = [
            ("dataset", str(self.out)),
            ("episodes", f"{log.written:,} of {self.policy} in {self.env}"),
            ("outcome", str(summary)),
            ("frames", f"{frames:,}"),
        ]
        rows += [("lost", f"start {one.index} (seed {one.seed}): {one.lost}") for one in log.episodes if one.lost][:5]
        if seconds:
            rows.append(("time", f"{seconds:.1f} s"))
        rows += [("next", f"pirl data check {self.out}"), ("", f"pirl data info {self.out}")]
        show(facts(rows))
