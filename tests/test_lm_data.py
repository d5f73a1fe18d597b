"""The language model's data: what is read, how it is split, which windows make a batch."""

import json
import os
import shutil

import numpy as np
import pytest

from jaxkern.lm.config import RunError, TrainConfig
from jaxkern.lm.data import build as build_module
from jaxkern.lm.data import (
    build_corpus,
    build_packed,
    check_length,
    open_corpus,
    open_packed,
    shards,
    train_batch,
    validation_batches,
)
from jaxkern.lm.data import corpus as corpus_module


def write_files(folder, count=40, size=100):
    for i in range(count):
        path = folder / f"part{i % 3}" / f"file{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"<{i}>" + "é" * size + f"</{i}>")
    return folder


def documents(data):
    return {bytes(part) for part in bytes(data).split(b"\0") if part}


def test_split_by_file_is_whole_and_disjoint(tmp_path):
    root = write_files(tmp_path / "text")
    corpus = build_corpus((str(root),), tmp_path / "corpus")
    train, validation = documents(corpus.train), documents(corpus.validation)
    expected = {path.read_bytes() for path in root.rglob("*.txt")}
    assert train | validation == expected
    assert train.isdisjoint(validation)
    assert train
    assert validation
    assert corpus.info["documents"] == 40
    assert corpus.info["split"] == "by document"


def test_split_is_the_same_elsewhere_and_moves_no_file_when_one_is_added(tmp_path):
    root = write_files(tmp_path / "here")
    first = build_corpus((str(root),), tmp_path / "c1")
    other = tmp_path / "there" / "deeper"
    shutil.copytree(root, other)
    second = build_corpus((str(other),), tmp_path / "c2")
    assert first.info["fingerprint"] == second.info["fingerprint"]
    np.testing.assert_array_equal(first.validation, second.validation)
    (other / "new.txt").write_text("new")
    third = build_corpus((str(other),), tmp_path / "c3")
    assert documents(first.validation) <= documents(third.validation)
    assert documents(first.train) <= documents(third.train)
    assert third.info["fingerprint"] != first.info["fingerprint"]


@pytest.mark.parametrize("count", [4, 5, 7])
def test_a_small_corpus_has_both_parts(tmp_path, count):
    corpus = build_corpus((str(write_files(tmp_path / "t", count)),), tmp_path / "c")
    assert len(documents(corpus.train)) + len(documents(corpus.validation)) == count
    assert len(documents(corpus.validation)) >= 1
    assert len(documents(corpus.train)) >= 1


