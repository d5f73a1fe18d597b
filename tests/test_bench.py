"""What the bench measures and refuses: ops beside peers, optimizers' steps, and errors in ulp."""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import accuracy, measured, modules, peers, processes, program, run, timing, train
from bench.cases import MODELS, TABLE, optim
from bench.cases.peers import Arranged

SMALL = next(case for case in measured.cases(small=True) if case.op == "linear_cross_entropy")
LOSS = "8192x4096x128256-plain"


def case_of(op, shape):
    return next(c for c in measured.cases(small=False) if (c.op, c.shape) == (op, shape))


@pytest.mark.exhaustive
def test_imports_leave_the_device_alone():
    """Each process says by itself how much of the device's memory it takes, before it takes it."""
    modules = "accuracy, collectives, devices, layers, modules, report, run, train"
    asked = "from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized())"
    command = [sys.executable, "-c", f"from bench import {modules}; {asked}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


PEERS = """
selective_scan 8x2048x2048x16 jla mamba_ssm
selective_scan 8x2048x2048x16/64
linear_scan 8x2048x2048 fla
linear_cross_entropy 8192x4096x128256-plain jax jla liger quack compile
linear_cross_entropy 8192x4096x128256-plain-160MiB jla liger
gated_delta_rule 1x8192x32x128x128x32 jla fla flash_qla
gated_delta_rule 1x8192x32x128x128x32-KDA jla fla
fused_adamw 100M torch optax update
fused_adamw 100M-folded optax update
fused_adamw 100M-8-bit-state update
"""


DELTA_RULES = [
    ("fla", "fla.ops.gated_delta_rule:chunk_gated_delta_rule"),
    ("fla", "fla.ops.kda:chunk_kda"),
    ("flash_qla", "flash_qla:chunk_gated_delta_rule"),
]


def test_peers_have_an_op_with_its_options():
    known = ["jax", "torch", "jla", "liger", "fla", "quack", "mamba_ssm", "compile"]
    known += ["flash_qla", "optax", "update"]
    for op, shape, *having in map(str.split, PEERS.strip().splitlines()):
        case = case_of(op, shape)
        assert [name for name in known if peers.has(case, name)] == having, (op, shape)


@pytest.mark.parametrize(("name", "path"), DELTA_RULES)
def test_a_library_gets_the_arrays_of_the_delta_rule(name, path, monkeypatch):
    """The bench takes the output, not the final state."""
    module, _, function = path.partition(":")
    fake = types.SimpleNamespace(**{function: lambda *arrays: (arrays, "state")})
    monkeypatch.setitem(sys.modules, module, fake)
    monkeypatch.setenv("FLA_FLASH_QLA", "1")
    case = case_of("gated_delta_rule", "1x8192x32x128x128x32" + "-KDA" * path.endswith("kda"))
    arrays = jax.eval_shape(case.arrays, jax.random.key(0))
    assert peers.arranged(case, name).call(*arrays) == arrays
    assert os.environ["FLA_FLASH_QLA"] == ("0" if name == "fla" else "1")
    if name == "flash_qla":
        small = case_of("gated_delta_rule", "1x8192x64x64x64x64")
        arrays = jax.eval_shape(small.arrays, jax.random.key(0))
        with pytest.raises(NotImplementedError, match="128 channels"):
            peers.arranged(small, name).call(*arrays)


@pytest.mark.parametrize(("variant", "heads"), [("", 16), ("-KDA", 32)])
def test_keys_of_groups_are_repeated_for_kda_alone(variant, heads, monkeypatch):
    """The kernels of Gated DeltaNet there take groups."""
    fake = types.SimpleNamespace(linear_attention=lambda kind, *qkv, **gates: (qkv, "state"))
    monkeypatch.setitem(sys.modules, "jla.ops", fake)
    case = case_of("gated_delta_rule", "1x8192x32x128x128x16" + variant)
    arrays = jax.eval_shape(case.arrays, jax.random.key(0))
    qkv = jax.eval_shape(peers.arranged(case, "jla").call, *arrays)
    assert [x.shape for x in qkv] == [(1, 8192, h, 128) for h in (heads, heads, 32)]


def test_plain_jax_is_not_timed_where_it_saves_no_memory():
    whole, in_parts = (case_of("linear_cross_entropy", LOSS + end) for end in ("", "-160MiB"))
    assert [run._is_timed(case, "xla") for case in (whole, in_parts)] == [True, False]
    assert all(run._is_timed(in_parts, name) for name in ("mosaic", "auto", "nobody"))


def test_shapes_of_models_are_cases():
    """Once each, with the names of all that have them."""
    every = measured.cases(small=False)
    places = [(case.op, case.shape, case.dtype) for case in every]
    assert len(set(places)) == len(places)
    models = {place: getattr(case, "models", ()) for place, case in zip(places, every, strict=True)}
    assert models["selective_scan", "8x2048x1536x16", "bfloat16"] == ("mamba-130m",)
    assert models["rms_norm", "16384x4096", "bfloat16"] == ("llama-2-7b", "llama-3-8b")
    assert {name for names in models.values() for name in names} == set(MODELS)
    assert not any(models["rms_norm", "16384x4096", dtype] for dtype in ("float32", "float16"))


@pytest.mark.parametrize(
    ("command", "words", "status", "told"),
    [
        (run.main, "--model mamba-130m", 2, "for a GPU"),
        (run.main, "--op nothing", 2, "no such case; there are: "),
        (run.main, "--op rms_norm --calls 1 --vs nobody", 1, "nobody does not have it"),
        (accuracy.main, "--op nothing", 2, "no such op; there are: "),
        (modules.main, "", 2, "give --write FILE or --against FILE"),
        (train.decode, "--tokens 20", 2, "--tokens must be a multiple of 16, got 20"),
        (train.checkpoints, "--every 100 --log-every 100", 2, "--every must be twice --log-every"),
    ],
)
def test_a_command_says_what_it_cannot_do(command, words, status, told, tmp_path, capsys):
    out = [] if command == modules.main else ["--out", str(tmp_path / "r.json")]
    with pytest.raises(SystemExit) if status == 2 else contextlib.nullcontext():
        assert command([*words.split(), *out]) == status
    assert told in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("visible", "one"), [(None, "0"), ("2,3", "2"), ("GPU-a", "GPU-a"), ("", "")]
)
def test_who_times_beside_pytorch_sees_one_gpu(visible, one, monkeypatch):
    """JAX leaves the last device current, and PyTorch hands on arrays of the current one alone."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    program.share_device(2, one=False)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible
    program.share_device(1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == one
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"


def test_products_are_beside_their_ceiling(tmp_path, capsys):
    out = tmp_path / "r.json"
    args = ["--op", "linear", "--calls", "2", "--vs", "xla", "--out", str(out)]
    assert run.main(args) == 0
    told = json.loads(out.read_text())
    assert told["product_tflop_s"] > 0
    assert "product_tflop_s " in capsys.readouterr().out
    for row in told["rows"]:
        rate = {"forward": 2, "backward": 4, "both": 6}[row["direction"]] * 256**3 / row["us"]
        assert row["percent_products"] > 0
        assert row["tflop_s"] == pytest.approx(rate * 1e-6, rel=2e-3)
        assert row["first_call_s"] > 0
        assert row["compile_s"] >= 0


@pytest.mark.exhaustive
def test_a_loss_is_timed_with_its_gradient():
    """A loss that is slightly off, or has no gradient, is a wrong result."""

    def measured(change):
        """By a loss of a weight that lies as an embedding does, and of a changed x."""
        loss = SMALL.of.peers["jax"]()
        call = lambda x, w, labels: loss(change(x), w.T, labels)
        take, back = (lambda x, w, labels: (x, w.T, labels)), (lambda dx, dw: (dx, dw.T))
        return peers.measure_jax(SMALL, Arranged(call, take, back=back), calls=1)

    assert [*measured(lambda x: x)] == ["forward", "both"]
    for change in (jax.lax.stop_gradient, lambda x: 1.1 * x):
        with pytest.raises(RuntimeError, match="against plain JAX"):
            measured(change)


def test_a_mean_is_held_to_a_hundredth_of_other_errors():
    assert float(peers.error(jnp.float32(2.001), jnp.float32(2))) == pytest.approx(0.05, 1e-2)
    assert float(peers.error(jnp.full(3, 2.001), jnp.full(3, 2.0))) == pytest.approx(5e-4, 1e-2)


class Tensor:
    """A tensor of PyTorch that is an array of JAX, and knows of what function it is the result."""

    requires_grad = False

    def __init__(self, array, tape=None):
        self.array, self.tape, self.ndim, self.nbytes = array, tape, array.ndim, array.nbytes
        self.detach = self.clone = lambda: Tensor(array)
        self.is_floating_point = lambda: jnp.issubdtype(array.dtype, jnp.floating)
        self.is_complex = lambda: False

    def requires_grad_(self):
        self.requires_grad = True
        return self


def fake_torch():
    """As much of PyTorch as the bench takes to time a function."""

    def grad(out, wanted, dout, retain_graph=False):
        f, args = out.tape
        grads = jax.vjp(f, *(t.array for t in args))[1](dout.array)
        return [Tensor(g) for t, g in zip(args, grads, strict=True) if any(t is w for w in wanted)]

    torch = types.ModuleType("torch")
    torch.from_dlpack, torch.no_grad = Tensor, contextlib.nullcontext
    torch.ones_like = lambda t: Tensor(jnp.ones_like(t.array))
    torch.randn_like = lambda t: Tensor(jax.random.normal(jax.random.key(0), t.array.shape))
    torch.autograd = types.SimpleNamespace(grad=grad)
    nothing = ("synchronize", "reset_peak_memory_stats", "max_memory_allocated", "memory_allocated")
    torch.cuda = types.SimpleNamespace(**dict.fromkeys(nothing, lambda: 0))
    return torch


def test_a_library_for_pytorch_is_timed_beside_plain_jax(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", fake_torch())
    monkeypatch.setattr(jax.dlpack, "from_dlpack", lambda tensor: tensor.array)
    norm = next(case for case in measured.cases(small=True) if case.op == "rms_norm")
    for case, passes in (norm, ["forward", "both", "backward"]), (SMALL, ["forward", "both"]):
        for factor in (1.0, 1.1):
            f = lambda *a, factor=factor, case=case: factor * case.call(*a, implementation="xla")
            of = Arranged(lambda *ts, f=f: Tensor(f(*(t.array for t in ts)), (f, ts)))
            if factor == 1:
                assert [*peers.measure_torch(case, of, 1)] == passes
            else:
                with pytest.raises(RuntimeError, match="against plain JAX"):
                    peers.measure_torch(case, of, 1)


@pytest.mark.compiled
@pytest.mark.large
@pytest.mark.needs("torch")
def test_pytorch_is_timed_in_each_pass(tmp_path):
    """In processes that hold nothing of JAX's; a loss has no backward of its own."""
    out = tmp_path / "r.json"
    words = "--op rms_norm --shape 16384x256 --op linear_cross_entropy "
    words += f"--shape 16384x768x50304-plain --vs compile --calls 1 --out {out}"
    subprocess.run([sys.executable, "-m", "bench", "run", *words.split()], check=True)
    rows = [r for r in json.loads(out.read_text())["rows"] if r["implementation"] == "compile"]
    found = {op: {r["direction"] for r in rows if r["op"] == op} for op in ("rms_norm", SMALL.op)}
    assert found == {"rms_norm": {"forward", "both", "backward"}, SMALL.op: {"forward", "both"}}
    assert all(row["us"] > 0 for row in rows)


