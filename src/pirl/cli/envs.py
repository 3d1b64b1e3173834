"""`pirl envs`: lists environments, shows their options, and renders episodes."""

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pirl.cli.console import check_writable, facts, show, table
from pirl.cli.options import EXPERT, Acting, InEnvironment
from pirl.cli.parser import Command, option, positional
from pirl.errors import UserError

if TYPE_CHECKING:
    from pirl.envs.registry import EnvConfig, KnownEnv


@dataclass(frozen=True, kw_only=True)
class ListEnvs(Command):
    """List the environments and whether they are installed."""

    def run(self) -> int:
        from pirl.envs.registry import KNOWN

        rows = [(entry.alias, entry.id, _installed(entry), entry.summary) for entry in KNOWN]
        show(table(("name", "Gymnasium id", "installed", "what it is"), rows))
        print("\nAny other Gymnasium environment: --env.id my_package:MyEnv-v0 --env.adapter my_adapter.py:MyAdapter")
        return 0


@dataclass(frozen=True, kw_only=True)
class ShowEnv(InEnvironment):
    """Print the options of an environment and, if it is installed, its cameras, widths, limits and tasks."""

    name: str | None = positional("[NAME]", None)
    """Environment (the same as --env)."""

    def run(self) -> int:
        from pirl.envs.registry import KNOWN, EnvConfig, find_env_class

        if self.env is not None and self.name not in (None, self.env):
            raise UserError(f"{self.name} and --env {self.env} are two different environments: leave one of them out.")
        asked = self.env_config()
        config = EnvConfig(self.name or asked.id, asked.adapter, asked.options)
        find_env_class(config)  # raises if the name or an option is unknown
        entry = next((entry for entry in KNOWN if config.id in (entry.alias, entry.id)), None)
        if entry is not None and config.adapter is None:
            rows = []
            for option in entry.options:
                default = "none" if option.default is None else str(option.default)
                rows.append((f"--env.{option.name.replace('_', '-')}", option.kind, default, option.help))
            options = table(("option", "takes", "default", "description"), rows)
            show(f"{entry.alias} ({entry.id}): {entry.summary}", "", options, "")
            if (installed := _installed(entry)).startswith("no"):
                print(f"installed: {installed}")
                return 0
        show(facts(_describe(config)))
        return 0


@dataclass(frozen=True, kw_only=True)
class Play(Acting):
    """Run episodes of the scripted expert or a policy, print their outcomes and, if asked, write a video."""

    episodes: int = 4
    """Episodes to run, side by side in the video."""
    checkpoint: str | None = option("CHECKPOINT", shown="the scripted expert")
    """Checkpoint directory or run to use as the policy."""
    render: Literal["gif", "mp4", "png"] | None = option(shown="no video")
    """Write an animation, a video, or strips of frames in one image."""
    out: Path | None = option("FILE", shown="the environment's name")
    """File to write; without --render, its suffix determines the format."""
    size: int = option("PIXELS", default=256)
    """Minimum height of an episode in the video."""

    @property
    def policies(self) -> list[str]:
        """The one policy."""
        return [self.checkpoint or EXPERT]

    def run(self) -> int:
        (policy,) = self.policies
        self.check(episodes=self.episodes, size=self.size)
        video = self._video_file()
        self.print_notes()
        from pirl.envs.evaluation import Summary, play
        from pirl.envs.registry import make_env, with_render_size
        from pirl.envs.rollout import make_starts
        from pirl.envs.video import write_videos

        results, videos, steps = [], [], self.resolved_execute_steps
        with contextlib.closing(make_env(with_render_size(self.env_config(), self.size))) as env:
            description = env.describe()
            actor = self.load_policy(policy, description, 1)
            for index, start in enumerate(make_starts(description, self.episodes, self.seed, self.task)):
                result, recorded = play(env, actor, start, execute_steps=steps, render=video is not None, index=index)
                results.append(result)
                videos += [] if recorded is None else [recorded]
                outcome = "success" if result.success else "failure" if result.terminated else "timeout"
                print(f"seed {result.seed}: {outcome} after {result.length} steps: {result.prompt}")
        print(f"{policy}: {Summary.of(results)}")
        if video is not None:
            write_videos(video, videos, description.fps, side=self.size)
            print(f"video: {video}")
        return 0

    def _video_file(self) -> Path | None:
        if self.render is None and self.out is None:
            return None
        from pirl.envs.video import video_format

        name = re.sub(r"\W+", "_", self.env_config().id).strip("_")
        file = self.out or Path(f"{name}.{self.render}")
        if video_format(file) != (self.render or video_format(file)):
            raise UserError(f"--render {self.render} does not fit --out {file}: its name should end in .{self.render}.")
        check_writable(file)
        return file


ENVS_COMMANDS: dict[str, Any] = {"list": ListEnvs, "show": ShowEnv, "play": Play}


def _describe(config: "EnvConfig") -> list[tuple[str, str]]:
    from pirl.envs.registry import make_env

    with contextlib.closing(make_env(config)) as env:
        description = env.describe()
    robot, shapes = description.robot, description.shapes
    cameras = ((name, "×".join(map(str, shapes[name][:2]))) for name in robot.cameras.values())
    state = ", ".join(f"{name} [{', '.join(map(str, shapes[name]))}]" for name in robot.state)
    return [
        ("robot", robot.name),
        *(("camera", f"{name}  {size}") for name, size in cameras),
        ("state", state),
        ("actions", f"{', '.join(robot.actions)} [{robot.action_dim}]"),
        ("time", f"{description.fps} steps per second, at most {description.max_steps} steps"),
        ("expert", "yes" if description.has_expert else "no"),
        *((f"task {index}", task) for index, task in enumerate(description.tasks)),
    ]


def _installed(entry: "KnownEnv") -> str:
    """Whether every package of its extra is installed, else how to install it."""
    if entry.extra is None:
        return "yes"
    from pirl.doctor import how_to_install, missing_packages

    missing = missing_packages(entry.extra)
    if missing is None:  # an editable install that is older than the extra
        return "unknown: install pirl again to know"
    return f"no: {how_to_install(entry.extra)}" if missing else "yes"
