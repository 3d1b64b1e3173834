"""The initial states of LIBERO: read as torch reads them, without running what a pickle can contain."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pirl.envs.libero.init_states import read_init_states
from pirl.errors import DataError

STATES = np.random.default_rng(0).normal(size=(5, 7))


def save(path: Path, content: bytes, name: str = "archive/data.pkl") -> Path:
    """A file such as `torch.save` writes: an archive, not compressed, of a pickle in protocol 2 and a version."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, content)
        archive.writestr("archive/version", "3\n")
    return path


def saved(path: Path, value: Any) -> Path:
    return save(path, pickle.dumps(value, protocol=2))


def old_numpy(content: bytes) -> bytes:
    """As numpy 1 wrote it, which is what LIBERO ships."""
    return content.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


@pytest.mark.parametrize("array", [STATES, np.asfortranarray(STATES)], ids=["rows", "columns"])
def test_states_are_read_exactly(tmp_path: Path, array: np.ndarray) -> None:
    content = pickle.dumps(array, protocol=2)
    assert b"numpy._core.multiarray" in content
    for number, written in enumerate((content, old_numpy(content))):
        read = read_init_states(save(tmp_path / f"{number}.pruned_init", written))
        np.testing.assert_array_equal(read, array)
        assert read.dtype == np.float64
        read[0, 0] = 1.0  # it can be written to


class Malicious:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def touch(path: str) -> None:
    Path(path).touch()


@pytest.mark.parametrize(
    ("function", "named"),
    [(touch, "test_libero_init_states.touch"), (exec, r"__builtin__\.exec"), (eval, r"__builtin__\.eval")],
    ids=["function", "exec", "eval"],
)
def test_code_in_a_pickle_is_not_run_but_named(tmp_path: Path, function: Any, named: str) -> None:
    victim = tmp_path / "victim"
    argument = str(victim) if function is touch else f"open({str(victim)!r}, 'w')"
    for number, value in enumerate((Malicious(function, argument), [STATES, Malicious(function, argument)])):
        path = saved(tmp_path / f"{number}.pruned_init", value)
        with pytest.raises(DataError, match=f"{number}.pruned_init wants to call .*{named}"):
            read_init_states(path)
        assert not victim.exists()
    # The file does what it was made for where nothing stops it.
    pickle.loads(pickle.dumps(Malicious(function, argument), protocol=2))
    assert victim.exists()


def test_what_is_allowed_calls_nothing_else(tmp_path: Path) -> None:
    """The few names that are allowed cannot be combined into more: codecs, object arrays, attributes of modules."""
    import _codecs

    for number, value in enumerate(
        (Malicious(_codecs.encode, "abc", "hex"), np.array([[STATES, None]], object), np.ndarray, np.dtype("f8"))
    ):
        with pytest.raises(DataError, match=f"{number}.pruned_init"):
            read_init_states(saved(tmp_path / f"{number}.pruned_init", value))
    with pytest.raises(DataError, match=r"wants to call numpy.ndarray.tofile"):
        read_init_states(save(tmp_path / "dotted.pruned_init", b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93."))


@pytest.mark.parametrize(
    "value",
    [STATES.astype(np.float32), STATES.astype(">f8"), STATES[0], STATES[None], np.arange(4).reshape(2, 2), [1.0], None],
    ids=["float32", "big endian", "one dimension", "three dimensions", "integers", "list", "nothing"],
)
def test_anything_but_a_table_of_numbers_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(DataError, match="file.pruned_init is damaged, or not initial states"):
        read_init_states(saved(tmp_path / "file.pruned_init", value))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.data())
def test_a_file_cut_short_is_named(tmp_path: Path, data: st.DataObject) -> None:
    whole = saved(tmp_path / "whole", STATES).read_bytes()
    path = tmp_path / "cut.pruned_init"
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(DataError, match="cut.pruned_init is damaged"):
        read_init_states(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(st.data())
def test_a_damaged_pickle_gives_states_or_a_clear_error(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(pickle.dumps(STATES, protocol=2))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        read = read_init_states(save(tmp_path / "damaged.pruned_init", bytes(content)))
    except DataError as error:
        assert "damaged.pruned_init" in str(error)
    else:
        assert read.dtype == np.float64
        assert read.ndim == 2


def test_a_file_that_is_missing_or_something_else_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing.pruned_init does not exist"):
        read_init_states(tmp_path / "nothing.pruned_init")
    (tmp_path / "legacy.pruned_init").write_bytes(pickle.dumps(STATES, protocol=2))
    with pytest.raises(DataError, match="legacy.pruned_init is damaged"):
        read_init_states(tmp_path / "legacy.pruned_init")
    with pytest.raises(DataError, match="other.pruned_init is damaged"):
        read_init_states(save(tmp_path / "other.pruned_init", b"", name="archive/other.pkl"))


def test_every_file_of_libero_reads_as_with_torch() -> None:
    pytest.importorskip("libero", reason="hf-libero is not installed")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from pirl.envs.libero.package import LiberoPackage

    folder = LiberoPackage().root / "init_files"
    files = sorted(folder.glob("*/*.pruned_init"))
    assert {path.parent.name for path in files} >= {"libero_spatial", "libero_object", "libero_goal", "libero_10"}
    assert len(files) >= 130
    for path in files:
        np.testing.assert_array_equal(read_init_states(path), torch.load(path, weights_only=False))
