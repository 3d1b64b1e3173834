"""`pirl eval`: measures how often a policy succeeds, and compares two policies."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pirl.cli.console import WithJson, check_writable, progress, show, table
from pirl.cli.options import ActingInMany
from pirl.cli.parser import option, positional
from pirl.errors import UserError

if TYPE_CHECKING:
    from pirl.envs.evaluation import Evaluation, Summary

_RECORDED = 16
"""Episodes of each policy in the video."""
_LISTED = 5
"""Lost episodes that are listed one by one."""


@dataclass(frozen=True, kw_only=True)
class Evaluate(WithJson, ActingInMany):
    """Measure how often a policy succeeds, with a 95 % interval; with two policies, test whether they differ.

    Two policies run from the same initial states and are compared pairwise. The same seed gives the same episodes.
    Episodes lost to a crash, a hang or NaN are counted as lost and excluded from the rate.
    """

    checkpoint: str = positional("CHECKPOINT")
    """Checkpoint directory, a run (its newest policy), or the word expert (the scripted one)."""
    other: str | None = positional("[CHECKPOINT_B]", None)
    """Second policy, to compare with."""
    episodes: int = 200
    """Episodes per policy."""
    video: Path | None = option("FILE")
    """Write a video (.mp4, .gif or .png) of the first 16 episodes side by side; for two policies, in pairs."""

    @property
    def policies(self) -> list[str]:
        """One policy, or the two to compare."""
        return [self.checkpoint] if self.other is None else [self.checkpoint, self.other]

    def run(self) -> int:
        self.check(episodes=self.episodes)
        self.check_json()
        if self.video is not None:
            from pirl.envs.video import video_format

            check_writable(self.video)
            video_format(self.video)
        self.print_notes()
        evaluations, fps = self._evaluate()
        for policy, evaluation in zip(self.policies, evaluations, strict=True):
            show(f"{policy} in {self.env_config().id}, seed {self.seed}", _table(evaluation), "")
            print(f"{policy}: {evaluation.summary()}")
            lost = [result for result in evaluation.results if result.lost is not None]
            for result in lost[:_LISTED]:
                print(f"  lost: episode {result.index} ({result.task}, seed {result.seed}): {result.lost}")
            if len(lost) > _LISTED:
                print(f"  and {len(lost) - _LISTED} more")
            if self.other is not None:
                print()
        content = evaluations[0].to_json()
        if self.other is not None:
            from pirl.envs.evaluation import compare

            comparison = compare(*evaluations)
            print(comparison.format(*self.policies))
            pairs = comparison.pairs
            print(
                f"both succeed {pairs.both}, only the first {pairs.only_first}, only the second {pairs.only_second}, "
                f"neither {pairs.neither}" + (f"; {comparison.left_out} left out" if comparison.left_out else "")
            )
            content = {"first": content, "second": evaluations[1].to_json(), "comparison": asdict(comparison)}
        self.write_json(content, "the result")
        if self.video is not None:
            _write_video(self.video, evaluations, fps)
        return 0

    def _evaluate(self) -> tuple[list["Evaluation"], int]:
        from pirl.envs.evaluation import evaluate
        from pirl.envs.pool import open_pool
        from pirl.envs.rollout import make_starts

        evaluations, envs = [], self.num_envs()
        with open_pool(self.env_config(), min(envs, self.episodes), timeout=self.timeout) as pool:
            if self.video is not None and not pool.description.robot.cameras:
                raise UserError(f"{pool.description.name} has no camera, so --video has nothing to record.")
            starts = make_starts(pool.description, self.episodes, self.seed, self.task)
            for policy in self.policies:
                # The same batch size whatever the number of episodes: another one would round differently.
                actor = self.load_policy(policy, pool.description, math.ceil(envs / pool.groups))
                with progress(self.episodes, policy) as advance:
                    evaluation = evaluate(
                        pool,
                        actor,
                        starts,
                        execute_steps=self.resolved_execute_steps,
                        settings=self.describe(policy) | {"episodes": self.episodes, "envs": envs},
                        videos=_RECORDED if self.video is not None else 0,
                        on_episode=advance,
                    )
                evaluations.append(evaluation)
            return evaluations, pool.description.fps


def _write_video(path: Path, evaluations: list["Evaluation"], fps: int) -> None:
    """Episodes side by side; those of two policies from one initial state are neighbors."""
    from pirl.envs.video import write_videos

    shown = [index for index in evaluations[0].videos if all(index in one.videos for one in evaluations)]
    videos = [evaluation.videos[index] for index in shown for evaluation in evaluations]
    if not videos:
        raise UserError("no episode started, so there is no video.")
    write_videos(path, videos, fps, columns=4 if len(videos) > 4 else len(videos))
    print(f"video of {len(shown)} episodes: {path}")


def _table(evaluation: "Evaluation") -> Any:
    tasks = evaluation.by_task()
    rows = [[task, *_cells(summary)] for task, summary in tasks.items()] if len(tasks) > 1 else []
    rows.append(["all" if rows else next(iter(tasks)), *_cells(evaluation.summary())])
    headers = ("task", "episodes", "success", "95 % interval", "return", "length", "length (success)", "lost")
    return table(headers, rows, left=1)


def _cells(summary: "Summary") -> list[str]:
    cells = [str(summary.episodes), "-", "-"]
    if summary.rate is not None:
        low, high = summary.interval
        cells[1:] = [f"{100 * summary.rate:.1f} %", f"[{100 * low:.1f}, {100 * high:.1f}]"]
    means = ((summary.mean_return, 3), (summary.mean_length, 1), (summary.mean_length_of_successes, 1))
    cells += ["-" if value is None else f"{value:.{digits}f}" for value, digits in means]
    return [*cells, str(summary.lost)]
