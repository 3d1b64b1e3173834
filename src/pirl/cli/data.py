"""`pirl data`: inspects, validates and labels LeRobot datasets, computes statistics, manages the frame cache."""

import sys
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pirl.cli.console import WithJson, check_writable, facts, show, table
from pirl.cli.parser import Command, option, positional
from pirl.errors import UserError
from pirl.text import format_size

if TYPE_CHECKING:
    from pirl.data import Dataset, Label, OutcomeConfig

_LONGEST_HORIZON = 10_000


@dataclass(frozen=True, kw_only=True)
class _WithOutcomes(Command):
    dataset: str = positional("DATASET")
    """Directory of a LeRobot dataset (v2.0, v2.1 or v3.0), or its hub id."""
    reward: Literal["sparse", "step_penalty", "raw"] = "sparse"
    """Reward used in training: 1 on success, -1 per step until success, or the reward column unchanged."""
    reward_column: str | None = option("NAME", shown="next.reward")
    """Reward column."""
    success_column: str | None = option("NAME", shown="next.success, is_success, success, …")
    """Success column."""
    success_threshold: float | None = option("REWARD")
    """Reward from which on a step is a success, for rewards such as 0 and 100 or those of several stages."""
    unlabeled: Literal["error", "success"] = "error"
    """How to treat episodes without an outcome: as an error, or as successful demonstrations."""
    episodes: str | None = option("EPISODES", shown="all")
    """Episodes to look at, such as 0,3,7-12."""

    def outcomes(self) -> "OutcomeConfig":
        """How to tell the outcomes of episodes."""
        from pirl.data import OutcomeConfig

        return OutcomeConfig(
            self.reward,
            self.reward_column,
            self.success_column,
            unlabeled=self.unlabeled,
            success_threshold=self.success_threshold,
        )

    def selected(self) -> list[int] | None:
        """The episodes to look at (none: all)."""
        from pirl.data import parse_episodes

        return None if self.episodes is None else parse_episodes(self.episodes)


@dataclass(frozen=True, kw_only=True)
class Check(WithJson, _WithOutcomes):
    """Validate a dataset before training: lists every problem by episode, file, column and value.

    Exit code 2 if there are problems, with the options that get the other episodes to train. Notes explain how an oddity
    is read; they do not block training.
    """

    robot: str | None = option("NAME|FILE", shown="one that uses all columns and cameras")
    """Robot preset, or a JSON file that describes a robot: what it does not use is not judged."""
    decode: bool = False
    """Decode every frame of the cameras, not only the first of each episode."""

    def run(self) -> int:
        from pirl.data import check_dataset, load_robot
        from pirl.data.problems import format_problems
        from pirl.data.validate import skip_advice

        self.check_json()
        robot = None if self.robot is None else load_robot(self.robot)
        usable, found = check_dataset(
            self.dataset, self.outcomes(), robot=robot, episodes=self.selected(), decode=self.decode
        )
        problems = [entry for entry in found if entry.severity == "problem"]
        notes = [entry for entry in found if entry.severity == "note"]
        lines = {"note": format_problems(notes), "problem": format_problems(problems)}
        for kind, entries in lines.items():
            print("".join(f"{kind}: {entry}\n" for entry in entries), end="")
        bad = {entry.episode for entry in problems if entry.episode is not None}
        extent = ""
        if usable is not None:
            kept = len(usable.episode_ids)
            total = kept + len(bad)
            extent = f", {f'{kept} of {total}' if bad else kept} episode{'s'[: total != 1]}, {len(usable):,} frames"
        print(f"{self.dataset}{extent}: {_count(lines['problem'], 'problem')}, {_count(lines['note'], 'note')}")
        if bad and usable is not None and all(entry.episode is not None for entry in problems):
            print(skip_advice(usable, bad))
        content = {"problems": [entry.to_json() for entry in problems], "notes": [entry.to_json() for entry in notes]}
        self.write_json(content, "the findings")
        return 2 if problems else 0


