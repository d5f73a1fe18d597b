"""The text that --data names: formats, folders, weights, tokenizers, and the corpus of bytes."""

import bz2
import functools
import gzip
import itertools
import json
import lzma
import os
import re
import shutil
import sys

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from jaxkern.lm.config import TrainConfig
from jaxkern.lm.data import (
    build_corpus,
    build_packed,
    check_length,
    corpus,
    open_corpus,
    pieces,
    tokenizer,
    train_batch,
    validation_batches,
)
from jaxkern.lm.data import documents as documents_module
from jaxkern.lm.data.documents import File, NotTextError
from jaxkern.lm.data.sources import Source, find_files, parse
from tests.language_models import refused

TEXTS = [f"document {i}: é\n" * (1 + i % 3) for i in range(40)]


def documents(*named, flag="--data", count=False):
    """The texts of all files that arguments of --data name."""
    found = []
    for source in parse(named, flag):
        for file in find_files(source, flag, count=count)[0]:
            found += [b"".join(parts).decode() for parts in file.documents()]
    return found


def lines(texts, field="text"):
    return "".join(json.dumps({"id": 3, field: text}) + "\n" for text in texts).encode()


def write_files(folder, count=40, size=100):
    for i in range(count):
        path = folder / f"part{i % 3}" / f"file{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"<{i}>" + "é" * size + f"</{i}>")
    return folder


def corpus_of(folder, *named):
    """The corpus of bytes, and the documents to train on and those to validate with."""
    found = build_corpus(tuple(map(str, named)), folder)
    parts = ({*bytes(part).split(b"\0")} - {b""} for part in (found.train, found.validation))
    return found, *parts


def zstd(content):
    """Compressed in two frames, as parallel compressors write them."""
    half = len(content) // 2
    frames = (pa.compress(part, "zstd", asbytes=True) for part in (content[:half], content[half:]))
    return b"".join(frames)


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
    assert documents(str(path)) == TEXTS
    whole = "".join(TEXTS)
    (tmp_path / f"one.txt{suffix}").write_bytes(COMPRESS[suffix](whole.encode()))
    assert documents(str(tmp_path / f"one.txt{suffix}")) == [whole]
    # The packed bytes of models without a tokenizer hold them, too.
    _, train, validation = corpus_of(tmp_path / "corpus", tmp_path)
    assert train | validation == {text.encode() for text in (*TEXTS, whole)}

    info = {"features": {"text": "string"}, "splits": [1, 2]}
    contents = {
        "lines.json": b"\n" + lines(TEXTS),  # as C4 and Dolma call them
        "info.json": json.dumps(info, indent=2).encode(),
        "list.json": json.dumps([{"text": text} for text in TEXTS]).encode(),
        "long.json": json.dumps({"text": "a" * 2**20}).encode() + b"\n",
        "number.json": b"7\n",
    }
    folder = tmp_path / "json"
    folder.mkdir()
    for name, content in contents.items():
        (folder / f"{name}{suffix}").write_bytes(COMPRESS[suffix](content))
    assert documents(str(folder)) == [*TEXTS, "a" * 2**20]
    assert documents(str(folder / f"lines.json{suffix}")) == TEXTS
    for name in ("info", "list", "number"):
        path = str(folder / f"{name}.json{suffix}")
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
        assert documents(str(path), count=True) == texts
    found, train, validation = corpus_of(tmp_path / "corpus", path)
    assert (found.info["files"], found.info["documents"]) == (1, 3)
    assert train | validation == {text.encode() for text in texts}
    path.write_bytes(COMPRESS[suffix](b"\n<|endoftext|>\n" * 3))
    refused("a file without text", documents, str(path), count=True)
    path.write_bytes(COMPRESS[suffix](b"\n\none\n"))
    assert documents(str(path)) == ["\n\none\n"]
    for name, whole in (("a.py", content), ("a.jsonl", lines([content.decode()]))):
        (tmp_path / name).write_bytes(whole)
        assert documents(str(tmp_path / name)) == [content.decode()]


