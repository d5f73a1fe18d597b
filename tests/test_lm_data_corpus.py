"""Tokens on disk, the windows that grain draws from them, and whole runs on tokens."""

import functools
import itertools
import json
import re
import signal

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxkern.lm import checkpoint, data, sources, tokenizer
from jaxkern.lm.config import ModelConfig, TrainConfig
from jaxkern.lm.data import Packed, Stream, Windows, predicted
from jaxkern.lm.model import Options
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
    return data.build(config_of(root, **flags), out)


def texts_of(corpus, *streams):
    """The texts of some sources of a corpus, or of all."""
    library, texts = getattr(corpus.tokenizer, "tokenizer", None), []
    for stream in streams or (*corpus.train, *corpus.held_out):
        for piece in np.split(stream.tokens, stream.starts[1:]):
            assert piece[0] == piece[-1] == 0
            ids = piece[1:-1].tolist()
            texts.append(library.decode(ids) if library else bytes(ids).decode())
    return texts


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*.*") if path.stem[0] in "01"}


def test_the_tokens_are_those_of_tokenising_at_once(root, tmp_path, monkeypatch):
    """In any number of documents at once, and of long documents in parts."""
    corpus = build(root, tmp_path / "run", tokenizer="bpe:300")
    (source,) = corpus.info["sources"]
    counts = [source["train"], source["validation"]]
    assert sum(count["documents"] for count in counts) == 200
    assert sum(count["bytes"] for count in counts) == sum(len(text.encode()) for text in TOLD)
    (train,), (held_out,) = corpus.train, corpus.held_out
    learned, held = texts_of(corpus, train), texts_of(corpus, held_out)
    for texts in (learned, held):
        assert [text for text in TOLD if text in {*texts}] == texts
    assert sorted(learned + held) == sorted(TOLD)
    assert 1 <= len(held) <= 25
    at_once = [[0, *ids, 0] for ids in corpus.tokenizer.encode_batch(learned)]
    np.testing.assert_array_equal(train.tokens, np.concatenate(at_once))
    assert (train.tokens.dtype, corpus.info["tokenizer"]["size"]) == (np.uint16, 300)
    plain = build(root, tmp_path / "bytes")
    assert texts_of(plain, *plain.train) == learned
    assert plain.tokens_per_byte == pytest.approx(1, abs=0.03)  # by the ends of documents

    books = [" ".join(text.strip() for text in TEXTS[i::3] * 20) for i in range(3)]
    path = write_lines(tmp_path / "books.jsonl", books)
    again = {"tokenizer": str(next(tmp_path.glob("run/*/bpe*")))}
    whole = build(path, tmp_path / "whole", **again)
    monkeypatch.setattr(sources, "_PART", 6400)
    monkeypatch.setattr(data, "_AT_ONCE", 9000)
    assert build(path, tmp_path / "parts", **again).info == whole.info
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


@pytest.mark.parametrize("saved", [True, False], ids=["saved", "in time"])
def test_tokenising_that_was_killed_goes_on_as_if_it_had_not_been(
    root, tmp_path, capsys, monkeypatch, saved
):
    """Wherever it is killed: what is behind the last save is written again."""
    (root / "b.txt").write_text(" ".join(TEXTS))
    monkeypatch.setattr(sources, "_PART", 640)
    monkeypatch.setattr(data, "_AT_ONCE", 900)
    monkeypatch.setattr(data, "_SAVE", 0.0 if saved else 1e9)
    named = {"data": (str(root / "a.jsonl"), str(root / "more"), str(root / "b.txt"))}
    whole = build(root, tmp_path / "undisturbed", **named)
    encode, left, kills = tokenizer.Bytes.encode_batch, itertools.count(1), 6 if saved else 2
    killed = lambda self, texts: encode(self, texts) if next(left) % 4 else 1 / 0
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer.Bytes, "encode_batch", killed)
        for _ in range(kills):
            with pytest.raises(ZeroDivisionError):
                build(root, tmp_path / "run", **named)
    assert not data.has_tokens(tmp_path / "run")  # those of bytes cost nothing
    assert build(root, tmp_path / "run", **named).info == whole.info
    assert contents(tmp_path / "run") == contents(tmp_path / "undisturbed")

    encode, out = tokenizer.Tokenizer.encode_batch, tmp_path / "stopped"
    interrupted = lambda self, texts: (signal.raise_signal(signal.SIGINT), encode(self, texts))[1]
    monkeypatch.setattr(tokenizer.Tokenizer, "encode_batch", interrupted)
    argv = ["train", "--preset", "micro", "--data", root, "--tokenizer", "bpe:300", "--out", out]
    line = command(capsys, *argv, code=128 + signal.SIGINT)
    told = r"stopped \(SIGINT\): training had not begun; .* keeps the tokens; the same"
    assert re.search(told, line)
    assert data.has_tokens(out)
    assert not checkpoint.is_run(out)


