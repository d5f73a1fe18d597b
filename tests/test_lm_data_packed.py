"""Tokens on disk, the windows of packed documents drawn from them, and whole runs on tokens."""

import functools
import gzip
import json
import re
import shutil
import signal
import subprocess
import types

import jax
import numpy as np
import pyarrow as pa
import pytest
from jax.sharding import Mesh, PartitionSpec
from pyarrow import parquet

from jaxkern.lm import cli, data, loader, run
from jaxkern.lm import train as train_module
from jaxkern.lm.config import ModelConfig, RunError, TrainConfig
from jaxkern.lm.data import build as build_module
from jaxkern.lm.data import packed, pieces, shards, tokenizer
from jaxkern.lm.data.packed import Order, Packed, Stream, predicted
from jaxkern.lm.model import Options
from jaxkern.lm.report import read_metrics
from jaxkern.lm.step import batch_loss, make_model, token_weights
from tests.language_models import command, jit, random_params, refused

WORDS = ["the", "a", "scan", "state", "of", "gate", "chunk", "step", "reads", "é", "\n", "  "]


def text(i):
    rng = np.random.default_rng(i)
    return " ".join(rng.choice(WORDS, size=rng.integers(1, 40))).lstrip("\n") + f" {i}"


TEXTS = [text(i) for i in range(200)]
TOLD = [*TEXTS[:149], "a marker <|endoftext|> of a .jsonl is text", *TEXTS[150:]]