def test_parquet_and_fields_that_are_named(tmp_path):
    table = write_table(tmp_path / "a.parquet", [*TEXTS, None, ""])
    assert documents(str(table)) == TEXTS
    other = write_table(tmp_path / "b.parquet", TEXTS[:3], "content")
    assert documents(f"{other}:content") == TEXTS[:3]
    assert documents(f"{other}:content=2.5") == TEXTS[:3]
    (tmp_path / "c.jsonl").write_bytes(lines(TEXTS[:5], "body"))
    assert documents(f"{tmp_path / 'c.jsonl'}:body") == TEXTS[:5]
    large, small = pa.large_string(), pa.string()
    dictionaries = pa.dictionary(pa.int32(), small), pa.dictionary(pa.int8(), large)
    for kind in (large, pa.string_view(), *dictionaries):
        column = pa.array([*TEXTS, None, TEXTS[0]]).cast(kind)
        parquet.write_table(pa.table({"text": column}), table, row_group_size=7)
        assert parquet.read_schema(table).field("text").type != small
        assert documents(str(table), count=True) == [*TEXTS, TEXTS[0]]


def test_records_without_a_text(tmp_path):
    """Null is no document in either format, and half a character does not lose one."""
    texts = [*TEXTS[:3], None, "", *TEXTS[3:]]
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines([None, *texts]))
    assert documents(str(path), count=True) == TEXTS
    table = write_table(tmp_path / "a.parquet", [None, *texts])
    assert documents(str(table), count=True) == TEXTS
    path.write_bytes(b'{"text": "a\\ud83d"}\n{"text": "\\ude00\\ud83d\\ude00"}\n')
    assert documents(str(path)) == ["a\ufffd", "\ufffd\U0001f600"]
    for broken, words in (
        ('{"text": [1]}', 'has a list as its "text", not a str'),
        ('{"text": {}}', 'has an object as its "text", not a str'),
        ('{"text": true}', 'has a boolean as its "text", not a str'),
        ("null", "is null, not an object"),
    ):
        path.write_bytes(lines(TEXTS) + f"{broken}\n".encode())
        refused(f"{path}: line 41 {words}", documents, str(path), count=True)
    binary = pa.array([*["a"] * 300, b"\xff"], pa.binary())
    column = pa.Array.from_buffers(pa.string(), 301, binary.buffers())
    parquet.write_table(pa.table({"text": column}), table, row_group_size=100)
    refused("a text in rows 257 to 301 is not UTF-8", documents, str(table), count=True)