def test_a_cache_is_shared_and_follows_data_and_tokenizer(root, tmp_path, monkeypatch):
    cache, config = tmp_path / "cache", functools.partial(config_of, root)
    flags = {"data_cache": str(cache), "tokenizer": "bpe:300"}
    first = build(root, tmp_path / "a", **flags)
    with monkeypatch.context() as patch:
        patch.setattr(data, "_write_source", None)
        patch.setattr(tokenizer, "train_bpe", None)
        assert build(root, tmp_path / "b", **flags).info == first.info
        info = json.loads(json.dumps(first.info))
        again = data.reopen(config(**flags), tmp_path / "b", info)
    assert texts_of(again) == texts_of(first)
    assert not (tmp_path / "a").exists()
    build(root, tmp_path / "c", **flags | {"tokenizer": "bpe:301"})
    assert len([*cache.glob("*/")]) == 2
    (root / "more" / "150.txt").write_text("other")
    other = build(root, tmp_path / "d")
    assert other.info["folder"] != build(root / "more", tmp_path / "d").info["folder"]
    assert len([*(tmp_path / "d" / "corpus").glob("*/")]) == 1  # no run began with the others
    words = "are missing or have changed since the run began; name what"
    refused(words, data.reopen, config(), tmp_path / "d", other.info)
    next(cache.glob(f"{info['folder']}/0.train.tokens")).write_bytes(b"cut")
    refused(words, data.reopen, config(**flags), tmp_path / "b", info)


