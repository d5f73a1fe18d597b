"""The text that --data names: formats, folders, weights, tokenizers, and the corpus of bytes."""

import bz2
import dataclasses
import functools
import gzip
import itertools
import json
import lzma
import os
import re
import sys

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from jaxkern.lm import data
from jaxkern.lm.config import TrainConfig
from jaxkern.lm.data import corpus, pieces, tokenizer
from jaxkern.lm.data import documents as documents_module
from jaxkern.lm.data.documents import File, NotTextError
from jaxkern.lm.data.sources import Source, find_files, parse
from tests.language_models import refused

TEXTS = [f"document {i}: é\n" * (1 + i % 3) for i in range(40)]


def found_by(named, flag="--data", count=False):
    """The files that an argument of --data names, and how many it passes over."""
    (source,) = parse([str(named)], flag)
    files, skipped = find_files(source, flag, count=count)
    return files, skipped.count


def documents(named, **options):
    """The texts of all files that an argument of --data names."""
    files, _ = found_by(named, **options)
    return [b"".join(parts).decode() for file in files for parts in file.documents()]


def lines(texts, field="text"):
    return "".join(json.dumps({"id": 3, field: text}) + "\n" for text in texts).encode()


def write_lines(folder, texts):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.jsonl").write_bytes(lines(texts) + b'\n{"text": ""}\n')
    return folder


def write_files(folder, texts):
    for i, text in enumerate(texts):
        path = folder / f"part{i % 3}" / f"file{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def corpus_of(folder, *named):
    """The corpus of bytes, and the documents to train on and those to validate with."""
    found = data.build_corpus(tuple(map(str, named)), folder)
    parts = ({*bytes(part).split(b"\0")} - {b""} for part in (found.train, found.validation))
    return found, *parts


