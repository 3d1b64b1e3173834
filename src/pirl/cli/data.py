"""`pirl data`: inspects, validates and labels LeRobot datasets, computes statistics, manages the frame cache."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from pirl.cli.console import check_writable, count, default, facts, optional, show
from pirl.cli.json_output import WithJson
from pirl.cli.label import DatasetPath, DropEpisodes, LabelEpisodes
from pirl.errors import UserError
from pirl.words import size

if TYPE_CHECKING:
    from pirl.data import OutcomeConfig
    from pirl.data.frame_cache import CachedFrames

_LONGEST_HORIZON = 10_000


@dataclass(frozen=True)
class _WithOutcomes:
    dataset: DatasetPath
    """Directory of a LeRobot dataset (v2.0, v2.1 or v3.0), or its hub id."""
    reward: Literal["sparse", "step_penalty", "raw"] = "sparse"
    """Reward used in training: 1 on success, -1 per step until success, or the reward column unchanged."""
    reward_column: Annotated[str | None, default("next.reward", "NAME")] = None
    """Reward column."""
    success_column: Annotated[str | None, default("next.success, is_success, success, …", "NAME")] = None
    """Success column."""
    success_threshold: Annotated[float | None, optional("REWARD")] = None
    """Reward from which on a step is a success, for rewards such as 0 and 100 or those of several stages."""
    unlabelled: Literal["error", "success"] = "error"
    """How to treat episodes without an outcome: as an error, or as successful demonstrations."""
    episodes: Annotated[str | None, default("all", "EPISODES")] = None
    """Episodes to look at, such as 0,3,7-12."""

    def outcomes(self) -> "OutcomeConfig":
        """How to tell the outcomes of episodes."""
        from pirl.data import OutcomeConfig

        return OutcomeConfig(
            self.reward,
            self.reward_column,
            self.success_column,
            unlabelled=self.unlabelled,
            success_threshold=self.success_threshold,
        )

    def chosen(self) -> list[int] | None:
        """The episodes that are named, if any are."""
        from pirl.data import parse_episodes

        return None if self.episodes is None else parse_episodes(self.episodes)


@dataclass(frozen=True)
class Check(WithJson, _WithOutcomes):
    """Validate a dataset before training: lists every problem by episode, file, column and value.

    Exit code 2 if there are problems, with the options that get the other episodes to train. Notes explain how an oddity
    is read; they do not block training.
    """

    robot: Annotated[str | None, default("one that uses all columns and cameras", "NAME|FILE")] = None
    """Robot preset, or a JSON file that describes a robot: what it does not use is not judged."""
    decode: bool = False
    """Decode every video frame, not only the first of each episode."""

    def run(self) -> int:
        """Do it; the return value is the exit code."""
        from pirl.data import check_dataset, load_robot
        from pirl.data.problems import format_problems
        from pirl.data.validate import skip_advice

        self.check_json()
        robot = None if self.robot is None else load_robot(self.robot)
        usable, found = check_dataset(
            self.dataset, self.outcomes(), robot=robot, episodes=self.chosen(), decode=self.decode
        )
        problems = [entry for entry in found if entry.severity == "problem"]
        notes = [entry for entry in found if entry.severity == "note"]
        for kind, entries in (("note", notes), ("problem", problems)):
            for line in format_problems(entries):
                print(f"{kind}: {line}")
        bad = {entry.episode for entry in problems if entry.episode is not None}
        extent = ""
        if usable is not None:
            kept = len(usable.episode_ids)
            extent = f", {f'{kept} of {kept + len(bad)}' if bad else kept} episodes, {len(usable):,} frames"
        print(f"{self.dataset}{extent}: {count(problems, 'problem')}, {count(notes, 'note')}")
        if bad and usable is not None and all(entry.episode is not None for entry in problems):
            print(skip_advice(usable, bad))
        kinds = {"problems": problems, "notes": notes}
        self.write_json(
            {kind: [entry.to_json() for entry in entries] for kind, entries in kinds.items()}, "the findings"
        )
        return 2 if problems else 0


@dataclass(frozen=True)
class Info(WithJson, _WithOutcomes):
    """Print what a dataset contains: episodes, tasks, success, lengths, returns, corrections, cameras.

    What cannot be read is listed at the end.
    """

    def run(self) -> int:
        """Do it; the return value is the exit code."""
        from pirl.data import scan_episodes, summarize

        self.check_json()
        summary = summarize(scan_episodes(self.dataset, self.chosen()), self.outcomes())
        rows = [
            ("dataset", summary["name"]),
            ("format", f"{summary['version']}, {summary['fps']:g} frames per second, robot {summary['robot_type']}"),
            ("episodes", f"{summary['episodes']:,}"),
            ("frames", f"{summary['frames']:,} ({summary['frames'] / summary['fps'] / 60:.1f} minutes)"),
        ]
        outcome = summary["outcomes"]
        if outcome is None:
            rows.append(("success", f"unknown: {summary['outcome_problem']}"))
        else:
            rate = (
                f"{outcome['success']} of {outcome['known']} episodes ({outcome['rate']:.0%})"
                if outcome["known"]
                else "-"
            )
            rows.append(("success", f"{rate}; {outcome['timeouts']} timed out"))
        if human := summary["interventions"]:
            share = f"{human['frames']:,} frames in {human['episodes']:,} episodes"
            rows.append(("corrections", f"{share} by a human ({human['column']})"))
        for camera in summary["cameras"]:
            rows.append(("camera", f"{camera['name']}  {camera['height']}×{camera['width']}  {camera['storage']}"))
        columns = (f"{column['name']} {column['dtype']}{column['shape']}" for column in summary["columns"])
        rows.append(("columns", ", ".join(columns)))
        for task in summary["tasks"]:
            rows.append(("task", f"{task['episodes']:>4} episodes  {task['task']}"))
        rows += [("not read", problem) for problem in summary["problems"]]
        histograms = [_bars("length", summary["lengths"])]
        if outcome is not None:
            histograms.append(_bars(f"return ({self.reward})", outcome["returns"]))
        show(facts(rows), "", *histograms)
        self.write_json(summary, "the summary")
        return 0


@dataclass(frozen=True)
class Stats(_WithOutcomes):
    """Compute normalisation statistics (z-score and exact quantiles) and write OpenPI's norm_stats.json.

    They are over the samples that training sees: chunks of actions from every frame up to the end of its episode, which
    is where it succeeds.
    """

    robot: Annotated[str, tyro.conf.arg(metavar="NAME|FILE")] = tyro.MISSING
    """Robot preset, or a JSON file that describes a robot.
    Presets: aloha, aloha_sim, libero, libero_delta, droid, droid_joint_position, tabletop, tabletop_state, metaworld."""
    horizon: int = tyro.MISSING
    """Length of the policy's action chunk: statistics of relative actions depend on it."""
    output: Annotated[Path | None, default("print only", "FILE")] = None
    """File to write."""

    def run(self) -> int:
        """Do it; the return value is the exit code."""
        from rich.table import Table

        from pirl.data import BrokenDatasetError, dataset_norm_stats, load_robot, scan_episodes
        from pirl.data.outcomes import try_outcomes
        from pirl.data.validate import leave_out, split_episodes
        from pirl.interop import write_norm_stats

        if not 1 <= self.horizon <= _LONGEST_HORIZON:
            raise UserError(f"--horizon should be at least 1, and {_LONGEST_HORIZON:,} at most; it is {self.horizon}.")
        if self.output is not None:
            check_writable(self.output)
        robot, dataset = load_robot(self.robot), scan_episodes(self.dataset, self.chosen())
        if broken := [entry for entry in dataset.problems if entry.severity == "problem" and entry.episode is None]:
            raise BrokenDatasetError(dataset.name, broken)
        cameras = [camera for camera in robot.cameras.values() if camera in dataset.cameras]
        dataset, problems = split_episodes(dataset, (*robot.state, *robot.actions), cameras, self.outcomes())
        dataset = leave_out(dataset, [entry for entry in problems if entry.episode is not None], "skip")
        found, _ = try_outcomes(dataset, self.outcomes())
        if found is None:
            print("how episodes ended is not known: all their frames count (pirl data check says more)")
        stats = dataset_norm_stats(dataset, robot, self.horizon, ends=None if found is None else found.ends)
        table = Table("quantity", "dimension", "mean", "std", "q01", "q99", box=None, pad_edge=False)
        for name, entry in stats.items():
            assert entry.q01 is not None
            assert entry.q99 is not None
            for dimension, values in enumerate(zip(entry.mean, entry.std, entry.q01, entry.q99, strict=True)):
                table.add_row(name, str(dimension), *(f"{value:.5g}" for value in values))
        show(table)
        if self.output is not None:
            write_norm_stats(self.output, stats)
            print(f"written to {self.output}")
        return 0


