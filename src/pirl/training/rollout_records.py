"""What a RIPT run keeps of its rollouts for others: a LeRobot dataset of all attempts, and films of some."""

import json
from pathlib import Path

from pirl.data import DatasetWriter
from pirl.data.lerobot.format import INFO_FILE
from pirl.envs.base import EnvDescription
from pirl.envs.collecting import DatasetFormat, collected_features, episode_columns
from pirl.envs.rollouts import Rollout
from pirl.envs.video import Film, write_films
from pirl.errors import ConfigError, DataError


class RolloutDataset:
    """All finished attempts of a run in the order in which they ended, labelled by their success."""

    def __init__(self, root: Path, description: EnvDescription) -> None:
        self._root, self._description, self._format = root, description, DatasetFormat()
        self._features = collected_features(description, self._format)
        self._writer: DatasetWriter | None = None
        # Episodes that this run has come to, and those in the dataset: more, where a run goes on from a checkpoint.
        self.episodes = 0
        self._written = self._count()

    def add(self, rollout: Rollout) -> None:
        """Write an attempt, unless it is there already."""
        self.episodes += 1
        if self.episodes <= self._written:
            return
        if self._writer is None:
            self._writer = DatasetWriter(
                self._root,
                fps=self._description.fps,
                features=self._features,
                robot_type=self._description.robot.name,
                version=self._format.version,
                codec=self._format.codec,
                resume=self._root.exists(),
            )
        self._writer.write_episode(episode_columns(rollout, self._description), task=rollout.prompt)
        self._written += 1

    def close(self) -> None:
        """Finish its statistics, which takes a look at all of it; without, it is whole, but they are bounds only."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def go_on_after(self, episodes: int | None) -> None:
        """Go on where so many episodes had come; those that came after them come again, and are not written twice.

        None: whatever is there was another story, and all that comes now is added to it.
        """
        self.close()
        self._written = self._count()
        self.episodes = self._written if episodes is None else episodes

    def _count(self) -> int:
        info = self._root / INFO_FILE
        if not info.exists():
            return 0
        try:
            return int(json.loads(info.read_text(encoding="utf-8"))["total_episodes"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{info} is damaged ({error!r}), so the rollouts cannot be added to: move {self._root} away, or go on "
                "without (--rollout.save-dataset false)."
            ) from error


class Films:
    """A few successes and as many failures of an iteration, side by side."""

    def __init__(self, directory: Path, description: EnvDescription, most: int = 4) -> None:
        self._directory, self._description, self._most = directory, description, most
        self._camera = next(iter(description.robot.cameras.values()), None)
        if self._camera is None:
            raise ConfigError(
                f"rollout.videos_every asks for films, and {description.name} shows no pictures as it is configured: "
                "--rollout.videos-every 0."
            )
        self._films: dict[bool, list[Film]] = {True: [], False: []}

    def add(self, rollout: Rollout) -> None:
        """Take the first ones of each outcome."""
        assert self._camera is not None
        if len(self._films[rollout.success]) < self._most:
            self._films[rollout.success].append(Film(rollout.observations[self._camera], rollout.success))

    def write(self, name: str) -> None:
        """Write the film of what was taken since the last one: successes above, failures below."""
        films = [*self._films[True], *self._films[False]]
        self._films = {True: [], False: []}
        if films:
            self._directory.mkdir(exist_ok=True)
            write_films(self._directory / f"{name}.mp4", films, self._description.fps, columns=self._most)
