"""Tokens on disk, and the windows of packed documents that are drawn from them."""

import dataclasses
import gzip
import json

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
from jax.sharding import Mesh, PartitionSpec
from pyarrow import parquet

from jaxkern.lm import data
from jaxkern.lm.config import PRESETS, RunError, TrainConfig
from jaxkern.lm.data import packed, pieces, shards, tokenizer
from jaxkern.lm.data.packed import Order, Packed, Stream, permuted, predicted
from jaxkern.lm.loader import initial
from jaxkern.lm.model import Options
from jaxkern.lm.step import batch_loss, make_model, token_weights

WORDS = ["the", "a", "scan", "state", "of", "gate", "chunk", "step", "reads", "é", "\n", "  "]


MICRO = PRESETS["micro"].model
GRAPHDEF, PARAMS = make_model(MICRO, Options()), initial(MICRO, 3).params
LOSS = jax.jit(batch_loss, static_argnums=0)
ALONE = lambda mean: mean  # the mean over one device


def text(i):
    rng = np.random.default_rng(i)
    return " ".join(rng.choice(WORDS, size=rng.integers(1, 40))) + f" {i}"


TEXTS = [text(i) for i in range(200)]


@pytest.fixture
def root(tmp_path):
    """200 documents, in lines and in files."""
    folder = tmp_path / "text"
    (folder / "more").mkdir(parents=True)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:150])
    (folder / "a.jsonl").write_text(lines)
    for i in range(150, 200):
        (folder / "more" / f"{i}.txt").write_text(TEXTS[i])
    return folder


def config_of(root, **flags):
    return TrainConfig.from_flags({"preset": "micro", "data": (str(root),), "pack": True} | flags)


def tokens_of(source):
    """All tokens of a source, and where its documents begin."""
    stream = source.stream
    window = stream.window(0, stream.size - 1)
    return window.tokens, np.flatnonzero(np.diff(window.segment_ids, prepend=-1))


def texts_of(source, library):
    tokens, starts = tokens_of(source)
    pieces = np.split(tokens, starts[1:])
    assert all(piece[0] == piece[-1] == 0 for piece in pieces)
    return [library.decode(piece[1:-1].tolist()) for piece in pieces]


@pytest.mark.parametrize("size", [400, 10**6])
def test_shards_hold_what_tokenising_at_once_gives(root, tmp_path, monkeypatch, size):
    """By one process, and by two that write some shards each."""
    monkeypatch.setattr(pieces, "_SHARD_BYTES", size)
    monkeypatch.setattr(shards, "_PROCESS_BYTES", 400)
    monkeypatch.setattr(shards.os, "sched_getaffinity", lambda pid: {0, 1})
    corpus = data.build_packed(config_of(root, tokenizer="bpe:300"), tmp_path / "run")
    (source,) = corpus.info["sources"]
    assert (source["shards"][1] > 20) == (size == 400)
    assert (source["documents"], source["held_out"]) == (200, 0.05)
    assert source["bytes"] == sum(len(text.encode()) for text in TEXTS)
    library = corpus.tokenizer.tokenizer
    (train,), (validation,) = corpus.train, corpus.validation
    learned, held = texts_of(train, library), texts_of(validation, library)
    assert [text for text in TEXTS if text in {*learned}] == learned
    assert [text for text in TEXTS if text in {*held}] == held
    assert sorted(learned + held) == sorted(TEXTS)
    assert 1 <= len(held) <= 25
    at_once = [[0, *library.encode(text).ids, 0] for text in learned]
    tokens, starts = tokens_of(train)
    np.testing.assert_array_equal(tokens, np.concatenate(at_once))
    np.testing.assert_array_equal(np.diff(starts), [len(ids) for ids in at_once[:-1]])
    assert tokens.dtype == np.uint16
    assert train.predicted == len(tokens) - len(learned)
    # Bytes are tokens, too.
    plain = data.build_packed(config_of(root), tmp_path / "bytes")
    tokens, starts = tokens_of(plain.train[0])
    assert [bytes(part[1:-1]).decode() for part in np.split(tokens, starts[1:])] == learned
    assert plain.tokens_per_byte == pytest.approx(1, abs=0.03)  # by the ends of documents


def test_a_long_document_is_tokenised_in_parts(tmp_path, monkeypatch):
    path = tmp_path / "long.txt"
    content = " ".join(TEXTS) * 3
    path.write_text(content)
    whole = data.build_packed(config_of(path, tokenizer="bpe:300"), tmp_path / "a")
    monkeypatch.setattr(shards, "_TEXT", 5000)
    parts = data.build_packed(config_of(path, tokenizer="bpe:300"), tmp_path / "b")
    assert "1 document: " in whole.describe()
    assert "(their end)" in whole.describe()
    assert parts.info["fingerprint"] == whole.info["fingerprint"]
    together = parts.train[0].together(parts.validation[0]).stream
    assert parts.train[0].stream.size + parts.validation[0].stream.size == together.size // 2


