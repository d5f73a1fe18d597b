"""What --data can name: formats, compressions, fields, folders, patterns, weights."""

import bz2
import functools
import gzip
import itertools
import json
import lzma
import re
import shutil
import sys

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from jaxkern.lm.config import RunError, TrainConfig
from jaxkern.lm.data import build_corpus, build_packed, pieces, tokenizer
from jaxkern.lm.data import documents as documents_module
from jaxkern.lm.data.documents import File, NotTextError
from jaxkern.lm.data.sources import Source, find_files, parse

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


def zstd(content):
    """Compressed in two frames, as parallel compressors write them."""
    half = len(content) // 2
    frames = (pa.compress(part, "zstd", asbytes=True) for part in (content[:half], content[half:]))
    return b"".join(frames)


COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}


def write_table(path, texts, column="text", rows=7):
    table = pa.table({"n": pa.array(range(len(texts))), column: pa.array(texts)})
    parquet.write_table(table, path, row_group_size=rows)
    return path


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_files_are_read_as_plain_ones(tmp_path, suffix):
    path = tmp_path / f"texts.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](lines(TEXTS)))
    assert documents(str(path)) == TEXTS
    if suffix:  # as C4 and Dolma call them
        other = shutil.copy(path, tmp_path / f"again.json{suffix}")
        assert documents(str(other)) == TEXTS
    text = tmp_path / f"one.txt{suffix}"
    text.write_bytes(COMPRESS[suffix]("".join(TEXTS).encode()))
    assert documents(str(text)) == ["".join(TEXTS)]
    # The packed bytes of models without a tokenizer hold them, too.
    corpus = build_corpus((str(tmp_path),), tmp_path / "corpus")
    held = bytes(corpus.train) + bytes(corpus.validation)
    assert {part.decode() for part in held.split(b"\0") if part} == {*TEXTS, "".join(TEXTS)}


@pytest.mark.parametrize("suffix", COMPRESS)
def test_json_is_read_by_its_first_line(tmp_path, suffix):
    """Named or found, compressed or not: what is not JSON Lines is passed over."""
    info = {"features": {"text": "string"}, "splits": [1, 2]}
    contents = {
        "lines.json": b"\n" + lines(TEXTS),
        "info.json": json.dumps(info, indent=2).encode(),
        "list.json": json.dumps([{"text": text} for text in TEXTS]).encode(),
        "long.json": json.dumps({"text": "a" * 2**20}).encode() + b"\n",
        "number.json": b"7\n",
    }
    for name, content in contents.items():
        (tmp_path / f"{name}{suffix}").write_bytes(COMPRESS[suffix](content))
    assert documents(str(tmp_path)) == [*TEXTS, "a" * 2**20]
    assert documents(str(tmp_path / f"lines.json{suffix}")) == TEXTS
    for name in ("info", "list", "number"):
        with pytest.raises(RunError, match=r"JSON, whose syntax would be trained on .*jsonl"):
            documents(str(tmp_path / f"{name}.json{suffix}"))


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
    corpus = build_corpus((str(path),), tmp_path / "corpus")
    assert (corpus.info["files"], corpus.info["documents"]) == (1, 3)
    held = bytes(corpus.train) + bytes(corpus.validation)
    assert {part.decode() for part in held.split(b"\0")[1:]} == {*texts}
    path.write_bytes(COMPRESS[suffix](b"\n<|endoftext|>\n" * 3))
    with pytest.raises(RunError, match="a file without text"):
        documents(str(path), count=True)
    path.write_bytes(COMPRESS[suffix](b"\n\none\n"))
    assert documents(str(path)) == ["\n\none\n"]
    for name, whole in (("a.py", content), ("a.jsonl", lines([content.decode()]))):
        (tmp_path / name).write_bytes(whole)
        assert documents(str(tmp_path / name)) == [content.decode()]


def test_a_marker_inside_a_document_is_no_token(tmp_path):
    trained = tokenizer.train_bpe(iter([*TEXTS, "<|endoftext|>"] * 9), 300, show=False)
    texts = ["a <|endoftext|> b", "<|endoftext|>", "", "<<|endoftext|>|endoftext|>"]
    encoded = trained.encode(texts)
    assert all(0 not in tokens for tokens in encoded)
    assert [trained.tokenizer.decode(tokens.tolist()) for tokens in encoded] == texts
    trained.tokenizer.add_special_tokens(["<|user|>"])
    assert 300 in trained.encode(["<|user|> asks"])[0]


def test_parquet_and_fields_that_are_named(tmp_path):
    table = write_table(tmp_path / "a.parquet", [*TEXTS, None, ""])
    assert documents(str(table)) == TEXTS
    other = write_table(tmp_path / "b.parquet", TEXTS[:3], "content")
    assert documents(f"{other}:content") == TEXTS[:3]
    assert documents(f"{other}:content=2.5") == TEXTS[:3]
    (tmp_path / "c.jsonl").write_bytes(lines(TEXTS[:5], "body"))
    assert documents(f"{tmp_path / 'c.jsonl'}:body") == TEXTS[:5]


@pytest.mark.parametrize(
    "kind",
    [
        pa.large_string(),
        pa.string_view(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.dictionary(pa.int8(), pa.large_string()),
    ],
    ids=str,
)
def test_every_type_of_text_in_parquet_is_read(tmp_path, kind):
    path = tmp_path / "a.parquet"
    column = pa.array([*TEXTS, None, TEXTS[0]]).cast(kind)
    parquet.write_table(pa.table({"text": column}), path, row_group_size=7)
    assert parquet.read_schema(path).field("text").type != pa.string()
    assert documents(str(path), count=True) == [*TEXTS, TEXTS[0]]


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
    for broken, kind in (("[1]", "a list"), ("{}", "an object"), ("true", "a boolean")):
        path.write_bytes(lines(TEXTS) + f'{{"text": {broken}}}\n'.encode())
        with pytest.raises(RunError, match=f'{path}: line 41 has {kind} as its "text", not a str'):
            documents(str(path), count=True)
    path.write_bytes(lines(TEXTS) + b"null\n")
    with pytest.raises(RunError, match="line 41 is null, not an object"):
        documents(str(path), count=True)
    binary = pa.array([*["a"] * 300, b"\xff"], pa.binary())
    column = pa.Array.from_buffers(pa.string(), 301, binary.buffers())
    parquet.write_table(pa.table({"text": column}), table, row_group_size=100)
    with pytest.raises(RunError, match="a text in rows 257 to 301 is not UTF-8"):
        documents(str(table), count=True)


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
    with pytest.raises(RunError, match=f"--data {path}: .*{words}"):
        documents(str(path), count=True)
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
        with pytest.raises(RunError, match=f"3 files without readable text there, .*{reason}"):
            build(tmp_path.parent / "run")
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
        with pytest.raises(RunError, match=f"--data .*{words}"):
            documents(*named)
    with pytest.raises(RunError, match="--eval-data nowhere: no such file"):
        documents("nowhere", flag="--eval-data")
    (tmp_path / "a.zst").write_bytes(zstd(b"text"))
    for module in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    for path in (table, tmp_path / "a.zst"):
        with pytest.raises(RunError, match=r'needs pyarrow; run: pip install "jaxkern\[data\]"'):
            documents(str(path))


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
        with pytest.raises(RunError, match=words):
            tokenizer.size_of(spec)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(RunError, match=r'needs tokenizers; run: pip install "jaxkern\[data\]"'):
        tokenizer.train_bpe(iter([]), 300, show=False)


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