@dataclass(frozen=True, kw_only=True)
class Info(WithJson, _WithOutcomes):
    """Print what a dataset contains: episodes, tasks, success, lengths, returns, corrections, cameras.

    What cannot be read is listed at the end.
    """

    def run(self) -> int:
        from pirl.data import scan_episodes, summarize

        self.check_json()
        summary = summarize(scan_episodes(self.dataset, self.selected()), self.outcomes())
        rows = [
            ("dataset", summary["name"]),
            ("format", f"{summary['version']}, {summary['fps']:g} frames per second, robot {summary['robot_type']}"),
            ("episodes", f"{summary['episodes']:,}"),
            ("frames", f"{summary['frames']:,} ({summary['frames'] / summary['fps'] / 60:.1f} minutes)"),
        ]
        outcome, rate = summary["outcomes"], "-"
        if outcome is None:
            rows.append(("success", f"unknown: {summary['outcome_problem']}"))
        else:
            if outcome["known"]:
                rate = f"{outcome['success']} of {outcome['known']} episodes ({outcome['rate']:.0%})"
            rows.append(("success", f"{rate}; {outcome['timeouts']} timed out"))
        if human := summary["interventions"]:
            share = f"{human['frames']:,} frames in {human['episodes']:,} episodes"
            rows.append(("corrections", f"{share} by a human ({human['column']})"))
        for camera in summary["cameras"]:
            rows.append(("camera", f"{camera['name']}  {camera['height']}×{camera['width']}  {camera['storage']}"))
        columns = (f"{column['name']} {column['dtype']}{column['shape']}" for column in summary["columns"])
        rows.append(("columns", ", ".join(columns)))
        rows += [("task", f"{task['episodes']:>4} episodes  {task['task']}") for task in summary["tasks"]]
        rows += [("not read", problem) for problem in summary["problems"]]
        histograms = [_bars("length", summary["lengths"])]
        if outcome is not None:
            histograms.append(_bars(f"return ({self.reward})", outcome["returns"]))
        show(facts(rows), "", *histograms)
        self.write_json(summary, "the summary")
        return 0


def _bars(title: str, histogram: dict[str, Any], width: int = 40) -> str:
    """A histogram in text."""
    counts, edges = histogram["counts"], histogram["edges"]
    lines = [f"{title}: {histogram['min']:.4g} to {histogram['max']:.4g}, mean {histogram['mean']:.4g}"]
    for number, low, high in zip(counts, edges, edges[1:], strict=False):
        bar = "█" * round(width * number / max(counts))
        lines.append(f"  {low:>9.4g} … {high:<9.4g} {number:>6} {bar}")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, kw_only=True)
class Stats(_WithOutcomes):
    """Compute normalization statistics (z-score and exact quantiles) and write OpenPI's norm_stats.json.

    They are over the samples that training sees: chunks of actions from every frame up to the end of its episode, which
    is where it succeeds.
    """

    robot: str = option("NAME|FILE", default=MISSING)
    """Robot preset, or a JSON file that describes a robot.
    Presets: aloha, aloha_sim, libero, libero_delta, droid, droid_joint_position, tabletop, tabletop_state, metaworld."""
    horizon: int
    """Length of the policy's action chunk: statistics of relative actions depend on it."""
    output: Path | None = option("FILE", shown="print only")
    """File to write."""

    def run(self) -> int:
        from pirl.data import BrokenDatasetError, dataset_norm_stats, load_robot, scan_episodes
        from pirl.data.outcomes import try_outcomes
        from pirl.data.validate import leave_out, split_episodes
        from pirl.interop import write_norm_stats

        if not 1 <= self.horizon <= _LONGEST_HORIZON:
            raise UserError(f"--horizon should be at least 1, and {_LONGEST_HORIZON:,} at most; it is {self.horizon}.")
        if self.output is not None:
            check_writable(self.output)
        robot, dataset = load_robot(self.robot), scan_episodes(self.dataset, self.selected())
        if broken := [entry for entry in dataset.problems if entry.severity == "problem" and entry.episode is None]:
            raise BrokenDatasetError(dataset.name, broken)
        cameras = [camera for camera in robot.cameras.values() if camera in dataset.cameras]
        dataset, problems = split_episodes(dataset, (*robot.state, *robot.actions), cameras, self.outcomes())
        dataset = leave_out(dataset, [entry for entry in problems if entry.episode is not None], "skip")
        found, _ = try_outcomes(dataset, self.outcomes())
        if found is None:
            print("how episodes ended is not known: all their frames count (pirl data check says more)")
        stats = dataset_norm_stats(dataset, robot, self.horizon, ends=None if found is None else found.ends)
        rows = []
        for name, entry in stats.items():
            assert entry.q01 is not None
            assert entry.q99 is not None
            for dimension, values in enumerate(zip(entry.mean, entry.std, entry.q01, entry.q99, strict=True)):
                rows.append((name, str(dimension), *(f"{value:.5g}" for value in values)))
        show(table(("quantity", "dimension", "mean", "std", "q01", "q99"), rows))
        if self.output is not None:
            write_norm_stats(self.output, stats)
            print(f"written to {self.output}")
        return 0


