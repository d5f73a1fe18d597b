"""The text that --data names: formats, folders, weights, and tokenizers."""

import gzip
import json
import os
import pathlib

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from jaxkern.lm import sources, tokenizer
from jaxkern.lm.config import TrainConfig
from jaxkern.lm.sources import Source, find, parse
from tests.language_models import refused

TEXTS = [f"document {i}: é\n" * (1 + i % 3) for i in range(40)]


def documents(*named):
    """The texts of all files that arguments of --data name."""
    found, texts = find([*map(str, named)], "--data", held_out=0), [""]
    for text, last, _ in (part for each in found for file in each.files for part in file.parts()):
        texts[-1] += text
        texts += [""] if last else []
    return texts[:-1]


def lines(texts, field="text"):
    return "".join(json.dumps({"id": 3, field: text}) + "\n" for text in texts).encode()


def zstd(content):
    """Compressed in two frames, as parallel compressors write them."""
    halves = content[: len(content) // 2], content[len(content) // 2 :]
    return b"".join(pa.compress(half, "zstd", asbytes=True) for half in halves)


COMPRESS = {"": bytes, ".gz": gzip.compress, ".zst": zstd}


def write_table(path, texts, column="text"):
    columns = texts if isinstance(texts, pa.Array) else pa.array(texts)
    table = pa.table({"n": pa.array(range(len(texts))), column: columns})
    parquet.write_table(table, path, row_group_size=7)
    return path


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_marker_ends_a_document_of_a_txt(tmp_path, monkeypatch, suffix):
    """Wherever reads and parts end, and in a .txt alone: elsewhere it is text."""
    content = b"<|endoftext|>\n\none\n\ntwo\r\n<|endoftext|>\r\nthree<|endoftext|><|endoftext|>"
    content += " é <|endof\n<|endoftext|>\n\n".encode()
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(COMPRESS[suffix](content))
    for size in (*range(1, 40), 1 << 20):
        monkeypatch.setattr(sources, "_CHUNK", size)
        monkeypatch.setattr(sources, "_PART", max(20, size))
        assert documents(path) == ["one\n\ntwo", "three", " é <|endof"]
    for name, whole in (("a.py", content), ("a.jsonl", lines([content.decode()]))):
        path = tmp_path / f"{name}{suffix}"
        path.write_bytes(COMPRESS[suffix](whole))
        assert documents(path) == [content.decode()]


@pytest.mark.parametrize("text", ["scan reads it all " * 900, "é" * 9000, "<|endof\n\n" * 999])
def test_a_long_document_comes_in_parts_that_end_between_words(tmp_path, monkeypatch, text):
    monkeypatch.setattr(sources, "_PART", 640)
    monkeypatch.setattr(sources, "_CHUNK", 1000)
    (tmp_path / "a.py").write_text(text)
    (tmp_path / "a.jsonl").write_bytes(lines([text]))
    for name in ("a.py", "a.jsonl"):
        (found,) = find([str(tmp_path / name)], "--data", held_out=0)
        parts = [*found.files[0].parts()]
        assert "".join(part.text for part in parts) == text
        assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
        assert max(len(part.text) for part in parts) < 2 * 640
        assert parts[-1].read == os.path.getsize(tmp_path / name)
        assert len(parts) > 5
        assert " " not in text or all(part.text.startswith(" ") for part in parts[1:])


def test_records_and_fields_that_are_named(tmp_path):
    """Null and an empty text are no document, and half a character does not lose a text."""
    texts = [None, *TEXTS[:3], None, "", *TEXTS[3:]]
    write_table(tmp_path / "a.parquet", texts)
    other = write_table(tmp_path / "b.parquet", texts, "content")
    (tmp_path / "a.json").write_bytes(b"\n" + lines(texts))  # as C4 and Dolma call JSON Lines
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(texts)))
    (tmp_path / "b.jsonl").write_bytes(lines(texts, "body"))
    for named in ("a.parquet", "a.json", "a.jsonl.gz", "b.parquet:content", "b.jsonl:body"):
        assert documents(tmp_path / named) == TEXTS
    assert documents(f"{other}:content=2.5") == TEXTS
    large, small = pa.large_string(), pa.string()
    dictionaries = pa.dictionary(pa.int32(), small), pa.dictionary(pa.int8(), large)
    for kind in (large, pa.string_view(), *dictionaries):
        table = write_table(tmp_path / "c.parquet", pa.array([*TEXTS, None, TEXTS[0]]).cast(kind))
        assert documents(table) == [*TEXTS, TEXTS[0]]
    (tmp_path / "c.jsonl").write_bytes(b'{"text": "a\\ud83d"}\n{"text": "\\ude00\\ud83d\\ude00"}\n')
    assert documents(tmp_path / "c.jsonl") == ["a\ufffd", "\ufffd\U0001f600"]
    binary = pa.array([*["a"] * 300, b"\xff"], pa.binary())
    write_table(table, pa.Array.from_buffers(small, 301, binary.buffers()))
    with pytest.raises(sources.NotTextError, match="a text in rows 257 to 301 is not UTF-8"):
        documents(table)


def test_folders_patterns_and_links(tmp_path, monkeypatch):
    """Hidden files are no text, links are followed and never around, an unreadable one is named."""
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
    for link, to in (("a/b", "b"), ("a/around", "."), ("a/0", "a"), ("a/c", "none"), ("b/a", "a")):
        (tmp_path / link).symlink_to(tmp_path / to)
    assert documents(tmp_path / "a") == [*names]
    assert not find([str(tmp_path / "a")], "--data", held_out=0)[0].skipped
    (tmp_path / "empty").mkdir()
    refused("no text to train on", documents, tmp_path / "empty")
    denied = PermissionError(13, "Permission denied", "private")
    monkeypatch.setattr(os, "walk", lambda top, onerror, followlinks: onerror(denied))
    refused(r"private: cannot be read \(Permission denied\)", documents, tmp_path)