def zstd(content):
    """Compressed in two frames, as parallel compressors write them."""
    halves = content[: len(content) // 2], content[len(content) // 2 :]
    return b"".join(pa.compress(half, "zstd", asbytes=True) for half in halves)


COMPRESS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
COMPRESS |= {".zst": zstd}


def write_table(path, texts, column="text", rows=7):
    table = pa.table({"n": pa.array(range(len(texts))), column: pa.array(texts)})
    parquet.write_table(table, path, row_group_size=rows)
    return path


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_files_are_read_as_plain_ones(tmp_path, suffix):
    """What is called .json is read by its first line: what is not JSON Lines is passed over."""
    path = tmp_path / f"texts.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](lines(TEXTS)))
    assert documents(path) == TEXTS
    whole = "".join(TEXTS)
    (tmp_path / f"one.txt{suffix}").write_bytes(COMPRESS[suffix](whole.encode()))
    assert documents(tmp_path / f"one.txt{suffix}") == [whole]
    # The packed bytes of models without a tokenizer hold them, too.
    _, train, validation = corpus_of(tmp_path / "corpus", tmp_path)
    assert train | validation == {text.encode() for text in (*TEXTS, whole)}

    info = {"features": {"text": "string"}, "splits": [1, 2]}
    contents = {
        "lines": "\n" + lines(TEXTS).decode(),  # as C4 and Dolma call them
        "info": json.dumps(info, indent=2),
        "list": json.dumps([{"text": text} for text in TEXTS]),
        "long": json.dumps({"text": "a" * 2**20}) + "\n",
        "number": "7\n",
    }
    folder = tmp_path / "json"
    folder.mkdir()
    for name, content in contents.items():
        (folder / f"{name}.json{suffix}").write_bytes(COMPRESS[suffix](content.encode()))
    assert documents(folder) == [*TEXTS, "a" * 2**20]
    assert documents(folder / f"lines.json{suffix}") == TEXTS
    for name in ("info", "list", "number"):
        path = folder / f"{name}.json{suffix}"
        refused(r"JSON, whose syntax would be trained on .*jsonl", documents, path)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_marker_ends_a_document_of_a_txt(tmp_path, monkeypatch, suffix):
    """Wherever reads end, and in a .txt alone: elsewhere it is text."""
    content = b"<|endoftext|>\n\none\n\ntwo\r\n<|endoftext|>\r\nthree<|endoftext|><|endoftext|>"
    content += " é <|endof\n<|endoftext|>\n\n".encode()
    texts = ["one\n\ntwo", "three", " é <|endof"]
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(COMPRESS[suffix](content))
    for size in (*range(1, 40), 1 << 20):
        monkeypatch.setattr(documents_module, "_CHUNK", size)
        assert documents(path, count=True) == texts
    found, train, validation = corpus_of(tmp_path / "corpus", path)
    assert "1 file with 3 documents: " in found.describe()
    assert train | validation == {text.encode() for text in texts}
    path.write_bytes(COMPRESS[suffix](b"\n<|endoftext|>\n" * 3))
    refused("a file without text", documents, path, count=True)
    path.write_bytes(COMPRESS[suffix](b"\n\none\n"))
    assert documents(path) == ["\n\none\n"]
    for name, whole in (("a.py", content), ("a.jsonl", lines([content.decode()]))):
        (tmp_path / name).write_bytes(whole)
        assert documents(tmp_path / name) == [content.decode()]


def test_parquet_and_fields_that_are_named(tmp_path):
    """Null and an empty text are no document in either format."""
    texts = [None, *TEXTS[:3], None, "", *TEXTS[3:]]
    table = write_table(tmp_path / "a.parquet", texts)
    other = write_table(tmp_path / "b.parquet", texts, "content")
    (tmp_path / "a.jsonl").write_bytes(lines(texts))
    (tmp_path / "b.jsonl").write_bytes(lines(texts, "body"))
    for named in ("a.parquet", "a.jsonl", "b.parquet:content", "b.jsonl:body"):
        assert documents(tmp_path / named) == documents(tmp_path / named, count=True) == TEXTS
    assert documents(f"{other}:content=2.5") == TEXTS
    large, small = pa.large_string(), pa.string()
    dictionaries = pa.dictionary(pa.int32(), small), pa.dictionary(pa.int8(), large)
    for kind in (large, pa.string_view(), *dictionaries):
        column = pa.array([*TEXTS, None, TEXTS[0]]).cast(kind)
        parquet.write_table(pa.table({"text": column}), table, row_group_size=7)
        assert parquet.read_schema(table).field("text").type != small
        assert documents(table, count=True) == [*TEXTS, TEXTS[0]]


def test_half_a_character_does_not_lose_a_text(tmp_path):
    path, table = tmp_path / "a.jsonl", tmp_path / "a.parquet"
    path.write_bytes(b'{"text": "a\\ud83d"}\n{"text": "\\ude00\\ud83d\\ude00"}\n')
    assert documents(path) == ["a\ufffd", "\ufffd\U0001f600"]
    binary = pa.array([*["a"] * 300, b"\xff"], pa.binary())
    column = pa.Array.from_buffers(pa.string(), 301, binary.buffers())
    parquet.write_table(pa.table({"text": column}), table, row_group_size=100)
    refused("a text in rows 257 to 301 is not UTF-8", documents, table, count=True)


def test_folders_and_patterns(tmp_path, monkeypatch):
    """Hidden files are no text, and a folder that cannot be read is named."""
    names = "a/1.txt", "a/2.txt", "b/4.md", "b/deep/3.txt"
    for name in (*names, "b/.git/config"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    for pattern, found in (
        ("a", names[:2]),
        ("*/*.txt", names[:2]),
        ("**/*.txt", (*names[:2], names[3])),
        ("[ab]", names),
    ):
        assert documents(tmp_path / pattern) == [*found]
    (tmp_path / "empty").mkdir()
    refused("no text to train on", corpus_of, tmp_path / "c", tmp_path / "empty")
    denied = PermissionError(13, "Permission denied", "private")
    monkeypatch.setattr(os, "walk", lambda top, onerror: onerror(denied))
    refused(r"private: cannot be read \(Permission denied\)", documents, tmp_path)


def test_links_to_folders_are_followed_and_never_around(tmp_path):
    root, away = tmp_path / "root", tmp_path / "away"
    for path in (root / "own" / "1.txt", away / "deep" / "2.txt", tmp_path / "outside.txt"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name)
    (root / "a_first").symlink_to(root / "own")
    (root / "away").symlink_to(away)
    (root / "around").symlink_to(tmp_path)
    (away / "back").symlink_to(root)
    (away / "deep" / "again").symlink_to(away / "deep")
    (root / "nowhere").symlink_to(tmp_path / "nowhere")
    files, skipped = found_by(root)
    assert [file.name for file in files] == ["away/deep/2.txt", "own/1.txt"]
    assert not skipped


def test_weights_and_paths_that_look_like_them(tmp_path):
    a, b = tmp_path / "year=2020", tmp_path / "b.txt"
    a.mkdir()
    b.write_text("b")
    assert parse([str(a)]) == [Source(str(a), str(a))]
    weighted = parse([f"{a}=0.7", f"{b}=3e-1"])
    assert [(s.path, s.weight) for s in weighted] == [(str(a), 0.7), (str(b), 0.3)]
    assert TrainConfig.from_flags({"data": (f"{a}=1",)}).pack
    named = b.rename(tmp_path / "b=inf")
    assert parse([str(named)])[0].weight is None
    assert not TrainConfig.from_flags({"data": (str(a),)}).pack


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.txt", b"", "an empty file"),
        ("binary.bin", b"\xff\xfe\x00", "a binary file"),
        ("cut.txt", "é".encode()[:1], "a binary file"),
        ("zeros.txt", b"text\0text", "zero bytes"),
        ("cut.txt.xz", lzma.compress(b"text" * 99)[:-9], "cannot be decompressed"),
        ("no.txt.zst", b"text", "cannot be decompressed .*ZSTD"),
        ("no.txt.bz2", b"text", "cannot be decompressed"),
        ("no.parquet", b"PAR1 text", "is not Parquet"),
        ("no.jsonl.gz", gzip.compress(b'\n{"body": "a"}\n'), 'line 2 has no "text".*PATH:FIELD'),
        ("17.jsonl", b"\n17\n", 'line 2 is a number, not an object with the field "text"'),
        ("17.ndjson", b'{"text": 17}\n', 'line 1 has a number as its "text", not a string; leave'),
        ("null.jsonl", b'{"text": null}\n', "a file without text"),
        ("blank.jsonl", b'{"text": ""}\n', "a file without text"),
        ("cut.jsonl", b'{"text": "a', "line 1 is not JSON"),
        ("zero.ndjson", b'{"text": "\\u0000"}', "document 1 has a zero byte, .* --tokenizer bpe"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_text_is_refused_and_passed_over_in_a_folder(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content)
    refused(f"--data {path}: .*{words}", documents, path, count=True)
    (tmp_path / "good.txt").write_text("text")
    assert documents(tmp_path, count=True) == ["text"]
    if "zero" not in name:  # from its beginning alone
        assert documents(tmp_path) == ["text"]


def test_records_that_break_off_are_not_passed_over(tmp_path):
    (tmp_path / "good.txt").write_text("text")
    path = tmp_path / "a.jsonl"
    for broken, words in (
        ('{"text": "b', "line 41 is not JSON"),
        ('{"text": [1]}', 'line 41 has a list as its "text", not a str'),
        ('{"text": {}}', 'line 41 has an object as its "text", not a str'),
        ('{"text": true}', 'line 41 has a boolean as its "text", not a str'),
        ("null", "line 41 is null, not an object"),
    ):
        path.write_bytes(lines(TEXTS) + f"{broken}\n".encode())
        for named in (path, tmp_path):
            refused(f"--data {path}: {words}", documents, named, count=True)
    path = path.rename(tmp_path / "a.jsonl.gz")
    path.write_bytes(gzip.compress(lines(TEXTS))[:-9])
    for named in (path, tmp_path):
        refused(f"--data {path}: cannot be decompressed", documents, named, count=True)
    assert len(found_by(tmp_path)[0]) == 2


def test_why_files_of_a_folder_are_skipped_is_told(tmp_path):
    """A wrong field before what is no text at all."""
    (tmp_path / "a.png").write_bytes(b"\xff")
    (tmp_path / "b.jsonl").write_bytes(lines(TEXTS, "body"))
    write_table(tmp_path / "c.parquet", TEXTS, "body")
    reason = f'{tmp_path}/b.jsonl: line 1 has no "text" of a document, but .*body.*PATH:FIELD'
    told = f"; 3 files without readable text skipped, such as {reason}"
    out, config = tmp_path.parent / "run", TrainConfig.from_flags({"data": (str(tmp_path),)})
    packed = functools.partial(data.build_packed, dataclasses.replace(config, pack=True))
    for build in (functools.partial(data.build_corpus, config.data), packed):
        refused(f"3 files without readable text there, .*{reason}", build, out)
        (tmp_path / "d.txt").write_text("text " * 99)
        assert re.search(told, build(out).describe())
        (tmp_path / "d.txt").unlink()
    assert re.search(told, data.open_corpus(out).describe())


def test_what_cannot_be_named(tmp_path):
    table = write_table(tmp_path / "a.parquet", TEXTS, "content")
    binary = write_table(tmp_path / "b.parquet", [text.encode() for text in TEXTS])
    for named, words in (
        (tmp_path / "*.csv", r"\*.csv: no file matches"),
        (table, r'no column "text" .*, but "n" \(int64\), "content" \(string\); name'),
        (binary, r'no column "text" .*, but "n" \(int64\), "text" \(binary\); name the'),
        (f"{table}:n", 'has no column "n" of text'),
        (f"{table}:gone", 'has no column "gone"'),
    ):
        refused(f"--data .*{words}", documents, named)
    for weight in ("0", "-1", "inf", "-Infinity", "NaN", "1e999"):
        words = f"--data .*weight {weight} must be a number above 0, such as 0.3"
        for named in (str(table), f"{table}:content"):
            refused(words, documents, f"{named}={weight}")


def test_missing_packages_are_named(tmp_path, monkeypatch):
    table, packed = write_table(tmp_path / "a.parquet", TEXTS), tmp_path / "a.zst"
    packed.write_bytes(zstd(b"text"))
    for module in ("pyarrow", "pyarrow.parquet", "tokenizers"):
        monkeypatch.setitem(sys.modules, module, None)
    for path in (table, packed):
        refused("needs pyarrow; run: pip install pyarrow", documents, path)
    words = "needs tokenizers; run: pip install tokenizers"
    refused(words, tokenizer.train_bpe, iter([]), 300, show=False)


@pytest.mark.parametrize("size", [1, 97, 1000, 10**6])
def test_a_large_file_is_divided_and_nothing_is_lost(tmp_path, monkeypatch, size):
    """Each line belongs to the part that it starts in, each group of rows to one part."""

    def read(*files):
        parts = [*itertools.chain(*pieces.divide(files))]
        texts = itertools.chain(*(part.file.documents(part.begin, part.end) for part in parts))
        return len(parts), [b"".join(text).decode() for text in texts]

    monkeypatch.setattr(pieces, "_SHARD_BYTES", size)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n" + lines(TEXTS) + b"\n" + lines(["end"]).rstrip())
    write_table(tmp_path / "b.parquet", TEXTS)
    files, _ = found_by(tmp_path)
    assert read(*files)[1] == [*TEXTS, "end", *TEXTS]
    # The parts of a compressed file share its lines.
    packed = File("c", tmp_path / "c.jsonl.gz")
    packed.path.write_bytes(gzip.compress(lines(TEXTS)))
    count, found = read(packed)
    assert count == min(16, -(-packed.path.stat().st_size // size))
    assert sorted(found) == sorted(TEXTS)
    # A line that is broken is found by its number, whichever part it is in.
    packed.path.write_bytes(gzip.compress(lines(TEXTS) + b"[]\n"))
    path.write_bytes(lines(TEXTS) + b'{"text": 7}\n' + lines(TEXTS))
    for file, words in ((packed, "is a list, not an object"), (files[0], "has a number as its")):
        with pytest.raises(NotTextError, match=f"line 41 {words}"):
            read(file)


def test_what_begins_and_ends_a_text(tmp_path):
    """By the files beside a tokenizer.json, by the usual names, or a token that is added."""
    trained = tokenizer.train_bpe(iter(TEXTS), 300, show=False)
    assert (trained.size, trained.begin, trained.end) == (300, 0, 0)
    (tmp_path / "tokenizer.json").write_text(trained.stored())
    found = tokenizer.load(tmp_path)
    assert found.stored() == trained.stored()
    found.tokenizer.add_special_tokens(["<s>", "<|im_end|>"])
    found.tokenizer.enable_truncation(5)
    found.tokenizer.save(str(tmp_path / "tokenizer.json"))
    named = {"bos_token": None, "eos_token": {"content": "<|im_end|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    chat = tokenizer.load(tmp_path)
    assert (chat.size, chat.begin, chat.end) == (302, 300, 301)
    (long,) = chat.encode(["a b c d e f g h"])
    assert len(long) > 5
    assert chat.tokenizer.decode(long.tolist()) == "a b c d e f g h"
    content = json.loads(trained.stored()) | {"added_tokens": []}
    vocab = content["model"]["vocab"]
    content["model"]["vocab"] = {token: i - 1 for token, i in vocab.items() if i}
    (tmp_path / "bare.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").unlink()
    bare = tokenizer.load(tmp_path / "bare.json")
    assert bare.begin == bare.end == 299
    assert np.array_equal(bare.encode(["é x"])[0] + 1, trained.encode(["é x"])[0])


def test_a_marker_inside_a_document_is_no_token():
    trained = tokenizer.train_bpe(iter([*TEXTS, "<|endoftext|>"] * 9), 300, show=False)
    texts = ["a <|endoftext|> b", "<|endoftext|>", "", "<<|endoftext|>|endoftext|>"]
    encoded = trained.encode(texts)
    assert all(0 not in tokens for tokens in encoded)
    assert [trained.tokenizer.decode(tokens.tolist()) for tokens in encoded] == texts
    trained.tokenizer.add_special_tokens(["<|user|>"])
    assert 300 in trained.encode(["<|user|> asks"])[0]


@pytest.mark.parametrize("write", [write_files, write_lines])
def test_the_split_is_whole_and_the_same_elsewhere(tmp_path, write):
    texts = [f"<{i:03}>" + "é" * 100 for i in range(200)]
    first, train, validation = corpus_of(tmp_path / "c1", write(tmp_path / "here", texts))
    assert train | validation == {text.encode() for text in texts}
    assert train.isdisjoint(validation)
    assert (first.info["documents"], first.info["split"]) == (200, "by document")
    assert 1 <= len(validation) < 30
    # A file that is named twice is read once.
    other = write(tmp_path / "there" / "deeper", texts)
    second, *_ = corpus_of(tmp_path / "c2", other, next(other.rglob("*.*")), other)
    assert first.info["fingerprint"] == second.info["fingerprint"]
    np.testing.assert_array_equal(first.validation, second.validation)
    # One more moves no other.
    third, more_train, more_validation = corpus_of(tmp_path / "c3", write(other, [*texts, "new"]))
    assert train <= more_train
    assert validation <= more_validation
    assert third.info["fingerprint"] != first.info["fingerprint"]
    for count in (4, 5, 7):
        _, *parts = corpus_of(tmp_path / "few", write(tmp_path / f"{count}", texts[:count]))
        assert sum(map(len, parts)) == count
        assert all(parts)


@pytest.mark.parametrize("share", [0.2, 0.3, 0.99])
def test_no_more_than_a_quarter_is_held_out(tmp_path, share):
    """Whichever files their names choose: of two, one is chosen."""
    size, folder = int(share * 10000), tmp_path / "t"
    folder.mkdir()
    texts = "h" * size, "l" * (10000 - size)
    for name, text in zip(sorted(("a.txt", "b.txt"), key=corpus._fraction), texts, strict=True):
        (folder / name).write_text(text)
    found, again = (corpus_of(tmp_path / name, folder)[0] for name in ("c", "again"))
    assert found.info["fingerprint"] == again.info["fingerprint"]
    whole = f"\0{texts[1]}\0{texts[0]}".encode()
    assert bytes(found.train) + bytes(found.validation) == whole
    by_document = share < 0.25
    assert found.info["split"] == ("by document" if by_document else "by position")
    assert len(found.validation) == (1 + size if by_document else len(whole) // 20)
    assert ("(their end is held out)" in found.describe()) != by_document


def test_text_that_names_do_not_divide_is_split_by_position(tmp_path):
    path, text = tmp_path / "book.txt", bytes(range(32, 127)) * 20
    path.write_bytes(text)
    found, *_ = corpus_of(tmp_path / "c", path)
    assert bytes(found.train) + bytes(found.validation) == b"\0" + text
    assert isinstance(found.train, np.memmap)
    size = len(b"\0" + text) // 20
    assert len(found.validation) == size
    data.check_length(found, size - 1)
    refused(f"validation data has {size} bytes, fewer .*--seq-len", data.check_length, found, size)
    assert "one file" in found.describe()
    # A character that lies across two 1 MiB reads is no damage.
    path.write_bytes(b"a" * ((1 << 20) - 1) + "é".encode() + b"b")
    found, *_ = corpus_of(tmp_path / "c", path)
    assert len(found.train) + len(found.validation) == path.stat().st_size + 1
    # The places of files of one name are the same, so the end of both is held out.
    paths = [tmp_path / name / "x.txt" for name in "ab"]
    for path in paths:
        path.parent.mkdir()
        path.write_text(str(path) * 50)
    found, *_ = corpus_of(tmp_path / "c", *paths)
    assert len(found.train) > len(found.validation) > 0
    assert found.info["split"] == "by position"


def test_batches_are_by_seed_and_step_and_cover_the_data_to_its_last_byte():
    text = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8)
    batch = functools.partial(data.train_batch, text, batch_size=4, seq_len=16)
    first = batch(seed=3, step=8)
    assert (first.shape, first.dtype) == ((4, 17), np.uint8)
    np.testing.assert_array_equal(batch(seed=3, step=8), first)
    np.testing.assert_array_equal(batch(seed=3, step=8, rows=np.array([2, 0])), first[[2, 0]])
    assert not np.array_equal(first, batch(seed=3, step=9))
    assert not np.array_equal(first, batch(seed=4, step=8))
    text = np.arange(20, dtype=np.uint8)
    for seq_len in (7, 19):
        many = data.train_batch(text, batch_size=2000, seq_len=seq_len, seed=0, step=0)
        windows = [range(start, start + seq_len + 1) for start in range(20 - seq_len)]
        np.testing.assert_array_equal(np.unique(many, axis=0), windows)


def test_validation_batches_are_fixed_windows_over_the_whole_data():
    batches = functools.partial(
        data.validation_batches, np.arange(256, dtype=np.uint8), batch_size=2, seq_len=8
    )
    windows = lambda count: np.stack([*batches(batches=count)])
    four = windows(4)
    assert four.shape == (4, 2, 9)
    starts = four.reshape(-1, 9)[:, 0]
    assert starts[0] == 0
    assert four.reshape(-1, 9)[-1, -1] == 255
    assert (np.diff(starts.astype(int)) >= 8).all()  # no byte is predicted twice
    np.testing.assert_array_equal(four, windows(4))
    assert windows(1000).shape == (15, 2, 9)  # no more than the data holds
