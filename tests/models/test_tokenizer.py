"""Prompts become tokens as OpenPI's tokenizer makes them, from a file that is found or asked for."""

import numpy as np
import pytest

from golden import ROOT, content, needs_golden
from pirl.errors import ObservationError, UserError
from pirl.models import Tokenizer, find_tokenizer, get_model_config
from pirl.models.tokenizer import discretize_state

TINY = get_model_config("tiny")
# Written down from the vocabulary inside the package; a change to it would break every tiny checkpoint.
KNOWN = {
    "put the red block in the blue zone": [2, 341, 263, 348, 459, 291, 263, 353, 298, 4],
    "  Transfer_cube \n": [2, 691, 469, 4],
    "": [2, 4],
}


@needs_golden
def test_every_recorded_case_equals_openpi():
    cases = content("tokenizer", "cases.json")["cases"]
    assert len(cases) > 50
    for case in cases:
        tokenizer = Tokenizer.from_file(ROOT / "tokenizer" / "tiny_spm.model", case["max_len"])
        state = None if case["state"] is None else np.asarray(case["state"])
        try:
            tokens, mask = tokenizer(case["prompt"], state)
        except ObservationError:  # where OpenPI truncates, with no room for another token
            assert all(case["mask"])
            continue
        assert tokens.tolist() == case["tokens"]
        assert mask.tolist() == case["mask"]
        assert [str(tokens.dtype), str(mask.dtype)] == case["dtype"]


@needs_golden
def test_state_bins_equal_openpi():
    recorded = content("transforms", "state_digitize.json")
    values = [np.nan if x is None else x for x in recorded["x"]]
    assert discretize_state(np.asarray(values)).tolist() == recorded["bins"]


def test_the_packaged_vocabulary_does_not_change():
    tokenizer = Tokenizer.for_model(TINY)
    assert tokenizer.vocab_size == TINY.vocab_size
    for prompt, known in KNOWN.items():
        tokens, mask = tokenizer(prompt)
        assert tokens[mask].tolist() == known
        assert not tokens[~mask].any()


@pytest.mark.usefixtures("unchecked_signatures")
def test_the_state_is_spelled_in_the_prompt():
    config = get_model_config("tiny_pi05")
    tokenizer = Tokenizer.for_model(config)
    tokens, mask = tokenizer("fold the towel", np.array([-1.0, 0.0, 2.0]))
    expected = tokenizer._encode("Task: fold the towel, State: 0 128 255;\nAction: ", bos=True)
    assert tokens[mask].tolist() == expected
    for bad in (np.array([np.nan]), np.zeros((1, 3))):
        with pytest.raises(ObservationError, match="one finite vector"):
            tokenizer("fold the towel", bad)


def test_the_prompt_format_is_that_of_the_model():
    with pytest.raises(ObservationError, match="needs the state"):
        Tokenizer.for_model(get_model_config("tiny_pi05"))("fold the towel")
    with pytest.raises(ObservationError, match="takes no state"):
        Tokenizer.for_model(TINY)("fold the towel", np.zeros(3))


def test_a_prompt_that_is_too_long_is_refused_by_name():
    with pytest.raises(ObservationError, match=r"'put the red.*takes 38 tokens.*max_token_len = 16"):
        Tokenizer.for_model(TINY)("put the red block in the blue zone and " * 4)


@pytest.fixture
def paths(tmp_path, monkeypatch):
    """Every path at which the file is looked for, in this order; the last two are the caches of pirl and of OpenPI."""
    for name in ("PIRL_CACHE", "PIRL_TOKENIZER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OPENPI_DATA_HOME", str(tmp_path / "openpi"))
    names = ("given.model", "variable.model", "cache/pirl/paligemma_tokenizer.model")
    return [tmp_path / name for name in (*names, "openpi/big_vision/paligemma_tokenizer.model")]


def test_the_file_is_found_by_path_variable_or_cache(paths, monkeypatch):
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    monkeypatch.setenv("PIRL_TOKENIZER", str(paths[1]))
    assert find_tokenizer(paths[0]) == paths[0]
    assert find_tokenizer() == paths[1]
    monkeypatch.delenv("PIRL_TOKENIZER")
    assert find_tokenizer() == paths[2]
    paths[2].unlink()
    assert find_tokenizer() == paths[3]
    with pytest.raises(UserError, match="is not a SentencePiece model"):
        Tokenizer.from_file(paths[3], 48)


def test_an_absent_file_is_asked_for(paths, monkeypatch):
    with pytest.raises(UserError) as error:
        Tokenizer.for_model(get_model_config("pi0_base"))
    for expected in (*map(str, paths[2:]), "PIRL_TOKENIZER"):
        assert expected in str(error.value)
    with pytest.raises(UserError, match=r"given.model"):
        find_tokenizer(paths[0])
    monkeypatch.setenv("PIRL_TOKENIZER", str(paths[1]))
    with pytest.raises(UserError, match=r"variable.model \(from \$PIRL_TOKENIZER\)"):
        find_tokenizer()
