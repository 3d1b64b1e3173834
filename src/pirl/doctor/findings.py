"""One thing that was looked at, how it is, and what to do if it is not well."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["good", "absent", "bad"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's. `absent` is what nobody has to have; `needed` is what pirl cannot do without."""

    section: str
    name: str
    state: State
    detail: str
    advice: str = ""
    needed: bool = False

    @property
    def breaks_pirl(self) -> bool:
        """Whether pirl itself does not work because of it."""
        return self.needed and self.state == "bad"

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)
