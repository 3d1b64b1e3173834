"""`pirl data`: look into, check and label LeRobot datasets, compute their statistics, see to their frame cache."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from pirl.cli.console import facts, show
from pirl.errors import UserError

if TYPE_CHECKING:
    from pirl.data import Dataset, Label, OutcomeConfig

DatasetPath = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATASET")]


@dataclass(frozen=True)
class _WithOutcomes:
    dataset: DatasetPath
    """Directory of a LeRobot dataset (v2.0, v2.1 or v3.0), or its hub id."""
    reward: Literal["sparse", "step_penalty", "raw"] = "sparse"
    """Reward the training will use: 1 on success, -1 per step until success, or the reward column as it is."""
    reward_column: str | None = None
    """Column that holds the reward (default: next.reward)."""
    success_column: str | None = None
    """Column that says whether the episode succeeded (default: next.success, is_success or success)."""
    unlabelled: Literal["error", "success"] = "error"
    """What episodes that say nothing about success are: a problem, or demonstrations that succeeded."""

    def outcomes(self) -> "OutcomeConfig":
        """How to tell the outcomes of episodes."""
        from pirl.data import OutcomeConfig

        return OutcomeConfig(self.reward, self.reward_column, self.success_column, unlabelled=self.unlabelled)


@dataclass(frozen=True)
class Check(_WithOutcomes):
    """Validate a dataset before training on it: every problem, by episode, file, column and value.

    Exit code 2 if there are problems. Notes say how an oddity is read; they do not keep a dataset from training.
    """

    decode: bool = False
    """Decode every video frame, not only the first of each episode."""
    json: bool = False
    """Print as JSON."""

    def run(self) -> int:
        """Do it; the return value is the exit code."""
        from pirl.data import check_dataset

        dataset, found = check_dataset(self.dataset, self.outcomes(), decode=self.decode)
        problems = [entry for entry in found if entry.severity == "problem"]
        notes = [entry for entry in found if entry.severity == "note"]
        if self.json:
            kinds = {"problems": problems, "notes": notes}
            print(
                json.dumps({kind: [entry.to_json() for entry in entries] for kind, entries in kinds.items()}, indent=2)
            )
            return 2 if problems else 0
        for kind, entries in (("note", notes), ("problem", problems)):
            for entry in entries:
                print(f"{kind}: {entry}")
        size = f", {len(dataset.episode_ids)} episodes, {len(dataset):,} frames" if dataset else ""
        print(f"{self.dataset}{size}: {_count(problems, 'problem')}, {_count(notes, 'note')}")
        return 2 if problems else 0


@dataclass(frozen=True)
class Info(_WithOutcomes):
    """Print what is in a dataset: episodes, tasks, success, lengths, returns, cameras."""

    json: bool = False
    """Print as JSON."""

    def run(self) -> int:
        """Do it; the return value is the exit code."""
        from pirl.data import open_dataset, summarize

        summary = summarize(open_dataset(self.dataset), self.outcomes())
        if self.json:
            print(json.dumps(summary, indent=2))
            return 0
        rows = [
            ("dataset", summary["name"]),
            ("format", f"{summary['version']}, {summary['fps']:g} frames per second, robot {summary['robot_type']}"),
            ("episodes", f"{summary['episodes']:,}"),
            ("frames", f"{summary['frames']:,} ({summary['frames'] / summary['fps'] / 60:.1f} minutes)"),
        ]
        outcome = summary["outcomes"]
        if outcome is None:
            rows.append(("success", f"not told: {summary['outcome_problem']}"))
        else:
            rate = (
                f"{outcome['success']} of {outcome['known']} episodes ({outcome['rate']:.0%})"
                if outcome["known"]
                else "-"
            )
            rows.append(("success", f"{rate}; {outcome['timeouts']} ran out of time"))
        for camera in summary["cameras"]:
            rows.append(("camera", f"{camera['name']}  {camera['height']}×{camera['width']}  {camera['storage']}"))
        columns = (f"{column['name']} {column['dtype']}{column['shape']}" for column in summary["columns"])
        rows.append(("columns", ", ".join(columns)))
        for task in summary["tasks"]:
            rows.append(("task", f"{task['episodes']:>4} episodes  {task['task']}"))
        histograms = [_bars("length", summary["lengths"])]
        if outcome is not None:
            histograms.append(_bars(f"return ({self.reward})", outcome["returns"]))
        show(facts(rows), "", *histograms)
        return 0


@dataclass(frozen=True)
class LabelEpisodes:
    """Say which episodes succeeded. Written to meta/pirl_labels.jsonl; the dataset itself is not touched.

    Labels come from a CSV file (columns episode and success, reward or truncated), from lists of episodes, or, if
    neither is given, from one question per episode. What a new label says replaces what was said before.
    """

    dataset: DatasetPath
    """Directory of a LeRobot dataset."""
    csv: Path | None = None
    """Table of labels: episode, and any of success, reward, truncated."""
    success: str | None = None
    """Episodes that succeeded, such as 0,3,7-12; "rest" for all that are not named otherwise."""
    failure: str | None = None
    """Episodes that failed, likewise."""
    truncated: str | None = None
    """Episodes that ran out of time rather than ending. Those of the other lists that are not in this one ended."""
    ask_again: bool = False
    """When asking, ask about labelled episodes too."""

    def run(self) -> int:
        """Do it; the return value is the exit code."""
        from pirl.data import open_dataset, read_csv, read_labels

        dataset = open_dataset(self.dataset)
        old = read_labels(dataset.root)
        by_flags = any(flag is not None for flag in (self.success, self.failure, self.truncated))
        if self.csv is not None and by_flags:
            raise UserError("give labels either by --csv or by --success, --failure and --truncated.")
        if self.csv is not None:
            return _save_labels(dataset, old, read_csv(self.csv))
        if by_flags:
            return _save_labels(dataset, old, _labels_from_flags(dataset, self.success, self.failure, self.truncated))
        return _ask(dataset, {} if self.ask_again else old, old)


@dataclass(frozen=True)
class Stats:
    """Compute normalisation statistics (z-score and exact quantiles) and write OpenPI's norm_stats.json."""

    dataset: DatasetPath
    """Directory of a LeRobot dataset (v2.0, v2.1 or v3.0), or its hub id."""
    robot: str
    """Robot preset (see the documentation), or a JSON file that describes a robot."""
    horizon: int
    """Length of the policy's action chunk: statistics of relative actions depend on it."""
    output: Path | None = None
    """Where to write the file (default: print only)."""

    def run(self) -> int:
        """Do it; the return value is the exit code."""
        from rich.table import Table

        from pirl.data import dataset_norm_stats, degenerate_dimensions, load_robot, open_dataset
        from pirl.interop import write_norm_stats

        if self.horizon < 1:
            raise UserError(f"--horizon should be at least 1; it is {self.horizon}.")
        robot = load_robot(self.robot)
        stats = dataset_norm_stats(open_dataset(self.dataset), robot, self.horizon)
        table = Table("quantity", "dimension", "mean", "std", "q01", "q99", box=None, pad_edge=False)
        for name, entry in stats.items():
            assert entry.q01 is not None
            assert entry.q99 is not None
            for dimension, values in enumerate(zip(entry.mean, entry.std, entry.q01, entry.q99, strict=True)):
                table.add_row(name, str(dimension), *(f"{value:.5g}" for value in values))
        show(table)
        for sentence in degenerate_dimensions(stats):
            print(f"warning: {sentence}")
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
        table = Table("dataset", "camera", "frames", "size", "kept as", "MiB", "last used", box=None, pad_edge=False)
        for entry in entries:
            size, used = f"{entry.height}×{entry.width}", f"{entry.last_used:%Y-%m-%d %H:%M}"
            kept = ("plain" if entry.compression == "none" else entry.compression) + (
                "" if entry.complete else ", unfinished"
            )
            mebibytes = f"{entry.bytes_on_disk / 2**20:,.1f}"
            table.add_row(entry.dataset, entry.camera, f"{entry.frames:,}", size, kept, mebibytes, used)
            if self.clear:
                delete_frame_cache(entry)
        if entries:
            show(table)
        total = sum(entry.bytes_on_disk for entry in entries) / 2**30
        print(f"{_count(entries, 'cache')}, {total:.2f} GiB{': deleted' if self.clear and entries else ''}")
        return 0


