"""Prompts become tokens as OpenPI's tokeniser makes them, from a file that is found or asked for."""

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


@pytest.mark.parametrize("prompt", KNOWN)
def test_the_packaged_vocabulary_does_not_change(prompt):
    tokens, mask = Tokenizer.for_model(TINY)(prompt)
    assert tokens[mask].tolist() == KNOWN[prompt]
    assert not tokens[~mask].any()
    assert Tokenizer.for_model(TINY).vocab_size == TINY.vocab_size


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


def test_the_file_is_found_by_path_variable_or_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("PIRL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OPENPI_DATA_HOME", str(tmp_path / "openpi"))
    monkeypatch.delenv("PIRL_TOKENIZER", raising=False)
    places = [
        tmp_path / "given.model",
        tmp_path / "variable.model",
        tmp_path / "cache/pirl/paligemma_tokenizer.model",
        tmp_path / "openpi/big_vision/paligemma_tokenizer.model",
    ]
    for place in places:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(b"x")
    monkeypatch.setenv("PIRL_TOKENIZER", str(places[1]))
    assert find_tokenizer(places[0]) == places[0]
    assert find_tokenizer() == places[1]
    monkeypatch.delenv("PIRL_TOKENIZER")
    assert find_tokenizer() == places[2]
    monkeypatch.setenv("PIRL_CACHE", str(tmp_path / "chosen"))
    assert find_tokenizer() == places[3], "there is none in the cache that was chosen"
    (tmp_path / "chosen").mkdir()
    (tmp_path / "chosen" / places[2].name).write_bytes(b"x")
    assert find_tokenizer() == tmp_path / "chosen" / places[2].name
    monkeypatch.delenv("PIRL_CACHE")
    places[2].unlink()
    assert find_tokenizer() == places[3]
    with pytest.raises(UserError, match="is not a SentencePiece model"):
        Tokenizer.from_file(places[3], 48)


def test_an_absent_file_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.delenv("PIRL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("OPENPI_DATA_HOME", str(tmp_path))
    monkeypatch.delenv("PIRL_TOKENIZER", raising=False)
    with pytest.raises(UserError) as error:
        Tokenizer.for_model(get_model_config("pi0_base"))
    message = str(error.value)
    assert str(tmp_path / "pirl" / "paligemma_tokenizer.model") in message
    assert "big_vision/paligemma_tokenizer.model" in message
    assert "PIRL_TOKENIZER" in message
    with pytest.raises(UserError, match="nowhere.model"):
        find_tokenizer(tmp_path / "nowhere.model")
    monkeypatch.setenv("PIRL_TOKENIZER", str(tmp_path / "gone.model"))
    with pytest.raises(UserError, match=r"gone.model \(from \$PIRL_TOKENIZER\)"):
        find_tokenizer()