@pytest.mark.parametrize("share", [0.2, 0.3, 0.99])
def test_no_more_than_a_quarter_is_held_out(tmp_path, share):
    def text_that(is_held, size):
        texts = (f"{i:02} " * (int(size * 10000) // 3) for i in range(100))
        return next(text for text in texts if (data._fraction(text) < 0.05) == is_held)

    texts = text_that(True, share), text_that(False, 1 - share)
    path, by_document = write_lines(tmp_path / "a.jsonl", texts), share < 0.25
    corpus = build(path, tmp_path / "run")
    (source,), (train,), (held,) = corpus.info["sources"], corpus.train, corpus.held_out
    assert source["split"] == ("by document" if by_document else "by position")
    size = len(train.tokens) + len(held.tokens)
    assert size == 2 * 2 + sum(map(len, texts))
    assert len(held.tokens) <= size * (0.25 if by_document else 0.05)
    assert len(train.starts) + len(held.starts) == 2
    assert build(path, tmp_path / "run").info == corpus.info


FIRSTS = np.cumsum([0, 3, 4, 2, 9])
COUNTED = Stream("counted", np.arange(24, dtype=np.uint16), FIRSTS, 1.0, 1.0)


@pytest.mark.parametrize("seq_len", [1, 3, 4, 10, 22, 40])
def test_windows_lose_nothing_and_predict_each_token_once(seq_len):
    """All but the first of each document; without segments, all but the first of all."""
    config, seen = functools.partial(config_of, "", seq_len=seq_len, vocab_size=2**17), []
    windows = Windows(COUNTED, config(tokenizer="bpe:300"))
    for tokens, segments in (windows[i] for i in range(len(windows))):
        assert tokens.shape == segments.shape == (seq_len + 1,)
        assert (tokens.dtype, segments.dtype) == (np.uint32, np.int32)
        same = segments[1:] == segments[:-1]
        np.testing.assert_array_equal(tokens[1:][same], tokens[:-1][same] + 1)
        seen += tokens[1:][same].tolist()
    assert seen == [i for i in range(24) if i not in FIRSTS]
    assert predicted(windows[len(windows)]) == 0
    if seq_len < 24:
        windows = Windows(COUNTED, config(pack=False, vocab_size=None))
        found = [windows[i].tokens for i in range(len(windows))]
        assert {len(tokens) for tokens in found} == {seq_len + 1}
        assert {*np.concatenate([tokens[1:] for tokens in found]).tolist()} == {*range(1, 24)}


@pytest.mark.parametrize("pack", [True, False])
def test_every_window_is_seen_once_in_an_epoch(root, tmp_path, pack):
    """In an order by the seed, which goes on from a state as if it had not been stopped."""
    named = (str(root / "a.jsonl"), str(root / "more"))
    corpus = build(root, tmp_path / "run", pack=pack, data=named)
    config = functools.partial(config_of, root, pack=pack, seq_len=16, batch_size=4)
    of_each = [Windows(stream, config()) for stream in corpus.train]
    there = sorted(windows[i].tokens.tobytes() for windows in of_each for i in range(len(windows)))
    steps = 3 * len(there) // 4 + 1
    drawn, batches = [], corpus.batches(config())
    for step in range(steps):
        if step == steps // 2:
            state = json.loads(json.dumps(batches.get_state()))
        drawn.append(next(batches))
    assert len(corpus.train) == 1 + pack
    assert (drawn[0].tokens.shape, drawn[0].tokens.dtype) == ((4, 17), np.uint8)
    rows = [row.tobytes() for batch in drawn for row in batch.tokens]
    epochs = [rows[i * len(there) : (i + 1) * len(there)] for i in range(3)]
    assert all(sorted(epoch) == there for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs} | {tuple(there)}) == 4
    again = corpus.batches(config())
    again.set_state(state)
    for batch in drawn[steps // 2 :]:
        jax.tree.map(np.testing.assert_array_equal, next(again), batch)
    other = next(corpus.batches(config(seed=1)))
    assert not np.array_equal(other.tokens, drawn[0].tokens)

    (stream, *_), there = corpus.held_out, len(Windows(corpus.held_out[0], config()))
    for count in (1, 3, 1000):  # validation is a fixed part of each source, spread evenly
        options = {"eval_batches": count * (1 + pack), "batch_size": 8, "grad_accum": 2}
        ((_, found), *_) = corpus.validation(config(**options))
        assert len(found) == max(1, min(2 * count, there // 4))
        rows = np.concatenate([batch.tokens for batch in found])
        assert len({row.tobytes() for row in rows}) == len(rows)
        np.testing.assert_array_equal(rows[0], stream.tokens[:17])
    if pack:  # where there are fewer windows than a batch has rows, the others predict nothing
        ((_, (few,)), *_) = corpus.validation(config(batch_size=there + 3))
        assert predicted(few) == len(stream.tokens) - len(stream.starts)


def test_sources_their_weights_and_data_to_validate_with(root, tmp_path):
    other = write_lines(tmp_path / "b.jsonl", ["b " * 30 + str(i) for i in range(30)])
    flags = {"data": (f"{root}=0.85", f"{other}=0.15"), "seq_len": 16, "batch_size": 200}
    corpus, config = build(root, tmp_path / "a", **flags), config_of(root, **flags)
    assert [stream.name for stream in corpus.train] == ["text", "b.jsonl"]
    batches = corpus.batches(config)
    of_other = [(row == ord("b")).sum() > 5 for _ in range(5) for row in next(batches).tokens]
    assert np.mean(of_other) == pytest.approx(0.15, abs=0.005)
    assert sum(of_other) > len(Windows(corpus.train[1], config))  # it has epochs of its own
    ratios = [stream.tokens_per_byte for stream in corpus.train]
    assert corpus.tokens_per_byte == pytest.approx(1 / (0.85 / ratios[0] + 0.15 / ratios[1]))

    flags = {"eval_data": (str(other), str(root / "more"))}
    corpus = build(root, tmp_path / "b", **flags)
    assert [stream.name for stream in corpus.held_out] == ["b.jsonl", "more"]
    assert sorted(texts_of(corpus, *corpus.train)) == sorted(TOLD[:150])
    ((b, batches), (more, _)) = corpus.validation(config_of(root, **flags, eval_batches=2))
    assert (b.name, more.name, b.share + more.share) == ("b.jsonl", "more", 1)
    assert len(batches) == 1
    # A file to validate with is not trained on by another field; two fields are two sources.
    records = [{"text": text, "title": f"{text} is the title"} for text in TEXTS]
    other.write_text("".join(json.dumps(record) + "\n" for record in records))
    flags = {"data": (f"{other}:title", str(root)), "eval_data": (str(other),)}
    refused("b.jsonl: all of its files are of --eval-data", build, root, tmp_path / "c", **flags)
    corpus = build(root, tmp_path / "d", data=(str(other), f"{other}:title"))
    assert [stream.name for stream in corpus.train] == [str(other), f"{other}:title"]
    for source, field in zip(corpus.info["sources"], ("text", "title"), strict=True):
        size = source["train"]["bytes"] + source["validation"]["bytes"]
        assert size == sum(len(record[field].encode()) for record in records)


def test_too_little_text_and_broken_files_are_named(tmp_path, capsys):
    path, out = tmp_path / "a.txt", tmp_path / "run"
    path.write_text("é")
    refused(r"source a\.txt has 3 tokens; give more text", build, path, out, tokenizer="bpe:300")
    path.write_bytes(b"a" * (1 << 20) + b"\xff")
    refused(r"a\.txt: a binary file .*mend it or leave it out", build, path, out)
    path.write_text(" " * (1 << 20) + "before\0behind")  # beyond what is read of it at first
    words = rf"^{path}: has a zero byte behind '.*before', which of bytes ends .*leave it"
    refused(words, build, path, out)
    write_lines(lines := tmp_path / "a.jsonl", [*TEXTS, "before\0behind"])
    refused("zero byte behind 'before'", build, lines, out)
    assert "before\0behind" in texts_of(build(lines, out, tokenizer="bpe:300"))
    lines.write_text(write_lines(lines, TEXTS).read_text() + '{"text": 3}\n')
    refused(f"^{lines}: line 201 has 3 as its .*mend it", build, lines, out)

    few, more = write_lines(tmp_path / "few.jsonl", ["the scan", "reads"]), tmp_path / "more.txt"
    more.write_text("some words " * 40)
    words = "training data has 1. tokens, fewer than the 4,097 that --seq-len 4096 needs; lower --s"
    refused(words, build, few, out, seq_len=4096)
    capsys.readouterr()
    build(few, out, data=(str(few), str(more)), seq_len=100)
    assert "warning: 1 of 2 sources of --data, such as few.jsonl, ha" in capsys.readouterr().out
    words = "validation data has 22 tokens, fewer than"
    refused(words, build, more, out, seq_len=50, pack=False)
    assert config_of(path).for_tokens(50277).model.vocab_size == 50304
    # Why files of a folder are skipped is told: a wrong field before what is no text at all.
    (folder := tmp_path / "folder").mkdir()
    more.rename(folder / "more.txt")
    (folder / "a.txt").touch()
    (folder / "b.jsonl").write_text('{"body": "a"}\n')
    for pack in (True, False):
        told = "; 2 × no readable text, such as .*b.jsonl: line 1 has no .*body"
        assert re.search(told, build(folder, out, pack=pack, seq_len=16).describe())


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
    assert token_weights(Packed(tokens), alone) is None

    if len(jax.devices()) > 1:
        mesh, spec = Mesh(np.array(jax.devices()[:2]), ("batch",)), PartitionSpec("batch")
        mean = lambda value: jax.lax.pmean(value, "batch")
        f = lambda batch: mean(loss(batch, token_weights(batch, mean)))
        specs = {"in_specs": spec, "out_specs": PartitionSpec(), "check_vma": False}
        got = jit(jax.shard_map(f, mesh=mesh, **specs))(whole)
        np.testing.assert_allclose(got, want, rtol=1e-5)