@dataclass(frozen=True, kw_only=True)
class Cache(Command):
    """List the frame caches, or delete them. They are rebuilt when needed."""

    clear: bool = False
    """Delete them all."""

    def run(self) -> int:
        from pirl.data import delete_frame_cache, list_frame_caches

        entries, rows = list_frame_caches(), []
        for entry in entries:
            kept = "plain" if entry.compression == "none" else entry.compression
            kept += "" if entry.complete else ", unfinished"
            row = [entry.dataset, entry.camera, f"{entry.frames:,}", f"{entry.height}×{entry.width}", kept]
            rows.append([*row, format_size(entry.bytes_on_disk), f"{entry.last_used:%Y-%m-%d %H:%M}"])
        if entries:
            show(table(("dataset", "camera", "frames", "size", "kept as", "on disk", "last used"), rows))
        print(f"{_count(entries, 'cache')}, {format_size(sum(entry.bytes_on_disk for entry in entries))}")
        if not self.clear or not entries:
            return 0
        deleted = []
        for entry in entries:
            try:
                delete_frame_cache(entry)
                deleted.append(entry)
            except UserError as error:
                print(f"not deleted: {error}", file=sys.stderr)
        print(f"deleted: {_count(deleted, 'cache')}, {format_size(sum(entry.bytes_on_disk for entry in deleted))}")
        return 0 if len(deleted) == len(entries) else 2


@dataclass(frozen=True, kw_only=True)
class LabelEpisodes(Command):
    """Label episodes as success or failure. Writes meta/pirl_labels.jsonl; the dataset itself is not changed.

    Labels come from a CSV file (columns episode and success, reward or truncated), from lists of episodes or, without
    either, from one question per episode. New labels replace old ones.
    """

    dataset: str = positional("DATASET")
    """Directory of a LeRobot dataset."""
    csv: Path | None = option("FILE")
    """CSV file with a column episode and any of success, reward, truncated."""
    success: str | None = option("EPISODES")
    """Successful episodes, such as 0,3,7-12; "rest" for all others."""
    failure: str | None = option("EPISODES")
    """Failed episodes, in the same form."""
    truncated: str | None = option("EPISODES")
    """Episodes that timed out. Episodes in the other lists that are not in this one count as terminated."""
    ask_again: bool = False
    """In interactive mode, also ask about labeled episodes."""

    def run(self) -> int:
        from pirl.data import read_csv, read_labels, scan_episodes

        dataset = scan_episodes(self.dataset)  # episodes with problems do not keep the others from being labeled
        old = read_labels(dataset.root)
        by_flags = any(flag is not None for flag in (self.success, self.failure, self.truncated))
        if self.csv is not None and by_flags:
            raise UserError("give labels either with --csv or with --success, --failure and --truncated.")
        if self.csv is not None:
            return _save_labels(dataset, old, read_csv(self.csv))
        if by_flags:
            return _save_labels(dataset, old, self._labels_from_flags(dataset))
        return self._ask(dataset, old)

    def _labels_from_flags(self, dataset: "Dataset") -> "dict[int, Label]":
        from pirl.data import Label, parse_episodes

        everything = set(dataset.episode_ids.tolist())
        named: dict[str, set[int]] = {"success": set(), "failure": set(), "truncated": set()}
        for flag in named:
            text = getattr(self, flag)
            if text is None or (text == "rest" and flag != "truncated"):
                continue
            named[flag] = set(parse_episodes(text, max(everything)))
            if not named[flag]:
                raise UserError(f"--{flag} names no episodes; give a list such as 0,3,7-12.")
        if self.success == self.failure == "rest":
            raise UserError('only one of --success and --failure can be "rest".')
        good, bad, timed_out = named["success"], named["failure"], named["truncated"]
        if self.success == "rest":
            good = everything - bad
        if self.failure == "rest":
            bad = everything - good
        if both := sorted(good & bad):
            raise UserError(f"episode {both[0]} cannot be both a success and a failure.")
        return {
            # Every label says whether the episode timed out, so that a wrong time-out can be taken back.
            episode: Label(
                episode, success=episode in good if episode in good | bad else None, truncated=episode in timed_out
            )
            for episode in sorted(good | bad | timed_out)
        }

    def _ask(self, dataset: "Dataset", old: "dict[int, Label]") -> int:
        """Ask about each episode; answers are kept even if it is interrupted."""
        from pirl.data import Label

        answers: dict[int, Any] = {}
        numbers = dataset.episode_ids.tolist()
        position = {number: episode for episode, number in enumerate(numbers) if self.ask_again or number not in old}
        if not position:
            print(f"all {len(numbers)} episodes are labeled; --ask-again asks about them again")
            return 0
        print("y: success   n: failure   t: failure by timeout   enter: skip   q: stop")
        try:
            for number, episode in position.items():
                task = dataset.rows.tasks[int(dataset.rows.task_of_row[dataset.starts[episode]])]
                seconds = dataset.lengths[episode] / dataset.info.fps
                answer = _answer(f"episode {number} ({seconds:.1f} s, {task!r}): success? ")
                if answer == "q":
                    break
                if answer:
                    answers[number] = Label(number, success=answer == "y", truncated=answer == "t")
        except (EOFError, KeyboardInterrupt) as stop:
            print()
            if not answers and isinstance(stop, KeyboardInterrupt):
                raise
            if not answers:
                raise UserError(
                    "no answers on standard input, so nothing was written. Use --csv, or --success and --failure."
                ) from None
        if not answers:
            print("no answers, so nothing was written")
            return 0
        return _save_labels(dataset, old, answers)