@dataclass(frozen=True)
class Cache:
    """List the frame caches, or delete them. They are rebuilt when needed."""

    clear: bool = False
    """Delete them all."""

    def run(self) -> int:
        """Do it; the return value is the exit code."""
        from rich.table import Table

        from pirl.data import delete_frame_cache, list_frame_caches

        entries = list_frame_caches()
        table = Table(
            "dataset", "camera", "frames", "size", "kept as", "on disk", "last used", box=None, pad_edge=False
        )
        for entry in entries:
            pixels, used = f"{entry.height}×{entry.width}", f"{entry.last_used:%Y-%m-%d %H:%M}"
            kept = ("plain" if entry.compression == "none" else entry.compression) + (
                "" if entry.complete else ", unfinished"
            )
            on_disk = size(entry.bytes_on_disk)
            table.add_row(entry.dataset, entry.camera, f"{entry.frames:,}", pixels, kept, on_disk, used)
        if entries:
            show(table)
        print(_amount(entries))
        if not self.clear or not entries:
            return 0
        deleted = []
        for entry in entries:
            try:
                delete_frame_cache(entry)
                deleted.append(entry)
            except UserError as error:
                print(f"not deleted: {error}", file=sys.stderr)
        print(f"deleted: {_amount(deleted)}")
        return 0 if len(deleted) == len(entries) else 2


def _amount(caches: "list[CachedFrames]") -> str:
    return f"{count(caches, 'cache')}, {size(sum(cache.bytes_on_disk for cache in caches))}"


DATA_COMMANDS: dict[str, Any] = {
    "check": Check,
    "info": Info,
    "label": LabelEpisodes,
    "drop": DropEpisodes,
    "stats": Stats,
    "cache": Cache,
}


def _bars(title: str, histogram: dict[str, Any], width: int = 40) -> str:
    """A histogram in text."""
    counts, edges = histogram["counts"], histogram["edges"]
    lines = [f"{title}: {histogram['min']:.4g} to {histogram['max']:.4g}, mean {histogram['mean']:.4g}"]
    for number, low, high in zip(counts, edges, edges[1:], strict=False):
        bar = "█" * round(width * number / max(counts))
        lines.append(f"  {low:>9.4g} … {high:<9.4g} {number:>6} {bar}")
    return "\n".join(lines) + "\n"
