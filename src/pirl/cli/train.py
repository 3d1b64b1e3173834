"""`pirl train`: checks a configuration and runs it."""

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pirl.cli.options import Configured, checked_name
from pirl.cli.parser import format_value, option
from pirl.config.presets import get_preset
from pirl.errors import ConfigError, TrainingError, did_you_mean, in_one_line
from pirl.files import expand_home
from pirl.run_files import RunFiles, runs_in

if TYPE_CHECKING:
    from pirl.config import RLTrainConfig


@dataclass(frozen=True, kw_only=True)
class Train(Configured):
    """Train a policy. `pirl train PRESET --help` shows every option with its default in that preset.

    Options override the configuration file, the file overrides the preset. The config.yaml of a run repeats that run.
    Write lists as a,b or [a, b], and an empty value as none. Pass environment options as `--env.OPTION VALUE`;
    `pirl envs show NAME` lists them. `pirl configs` lists the presets.
    """

    exp_name: str | None = option("NAME")
    """Name of the run and of its directory in runs_dir."""
    dry_run: bool = False
    """Build everything, make a few updates, print parameters, memory and time; write nothing but caches."""
    resume: bool = False
    """Continue the run of that name."""
    overwrite: bool = False
    """Delete the run of that name and start over."""

    def run(self) -> int:
        if self.preset is not None:
            get_preset(self.preset)
        name = checked_name(self.exp_name, resume=self.resume, overwrite=self.overwrite, is_needed=not self.dry_run)
        config = self.resolve()
        from pirl.training.distributed import find_hosts, supervise

        hosts = find_hosts(config.hosts)
        # The hosts are no part of the run: it may be resumed on others.
        timeouts = replace(config.hosts, coordinator=None, processes=None, process_id=None)
        config = replace(config, hosts=timeouts)
        if hosts is not None:
            return supervise(hosts, config.hosts, lambda: self._train(config, name))
        try:
            return self._train(config, name)
        except KeyboardInterrupt:
            # XLA compiles in its own threads, which crash if the interpreter ends before them.
            print("interrupted", file=sys.stderr, flush=True)
            os._exit(130)

    def _train(self, config: "RLTrainConfig", name: str) -> int:
        import jax

        from pirl.config import check_config

        check_config(config, device_count=jax.device_count(), process_count=jax.process_count(), resume=self.resume)
        config = self._with_room(config)
        try:
            if self.dry_run:
                from pirl.training.dry_run import dry_run

                return dry_run(config)
            from pirl.training.train import train

            return train(config, exp_name=name, resume=self.resume, overwrite=self.overwrite)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise TrainingError(
                f"a device has not enough memory: {in_one_line(error).rstrip('.')}. Less is needed with more "
                "--fsdp-devices or with --model.remat full, which a run can also be resumed with; with a smaller "
                "--batch-size, or more --agent.accumulation-steps, it is another run. `pirl plan` says what fits."
            ) from error

    def _with_room(self, config: "RLTrainConfig") -> "RLTrainConfig":
        """The configuration with a model from scratch that is as large as the data needs, where that was left open."""
        import jax

        from pirl.config import find_missing_room, override_config
        from pirl.config.yaml import read_yaml

        file = self.config_file or (self.default_config_file() if self.preset is None else None)
        given = {*self.settings, *(f"model.{name}" for name in (read_yaml(file).get("model") or {} if file else {}))}
        room = {name: size for name, size in find_missing_room(config).items() if name not in given}
        if room and jax.process_index() == 0:
            sizes = ", ".join(f"{name} = {format_value(size)}" for name, size in room.items())
            print(f"sized for the data: {sizes}", flush=True)
        return override_config(config, room)

    def resolve(self) -> "RLTrainConfig":
        """The configuration; that of a run which is resumed by its name alone keeps the place where it was found."""
        config = super().resolve()
        if self.preset is None and self.config_file is None:
            config = replace(config, runs_dir=self._runs_dir())
        return config

    def _runs_dir(self) -> Path:
        return Path(self.settings.get("runs_dir", "runs"))

    def default_config_file(self) -> Path | None:
        """The configuration of the run to resume."""
        if not self.resume or self.exp_name is None:
            return None
        runs = expand_home(self._runs_dir())
        file = RunFiles(runs / self.exp_name).config_file
        if not file.is_file():
            question = did_you_mean(self.exp_name, [run.name for run in runs_in(runs)])
            raise ConfigError(
                f"there is no run to resume in {runs / self.exp_name}: {file.name} does not exist. {question}"
                "Check --exp-name and --runs-dir, or start a run with a preset and without --resume."
            )
        return file
