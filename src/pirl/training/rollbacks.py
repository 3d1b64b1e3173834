"""Going back to an earlier checkpoint when practice has gone astray: whether it may be, to which, and what to say."""

from pirl.config import RLTrainConfig
from pirl.errors import TrainingError
from pirl.training.checkpoints import Checkpoints
from pirl.training.run import RunDirectory


class Rollbacks:
    """The roll-backs of a run, which its metadata tell of. All hosts come to the same decisions."""

    def __init__(self, config: RLTrainConfig, run: RunDirectory, checkpoints: Checkpoints) -> None:
        self._config, self._run, self._checkpoints = config, run, checkpoints

    def __len__(self) -> int:
        return len(self._run.rollbacks)

    def candidates(self, good_step: int) -> list[int]:
        """The checkpoints of policies that were fine, to one of which the run may go back."""
        self._checkpoints.wait()
        if not self._config.on_policy or len(self) >= self._config.health.max_rollbacks:
            return []
        return [step for step in self._checkpoints.saved_between_iterations() if step <= good_step]

    def record(self, step: int, good_step: int, reason: str) -> None:
        """The run goes back to a checkpoint, which can be read: it is the newest of all from now on."""
        # In this order: a process that dies in between goes back to that checkpoint, and comes here again.
        self._checkpoints.discard_after(good_step)
        self._run.note(rollbacks=[*self._run.rollbacks, {"from": step, "to": good_step, "reason": reason}])

    def give_up(self, step: int, reason: str) -> TrainingError:
        """What to say where the run cannot go back, or has often enough."""
        self._checkpoints.wait()
        tried = f" after {len(self)} roll-backs" if len(self) else ""
        return TrainingError(
            f"training stopped at step {step}{tried}: {reason}. Checkpoints up to step {self._checkpoints.latest()} are "
            "kept. Try a lower learning rate, fewer epochs per iteration (agent.num_epochs), or demonstrations mixed in "
            "(agent.bc_loss_weight)."
        )
