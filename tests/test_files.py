"""Paths that begin at a home, and files and directories that are replaced whole or not at all."""

import errno
import os
from pathlib import Path

import pytest

from pirl.errors import UserError
from pirl.files import atomic_replace, cache_directory, expand_home, replace_tail, restore_replaced, write_file

NOBODY = "~nobody_at_all/place"


@pytest.mark.parametrize("path", ["~/a/b", "a/~/b", "~root/a"])
def test_paths_are_expanded_as_the_system_does(path):
    assert expand_home(path) == Path(os.path.expanduser(path))


def test_whoever_has_no_home_is_asked_for_one(monkeypatch):
    monkeypatch.setattr("os.path.expanduser", str)  # as under a number that no user has
    monkeypatch.delenv("PIRL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(UserError, match="~/.cache: .* Set HOME"):
        cache_directory()


def test_a_name_with_a_nul_is_no_path():
    with pytest.raises(UserError, match=r"'~a\\x00b' is no path"):
        expand_home("~a\0b")


def test_a_full_disk_is_told_with_the_file_that_was_to_be_written(tmp_path, monkeypatch):
    def fail(self, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="No space left") as failed:
        write_file(tmp_path / "notes.json", "{}")
    assert failed.value.filename == str(tmp_path / "notes.json")
    assert os.listdir(tmp_path) == []


def test_what_is_to_last_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    file, sync, seen = tmp_path / "notes.json", os.fsync, []

    def look(number):
        seen.append((Path(os.readlink(f"/proc/self/fd/{number}")).read_text(), file.exists()))
        sync(number)

    monkeypatch.setattr(os, "fsync", look)
    write_file(file, "{}")
    assert seen == []
    file.unlink()
    write_file(file, "{}", fsync=True)
    assert seen == [("{}", False)]


def test_a_line_that_does_not_fit_on_the_disk_is_not_begun(tmp_path, monkeypatch):
    file = tmp_path / "lines.jsonl"
    replace_tail(file, 0, b"first\n")
    pwrite = os.pwrite
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda file, content, place: pwrite(file, content[:3], place))
        with pytest.raises(OSError, match="No space left") as failed:
            replace_tail(file, 6, b"second\n")
    assert failed.value.filename == str(file)
    assert file.read_bytes() == b"first\n"
    replace_tail(file, 6, b"second\n")
    replace_tail(file, 6, b"2\n")
    assert file.read_bytes() == b"first\n2\n"


def test_the_home_of_nobody_is_named():
    with pytest.raises(UserError, match=f"{NOBODY} is in the home of nobody: there is no user 'nobody_at_all'"):
        expand_home(NOBODY)


def directory_with(path, text):
    path.mkdir()
    (path / "text").write_text(text)
    return path


def test_a_directory_takes_the_place_of_another_or_the_other_stays(tmp_path):
    place = directory_with(tmp_path / "place", "old")
    with pytest.raises(FileNotFoundError):
        atomic_replace(tmp_path / "never_written", place)
    assert (place / "text").read_text() == "old"
    atomic_replace(directory_with(tmp_path / "partial", "new"), place)
    assert (place / "text").read_text() == "new"
    assert os.listdir(tmp_path) == ["place"]
    place.rename(tmp_path / ".place.replaced")  # a process that died in between
    restore_replaced(place)
    assert (place / "text").read_text() == "new"
    assert os.listdir(tmp_path) == ["place"]
