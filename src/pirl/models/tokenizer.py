"""Prompts to tokens: SentencePiece with the two prompt formats of π₀ and π₀.₅.

The PaliGemma vocabulary is a file found by path, environment variable or cache, never downloaded; a small vocabulary for
the `tiny` presets is part of the package.
"""

import os
from importlib import resources
from pathlib import Path

import numpy as np
import sentencepiece
from jaxtyping import Bool, Float, Int, Int64

from pirl.errors import ObservationError, UserError
from pirl.files import cache_directory, expand_home
from pirl.models.config import Pi0Config

PATH_VARIABLE = "PIRL_TOKENIZER"
_FILE = "paligemma_tokenizer.model"
_SOURCE = "https://storage.googleapis.com/big_vision/paligemma_tokenizer.model"


def find_tokenizer(path: str | os.PathLike[str] | None = None) -> Path:
    """The PaliGemma SentencePiece file: `path`, else $PIRL_TOKENIZER, else in the cache of pirl or of OpenPI."""
    for origin, given in ((None, path), (PATH_VARIABLE, os.environ.get(PATH_VARIABLE))):
        if given:
            file = expand_home(given)
            if file.is_file():
                return file
            raise UserError(f"no tokenizer file at {file}" + (f" (from ${origin})." if origin else "."))
    openpi = expand_home(os.environ.get("OPENPI_DATA_HOME") or "~/.cache/openpi")
    cached = [cache_directory() / _FILE, openpi / "big_vision" / _FILE]
    for file in cached:
        if file.is_file():
            return file
    raise UserError(
        "the PaliGemma tokenizer was not found. Looked at:\n"
        + "".join(f"  {file}\n" for file in cached)
        + f"Download it once, for example with\n  curl --create-dirs -o {cached[0]} {_SOURCE}\n"
        f"or set ${PATH_VARIABLE} to its path. pirl never downloads it by itself."
    )


class Tokenizer:
    """Turns a prompt, with or without a state, into a fixed number of tokens and their validity mask."""

    def __init__(self, model: bytes, max_len: int, *, discrete_state: bool | None = None):
        """`discrete_state` says whether prompts must contain the state; None leaves it to each call."""
        self._max_len = max_len
        self._discrete_state = discrete_state
        self._sentencepiece = sentencepiece.SentencePieceProcessor()
        self._sentencepiece.LoadFromSerializedProto(model)

    @classmethod
    def from_file(
        cls, path: str | os.PathLike[str] | None, max_len: int, *, discrete_state: bool | None = None
    ) -> "Tokenizer":
        """Read a SentencePiece file; without a path, that of PaliGemma."""
        file = find_tokenizer(path)
        try:
            return cls(file.read_bytes(), max_len, discrete_state=discrete_state)
        except (RuntimeError, OSError) as error:
            raise UserError(f"{file} is not a SentencePiece model ({error}). Get the file again.") from error

    @classmethod
    def for_model(cls, config: Pi0Config, path: str | os.PathLike[str] | None = None) -> "Tokenizer":
        """The vocabulary and prompt format of a model."""
        if path is None and config.tokenizer == "tiny":
            model = resources.files("pirl.models").joinpath("assets/tiny_tokenizer.model").read_bytes()
            return cls(model, config.max_token_len, discrete_state=config.discrete_state_input)
        return cls.from_file(path, config.max_token_len, discrete_state=config.discrete_state_input)

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return self._sentencepiece.vocab_size()

    def __call__(
        self, prompt: str, state: Float[np.ndarray, " dims"] | None = None
    ) -> tuple[Int64[np.ndarray, " max_len"], Bool[np.ndarray, " max_len"]]:
        """Tokens and mask of one prompt. A state (normalized, not padded) selects the π₀.₅ format.

        A prompt that does not fit raises: truncation would take off the tail, after which the actions begin.
        """
        if self._discrete_state is not None and self._discrete_state != (state is not None):
            wanted = "needs the state in its prompt" if self._discrete_state else "takes no state in its prompt"
            raise ObservationError(f"this model {wanted} (discrete_state_input = {self._discrete_state}).")
        text = prompt.strip().replace("_", " ").replace("\n", " ")
        if state is None:
            # The newline is the start-of-answer token, encoded on its own.
            tokens = self._encode(text, bos=True) + self._encode("\n")
        else:
            if np.ndim(state) != 1 or not np.all(np.isfinite(state)):
                raise ObservationError(f"the state in a prompt should be one finite vector; it is {np.asarray(state)}.")
            spelled = " ".join(map(str, discretize_state(state)))
            tokens = self._encode(f"Task: {text}, State: {spelled};\nAction: ", bos=True)
        padding = self._max_len - len(tokens)
        if padding < 0:
            raise ObservationError(
                f"the prompt {prompt!r} takes {len(tokens)} tokens, the limit is max_token_len = {self._max_len}: "
                "shorten the prompt or raise max_token_len."
            )
        return np.array(tokens + [0] * padding, np.int64), np.arange(self._max_len) < len(tokens)

    def _encode(self, text: str, *, bos: bool = False) -> list[int]:
        return self._sentencepiece.encode(text, add_bos=bos)


_STATE_BINS = np.linspace(-1, 1, 256 + 1)[:-1]


def discretize_state(state: Float[np.ndarray, " dims"]) -> Int[np.ndarray, " dims"]:
    """Bins 0..255 over [-1, 1); below it -1, above it 255."""
    return np.digitize(state, bins=_STATE_BINS) - 1