DATA_COMMANDS: dict[str, Any] = {
    "check": Check,
    "info": Info,
    "label": LabelEpisodes,
    "stats": Stats,
    "cache": Cache,
}


# --- labels --------------------------------------------------------------------------------------------------------


def _save_labels(dataset: "Dataset", old: "dict[int, Label]", new: "dict[int, Label]") -> int:
    from dataclasses import replace

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
    print(f"{_count(dated, 'label')} written to {path}; {_count(merged, 'episode')} of {len(lengths)} labelled")
    return 0


def _labels_from_flags(
    dataset: "Dataset", success: str | None, failure: str | None, truncated: str | None
) -> "dict[int, Label]":
    from pirl.data import Label, parse_episodes

    everything = set(dataset.episode_ids.tolist())
    named: dict[str, set[int]] = {}
    for flag, text in (("success", success), ("failure", failure), ("truncated", truncated)):
        if text is None or (text == "rest" and flag != "truncated"):
            continue
        named[flag] = set(parse_episodes(text, max(everything)))
        if not named[flag]:
            raise UserError(f"--{flag} names no episodes; give a list such as 0,3,7-12.")
    if success == failure == "rest":
        raise UserError('only one of --success and --failure can be "rest".')
    good, bad, cut = (named.get(flag, set()) for flag in ("success", "failure", "truncated"))
    if success == "rest":
        good = everything - bad
    if failure == "rest":
        bad = everything - good
    if both := sorted(good & bad):
        raise UserError(f"episode {both[0]} cannot be both a success and a failure.")
    return {
        # Said of every episode, so that a wrong time-out can be taken back.
        episode: Label(episode, success=episode in good if episode in good | bad else None, truncated=episode in cut)
        for episode in sorted(good | bad | cut)
    }