@pytest.mark.parametrize(
    ("name", "glue", "documents"),
    [
        ("one.txt", " ", 1),
        ("one.md", "<|endoftext|>", 1),
        ("many.txt", "\n<|endoftext|>\n", 1200),
        ("two.txt", "<|endoftext|>", 2),
    ],
)
def test_a_large_text_is_divided_and_its_tokens_stay(tmp_path, monkeypatch, name, glue, documents):
    """Behind markers, and in a long document between two words."""
    monkeypatch.setattr(shards, "_TEXT", 5000)
    monkeypatch.setattr(pieces, "_HEAD_BYTES", 20000)
    texts = [text.strip() for text in TEXTS * 6]
    texts = [" ".join(texts[i::2]) for i in range(2)] if documents == 2 else texts
    content = glue.join(texts).encode()
    (tmp_path / name).write_bytes(content)
    trained = tokenizer.train_bpe(iter(TEXTS), 300, show=False)
    (tmp_path / "tokenizer.json").write_text(trained.stored())
    for spec in ("bytes", str(tmp_path)):
        found = []
        for size in (10**6, 7000, 10000):
            monkeypatch.setattr(pieces, "_SHARD_BYTES", size)
            config = config_of(tmp_path / name, tokenizer=spec)
            corpus = data.build_packed(config, tmp_path / "run")
            (source,) = corpus.info["sources"]
            assert (source["shards"][1] > 5) == (size < 10**6)
            assert source["documents"] == documents
            assert source["bytes"] == len(content) - (documents - 1) * len(glue)
            found.append([tokens_of(part) for part in (*corpus.train, *corpus.validation)])
        for divided in found[1:]:
            for (tokens, starts), (whole, begins) in zip(divided, found[0], strict=True):
                np.testing.assert_array_equal(tokens, whole)
                np.testing.assert_array_equal(starts, begins)


@pytest.mark.parametrize("content", ["é" * 4000, "é\n" * 3000, "\n" * 5000, "<|endof\n\n\n" * 700])
def test_a_large_text_without_words_is_divided(tmp_path, monkeypatch, content):
    """At the ends of lines, or of characters: all bytes are there."""
    monkeypatch.setattr(pieces, "_HEAD_BYTES", 300)
    monkeypatch.setattr(pieces, "_WINDOW", 50)
    monkeypatch.setattr(shards, "_TEXT", 100)
    monkeypatch.setattr(pieces, "_SHARD_BYTES", 333)
    path = tmp_path / "a.txt"
    path.write_text(content)
    corpus = data.build_packed(config_of(path), tmp_path / "run")
    tokens = [tokens_of(part)[0] for part in (*corpus.train, *corpus.validation)]
    (source,) = corpus.info["sources"]
    assert source["shards"][1] > 10
    assert source["documents"] == 1
    assert bytes(np.concatenate(tokens)) == b"\0" + content.encode() + b"\0"


def test_the_number_of_processes_changes_no_token(root, tmp_path, monkeypatch):
    (root / "more" / "large.txt").write_text(" ".join(TEXTS) * 700)
    fingerprints = set()
    for cores in (1, 2):
        monkeypatch.setattr(shards.os, "sched_getaffinity", lambda pid, n=cores: {*range(n)})
        corpus = data.build_packed(config_of(root), tmp_path / str(cores))
        assert corpus.info["sources"][0]["shards"][1] > 2
        fingerprints.add(corpus.info["fingerprint"])
    assert len(fingerprints) == 1