def test_weights_and_paths_that_look_like_them(tmp_path):
    a, b = tmp_path / "year=2020", tmp_path / "b.txt"
    a.mkdir()
    b.write_text("b")
    assert parse([str(a)]) == [Source(str(a))]
    weighted = parse([f"{a}=0.7", f"{b}=3e-1"])
    assert [(s.path, s.weight) for s in weighted] == [(str(a), 0.7), (str(b), 0.3)]
    assert TrainConfig.from_flags({"data": (f"{a}=1",)}).pack
    named = b.rename(tmp_path / "b=inf")
    assert parse([str(named)])[0].weight is None
    assert not TrainConfig.from_flags({"data": (str(a),)}).pack
    for weight in ("0", "-1", "1e999"):
        for text in (str(a), f"{a}:content"):
            refused(f"--data {text}={weight}: the weight must be a", parse, [f"{text}={weight}"])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.txt", b"", "a file without text"),
        ("binary.bin", b"\xff\xfe\x00", "a binary file"),
        ("cut.txt", "é".encode()[:1], "a binary file"),
        ("zeros.txt", b"text\0text", "zero bytes"),
        ("cut.txt.gz", gzip.compress(b"text" * 99)[:-9], "cannot be decompressed"),
        ("no.txt.zst", b"text", "cannot be decompressed .*ZSTD"),
        ("no.parquet", b"PAR1 text", "is not Parquet"),
        ("no.jsonl.gz", gzip.compress(b'\n{"body": "a"}\n'), 'line 2 has no "text".*PATH:FIELD'),
        ("17.jsonl", b"\n17\n", 'line 2 has no "text" of a document, but 17'),
        ("17.ndjson", b'{"text": 17}\n', 'line 1 has 17 as its "text", not a string'),
        ("null.jsonl", b'{"text": null}\n', "a file without text"),
        ("cut.jsonl", b'{"text": "a', "line 1 is not JSON"),
        ("info.json", b'{\n  "text": "a"\n}', "line 1 is not JSON Lines"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_text_is_refused_and_passed_over_in_a_folder(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content)
    refused(f"--data {path}: .*{words}", documents, path)
    (tmp_path / "good.txt").write_text("text")
    assert documents(tmp_path) == ["text"]
    ((reason,),) = [each.skipped for each in find([str(tmp_path)], "--data", held_out=0)]
    assert reason.startswith(str(path))


def test_what_cannot_be_named(tmp_path):
    table = write_table(tmp_path / "a.parquet", TEXTS, "content")
    binary = write_table(tmp_path / "b.parquet", [text.encode() for text in TEXTS])
    for named, words in (
        (tmp_path / "*.csv", r"\*.csv: .*no file matches"),
        (tmp_path / "gone", "gone: no such file or folder"),
        (table, r'no column "text" .*, but "n" \(int64\), "content" \(string\); name'),
        (binary, r'no column "text" .*, but "n" \(int64\), "text" \(binary\); name the'),
        (f"{table}:n", 'has no column "n" of text'),
    ):
        refused(f"--data .*{words}", documents, named)
    (tmp_path / "c.jsonl").write_bytes(lines(TEXTS))
    (tmp_path / "d.txt").write_text("text")
    for named in (tmp_path / "c.jsonl", f"{tmp_path}/d.txt:body"):
        path = str(named).removesuffix(":body")
        words, left_out = (
            f"--data {path}: all of its files are of --eval-data",
            [pathlib.Path(path)],
        )
        refused(words, find, [str(named)], "--data", held_out=0, left_out=left_out)


def test_what_begins_and_ends_a_text(tmp_path):
    """By the files beside a tokenizer.json, by the usual names, or a token that is added."""
    trained = tokenizer.train_bpe(iter(TEXTS), 300, show=False)
    assert (trained.size, trained.begin, trained.end) == (300, 0, 0)
    (tmp_path / "tokenizer.json").write_text(trained.stored())
    found = tokenizer.load(tmp_path)
    assert found.stored() == trained.stored()
    found.tokenizer.add_special_tokens(["<s>", "<|im_end|>"])
    found.tokenizer.save(str(tmp_path / "tokenizer.json"))
    named = {"bos_token": None, "eos_token": {"content": "<|im_end|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    chat = tokenizer.load(tmp_path)
    assert (chat.size, chat.begin, chat.end) == (302, 300, 301)
    content = json.loads(trained.stored()) | {"added_tokens": []}
    vocab = content["model"]["vocab"]
    content["model"]["vocab"] = {token: i - 1 for token, i in vocab.items() if i}
    (tmp_path / "bare.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").unlink()
    bare = tokenizer.load(tmp_path / "bare.json")
    assert bare.begin == bare.end == 299
    assert np.array_equal(bare.encode_batch(["é x"])[0] + 1, trained.encode_batch(["é x"])[0])


def test_a_marker_inside_a_document_is_no_token():
    trained = tokenizer.train_bpe(iter([*TEXTS, "<|endoftext|>"] * 9), 300, show=False)
    texts = ["a <|endoftext|> b", "<|endoftext|>", "", "<<|endoftext|>|endoftext|>"]
    encoded = trained.encode_batch(texts)
    assert all(0 not in tokens for tokens in encoded)
    assert [trained.tokenizer.decode(tokens.tolist()) for tokens in encoded] == texts
    trained.tokenizer.add_special_tokens(["<|user|>"])
    assert 300 in trained.encode_batch(["<|user|> asks"])[0]
