"""Which of the documents that --data names are packed, and which are refused."""

import json

import pytest

from jaxkern.lm import data
from jaxkern.lm.config import RunError
from jaxkern.lm.data import pieces, shards
from tests.test_lm_data_packed import TEXTS, config_of, texts_of


def test_two_fields_of_a_file_are_two_sources(tmp_path):
    """A text, which has no fields, is one source whatever field is named."""
    path, book = tmp_path / "a.jsonl", tmp_path / "book.txt"
    records = [{"body": text, "title": f"{text} is the title"} for text in TEXTS]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    book.write_text("some words " * 40)
    named = f"{path}:body", f"{path}:title", str(book)
    corpus = data.build_packed(config_of(tmp_path, data=named), tmp_path / "a")
    assert [source.name for source in corpus.train] == [*named[:2], "book.txt"]
    for source, field in zip(corpus.info["sources"], ("body", "title"), strict=False):
        assert source["bytes"] == sum(len(record[field].encode()) for record in records)
    corpus = data.build_corpus(named, tmp_path / "b")
    assert corpus.info["documents"] == 2 * len(records) + 1
    for again in (f"{path}:body", f"{book}:body"):
        config = config_of(tmp_path, data=(*named, again))
        with pytest.raises(RunError, match=f"{again}: all of its files are named before"):
            data.build_packed(config, tmp_path / "c")
        info = data.build_corpus(config.data, tmp_path / "d").info
        assert info["fingerprint"] == corpus.info["fingerprint"]
    # A file to validate with is not trained on by another field.
    config = config_of(tmp_path, data=(named[0], str(book)), eval_data=(named[1],))
    with pytest.raises(RunError, match=f"{named[0]}: all of its files are named before"):
        data.build_packed(config, tmp_path / "e")


@pytest.mark.parametrize("cores", [1, 2])
def test_zero_bytes_are_refused_of_bytes_alone(tmp_path, monkeypatch, cores):
    """They are the token that begins and ends a document."""
    monkeypatch.setattr(pieces, "_SHARD_BYTES", 4000)
    monkeypatch.setattr(shards, "_PROCESS_BYTES", 400)
    monkeypatch.setattr(shards.os, "sched_getaffinity", lambda pid: {*range(cores)})
    texts = [*TEXTS, "before\0behind"]
    lines, book = tmp_path / "a.jsonl", tmp_path / "book.txt"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    book.write_text(" " * (1 << 20) + "before\0behind")  # beyond what is read of it at first
    for path in (lines, book):
        words = rf"^{path}: has a zero byte behind '.*before', .* --tokenizer bpe:32000, .*leave it"
        with pytest.raises(RunError, match=words):
            data.build_packed(config_of(path), tmp_path / "run")
    corpus = data.build_packed(config_of(lines, tokenizer="bpe:300"), tmp_path / "run")
    library = corpus.tokenizer.tokenizer
    held = [text for part in (corpus.train, corpus.validation) for text in texts_of(*part, library)]
    assert sorted(held) == sorted(texts)