def _ask(dataset: "Dataset", skip: "dict[int, Label]", old: "dict[int, Label]") -> int:
    """One question per episode; what was answered is kept, however it ends."""
    from pirl.data import Label

    answers: dict[int, Any] = {}
    asked = [number for number in dataset.episode_ids.tolist() if number not in skip]
    if not asked:
        print(f"all {len(dataset.episode_ids)} episodes are labelled; --ask-again asks about them anew")
        return 0
    print("y: success   n: failure   t: failure, out of time   enter: skip   q: stop")
    position = {number: episode for episode, number in enumerate(dataset.episode_ids.tolist())}
    try:
        for number in asked:
            episode = position[number]
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
                "nobody answered, so nothing was written. Give labels by --csv, or by --success and --failure."
            ) from None
    if not answers:
        print("no answers, so nothing was written")
        return 0
    return _save_labels(dataset, old, answers)


def _answer(question: str) -> str:
    if sys.stdin is None:  # closed before we started
        raise EOFError
    while (answer := input(question).strip().lower()) not in ("y", "n", "t", "q", ""):
        print("please answer y, n, t or q, or press enter to skip")
    return answer


# --- text ----------------------------------------------------------------------------------------------------------


def _count(things: Any, name: str) -> str:
    return f"{len(things):,} {name}{'' if len(things) == 1 else 's'}"


def _bars(title: str, histogram: dict[str, Any], width: int = 40) -> str:
    """A histogram in text."""
    counts, edges = histogram["counts"], histogram["edges"]
    lines = [f"{title}: {histogram['min']:.4g} to {histogram['max']:.4g}, mean {histogram['mean']:.4g}"]
    for count, low, high in zip(counts, edges, edges[1:], strict=False):
        bar = "█" * round(width * count / max(counts))
        lines.append(f"  {low:>9.4g} … {high:<9.4g} {count:>6} {bar}")
    return "\n".join(lines) + "\n"
