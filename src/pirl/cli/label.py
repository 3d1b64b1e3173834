"""`pirl data label`: labels episodes as success or failure, in a separate file that leaves the dataset unchanged."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from pirl.cli.console import count, optional
from pirl.errors import UserError

if TYPE_CHECKING:
    from pirl.data import Dataset, Label

DatasetPath = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATASET")]


@dataclass(frozen=True)
class LabelEpisodes:
    """Label episodes as success or failure. Writes meta/pirl_labels.jsonl; the dataset itself is not changed.

    Labels come from a CSV file (columns episode and success, reward or truncated), from lists of episodes or, without
    either, from one question per episode. New labels replace old ones.
    """

    dataset: DatasetPath
    """Directory of a LeRobot dataset."""
    csv: Annotated[Path | None, optional("FILE")] = None
    """CSV file with a column episode and any of success, reward, truncated."""
    success: Annotated[str | None, optional("EPISODES")] = None
    """Successful episodes, such as 0,3,7-12; "rest" for all others."""
    failure: Annotated[str | None, optional("EPISODES")] = None
    """Failed episodes, in the same form."""
    truncated: Annotated[str | None, optional("EPISODES")] = None
    """Episodes that timed out. Episodes in the other lists that are not in this one count as terminated."""
    ask_again: bool = False
    """In interactive mode, also ask about labelled episodes."""

    def run(self) -> int:
        """Do it; the return value is the exit code."""
        from pirl.data import read_csv, read_labels, scan_episodes

        dataset = scan_episodes(self.dataset)  # what is wrong with episodes does not keep others from being labelled
        old = read_labels(dataset.root)
        by_flags = any(flag is not None for flag in (self.success, self.failure, self.truncated))
        if self.csv is not None and by_flags:
            raise UserError("give labels either with --csv or with --success, --failure and --truncated.")
        if self.csv is not None:
            return _save_labels(dataset, old, read_csv(self.csv))
        if by_flags:
            return _save_labels(dataset, old, _labels_from_flags(dataset, self.success, self.failure, self.truncated))
        return _ask(dataset, {} if self.ask_again else old, old)


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
    print(f"{count(dated, 'label')} written to {path}; {count(merged, 'episode')} of {len(lengths)} labelled")
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
        print(f"all {len(dataset.episode_ids)} episodes are labelled; --ask-again asks about them again")
        return 0
    print("y: success   n: failure   t: failure by timeout   enter: skip   q: stop")
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
                "no answers on standard input, so nothing was written. Use --csv, or --success and --failure."
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


@dataclass(frozen=True)
class DropEpisodes:
    """Leave episodes out of a dataset. Writes meta/pirl_dropped.txt; the dataset itself is not changed.

    All commands of pirl then go by the others. LeRobot does not know the file: for a copy without the episodes, use its
    own tools.
    """

    dataset: DatasetPath
    """Directory of a LeRobot dataset."""
    episodes: Annotated[str | None, optional("EPISODES")] = None
    """Episodes to leave out, such as 0,3,7-12."""
    bad: bool = False
    """Leave out all episodes in which pirl data check finds a problem."""
    robot: Annotated[str | None, optional("NAME|FILE")] = None
    """With --bad: the robot that is to be trained; what it does not use is not judged."""
    restore: Annotated[str | None, optional("EPISODES")] = None
    """Episodes to take back, or "all"."""

    def run(self) -> int:
        """Do it; the return value is the exit code."""
        from pirl.data import OutcomeConfig, check_dataset, load_robot, parse_episodes
        from pirl.data.labels import DROPPED_FILE, read_dropped, write_dropped
        from pirl.data.lerobot.reader import scan_dataset
        from pirl.data.problems import format_episodes

        if self.episodes is None and self.restore is None and not self.bad:
            raise UserError("say which episodes: --episodes 0,3,7-12, --bad, or --restore all.")
        dataset = scan_dataset(self.dataset)
        known = {*dataset.whole.episode_ids.tolist(), *dataset.listing.episodes}
        dropped = read_dropped(dataset.root)
        named = set(parse_episodes(self.episodes or "", max(known, default=0)))
        if self.bad:
            robot = None if self.robot is None else load_robot(self.robot)
            _, found = check_dataset(self.dataset, OutcomeConfig(unlabelled="success"), robot=robot, decode=True)
            named |= {entry.episode for entry in found if entry.severity == "problem" and entry.episode is not None}
        back = dropped if self.restore == "all" else set(parse_episodes(self.restore or ""))
        left_out = (dropped | named) - back
        if not known - left_out:
            raise UserError(f"no episode of {self.dataset} would be left. Nothing was written.")
        write_dropped(dataset.root, left_out)
        numbers = f" ({format_episodes(left_out)}), written to {dataset.root / DROPPED_FILE}" if left_out else ""
        print(f"{count(left_out, 'episode')} of {len(known)} left out{numbers}")
        return 0