@pytest.mark.parametrize("cores", [1, 2])
def test_progress_is_told_inside_of_shards(tmp_path, monkeypatch, cores):
    """Progress is told of every kind of file, and of all bytes in the end."""
    words = " ".join(TEXTS) * 400
    record = (json.dumps({"text": " ".join(TEXTS[:9])}) + "\n").encode()
    (tmp_path / "a.txt").write_text(words)
    (tmp_path / "b.jsonl").write_bytes(record * 8000)
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(record * 8000, 0))
    parquet.write_table(pa.table({"text": TEXTS * 9}), tmp_path / "d.parquet")
    told = []
    monkeypatch.setattr(shards._Bar, "add", lambda self, size: told.append(size))
    monkeypatch.setattr(shards.os, "sched_getaffinity", lambda pid: {*range(cores)})
    monkeypatch.setattr(shards, "_TICK", 0.001)
    for path in sorted(tmp_path.glob("*.*")):
        size = path.stat().st_size
        monkeypatch.setattr(pieces, "_LEAST_BYTES", size // cores + 1)
        monkeypatch.setattr(shards, "_PROCESS_BYTES", size // 2)
        told.clear()
        data.build_packed(config_of(path), tmp_path / "run")
        assert sum(told) == size or path.suffix == ".parquet"
        if cores == 1:
            assert len(told) >= 5 or path.suffix == ".parquet"
            assert max(told) <= 2**20


def test_shards_are_as_large_as_the_data_asks_for():
    sizes = []
    for total in (3 << 20, 48 << 20, 8 << 30, 1 << 40):
        sizes.append(pieces.shard_bytes(total) >> 20)
    assert sizes == [4, 4, 32, 64]


def test_texts_between_markers_are_documents(tmp_path):
    """Neither state nor loss goes from a story to the next, whatever the tokenizer."""
    folder = tmp_path / "text"
    folder.mkdir()
    want = [text.strip() for text in TEXTS]
    (folder / "a.txt").write_text("\n<|endoftext|>\n".join(want))
    want.append("one<|endoftext|>two")
    (folder / "b.jsonl").write_text(json.dumps({"text": want[-1]}) + "\n")
    for spec in ("bytes", "bpe:300"):
        corpus = data.build_packed(config_of(folder, tokenizer=spec), tmp_path / spec)
        found = []
        for source in (*corpus.train, *corpus.validation):
            tokens, starts = tokens_of(source)
            pieces = [piece[1:-1].tolist() for piece in np.split(tokens, starts[1:])]
            if spec == "bytes":
                found += [bytes(piece).decode() for piece in pieces]
            else:
                found += [corpus.tokenizer.tokenizer.decode(piece) for piece in pieces]
        assert sorted(found) == sorted(want)


def test_a_killed_run_keeps_its_whole_shards(root, tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "_SHARD_BYTES", 400)
    config, out = config_of(root), tmp_path / "run"
    whole = data.build_packed(config, tmp_path / "undisturbed")
    write, written = shards.write_shard, []

    def killed(shard, tokens, tell):
        written.append(shard.path.name)
        if len(written) == 9:

            class Killed:
                size, begin, end = 256, 0, 0

                def encode(self, texts):
                    raise KeyboardInterrupt

            tokens = Killed()
        write(shard, tokens, tell)

    monkeypatch.setattr(shards, "write_shard", killed)
    assert not data.has_shards(out)
    with pytest.raises(KeyboardInterrupt):
        data.build_packed(config, out)
    assert data.has_shards(out)
    (folder,) = (out / "corpus").glob("*/")
    assert len([*folder.glob("*.json")]) == 8
    # One whose files are not as long as they were is written again, too.
    (folder / "00003.train.tokens").write_bytes(b"")
    again = data.build_packed(config, out)
    assert written[9:11] == ["00003", "00008"]
    assert len(written) == 9 + again.info["sources"][0]["shards"][1] - 7
    assert again.info["fingerprint"] == whole.info["fingerprint"]
    count = len(written)
    reopened = data.open_packed(config, out, json.loads(json.dumps(again.info)))
    assert reopened.info == again.info
    assert data.build_packed(config, out).info == again.info
    assert len(written) == count
    # What has changed is told from it.
    (root / "more" / "150.txt").write_text("other")
    assert data.build_packed(config, out).info["fingerprint"] != again.info["fingerprint"]
    with pytest.raises(RunError, match="are missing or have changed since the run began"):
        data.open_packed(config, out, again.info)


def test_a_cache_is_shared_and_follows_data_and_tokenizer(root, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    flags = {"data_cache": str(cache), "tokenizer": "bpe:300"}
    first = data.build_packed(config_of(root, **flags), tmp_path / "a")
    with monkeypatch.context() as patch:
        patch.setattr(shards, "write_shard", None)
        patch.setattr(tokenizer, "train_bpe", None)
        again = data.build_packed(config_of(root, **flags), tmp_path / "b")
    assert again.info == first.info
    assert not (tmp_path / "a").exists()
    data.build_packed(config_of(root, data_cache=str(cache), tokenizer="bpe:301"), tmp_path / "c")
    assert len([*cache.glob("*/")]) == 2
    path = next(cache.glob("bpe-300-*.json"))
    of_file = data.build_packed(config_of(root, tokenizer=str(path)), tmp_path / "d")
    assert of_file.info == first.info | {"folder": of_file.info["folder"]}
    with pytest.raises(RunError, match="--data-cache x keeps the tokens of packed documents"):
        TrainConfig.from_flags({"data_cache": "x"})


def documents_of(folder, lengths, first=7):
    """Documents of some lengths in two shards, whose tokens count from 0."""
    starts = np.cumsum([0, *lengths])
    bounds = (0, first), (first, int(starts[-1]))
    for name, (begin, end) in zip("ab", bounds, strict=True):
        np.arange(begin, end, dtype=np.uint16).tofile(folder / f"{name}.tokens")
        inside = starts[:-1][(starts[:-1] >= begin) & (starts[:-1] < end)]
        (inside - begin).astype(np.int64).tofile(folder / f"{name}.starts")
    return Stream([folder / "a", folder / "b"], [e - b for b, e in bounds], np.uint16)


@pytest.mark.parametrize("seq_len", [1, 3, 4, 10, 40])
def test_windows_lose_nothing_and_predict_each_token_once(tmp_path, seq_len):
    """All but the first of each document, also where shards and windows end."""
    lengths = 3, 4, 2, 9, 6
    stream = documents_of(tmp_path, lengths)
    seen = []
    for i in range(stream.windows(seq_len)):
        tokens, segments = stream.window(i, seq_len)
        assert tokens.shape == segments.shape == (seq_len + 1,)
        same = segments[1:] == segments[:-1]
        np.testing.assert_array_equal(tokens[1:][same], tokens[:-1][same] + 1)
        seen += tokens[1:][same].tolist()
    firsts = np.cumsum([0, *lengths[:-1]])
    assert seen == [i for i in range(sum(lengths)) if i not in firsts]
    beyond = stream.window(stream.windows(seq_len), seq_len)
    assert predicted(beyond) == 0
    # A part of it is as if there were no more.
    part = stream.part(5, 20)
    tokens, segments = part.window(0, 14)
    assert tokens.tolist() == [*range(5, 20)]
    assert np.flatnonzero(np.diff(segments)).tolist() == [1, 3, 12]
    assert predicted(part.window(1, 14)) == 0


def test_packed_documents_are_as_each_is_alone():
    """The loss of a window is the mean over the tokens of its documents."""
    rng = np.random.default_rng(0)
    lengths = 5, 9, 5, 9
    tokens = rng.integers(0, 256, sum(lengths))
    batch = Packed(tokens[None], np.repeat([3, 1, 2, 7], lengths)[None])
    whole = LOSS(GRAPHDEF, PARAMS, batch, None)
    alone = [
        LOSS(GRAPHDEF, PARAMS, document[None], None) * (len(document) - 1)
        for document in np.split(tokens, np.cumsum(lengths)[:-1])
    ]
    np.testing.assert_allclose(whole, sum(alone) / (sum(lengths) - 4), rtol=1e-5)


def test_every_token_of_a_batch_counts_alike():
    """Whatever parts and devices it is split in."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 256, (4, 9))
    segments = np.cumsum(rng.random((4, 9)) < [[0.05], [0.9], [0.3], [1.0]], axis=1)
    whole = Packed(tokens, segments)
    want = LOSS(GRAPHDEF, PARAMS, whole, None)
    parts = Packed(tokens.reshape(2, 2, 9), segments.reshape(2, 2, 9))
    weights = token_weights(parts, ALONE)
    each = [
        LOSS(GRAPHDEF, PARAMS, Packed(*part), weight)
        for *part, weight in zip(*parts, weights, strict=True)
    ]
    np.testing.assert_allclose(np.mean(each), want, rtol=1e-5)
    assert token_weights(tokens, ALONE) is None
    padding = Packed(tokens, np.arange(36).reshape(4, 9))
    assert LOSS(GRAPHDEF, PARAMS, padding, token_weights(padding, ALONE)) == 0
    if len(jax.devices()) > 1:
        mesh = Mesh(np.array(jax.devices()[:2]), ("batch",))

        def mean(batch):
            of_all = lambda value: jax.lax.pmean(value, "batch")
            return of_all(batch_loss(GRAPHDEF, PARAMS, batch, token_weights(batch, of_all)))

        spec = PartitionSpec("batch")
        f = jax.shard_map(
            mean, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False
        )
        np.testing.assert_allclose(jax.jit(f)(jax.tree.map(jnp.asarray, whole)), want, rtol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3, 17, 64, 1000])
def test_the_order_is_a_permutation(size):
    orders = {
        tuple(permuted(i, size, (seed, 0, epoch)) for i in range(size))
        for seed in range(3)
        for epoch in range(3)
    }
    assert all(sorted(order) == [*range(size)] for order in orders)
    assert len(orders) >= min(size, 9) - 1
    big = [permuted(i, 10**12, (0,)) for i in range(100)]
    assert len({*big}) == 100
    assert 3e11 < np.mean(big) < 7e11


def test_every_window_is_seen_once_in_an_epoch():
    order = Order([5, 0, 12], None, seed=3)
    drawn = order(np.arange(17 * 3))
    every = {(0, i) for i in range(5)} | {(2, i) for i in range(12)}
    epochs = [drawn[i : i + 17] for i in range(0, 51, 17)]
    assert all({*epoch} == every for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert order(np.arange(20, 40)) == drawn[20:40]  # as a resumed run asks for it
    assert Order([5, 0, 12], None, seed=4)(np.arange(17)) != epochs[0]


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
    other = tmp_path / "b.jsonl"
    other.write_text("".join(json.dumps({"text": "b " * 30 + str(i)}) + "\n" for i in range(30)))
    config = config_of(root, data=(f"{root}=3", f"{other}=1"), seq_len=16)
    corpus = data.build_packed(config, tmp_path / "a")
    assert [source.name for source in corpus.train] == ["text", "b.jsonl"]
    assert packed.shares(corpus.train) == packed.shares(corpus.validation) == [0.75, 0.25]
    batch = corpus.batch(batch_size=400, seq_len=16, seed=0, step=0)
    of_b = np.mean([(row == ord("b")).sum() > 5 for row in batch.tokens])
    assert 0.2 < of_b < 0.3
    same = corpus.batch(batch_size=400, seq_len=16, seed=0, step=0)
    assert np.array_equal(batch.tokens, same.tokens)
    assert batch.tokens.dtype == np.uint8
    assert batch.segment_ids.dtype == np.int32
    ratios = [source.bytes / source.predicted for source in corpus.train]
    assert corpus.tokens_per_byte == pytest.approx(1 / (0.75 * ratios[0] + 0.25 * ratios[1]))

    config = config_of(root, eval_data=(str(other), str(root / "more")))
    corpus = data.build_packed(config, tmp_path / "b")
    assert [source.name for source in corpus.validation] == ["b.jsonl", "more"]
    assert corpus.info["split"] == "by source"
    assert sum(source["documents"] for source in corpus.info["sources"]) == 150 + 30 + 50
    with pytest.raises(RunError, match=r"--eval-data .*nowhere: no such file"):
        data.build_packed(config_of(root, eval_data=(str(root / "nowhere"),)), tmp_path / "c")
    config = config_of(root, data=(str(root), str(root / "a.jsonl")))
    with pytest.raises(RunError, match=r"--data .*a\.jsonl: all of its files are named before"):
        data.build_packed(config, tmp_path / "d")


@pytest.mark.parametrize("batches", [1, 3, 1000])
def test_validation_is_a_fixed_part_spread_evenly(root, tmp_path, batches):
    corpus = data.build_packed(config_of(root), tmp_path / "a")
    options = {"batch_size": 4, "seq_len": 32, "batches": batches}
    found = corpus.validation_batches(0, **options)
    there = corpus.validation[0].stream.windows(32)
    assert len(found) == max(1, min(batches, there // 4))
    rows = np.concatenate([batch.tokens for batch in found])
    assert len({row.tobytes() for row in rows}) == len(rows)
    np.testing.assert_array_equal(found[0].tokens[0], corpus.validation[0].stream.window(0, 32)[0])
    # Where there are fewer windows than a batch has rows, the others predict nothing.
    (few,) = corpus.validation_batches(0, batch_size=there + 3, seq_len=32, batches=2)
    assert predicted(few) == sum(
        predicted(corpus.validation[0].stream.window(i, 32)) for i in range(there)
    )


def test_too_little_text_and_broken_files_are_named(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("é")
    with pytest.raises(RunError, match=r"--data a\.txt has 3 tokens; give more text"):
        data.build_packed(config_of(path, tokenizer="bpe:300"), tmp_path / "run")
    path.write_bytes(b"a" * (1 << 20) + b"\xff")
    with pytest.raises(RunError, match=r"a\.txt: is not UTF-8 text .*mend it or leave it out"):
        data.build_packed(config_of(path), tmp_path / "run")
    config = dataclasses.replace(config_of(path, tokenizer="bpe:300"), vocab_size=299)
    with pytest.raises(RunError, match="--vocab-size 299 is less than the 300 tokens of --token"):
        config.for_tokens(300)
    assert config_of(path).for_tokens(50277).model.vocab_size == 50304