def _count(things: Any, name: str) -> str:
    return f"{len(things):,} {name}{'' if len(things) == 1 else 's'}"


def _answer(question: str) -> str:
    if sys.stdin is None:  # closed before the program started
        raise EOFError
    while (answer := input(question).strip().lower()) not in ("y", "n", "t", "q", ""):
        print("please answer y, n, t or q, or press enter to skip")
    return answer


def _save_labels(dataset: "Dataset", old: "dict[int, Label]", new: "dict[int, Label]") -> int:
    from pirl.data import merge_labels, write_labels

    lengths = dict(zip(dataset.episode_ids.tolist(), dataset.lengths.tolist(), strict=True))
    if unknown := sorted(set(new) - set(lengths)):
        raise UserError(
            f"{dataset.name} has no episode {unknown[0]}; its episodes are {min(lengths)} to {max(lengths)}. "
            "Nothing was written."
        )
    dated = [replace(label, length=lengths[episode]) for episode, label in new.items()]
    merged = merge_labels(old, dated)
    path = write_labels(dataset.root, merged)
    print(f"{_count(dated, 'label')} written to {path}; {_count(merged, 'episode')} of {len(lengths)} labeled")
    return 0


@dataclass(frozen=True, kw_only=True)
class DropEpisodes(Command):
    """Leave episodes out of a dataset. Writes meta/pirl_dropped.txt; the dataset itself is not changed.

    All commands of pirl then go by the others. LeRobot does not know the file: --out writes the others as a dataset of
    their own instead, which both read.
    """

    dataset: str = positional("DATASET")
    """Directory of a LeRobot dataset."""
    episodes: str | None = option("EPISODES")
    """Episodes to leave out, such as 0,3,7-12."""
    bad: bool = False
    """Leave out all episodes in which pirl data check finds a problem."""
    robot: str | None = option("NAME|FILE")
    """With --bad: the robot that is to be trained; what it does not use is not judged."""
    restore: str | None = option("EPISODES")
    """Episodes to take back, or "all"."""
    out: Path | None = option("DIR")
    """Directory for a copy without the episodes, numbered from 0 (v3.0, videos encoded anew)."""

    def run(self) -> int:
        from pirl.data import OutcomeConfig, check_dataset, load_robot, parse_episodes
        from pirl.data.labels import DROPPED_FILE, read_dropped, write_dropped
        from pirl.data.lerobot.reader import scan_dataset
        from pirl.data.lerobot.writer import copy_dataset
        from pirl.data.problems import format_episodes

        if self.episodes is None and self.restore is None and not self.bad and self.out is None:
            raise UserError("say which episodes: --episodes 0,3,7-12, --bad, or --restore all.")
        if self.out is not None and self.out.exists() and (self.out.is_file() or any(self.out.iterdir())):
            raise UserError(f"{self.out} is there already: choose another directory for the copy.")
        dataset = scan_dataset(self.dataset)
        known = {*dataset.whole.episode_ids.tolist(), *dataset.listing.episodes}
        dropped = read_dropped(dataset.root)
        named = set(parse_episodes(self.episodes or "", max(known, default=0)))
        if self.bad:
            robot = None if self.robot is None else load_robot(self.robot)
            _, found = check_dataset(self.dataset, OutcomeConfig(unlabeled="success"), robot=robot, decode=True)
            named |= {entry.episode for entry in found if entry.severity == "problem" and entry.episode is not None}
        restored = dropped if self.restore == "all" else set(parse_episodes(self.restore or ""))
        left_out = (dropped | named) - restored
        if not known - left_out:
            raise UserError(f"no episode of {self.dataset} would be left. Nothing was written.")
        if self.out is not None:
            lost = copy_dataset(dataset.select(known - left_out), self.out)
            without = f", without {', '.join(lost)}" if lost else ""
            print(f"{_count(known - left_out, 'episode')} of {len(known)} copied to {self.out}{without}")
            return 0
        write_dropped(dataset.root, left_out)
        numbers = f" ({format_episodes(left_out)}), written to {dataset.root / DROPPED_FILE}" if left_out else ""
        print(f"{_count(left_out, 'episode')} of {len(known)} left out{numbers}")
        return 0


DATA_COMMANDS: dict[str, Any] = {
    "check": Check,
    "info": Info,
    "label": LabelEpisodes,
    "drop": DropEpisodes,
    "stats": Stats,
    "cache": Cache,
}