def test_folders_and_patterns(tmp_path):
    for name in ("a/1.txt", "a/2.txt", "b/deep/3.txt", "b/4.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert documents(str(tmp_path / "a")) == ["a/1.txt", "a/2.txt"]
    assert documents(str(tmp_path / "*" / "*.txt")) == ["a/1.txt", "a/2.txt"]
    assert documents(str(tmp_path / "**" / "*.txt")) == ["a/1.txt", "a/2.txt", "b/deep/3.txt"]
    assert documents(str(tmp_path / "[ab]")) == ["a/1.txt", "a/2.txt", "b/4.md", "b/deep/3.txt"]


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
    files, skipped = find_files(parse([str(root)])[0])
    assert [file.name for file in files] == ["away/deep/2.txt", "own/1.txt"]
    assert not skipped.count


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
        ("cut.jsonl.gz", gzip.compress(lines(TEXTS))[:-9], "cannot be decompressed"),
        ("cut.txt.xz", lzma.compress(b"text" * 99)[:-9], "cannot be decompressed"),
        ("no.txt.zst", b"text", "cannot be decompressed .*ZSTD"),
        ("no.txt.bz2", b"text", "cannot be decompressed"),
        ("no.parquet", b"PAR1 text", "is not Parquet"),
        ("no.jsonl.gz", gzip.compress(b'\n{"body": "a"}\n'), 'line 2 has no "text".*PATH:FIELD'),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_files_that_are_not_what_they_are_called(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content)
    refused(f"--data {path}: .*{words}", documents, str(path), count=True)
    # In a folder it is passed over, unless it begins as a file of documents does.
    (tmp_path / "good.txt").write_text("text")
    assert find_files(parse([str(tmp_path)])[0])[1].count == (0 if name == "cut.jsonl.gz" else 1)


def test_why_files_of_a_folder_are_skipped_is_told(tmp_path):
    """A wrong field before what is no text at all."""
    (tmp_path / "a.png").write_bytes(b"\xff")
    (tmp_path / "b.jsonl").write_bytes(lines(TEXTS, "body"))
    write_table(tmp_path / "c.parquet", TEXTS, "body")
    reason = f'{tmp_path}/b.jsonl: line 1 has no "text" of a document, but .*body.*PATH:FIELD'
    config = TrainConfig.from_flags({"data": (str(tmp_path),), "pack": True})
    plain = functools.partial(build_corpus, config.data)
    for build in (plain, functools.partial(build_packed, config)):
        refused(f"3 files without readable text there, .*{reason}", build, tmp_path.parent / "run")
        (tmp_path / "d.txt").write_text("text " * 99)
        told = build(tmp_path.parent / "run").describe()
        assert re.search(f"; 3 files without readable text skipped, such as {reason}", told)
        (tmp_path / "d.txt").unlink()


def test_what_cannot_be_named(tmp_path, monkeypatch):
    table = write_table(tmp_path / "a.parquet", TEXTS, "content")
    binary = write_table(tmp_path / "b.parquet", [text.encode() for text in TEXTS])
    for named, words in (
        ([str(tmp_path / "*.csv")], r"\*.csv: no file matches"),
        ([f"{table}=0"], "weight 0 must be a number above 0"),
        ([f"{table}=-1"], "weight -1 must be"),
        ([f"{table}=inf"], "weight inf must be a number above 0, such as 0.3"),
        ([f"{table}:content=-Infinity"], "weight -Infinity must be a number above 0"),
        ([f"{table}:content=NaN", f"{table}=1"], "weight NaN must be a number above 0"),
        ([f"{table}=1e999"], "weight 1e999 must be a number above 0"),
        ([f"{table}=1", str(table)], "some have a weight and some do not; write =WEIGHT"),
        ([str(table)], r'no column "text" .*, but "n" \(int64\), "content" \(string\); name'),
        ([str(binary)], r'no column "text" .*, but "n" \(int64\), "text" \(binary\); name the'),
        ([f"{table}:n"], 'has no column "n" of text'),
        ([f"{table}:gone"], 'has no column "gone"'),
    ):
        refused(f"--data .*{words}", documents, *named)
    refused("--eval-data nowhere: no such file", documents, "nowhere", flag="--eval-data")
    (tmp_path / "a.zst").write_bytes(zstd(b"text"))
    for module in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    for path in (table, tmp_path / "a.zst"):
        refused(r"needs pyarrow; run: pip install pyarrow", documents, str(path))


@pytest.mark.parametrize("size", [1, 97, 1000, 10**6])
def test_a_large_file_is_divided_and_nothing_is_lost(tmp_path, monkeypatch, size):
    """Each line belongs to the part that it starts in, each group of rows to one part."""
    monkeypatch.setattr(pieces, "_SHARD_BYTES", size)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n" + lines(TEXTS) + b"\n" + lines(["end"]).rstrip())
    write_table(tmp_path / "b.parquet", TEXTS)
    files = find_files(parse([str(tmp_path)])[0])[0]
    found = [
        b"".join(parts).decode()
        for group in pieces.divide(files)
        for piece in group
        for parts in piece.file.documents(piece.begin, piece.end)
    ]
    assert found == [*TEXTS, "end", *TEXTS]
    # The parts of a compressed file share its lines.
    packed = tmp_path / "c.jsonl.gz"
    packed.write_bytes(gzip.compress(lines(TEXTS) + b"[]\n"))
    groups = pieces.divide([File("c", packed)])
    assert len([*itertools.chain(*groups)]) == min(16, -(-packed.stat().st_size // size))
    broken = itertools.chain(*(p.file.documents(p.begin, p.end) for g in groups for p in g))
    with pytest.raises(NotTextError, match=r"line 41 is a list, not an object"):
        list(broken)
    packed.write_bytes(gzip.compress(lines(TEXTS)))
    parts = [*itertools.chain(*pieces.divide([File("c", packed)]))]
    found = [text for p in parts for (text,) in p.file.documents(p.begin, p.end)]
    assert sorted(found) == sorted(text.encode() for text in TEXTS)
    # A line that is broken is found by its number, whichever part it is in.
    path.write_bytes(lines(TEXTS) + b'{"text": 7}\n' + lines(TEXTS))
    parts = [piece for group in pieces.divide(files[:1]) for piece in group]
    with pytest.raises(NotTextError, match=r'line 41 has a number as its "text"'):
        [*itertools.chain(*(piece.file.documents(piece.begin, piece.end) for piece in parts))]


def test_tokenizers_that_cannot_be_had(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    for spec, words in (
        ("bpe:12", "from 257 to 2\\^24"),
        ("bpe:many", "--tokenizer bpe:many: the size must be a whole number"),
        ("nowhere", "--tokenizer nowhere: no such tokenizer; give bytes, bpe:32000"),
        (str(tmp_path), "tokenizer.json cannot be read .*give a tokenizer.json of"),
    ):
        refused(words, tokenizer.size_of, spec)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    words = r"needs tokenizers; run: pip install tokenizers"
    refused(words, tokenizer.train_bpe, iter([]), 300, show=False)


def test_what_begins_and_ends_a_text(tmp_path):
    """By the files beside a tokenizer.json, by the usual names, or a token that is added."""
    trained = tokenizer.train_bpe(iter(TEXTS), 300, show=False)
    assert (trained.size, trained.begin, trained.end) == (300, 0, 0)
    (tmp_path / "tokenizer.json").write_text(trained.stored())
    assert tokenizer.load(tmp_path).stored() == trained.stored()
    library = tokenizer.load(tmp_path).tokenizer
    library.add_special_tokens(["<s>", "<|im_end|>"])
    library.enable_truncation(5)
    library.save(str(tmp_path / "tokenizer.json"))
    named = {"bos_token": None, "eos_token": {"content": "<|im_end|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    chat = tokenizer.load(tmp_path)
    assert (chat.size, chat.begin, chat.end) == (302, 300, 301)
    (long,) = chat.encode(["a b c d e f g h"])
    assert len(long) > 5
    assert chat.tokenizer.decode(long.tolist()) == "a b c d e f g h"
    content = json.loads(trained.stored())
    content["added_tokens"] = []
    content["model"]["vocab"] = {
        token: i - 1 for token, i in content["model"]["vocab"].items() if i
    }
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


def test_the_split_of_files_is_whole_and_the_same_elsewhere(tmp_path):
    root = write_files(tmp_path / "here")
    first, train, validation = corpus_of(tmp_path / "c1", root)
    assert train | validation == {path.read_bytes() for path in root.rglob("*.txt")}
    assert train.isdisjoint(validation)
    assert (first.info["documents"], first.info["split"]) == (40, "by document")
    assert train
    assert validation
    # A file that is named twice is read once.
    other = tmp_path / "there" / "deeper"
    shutil.copytree(root, other)
    second, *_ = corpus_of(tmp_path / "c2", other, next(other.rglob("*.txt")), other)
    assert first.info["fingerprint"] == second.info["fingerprint"]
    np.testing.assert_array_equal(first.validation, second.validation)
    # One more moves no other.
    (other / "new.txt").write_text("new")
    third, more_train, more_validation = corpus_of(tmp_path / "c3", other)
    assert train <= more_train
    assert validation <= more_validation
    assert third.info["fingerprint"] != first.info["fingerprint"]
    for count in (4, 5, 7):
        few = write_files(tmp_path / f"{count}", count)
        _, train, validation = corpus_of(tmp_path / "few", few)
        assert len(train) + len(validation) == count
        assert min(len(train), len(validation)) >= 1


@pytest.mark.parametrize("share", [0.2, 0.3, 0.99])
def test_no_more_than_a_quarter_is_held_out(tmp_path, share):
    """Whichever files their names choose: of two, one is chosen."""
    folder, sizes = tmp_path / "t", (int(share * 10000), int(10000 - share * 10000))
    folder.mkdir()
    held, learned = sorted(("a.txt", "b.txt"), key=corpus._fraction)
    texts = [character * size for character, size in zip("hl", sizes, strict=True)]
    for name, text in zip((held, learned), texts, strict=True):
        (folder / name).write_text(text)
    found, again = (corpus_of(tmp_path / name, folder)[0] for name in ("c", "again"))
    assert found.info["fingerprint"] == again.info["fingerprint"]
    whole = f"\0{texts[1]}\0{texts[0]}".encode()
    assert bytes(found.train) + bytes(found.validation) == whole
    by_document = share < 0.25
    assert found.info["split"] == ("by document" if by_document else "by position")
    assert len(found.validation) == (1 + sizes[0] if by_document else len(whole) // 20)
    assert ("(their end is held out)" in found.describe()) != by_document


def test_text_that_names_do_not_divide_is_split_by_position(tmp_path):
    path, text = tmp_path / "book.txt", bytes(range(32, 127)) * 20
    path.write_bytes(text)
    found, *_ = corpus_of(tmp_path / "c", path)
    assert bytes(found.train) + bytes(found.validation) == b"\0" + text
    assert len(found.validation) == len(b"\0" + text) // 20
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


def test_folders_skip_what_is_not_text(tmp_path):
    root = write_files(tmp_path / "t", 5)
    broken = {"picture.png": b"\x89PNG\xff\xfe", "zeros.bin": b"abc\0def", "empty.txt": b""}
    broken |= {"cut.txt": "é".encode()[:1], ".git/config": b"hidden"}
    (root / ".git").mkdir()
    for name, content in broken.items():
        (root / name).write_bytes(content)
    (root / "loop").symlink_to(root)
    found, train, validation = corpus_of(tmp_path / "c", root)
    assert (found.info["documents"], found.info["skipped"]) == (5, 4)
    assert "; 4 files without readable text skipped, such as " in found.describe()
    assert f"{root}/cut.txt: a binary file" in open_corpus(tmp_path / "c").describe()
    assert b"hidden" not in train | validation


def test_json_lines_are_their_texts(tmp_path):
    texts = [f"text {i}: é\n" for i in range(200)]
    path = tmp_path / "shard.jsonl"
    path.write_bytes(lines(texts) + b'\n{"text": ""}\n')
    found, train, validation = corpus_of(tmp_path / "c", path)
    assert train | validation == {text.encode() for text in texts}
    assert train.isdisjoint(validation)
    assert 1 <= len(validation) < 30
    assert bytes(found.train).startswith(b"\0text ")
    assert "1 file with 200 documents: " in found.describe()
    # More lines move none of those before.
    path.write_bytes(lines([*texts, "one more"]))
    _, more_train, more_validation = corpus_of(tmp_path / "c2", path)
    assert more_validation >= validation
    assert more_train >= train


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
        refused(rf"{root / name}.*{words}", corpus_of, tmp_path / "c", root / name)
    assert corpus_of(tmp_path / "c", root)[0].info["skipped"] == len(bad)
    # A file that begins as text and breaks off is not left out silently.
    (root / "cut.jsonl").write_text('{"text": "a"}\n{"text": "b')
    refused(r"cut\.jsonl: line 2 is not JSON", corpus_of, tmp_path / "c", root)


def test_what_cannot_be_read_is_named(tmp_path, monkeypatch):
    path, folder = tmp_path / "input", tmp_path / "t"
    refused(f"{path}.*no such file", corpus_of, tmp_path / "c", path)
    for content, words in (
        (b"", "an empty file"),
        (b"\xff\xfe\x00", "binary"),
        (b"text\0text", "zero bytes"),
    ):
        path.write_bytes(content)
        refused(f"{path}.*{words}", corpus_of, tmp_path / "c", path)
    folder.mkdir()
    refused("no text to train on", corpus_of, tmp_path / "c", folder)
    (folder / "x.bin").write_bytes(b"\xff")
    words = r"1 file without readable text there, .*/x\.bin: a binary file"
    refused(words, corpus_of, tmp_path / "c", folder)

    def walk(top, onerror):
        onerror(PermissionError(13, "Permission denied", str(top / "private")))
        return iter(())

    monkeypatch.setattr(os, "walk", walk)
    words = r"private: cannot be read \(Permission denied\)"
    refused(words, corpus_of, tmp_path / "c", tmp_path)


def test_a_corpus_is_opened_again_only_unchanged(tmp_path):
    found, *_ = corpus_of(tmp_path / "c", write_files(tmp_path / "t"))
    again = open_corpus(tmp_path / "c")
    np.testing.assert_array_equal(again.train, found.train)
    assert again.info == found.info
    assert isinstance(again.train, np.memmap)
    size = min(len(found.train), len(found.validation))
    check_length(found, size - 1)
    refused("--seq-len", check_length, found, size)
    path = tmp_path / "c" / "train.bin"
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(bytes(content))
    refused("has changed", open_corpus, tmp_path / "c")
    (tmp_path / "c" / "corpus.json").write_text(json.dumps([]))
    refused("missing or has changed", open_corpus, tmp_path / "c")


def test_batches_are_by_seed_and_step_and_cover_the_data_to_its_last_byte():
    data = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8)
    batch = functools.partial(train_batch, data, batch_size=4, seq_len=16)
    first = batch(seed=3, step=8)
    assert (first.shape, first.dtype) == ((4, 17), np.uint8)
    np.testing.assert_array_equal(batch(seed=3, step=8), first)
    np.testing.assert_array_equal(batch(seed=3, step=8, rows=np.array([2, 0])), first[[2, 0]])
    assert not np.array_equal(first, batch(seed=3, step=9))
    assert not np.array_equal(first, batch(seed=4, step=8))

    data = np.arange(20, dtype=np.uint8)
    many = train_batch(data, batch_size=2000, seq_len=7, seed=0, step=0)
    np.testing.assert_array_equal(many - many[:, :1], np.tile(np.arange(8), (2000, 1)))
    assert set(many[:, 0]) == set(range(13))
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