@pytest.mark.parametrize("share", [0.2, 0.3, 0.99])
def test_no_more_than_a_quarter_is_held_out(tmp_path, share):
    """Whichever files their names choose: of two, one is chosen."""
    folder, sizes = tmp_path / "t", (int(share * 10000), int(10000 - share * 10000))
    folder.mkdir()
    held, learned = sorted(("a.txt", "b.txt"), key=corpus_module._fraction)
    texts = [character * size for character, size in zip("hl", sizes, strict=True)]
    for name, text in zip((held, learned), texts, strict=True):
        (folder / name).write_text(text)
    built = [build_corpus((str(folder),), tmp_path / name) for name in ("c", "again")]
    corpus = built[0]
    assert corpus.info["fingerprint"] == built[1].info["fingerprint"]
    whole = f"\0{texts[1]}\0{texts[0]}".encode()
    assert bytes(corpus.train) + bytes(corpus.validation) == whole
    by_document = share < 0.25
    assert corpus.info["split"] == ("by document" if by_document else "by position")
    assert len(corpus.validation) == (1 + sizes[0] if by_document else len(whole) // 20)
    assert ("(their end is held out)" in corpus.describe()) != by_document


@pytest.mark.parametrize("share", [0.2, 0.3, 0.99])
def test_no_more_than_a_quarter_of_packed_documents_is_held_out(tmp_path, monkeypatch, share):
    """A run that was begun without the bound goes on with what it has held out."""
    sizes = int(share * 10000), int(10000 - share * 10000)
    texts = [f"{i:02} " for i in range(100)]
    held = next(text for text in texts if shards._fraction(text * (sizes[0] // 3)) < 0.05)
    learned = next(text for text in texts if shards._fraction(text * (sizes[1] // 3)) >= 0.05)
    path = write_lines(
        tmp_path / "a.jsonl",
        {"text": held * (sizes[0] // 3)},
        {"text": learned * (sizes[1] // 3)},
    )
    config = TrainConfig.from_flags({"preset": "micro", "data": (str(path),), "pack": True})
    corpus = build_packed(config, tmp_path / "run")
    by_document = share < 0.25
    assert corpus.info["split"] == ("by document" if by_document else "by position")
    (train,), (validation,) = corpus.train, corpus.validation
    size = train.stream.size + validation.stream.size
    assert validation.stream.size <= size * (0.25 if by_document else 0.05)
    again = open_packed(config, tmp_path / "run", json.loads(json.dumps(corpus.info)))
    assert again.info == corpus.info

    monkeypatch.setattr(build_module, "MOST_HELD_OUT", 1)
    earlier = build_packed(config, tmp_path / "run")
    assert earlier.info["split"] == "by document"
    (source,) = earlier.info["sources"]
    del source["most_held_out"]
    monkeypatch.undo()
    again = open_packed(config, tmp_path / "run", json.loads(json.dumps(earlier.info)))
    assert again.info == earlier.info
    assert again.validation[0].stream.size == earlier.validation[0].stream.size > size * share / 2


def test_one_file_is_split_by_position(tmp_path):
    path = tmp_path / "book.txt"
    text = bytes(range(32, 127)) * 20
    path.write_bytes(text)
    corpus = build_corpus((str(path),), tmp_path / "c")
    assert bytes(corpus.train) + bytes(corpus.validation) == b"\0" + text
    assert len(corpus.validation) == len(b"\0" + text) // 20
    assert "one file" in corpus.describe()


def test_a_file_named_twice_is_read_once(tmp_path):
    root = write_files(tmp_path / "t", 3)
    file = next(root.rglob("*.txt"))
    corpus = build_corpus((str(root), str(file), str(root)), tmp_path / "c")
    assert corpus.info["documents"] == 3


def test_folders_skip_what_is_not_text(tmp_path):
    root = write_files(tmp_path / "t", 5)
    (root / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    (root / "zeros.bin").write_bytes(b"abc\0def")
    (root / "empty.txt").write_bytes(b"")
    (root / "cut.txt").write_bytes("é".encode()[:1])
    (root / ".git").mkdir()
    (root / ".git" / "config").write_text("hidden")
    (root / "loop").symlink_to(root)
    corpus = build_corpus((str(root),), tmp_path / "c")
    assert corpus.info["documents"] == 5
    assert corpus.info["skipped"] == 4
    assert "; 4 files without readable text skipped, such as " in corpus.describe()
    assert f"{root}/cut.txt: a binary file" in open_corpus(tmp_path / "c").describe()
    assert b"hidden" not in bytes(corpus.train) + bytes(corpus.validation)


def write_lines(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_json_lines_are_their_texts(tmp_path):
    texts = [f"text {i}: é\n" for i in range(200)]
    path = write_lines(tmp_path / "shard.jsonl", *({"id": 7, "text": text} for text in texts))
    with path.open("a") as file:
        file.write('\n{"text": ""}\n')
    corpus = build_corpus((str(path),), tmp_path / "c")
    train, validation = documents(corpus.train), documents(corpus.validation)
    assert train | validation == {text.encode() for text in texts}
    assert train.isdisjoint(validation)
    assert 1 <= len(validation) < 30
    assert bytes(corpus.train).startswith(b"\0text ")
    assert "1 file with 200 documents: " in corpus.describe()
    # More lines move none of those before.
    write_lines(path, *({"text": text} for text in [*texts, "one more"]))
    more = build_corpus((str(path),), tmp_path / "c2")
    assert documents(more.validation) >= validation
    assert documents(more.train) >= train


def test_json_without_text_is_named_and_beside_text_it_is_skipped(tmp_path):
    bad = {
        "no_text.jsonl": (
            '{"content": "a"}\n',
            'line 1 has no "text" of a document, but "content"; name the field',
        ),
        "number.jsonl": ("\n17\n", 'line 2 is a number, not an object with the field "text"'),
        "field.jsonl": ('{"text": 17}\n', 'line 1 has a number as its "text", not a string; leave'),
        "null.jsonl": ('{"text": null}\n', "a file without text"),
        "cut.jsonl": ('{"text": "a', "line 1 is not JSON"),
        "zero.ndjson": ('{"text": "\\u0000"}', "document 1 has a zero byte, .* --tokenizer bpe:32"),
        "empty.jsonl": ('{"text": ""}\n', "a file without text"),
        "list.json": ('[{"text": "a"}]', "JSON, whose syntax would be trained on"),
    }
    root = write_files(tmp_path / "t", 3)
    for name, (content, words) in bad.items():
        (root / name).write_text(content)
        with pytest.raises(RunError, match=words) as caught:
            build_corpus((str(root / name),), tmp_path / "c")
        assert str(root / name) in str(caught.value)
    corpus = build_corpus((str(root),), tmp_path / "c")
    assert corpus.info["skipped"] == len(bad)
    # A file that begins as text and breaks off is not left out silently.
    (root / "cut.jsonl").write_text('{"text": "a"}\n{"text": "b')
    with pytest.raises(RunError, match=r"cut\.jsonl: line 2 is not JSON"):
        build_corpus((str(root),), tmp_path / "c")


def test_files_of_one_name_are_divided(tmp_path):
    """Their places are the same, so the end of both is held out."""
    paths = [tmp_path / name / "x.txt" for name in "ab"]
    for path in paths:
        path.parent.mkdir()
        path.write_text(str(path) * 50)
    corpus = build_corpus(tuple(map(str, paths)), tmp_path / "c")
    assert len(corpus.train) > len(corpus.validation) > 0
    assert corpus.info["split"] == "by position"


def test_an_unreadable_folder_is_named(tmp_path, monkeypatch):
    def walk(top, onerror):
        onerror(PermissionError(13, "Permission denied", str(top / "private")))
        return iter(())

    monkeypatch.setattr(os, "walk", walk)
    with pytest.raises(RunError, match=r"private: cannot be read \(Permission denied\)"):
        build_corpus((str(tmp_path),), tmp_path / "c")


def test_text_is_told_from_binary_across_read_boundaries(tmp_path):
    """A character that lies across two 1 MiB reads is no damage."""
    path = tmp_path / "long.txt"
    path.write_bytes(b"a" * ((1 << 20) - 1) + "é".encode() + b"b")
    corpus = build_corpus((str(path),), tmp_path / "c")
    assert len(corpus.train) + len(corpus.validation) == path.stat().st_size + 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file"),
        (b"", "an empty file"),
        (b"\xff\xfe\x00", "binary"),
        (b"text\0text", "zero bytes"),
    ],
)
def test_a_named_file_must_be_text(tmp_path, content, words):
    path = tmp_path / "input"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RunError, match=words) as caught:
        build_corpus((str(path),), tmp_path / "c")
    assert str(path) in str(caught.value)


def test_folders_without_text_are_refused(tmp_path):
    (tmp_path / "t").mkdir()
    with pytest.raises(RunError, match="no text to train on"):
        build_corpus((str(tmp_path / "t"),), tmp_path / "c")
    (tmp_path / "t" / "x.bin").write_bytes(b"\xff")
    with pytest.raises(
        RunError, match=r"1 file without readable text there, .*/x\.bin: a binary file"
    ):
        build_corpus((str(tmp_path / "t"),), tmp_path / "c")


def test_too_short_data_is_refused(tmp_path):
    corpus = build_corpus((str(write_files(tmp_path / "t", 2, 20)),), tmp_path / "c")
    size = min(len(corpus.train), len(corpus.validation))
    check_length(corpus, size - 1)
    with pytest.raises(RunError, match="--seq-len"):
        check_length(corpus, size)


def test_a_corpus_is_opened_again_only_unchanged(tmp_path):
    corpus = build_corpus((str(write_files(tmp_path / "t")),), tmp_path / "c")
    again = open_corpus(tmp_path / "c")
    np.testing.assert_array_equal(again.train, corpus.train)
    assert again.info == corpus.info
    assert isinstance(again.train, np.memmap)
    path = tmp_path / "c" / "train.bin"
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(RunError, match="has changed"):
        open_corpus(tmp_path / "c")
    (tmp_path / "c" / "corpus.json").write_text(json.dumps([]))
    with pytest.raises(RunError, match="missing or has changed"):
        open_corpus(tmp_path / "c")


def test_batches_depend_on_seed_and_step_alone():
    data = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8)

    def batch(seed, step):
        return train_batch(data, batch_size=4, seq_len=16, seed=seed, step=step)

    np.testing.assert_array_equal(batch(3, 8), batch(3, 8))
    assert not np.array_equal(batch(3, 8), batch(3, 9))
    assert not np.array_equal(batch(3, 8), batch(4, 8))
    assert batch(3, 8).shape == (4, 17)
    assert batch(3, 8).dtype == np.uint8


def test_batches_cover_the_data_to_its_last_byte():
    data = np.arange(20, dtype=np.uint8)
    batch = train_batch(data, batch_size=2000, seq_len=7, seed=0, step=0)
    np.testing.assert_array_equal(batch - batch[:, :1], np.tile(np.arange(8), (2000, 1)))
    assert set(batch[:, 0]) == set(range(13))
    whole = train_batch(data, batch_size=3, seq_len=19, seed=0, step=0)
    np.testing.assert_array_equal(whole, np.tile(data, (3, 1)))


def test_validation_batches_are_fixed_windows_over_the_whole_data():
    data = np.arange(256, dtype=np.uint8)

    def windows(batches):
        return np.stack(list(validation_batches(data, batch_size=2, seq_len=8, batches=batches)))

    four = windows(4)
    assert four.shape == (4, 2, 9)
    starts = four.reshape(-1, 9)[:, 0]
    assert starts[0] == 0
    assert four.reshape(-1, 9)[-1, -1] == 255
    assert (np.diff(starts.astype(int)) >= 8).all()  # no byte is predicted twice
    np.testing.assert_array_equal(four, windows(4))
    assert windows(1000).shape == (15, 2, 9)  # no more than the data holds