@pytest.mark.exhaustive
def test_optimizer_steps_are_timed_beside_optax(tmp_path, monkeypatch):
    names = ["xla", "optax", "update", "liger"]
    monkeypatch.setattr(peers, "installed", lambda: names[1:])
    args = ["--op", "fused_adamw", "--calls", "1", "--vs", ",".join(names)]
    assert run.main([*args, "--out", str(tmp_path / "r.json")]) == 0
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [(r["implementation"], r["direction"]) for r in rows] == [(n, "step") for n in names[:3]]


@pytest.mark.exhaustive
def test_optax_does_the_same_steps():
    for shape in ("100M", "100M-master", "100M-folded", "100M-bf16-all"):
        step = case_of("fused_adamw", shape)
        for name in ("optax", "update")[shape == "100M-bf16-all" :]:
            got, want = (measured.changes_of(step, by)() for by in (name, "xla"))
            timing.agrees(shape, timing.error(got, want))


def test_a_wrong_step_is_not_timed(monkeypatch):
    right = measured.step_program

    def wrong(step, name):
        init, go = right(step, name)
        return init, (go if name == "xla" else lambda g, s, p: go(g, s, [0.9 * a for a in p]))

    monkeypatch.setattr(measured, "step_program", wrong)
    with pytest.raises(RuntimeError, match="against plain JAX"):
        measured.measure_step(optim.steps(small=True)[0], "optax", 1)


