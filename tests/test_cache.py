"""The cache of lowered kernels on disk: what it keeps, and what it refuses."""

import multiprocessing
import os
import stat
import warnings

import pytest

from jaxkern.core import cache


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXKERN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("JAXKERN_CACHE", raising=False)
    cache._warn_once.cache_clear()
    return tmp_path / "cache"


def entries(folder):
    return sorted((folder / "kernels").glob("*.kernel"))


def test_what_is_stored_is_loaded_and_counted(own_cache):
    assert cache.load("a") is None
    cache.store("a", b"kernel a")
    cache.store("b", b"")
    assert cache.load("a") == b"kernel a"
    assert cache.load("b") == b""
    held = cache.summary()
    assert (held.folder, held.entries, held.hits, held.misses) == (own_cache, 2, 2, 1)
    assert held.size == sum(path.stat().st_size for path in entries(own_cache))
    assert cache.empty() == 2
    assert cache.summary() == cache.Summary(own_cache)
    assert cache.load("a") is None


@pytest.mark.parametrize(
    "harm",
    [
        lambda whole: whole[:-1],
        lambda whole: whole[:-1] + b"?",
        lambda whole: b"",
        lambda whole: b"?" + whole[1:],
        lambda whole: whole[:20] + b"?" + whole[21:],
    ],
    ids=["truncated", "changed", "empty", "foreign", "another digest"],
)
def test_a_damaged_entry_is_ignored_and_written_again(own_cache, harm):
    cache.store("a", b"kernel a")
    (path,) = entries(own_cache)
    path.write_bytes(harm(path.read_bytes()))
    assert cache.load("a") is None
    cache.store("a", b"kernel a")
    assert cache.load("a") == b"kernel a"


def test_the_folder_is_the_users_own(own_cache):
    cache.store("a", b"kernel a")
    for folder in (own_cache, own_cache / "kernels"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("part", [".", "kernels"])
@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_folder_that_others_may_write_to_is_refused(own_cache, part, mode):
    cache.store("a", b"kernel a")
    (own_cache / part).chmod(mode)
    with pytest.warns(cache.UnsafeCacheWarning, match="can be written to by other users"):
        assert cache.load("a") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # told once
        cache.store("b", b"kernel b")
    assert len(entries(own_cache)) == 1
    (own_cache / part).chmod(0o700)
    assert cache.load("a") == b"kernel a"


def test_a_folder_of_another_user_is_refused(own_cache, monkeypatch):
    cache.store("a", b"kernel a")
    monkeypatch.setattr(os, "geteuid", lambda: own_cache.stat().st_uid + 1)
    with pytest.warns(cache.UnsafeCacheWarning, match="belongs to another user"):
        assert cache.load("a") is None


@pytest.mark.parametrize("word", ["0", "off", "False"])
def test_it_can_be_switched_off(own_cache, monkeypatch, word):
    monkeypatch.setenv("JAXKERN_CACHE", word)
    cache.store("a", b"kernel a")
    assert cache.load("a") is None
    assert cache.folder() is None
    assert cache.summary() == cache.Summary(None)
    assert not own_cache.exists()


def test_the_platforms_folder_is_the_default(monkeypatch, tmp_path):
    monkeypatch.delenv("JAXKERN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert cache.folder() == tmp_path / "caches" / "jaxkern"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder() == tmp_path / ".cache" / "jaxkern"


def test_nothing_is_kept_where_nothing_can_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXKERN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    cache.store("a", b"kernel a")
    assert cache.load("a") is None
    assert cache.programs() is None
    assert cache.empty() == 0


def test_what_was_not_used_for_longest_goes(own_cache, monkeypatch):
    monkeypatch.setattr(cache, "_LARGEST", 10_000)
    for i in range(9):
        cache.store(f"{i}", bytes(1000))
        (path,) = set(entries(own_cache)) - {p for p in entries(own_cache) if p.stat().st_mtime < i}
        os.utime(path, (i, i))
    assert cache.load("0") is not None  # used just now
    for i in range(9, 11):
        cache.store(f"{i}", bytes(1000))
    assert cache.load("0") is not None
    assert cache.load("1") is None
    assert cache.load("10") is not None
    assert cache.summary().size <= 10_000


def store_many(seed):
    for i in range(20):
        cache.store(f"{i}", f"kernel {i}".encode() * 1000)
        got = cache.load(f"{(i + seed) % 20}")
        assert got in (None, f"kernel {(i + seed) % 20}".encode() * 1000)


@pytest.mark.exhaustive
def test_many_processes_write_the_same_entries(own_cache):
    processes = [
        multiprocessing.get_context("spawn").Process(target=store_many, args=(seed,))
        for seed in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert [cache.load(f"{i}") for i in range(20)] == [
        f"kernel {i}".encode() * 1000 for i in range(20)
    ]
    held = cache.summary()
    assert held.entries == 20
    assert held.hits + held.misses == 4 * 20 + 20
    assert not list(own_cache.rglob("*.part"))
