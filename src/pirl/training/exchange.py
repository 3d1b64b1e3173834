"""What the processes of a run tell each other through their coordinator: words, not arrays, and without any device."""

import itertools
import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax

T = TypeVar("T")
# Python hears of signals between two waits.
_PATIENCE_MS = 1_000
# What was said is forgotten when so much more has been said: by then everybody has heard it.
_REMEMBERED = 64


class Exchange:
    """A line between all processes, known by its name. All of them use it in the same order; others do not disturb it.

    A process that is alone talks to nobody. One that waits does so until it is answered: whoever is lost ends all.
    """

    def __init__(self, name: str) -> None:
        self._name = f"pirl/{name}"
        self.index, self.count = jax.process_index(), jax.process_count()
        self._numbers = itertools.count()

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes and acts for all."""
        return self.index == 0

    def share(self, make: Callable[[], T]) -> T:
        """What the first process makes, as JSON can hold it, for all."""
        if self.count == 1:
            return make()
        key = self._next()
        if not self.is_first:
            return json.loads(self._hear(key))
        made = make()
        _client().key_value_set(key, json.dumps(made))
        return made

    def gather(self, value: Any) -> list[Any]:
        """What every process has to say, in their order, for all."""
        if self.count == 1:
            return [value]
        key = self._next()
        _client().key_value_set(f"{key}/{self.index}", json.dumps(value))
        return [json.loads(self._hear(f"{key}/{index}")) for index in range(self.count)]

    def meet(self) -> None:
        """Wait until all have come here."""
        self.gather(None)

    def _next(self) -> str:
        number = next(self._numbers)
        if self.is_first and number >= _REMEMBERED:
            _client().key_value_delete(f"{self._name}/{number - _REMEMBERED}")
        return f"{self._name}/{number}"

    def _hear(self, key: str) -> str:
        while True:
            try:
                return str(_client().blocking_key_value_get(key, _PATIENCE_MS))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise


class Requests:
    """Something any process may ask for at any time, such as a stop, and that all hear of at the same point."""

    # Times that are asked between two looks at what others want: each costs a message or two.
    EVERY = 4

    def __init__(self, name: str) -> None:
        self._exchange, self._place = Exchange(name), f"pirl/{name}-wanted"
        self._times = itertools.count()
        self._is_asked = False

    def heard(self, mine: int | None) -> int | None:
        """What was asked for, by this process or another, as all of them hear it; called by all equally often."""
        exchange = self._exchange
        if exchange.count == 1:
            return mine
        if mine is not None and not self._is_asked:
            _client().key_value_set(f"{self._place}/{exchange.index}", str(mine))
            self._is_asked = True
        if next(self._times) % self.EVERY:
            return None
        return exchange.share(self._first)

    def _first(self) -> int | None:
        wanted = _client().key_value_dir_get(self._place)
        return int(wanted[0][1]) if wanted else None


def _client() -> Any:
    from jax._src import distributed  # JAX has no public name for it; Orbax uses the same

    return distributed.global_state.client