def test_who_times_is_alone_and_goes_before_those_who_compile(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_folder", tmp_path)
    order, started, asked = [], threading.Event(), threading.Event()

    def compile_first():
        with processes.compiling():
            started.set()
            asked.wait()
            order.append("compiled")

    def measure():
        with processes.alone():
            order.append("timed")

    def compile_later():
        with processes.compiling():
            order.append("compiled later")

    threads = [threading.Thread(target=f) for f in (compile_first, measure, compile_later)]
    threads[0].start()
    started.wait()
    threads[1].start()
    with contextlib.suppress(BlockingIOError):  # a compiler that asks now finds one that waits
        while True:
            with processes.locked("turn", fcntl.LOCK_SH | fcntl.LOCK_NB):
                time.sleep(0.001)
    threads[2].start()
    asked.set()
    for thread in threads:
        thread.join()
    assert order == ["compiled", "timed", "compiled later"]


def test_kernels_of_other_threads_are_counted_to_their_calls():
    """CUPTI may report a backward's, from its thread, after all forwards."""
    forward, backward = [("f", 1.0), ("f", 2.0)], [("g", 10.0), ("h", 5.0), ("g", 20.0), ("h", 5.0)]
    assert timing.by_call(forward + backward, 2) == ([16.0, 27.0], ["f", "g", "h"])
    with pytest.raises(RuntimeError, match="3 kernels were recorded for 2 calls"):
        timing.by_call([*forward, ("g", 1.0)], 2)


# Errors in ulp


@pytest.mark.parametrize("dtype", accuracy.DTYPES)
def test_an_ulp_is_the_distance_of_neighbours(dtype):
    x = np.array([1.0, -1.5, 1.9], np.float64)
    got = jnp.asarray(x, dtype)
    step = float(jnp.finfo(dtype).eps)
    assert accuracy.ulps(got, np.asarray(got, np.float64) + step).tolist() == [1.0, 1.0, 1.0]
    assert accuracy.ulps(got, x).max() <= 0.5
    assert accuracy.ulps(jnp.asarray([1.0, np.nan], dtype), np.ones(2)).tolist() == [0.0, np.inf]


def test_small_values_count_in_ulps_of_the_root_mean_square():
    want = np.array([1.0] * 99 + [1e-6])
    got = want.astype(np.float32)
    got[-1] += 2.0**-24  # half an ulp of the root mean square, which is just below 1
    assert accuracy.ulps(got, want)[-1] == pytest.approx(1.0, rel=1e-3)


def errors(op, folder, *args):
    """The errors of the ledger of an op in bf16."""
    out = folder / "a.json"
    assert accuracy.main(["--op", op, "--dtype", "bfloat16", "--out", str(out), *args]) == 0
    rows = json.loads(out.read_text())["rows"]
    return {(row["implementation"], row["array"]): row["max_ulp"] for row in rows}


def test_ledger_of_an_op(tmp_path, capsys):
    found = errors("silu", tmp_path, "--interpret")
    assert len(found) == 6
    for array in ("out", "dx"):
        assert found["mosaic", array] <= 0.51  # rounded once
        assert found["xla", array] <= 0.51
        assert found["expression", array] > 0.6
    said = capsys.readouterr().out
    assert "INTERPRETER" in said
    assert "| silu | dx | bfloat16 |" in said


@pytest.mark.exhaustive
def test_labels_have_no_errors(tmp_path):
    found = errors("cross_entropy", tmp_path)
    assert {array for _, array in found} == {"out", "dlogits"}
    assert all(ulp < 2 for (who, _), ulp in found.items() if who == "xla")


def test_worse_than_twice_the_expression_is_marked():
    for mean, marked in ((0.39, False), (0.41, True)):
        row = {"xla": {"mean_ulp": mean}, "expression": {"mean_ulp": 0.2}}
        assert accuracy._worse(row) == marked


def test_who_refused_is_named():
    (row,) = accuracy.measure("linear, float32, mosaic")
    assert row["refused"].startswith("linear float32, jaxkern: ")
    assert {row["implementation"] for row in accuracy.measure("linear, float32, xla")} == {"xla"}


def test_ledger_has_every_op():
    measured = {case.op for case, _ in accuracy.subjects(small=True).values()}
    assert measured == {c.op for c in TABLE if c.errors}