def write_lines(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def root(tmp_path):
    """200 documents: in lines, in files, and between markers of one."""
    folder = tmp_path / "text"
    (folder / "more").mkdir(parents=True)
    write_lines(folder / "a.jsonl", TOLD[:150])
    for i in range(150, 180):
        (folder / "more" / f"{i}.txt").write_text(TOLD[i])
    (folder / "more" / "marked.txt").write_text("\n<|endoftext|>\n".join(TOLD[180:]))
    return folder


def config_of(root, **flags):
    return TrainConfig.from_flags({"preset": "micro", "data": (str(root),), "pack": True} | flags)


def build(root, out, **flags):
    return data.build_packed(config_of(root, **flags), out)


def reopened(corpus, root, out):
    return data.open_packed(config_of(root), out, json.loads(json.dumps(corpus.info)))


def tokens_of(source):
    """All tokens of a source, and where its documents begin."""
    stream = source.stream
    window = stream.window(0, stream.size - 1)
    return window.tokens, np.flatnonzero(np.diff(window.segment_ids, prepend=-1))


def texts_of(corpus, *sources):
    """The texts of some sources of a corpus, or of all."""
    library, texts = getattr(corpus.tokenizer, "tokenizer", None), []
    for source in sources or (*corpus.train, *corpus.validation):
        tokens, starts = tokens_of(source)
        for piece in np.split(tokens, starts[1:]):
            assert piece[0] == piece[-1] == 0
            ids = piece[1:-1].tolist()
            texts.append(library.decode(ids) if library else bytes(ids).decode())
    return texts


@pytest.mark.parametrize("size", [400, 10**6])
def test_shards_hold_what_tokenising_at_once_gives(root, tmp_path, monkeypatch, size):
    monkeypatch.setattr(pieces, "_SHARD_BYTES", size)
    corpus = build(root, tmp_path / "run", tokenizer="bpe:300")
    (source,) = corpus.info["sources"]
    assert (source["shards"][1] > 20) == (size == 400)
    assert (source["documents"], source["held_out"]) == (200, 0.05)
    assert source["bytes"] == sum(len(text.encode()) for text in TOLD)
    (train,), (validation,) = corpus.train, corpus.validation
    learned, held = texts_of(corpus, train), texts_of(corpus, validation)
    assert [text for text in TOLD if text in {*learned}] == learned
    assert [text for text in TOLD if text in {*held}] == held
    assert sorted(learned + held) == sorted(TOLD)
    assert 1 <= len(held) <= 25
    at_once = [[0, *ids, 0] for ids in corpus.tokenizer.encode(learned)]
    tokens, starts = tokens_of(train)
    np.testing.assert_array_equal(tokens, np.concatenate(at_once))
    np.testing.assert_array_equal(np.diff(starts), [len(ids) for ids in at_once[:-1]])
    assert tokens.dtype == np.uint16
    assert train.predicted == len(tokens) - len(learned)
    plain = build(root, tmp_path / "bytes")
    assert texts_of(plain, *plain.train) == learned
    assert texts_of(plain, *plain.validation) == held
    assert plain.tokens_per_byte == pytest.approx(1, abs=0.03)  # by the ends of documents


STRIPPED = [text.strip() for text in TEXTS * 6]


LARGE = {
    "one.txt": (" ".join(STRIPPED), 1),
    "one.md": ("<|endoftext|>".join(STRIPPED), 1),
    "many.txt": ("\n<|endoftext|>\n".join(STRIPPED), 1200),
    "two.txt": ("<|endoftext|>".join(" ".join(STRIPPED[i::2]) for i in range(2)), 2),
    "letters.txt": ("é" * 40000, 1),
    "lines.txt": ("é\n" * 30000, 1),
    "blank.txt": ("\n" * 90000, 1),
    "almost.txt": ("<|endof\n\n\n" * 9000, 1),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_text_is_divided_and_its_tokens_stay(tmp_path, monkeypatch, name):
    """Behind markers; in a long document between two words, else behind a line or a character."""
    content, documents = LARGE[name]
    monkeypatch.setattr(pieces, "_HEAD_BYTES", 20000)
    (tmp_path / name).write_text(content)
    trained = tokenizer.train_bpe(iter(TEXTS), 300, show=False)
    (tmp_path / "tokenizer.json").write_text(trained.stored())
    text = re.sub(r"\n?<\|endoftext\|>\n?", "", content) if documents > 1 else content
    for spec in ("bytes", str(tmp_path))[: 2 if "scan" in content else 1]:
        found = []
        for size, at_once in ((10**6, 10**6), (7000, 5000), (10**6, 5000), (10000, 5000)):
            monkeypatch.setattr(pieces, "_SHARD_BYTES", size)
            monkeypatch.setattr(shards, "_TEXT", at_once)
            corpus = build(tmp_path / name, tmp_path / "run", tokenizer=spec)
            (source,) = corpus.info["sources"]
            assert (source["shards"][1] > 5) == (size < 10**6)
            assert (source["documents"], source["bytes"]) == (documents, len(text.encode()))
            found.append([tokens_of(part) for part in (*corpus.train, *corpus.validation)])
            if spec == "bytes" and documents == 1:
                tokens = np.concatenate([tokens for tokens, _ in found[-1]])
                assert bytes(tokens) == b"\0" + content.encode() + b"\0"
                assert "1 document: " in corpus.describe()
                assert "(their end)" in corpus.describe()
        for divided in found[1:]:
            jax.tree.map(np.testing.assert_array_equal, divided, found[0])


def test_progress_is_told_inside_of_shards(tmp_path, monkeypatch):
    """Progress is told of every kind of file, and of all bytes in the end."""
    record = (json.dumps({"text": " ".join(TEXTS[:9])}) + "\n").encode()
    (tmp_path / "a.txt").write_text(" ".join(TEXTS) * 400)
    (tmp_path / "b.jsonl").write_bytes(record * 8000)
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(record * 8000, 0))
    parquet.write_table(pa.table({"text": TEXTS * 9}), tmp_path / "d.parquet")
    told = []
    monkeypatch.setattr(shards._Bar, "add", lambda self, size: told.append(size))
    for path in sorted(tmp_path.glob("*.*")):
        size = path.stat().st_size
        monkeypatch.setattr(pieces, "_LEAST_BYTES", size + 1)
        monkeypatch.setattr(shards, "_PROCESS_BYTES", size + 1)
        told.clear()
        build(path, tmp_path / "run")
        assert max(told) <= 2**20
        if path.suffix != ".parquet":
            assert sum(told) == size
            assert len(told) >= 5


@pytest.mark.exhaustive
def test_two_processes_write_what_one_does(root, tmp_path, monkeypatch):
    """The tokens, their progress, and what is wrong with a document."""
    (root / "large.txt").write_text(" ".join(TEXTS) * 50)
    (root / "c.jsonl.gz").write_bytes(gzip.compress((root / "a.jsonl").read_bytes() * 9, 0))
    total = sum(path.stat().st_size for path in root.rglob("*.*"))
    monkeypatch.setattr(pieces, "_SHARD_BYTES", 20000)
    monkeypatch.setattr(shards, "_PROCESS_BYTES", 400)
    monkeypatch.setattr(shards, "_TICK", 0.001)
    told, found = [], []
    monkeypatch.setattr(shards._Bar, "add", lambda self, size: told.append(size))
    for cores in (1, 2):
        monkeypatch.setattr(shards.os, "sched_getaffinity", lambda pid, n=cores: {*range(n)})
        corpus = build(root, tmp_path / str(cores), tokenizer="bpe:300")
        assert corpus.info["sources"][0]["shards"][1] > 10
        found.append(corpus.info["fingerprint"])
        assert sum(told) == total
        told.clear()
    assert found[0] == found[1]
    path = write_lines(tmp_path / "a.jsonl", [*TEXTS * 9, "before\0behind"])
    refused(f"^{path}: has a zero byte behind", build, path, tmp_path / "a")


def test_zero_bytes_are_refused_of_bytes_alone(tmp_path, monkeypatch):
    """They are the token that begins and ends a document."""
    monkeypatch.setattr(pieces, "_SHARD_BYTES", 4000)
    texts, book = [*TEXTS, "before\0behind"], tmp_path / "book.txt"
    lines = write_lines(tmp_path / "a.jsonl", texts)
    book.write_text(" " * (1 << 20) + "before\0behind")  # beyond what is read of it at first
    for path in (lines, book):
        words = rf"^{path}: has a zero byte behind '.*before', .* --tokenizer bpe:32000, .*leave it"
        refused(words, build, path, tmp_path / "run")
    assert sorted(texts_of(build(lines, tmp_path / "run", tokenizer="bpe:300"))) == sorted(texts)


def test_shards_are_as_large_as_the_data_asks_for():
    totals = 3 << 20, 48 << 20, 8 << 30, 1 << 40
    assert [pieces.shard_bytes(total) >> 20 for total in totals] == [4, 4, 32, 64]


def test_tokenising_that_ctrl_c_stops_keeps_its_whole_shards(root, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pieces, "_SHARD_BYTES", 400)
    whole = build(root, tmp_path / "undisturbed")
    out, write, written = tmp_path / "run", shards.write_shard, []

    def write_shard(shard, tokens, tell):
        written.append(shard.path.name)
        if len(written) == 9:
            shard.path.with_name("00008.train.tokens").write_bytes(b"begun")
            signal.raise_signal(signal.SIGINT)
        write(shard, tokens, tell)

    monkeypatch.setattr(shards, "write_shard", write_shard)
    argv = ["train", "--preset", "micro", "--data", root, "--pack", "--out", out]
    line = command(capsys, *argv, code=128 + signal.SIGINT)
    assert "jaxkern: stopped (SIGINT): training had not begun; " in line
    assert "keeps the tokens that are made" in line
    assert not (out / "config.json").exists()
    (folder,) = (out / "corpus").glob("*/")
    assert len([*folder.glob("*.json")]) == 8
    # One whose files are not as long as they were is written again, too.
    (folder / "00003.train.tokens").write_bytes(b"")
    monkeypatch.setattr(train_module.Trainer, "compile", lambda self, fresh: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        command(capsys, *argv)
    again = build(root, out)
    assert written[9:11] == ["00003", "00008"]
    assert len(written) == 9 + again.info["sources"][0]["shards"][1] - 7
    assert again.info["fingerprint"] == whole.info["fingerprint"]
    assert reopened(again, root, out).info == again.info
    # What has changed is told from it.
    (root / "more" / "150.txt").write_text("other")
    assert build(root, out).info["fingerprint"] != again.info["fingerprint"]
    refused("are missing or have changed since the run began", reopened, again, root, out)


def test_a_cache_is_shared_and_follows_data_and_tokenizer(root, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    flags = {"data_cache": str(cache), "tokenizer": "bpe:300"}
    first = build(root, tmp_path / "a", **flags)
    with monkeypatch.context() as patch:
        patch.setattr(shards, "write_shard", None)
        patch.setattr(tokenizer, "train_bpe", None)
        again = build(root, tmp_path / "b", **flags)
    assert again.info == first.info
    assert not (tmp_path / "a").exists()
    build(root, tmp_path / "c", **flags | {"tokenizer": "bpe:301"})
    assert len([*cache.glob("*/")]) == 2
    path = next(cache.glob("bpe-300-*.json"))
    of_file = build(root, tmp_path / "d", tokenizer=str(path))
    assert of_file.info == first.info | {"folder": of_file.info["folder"]}
    refused("--data-cache x keeps the tokens", TrainConfig.from_flags, {"data_cache": "x"})


@pytest.mark.parametrize("share", [0.2, 0.3, 0.99])
def test_no_more_than_a_quarter_is_held_out(tmp_path, monkeypatch, share):
    """A run that was begun without the bound goes on with what it has held out."""

    def text_that(is_held, size):
        texts = (f"{i:02} " * (int(size * 10000) // 3) for i in range(100))
        return next(text for text in texts if (shards._fraction(text) < 0.05) == is_held)

    path, out = tmp_path / "a.jsonl", tmp_path / "run"
    write_lines(path, [text_that(True, share), text_that(False, 1 - share)])
    corpus = build(path, out)
    by_document = share < 0.25
    assert corpus.info["split"] == ("by document" if by_document else "by position")
    learned, held = (part[0].stream.size for part in (corpus.train, corpus.validation))
    size = learned + held
    assert held <= size * (0.25 if by_document else 0.05)
    assert reopened(corpus, path, out).info == corpus.info

    monkeypatch.setattr(build_module, "MOST_HELD_OUT", 1)
    earlier = build(path, out)
    assert earlier.info["split"] == "by document"
    del earlier.info["sources"][0]["most_held_out"]
    monkeypatch.undo()
    again = reopened(earlier, path, out)
    assert again.info == earlier.info
    assert again.validation[0].stream.size == earlier.validation[0].stream.size > size * share / 2


@pytest.mark.parametrize("seq_len", [1, 3, 4, 10, 40])
def test_windows_lose_nothing_and_predict_each_token_once(tmp_path, seq_len):
    """All but the first of each document, also where shards and windows end."""
    firsts, size, seen = np.cumsum([0, 3, 4, 2, 9]), 24, []  # tokens count from 0, in two shards
    for name, begin, end in (("a", 0, 7), ("b", 7, size)):
        np.arange(begin, end, dtype=np.uint16).tofile(tmp_path / f"{name}.tokens")
        inside = firsts[(firsts >= begin) & (firsts < end)] - begin
        inside.astype(np.int64).tofile(tmp_path / f"{name}.starts")
    stream = Stream([tmp_path / "a", tmp_path / "b"], [7, size - 7], np.uint16)
    for i in range(stream.windows(seq_len)):
        tokens, segments = stream.window(i, seq_len)
        assert tokens.shape == segments.shape == (seq_len + 1,)
        same = segments[1:] == segments[:-1]
        np.testing.assert_array_equal(tokens[1:][same], tokens[:-1][same] + 1)
        seen += tokens[1:][same].tolist()
    assert seen == [i for i in range(size) if i not in firsts]
    beyond = stream.window(stream.windows(seq_len), seq_len)
    assert predicted(beyond) == 0
    # A part of it is as if there were no more.
    part = stream.part(5, 20)
    tokens, segments = part.window(0, 14)
    assert tokens.tolist() == [*range(5, 20)]
    assert np.flatnonzero(np.diff(segments)).tolist() == [1, 3, 12]
    assert predicted(part.window(1, 14)) == 0


def test_every_token_of_a_batch_counts_alike():
    """Whatever parts and devices it is split in."""
    shape = ModelConfig(8, 1, d_state=2)
    loss = functools.partial(batch_loss, make_model(shape, Options()), random_params(shape))
    alone = lambda mean: mean  # the mean over one device
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 256, (4, 9))
    whole = Packed(tokens, np.cumsum(rng.random((4, 9)) < [[0.05], [0.9], [0.3], [1.0]], axis=1))

    @jit
    def of_parts(batch):
        parts = Packed(*(leaf.reshape(2, 2, 9) for leaf in batch))
        of_part = lambda part: loss(Packed(*part[:2]), part[2])
        each = jax.lax.map(of_part, (*parts, token_weights(parts, alone)))
        return loss(batch, None), each.mean()

    want, got = of_parts(whole)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert of_parts(Packed(tokens, np.arange(36).reshape(4, 9)))[1] == 0  # of padding alone
    assert token_weights(tokens, alone) is None

    if len(jax.devices()) > 1:
        mesh, spec = Mesh(np.array(jax.devices()[:2]), ("batch",)), PartitionSpec("batch")
        mean = lambda value: jax.lax.pmean(value, "batch")
        f = lambda batch: mean(loss(batch, token_weights(batch, mean)))
        specs = {"in_specs": spec, "out_specs": PartitionSpec(), "check_vma": False}
        got = jit(jax.shard_map(f, mesh=mesh, **specs))(whole)
        np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("windows", [[1], [2], [3], [64], [1000], [5, 0, 12]])
def test_every_window_is_seen_once_in_an_epoch(windows):
    size, orders = sum(windows), set()
    every = [(source, i) for source, count in enumerate(windows) for i in range(count)]
    for seed in range(3):
        order = Order(windows, None, seed)
        drawn = order(np.arange(3 * size))
        epochs = [drawn[i : i + size] for i in range(0, 3 * size, size)]
        assert all(sorted(epoch) == every for epoch in epochs)
        orders |= {*map(tuple, epochs)}
        later = slice(size // 2, 2 * size)  # as a resumed run asks for it
        assert order(np.arange(3 * size)[later]) == drawn[later]
    assert len(orders) >= min(size, 9) - 1


def test_windows_are_drawn_from_everywhere():
    drawn = [window for _, window in Order([10**12], None, seed=0)(np.arange(100))]
    assert len({*drawn}) == 100
    assert 3e11 < np.mean(drawn) < 7e11


def test_weights_are_the_shares_of_what_is_drawn(monkeypatch):
    monkeypatch.setattr(packed, "_BLOCK", 100)
    order = Order([5, 12, 7], [6, 1.5, 2.5], seed=3)
    drawn = order(np.arange(300))
    assert [sum(source == i for source, _ in drawn[:100]) for i in range(3)] == [60, 15, 25]
    for source, windows in enumerate((5, 12, 7)):
        of_it = [window for which, window in drawn if which == source]
        assert sorted(of_it[:windows]) == sorted(of_it[windows : 2 * windows]) == [*range(windows)]
    assert order(np.arange(150, 180)) == drawn[150:180]
    with pytest.raises(RunError, match="the weight is less than 1/100 of all"):
        Order([5, 12], [1000, 1], seed=3)


def test_sources_their_weights_and_data_to_validate_with(root, tmp_path):
    other = write_lines(tmp_path / "b.jsonl", ["b " * 30 + str(i) for i in range(30)])
    corpus = build(root, tmp_path / "a", data=(f"{root}=3", f"{other}=1"), seq_len=16)
    assert [source.name for source in corpus.train] == ["text", "b.jsonl"]
    assert packed.shares(corpus.train) == packed.shares(corpus.validation) == [0.75, 0.25]
    options = {"batch_size": 400, "seq_len": 16, "seed": 0, "step": 0}
    batch, rows = corpus.batch(**options), np.array([5, 2])
    assert 0.2 < np.mean([(row == ord("b")).sum() > 5 for row in batch.tokens]) < 0.3
    assert np.array_equal(corpus.batch(**options, rows=rows).tokens, batch.tokens[rows])
    assert (batch.tokens.dtype, batch.segment_ids.dtype) == (np.uint8, np.int32)
    ratios = [source.bytes / source.predicted for source in corpus.train]
    assert corpus.tokens_per_byte == pytest.approx(1 / (0.75 * ratios[0] + 0.25 * ratios[1]))

    corpus = build(root, tmp_path / "b", eval_data=(str(other), str(root / "more")))
    assert [source.name for source in corpus.validation] == ["b.jsonl", "more"]
    assert corpus.info["split"] == "by source"
    assert sum(source["documents"] for source in corpus.info["sources"]) == 150 + 30 + 50


@pytest.mark.parametrize("batches", [1, 3, 1000])
def test_validation_is_a_fixed_part_spread_evenly(root, tmp_path, batches):
    corpus = build(root, tmp_path / "a")
    options = {"batch_size": 4, "seq_len": 32, "batches": batches}
    found = corpus.validation_batches(0, **options)
    there = corpus.validation[0].stream.windows(32)
    assert len(found) == max(1, min(batches, there // 4))
    rows = np.concatenate([batch.tokens for batch in found])
    assert len({row.tobytes() for row in rows}) == len(rows)
    np.testing.assert_array_equal(found[0].tokens[0], corpus.validation[0].stream.window(0, 32)[0])
    # Where there are fewer windows than a batch has rows, the others predict nothing.
    (few,) = corpus.validation_batches(0, batch_size=there + 3, seq_len=32, batches=2)
    windows = [corpus.validation[0].stream.window(i, 32) for i in range(there)]
    assert predicted(few) == sum(map(predicted, windows))


def test_too_little_text_and_broken_files_are_named(tmp_path):
    path, out = tmp_path / "a.txt", tmp_path / "run"
    path.write_text("é")
    refused(r"--data a\.txt has 3 tokens; give more text", build, path, out, tokenizer="bpe:300")
    path.write_bytes(b"a" * (1 << 20) + b"\xff")
    refused(r"a\.txt: is not UTF-8 text .*mend it or leave it out", build, path, out)
    assert config_of(path).for_tokens(50277).model.vocab_size == 50304


def test_two_fields_of_a_file_are_two_sources(tmp_path):
    """A text, which has no fields, is one source whatever field is named."""
    path, book = tmp_path / "a.jsonl", tmp_path / "book.txt"
    records = [{"body": text, "title": f"{text} is the title"} for text in TEXTS]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    book.write_text("some words " * 40)
    named = f"{path}:body", f"{path}:title", str(book)
    corpus = build(tmp_path, tmp_path / "a", data=named)
    assert [source.name for source in corpus.train] == [*named[:2], "book.txt"]
    for source, field in zip(corpus.info["sources"], ("body", "title"), strict=False):
        assert source["bytes"] == sum(len(record[field].encode()) for record in records)
    corpus = data.build_corpus(named, tmp_path / "b")
    assert corpus.info["documents"] == 2 * len(records) + 1
    for again in (f"{path}:body", f"{book}:body"):
        words, several = f"--data {again}: all of its files are named before", (*named, again)
        refused(words, build, tmp_path, tmp_path / "c", data=several)
        info = data.build_corpus(several, tmp_path / "d").info
        assert info["fingerprint"] == corpus.info["fingerprint"]
    # A file to validate with is not trained on by another field.
    flags = {"data": (named[0], str(book)), "eval_data": (named[1],)}
    words = f"{named[0]}: all of its files are named before"
    refused(words, build, tmp_path, tmp_path / "e", **flags)


@pytest.fixture(scope="module")
def argv(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    a, b, c, d = (
        write_lines(folder / f"{name}.jsonl", [text(60 * i + j) for j in range(60)])
        for i, name in enumerate("abcd")
    )
    flags = ["train", "--preset", "micro", "--tokenizer", "bpe:300", "--data", f"{a}=3", f"{b}=1"]
    flags += ["--eval-data", c, d, "--steps", 8, "--checkpoint-every", 4, "--eval-every", 4]
    return [str(flag) for flag in [*flags, "--grad-accum", 2, "--eval-batches", 2, "--out"]]


@pytest.fixture(scope="module")
def finished(argv, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "finished"
    assert cli.main([*argv, str(out)]) == 0
    return out


def losses(folder):
    records = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in r.items() if k != "tokens_per_second"} for r in records]


@pytest.mark.exhaustive
def test_a_run_on_tokens_learns_and_keeps_its_tokenizer(finished, tmp_path, capsys):
    first, *_, last = read_metrics(finished / "metrics.jsonl")
    assert last["validation_loss"] < first["validation_loss"]
    assert last["validation_perplexity"] == pytest.approx(np.exp(last["validation_loss"]))
    each = [last[f"validation_loss/{name}"] for name in ("c.jsonl", "d.jsonl")]
    for name, loss in zip(("c.jsonl", "d.jsonl"), each, strict=True):
        assert last[f"validation_perplexity/{name}"] == pytest.approx(np.exp(loss))
    assert min(each) <= last["validation_loss"] <= max(each)
    stored = json.loads((finished / "config.json").read_text())
    assert stored["flags"]["vocab_size"] == stored["model"]["vocab_size"] == 320
    assert stored["data"]["tokenizer"] == {"begin": 0, "end": 0, "size": 300}
    # A loss of bytes is one of tokens by how many there are of each.
    ratio = last["validation_bits_per_byte"] * np.log(2) / last["validation_loss"]
    assert 0.2 < ratio < 0.9

    model = loader.load(finished)
    ids = model.encode("the scan reads é")
    assert ids[0] == 0
    assert len(ids) < len("the scan reads é")
    assert model.decode(ids) == "the scan reads é"
    assert (model.codec.ends, model.codec.encode("")) == ({0}, [0])
    written = model.generate("the scan", length=5, temperature=0)
    options = ["--length", 5, "--temperature", 0]
    printed = command(capsys, "sample", "--run", finished, "--prompt", "the scan", *options)
    assert printed == f"the scan{written}\n"
    lost = shutil.copytree(finished, tmp_path / "it's lost")
    (lost / "tokenizer.json").unlink()
    argv = ["sample", "--run", lost, *options]
    line = command(capsys, *argv, code=1)
    assert "it's lost has lost its tokenizer.json, by which its model reads and writes" in line
    assert command(capsys, "train", "--resume", "--steps", 9, "--out", lost, code=1) == line
    subprocess.run(line.partition("with: ")[2], shell=True, check=True)  # what it says
    command(capsys, *argv)
    shutil.rmtree(lost / "corpus")
    (lost / "tokenizer.json").unlink()
    line = command(capsys, *argv, code=1)
    assert "put it back from a backup, its --data-cache, or a folder that jaxkern export" in line


@pytest.mark.exhaustive
def test_a_run_goes_on_as_if_it_had_not_been_stopped(finished, tmp_path, capsys):
    out, cache = shutil.copytree(finished, tmp_path / "copied"), tmp_path / "cache"
    shutil.rmtree(out / "checkpoints" / "8")
    resume = ["train", "--resume", "--out", out]
    shown = command(capsys, *resume)
    assert all(told in shown for told in ("continued from step 4", " · perplexity ", "(c.jsonl "))
    assert losses(out) == losses(finished)
    shutil.rmtree(next((out / "corpus").glob("*/")))
    line = command(capsys, *resume, "--steps", 9, code=1)
    assert "--data-cache, or start a new run" in line
    shutil.copytree(finished / "corpus", cache)
    line = command(capsys, *resume, "--tokenizer", "bytes", code=1)
    assert "--tokenizer bytes differs from the run's bpe:300" in line
    # It is found there, and has all its steps.
    assert "already trained for 8 steps" in command(capsys, *resume, "--data-cache", cache)


@pytest.mark.exhaustive
@pytest.mark.skipif(len(jax.devices()) < 2, reason="one device cannot share a batch")
def test_two_devices_see_the_batches_of_one(argv, finished, tmp_path):
    assert cli.main([*argv, str(tmp_path / "two"), "--devices", "2"]) == 0
    for one, two in zip(losses(finished), losses(tmp_path / "two"), strict=True):
        assert one.keys() == two.keys()
        np.testing.assert_allclose([*one.values()], [*two.values()], rtol=1e-4)


def test_what_a_run_on_tokens_cannot_begin_with(argv, tmp_path, capsys, monkeypatch):
    """Each is told before a tokenizer is trained, and leaves no folder behind."""
    out = tmp_path / "run"
    (tmp_path / "file").touch()
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(data.tokenizer, "train_bpe", lambda *_, **__: 1 / 0)
    size = "the size must be a whole number from 257 to 2\\^24"
    for flags, words in (
        ("--tokenizer bpe:256", f"--tokenizer bpe:256: {size}"),
        ("--tokenizer bpe:many", f"--tokenizer bpe:many: {size}"),
        ("--tokenizer x.json", "--tokenizer x.json: no such tokenizer; give bytes, bpe:32000"),
        (f"--tokenizer {tmp_path}", r"tokenizer\.json cannot be read .*give a tokenizer\.json of"),
        ("--eval-data nowhere", "--eval-data nowhere: no such file or folder"),
        ("--data a=1 b", "some have a weight and some do not; write =WEIGHT"),
        ("--tokenizer bytes --vocab-size 512", "512: bytes are 256 tokens; leave it"),
        ("--vocab-size 299", "--vocab-size 299 is less than the 300 tokens of --token"),
        ("--profile 7:3", "--profile 7:3 are steps 7 to 9, and those to come are 1 to 8"),
        (f"--data-cache {tmp_path}/file/a", "/file/a cannot be written to .Not a dir"),
    ):
        (line,) = command(capsys, *argv, out, *flags.split(), code=1).splitlines()
        assert re.search(words, line), line
        assert not out.exists()


def test_sequences_that_the_data_does_not_fill_are_refused(argv, tmp_path, capsys):
    out = ["--out", tmp_path / "run", "--tokenizer", "bytes", "--pack", "--seq-len", 4096]
    few = write_lines(tmp_path / "few.jsonl", ["the scan", "reads"])
    line = command(capsys, *argv[:3], *out, "--data", few, code=1)
    assert "error: the training data has " in line
    assert "tokens, fewer than the 4,097 that --seq-len 4096 needs; lower --seq-len or" in line

    def corpus_of(*sizes):
        stub = types.SimpleNamespace
        return stub(train=[stub(name=f"of {n}", stream=stub(size=n)) for n in sizes])

    words = r"no source of --data has more than 80 tokens, fewer than"
    refused(words, run.check_length, corpus_of(20, 80), 80)
    run.check_length(corpus_of(81), 80)
    assert not capsys.readouterr().out
    run.check_length(corpus_of(20, 81, 80), 80)
    assert "warning: 2 of 3 sources of --data (of 20, of 80) have" in capsys.readouterr().out
