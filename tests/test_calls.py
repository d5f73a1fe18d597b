"""The table of cases, what ops say of wrong arguments, and what they do with empty ones."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkern
from bench.cases import MODELS, TABLE
from bench.cases.case import AXES, dtypes, total, truth
from jaxkern.core import dispatch
from tests import check
from tests.test_modes import BF16, CASES, F32, KERNELS, gradients, in_turn

SIZES = {"b": 2, "m": 7, "l": 5, "d": 32, "k": 16, "h": 24, "n": 3, "w": 4}
SIZES |= {"heads": 6, "p": 64, "g": 1, "v": 40}
MIXED = dtypes(BF16, matrices=F32, parameters=F32)
OF_PRODUCTS = {"linear", "gated_linear_unit", "rms_norm_linear", "layer_norm_linear"}


def _emptied(case):
    """Sizes in which all axes of the case are empty, and those in which one is."""
    axes = set(case.axes.split()) & {*"bmlkhp", "heads"}
    axes |= set() if "group_size" in case.options else {"d"} & set(case.axes.split())
    for empty in (axes, *({axis} for axis in sorted(axes))):
        none = {SIZES[axis] for axis in empty}
        yield SIZES | dict.fromkeys(empty, 0), lambda n, none=none: n * (n not in none)


def _check_empty(case, implementation):
    """Results and gradients have their shapes and dtypes, and what nothing depends on is 0."""
    call = functools.partial(case.call, implementation=implementation)
    full = jax.tree.leaves(jax.eval_shape(call, *case.types(SIZES, MIXED)))
    every = list(_emptied(case))
    given = [case.arrays(jax.random.key(0), sizes, MIXED) for sizes, _ in every]
    run = lambda arrays: (jax.tree.leaves(call(*arrays)), gradients(call, arrays)(*arrays)[1])
    with check.running(implementation):  # one program is compiled sooner than one for each
        found = jax.jit(lambda given: [run(arrays) for arrays in given])(given)
    for (_, left), arrays, (results, grads) in zip(every, given, found, strict=True):
        assert [v.shape for v in results] == [tuple(map(left, v.shape)) for v in full]
        floating = [a for a in arrays if jnp.issubdtype(a.dtype, jnp.floating)]
        for grad, array in zip(grads, floating, strict=True):
            assert (grad.shape, grad.dtype) == (array.shape, array.dtype)
            assert np.isfinite(np.float32(grad)).all()
            assert any(v.size for v in results) or not grad.any()


@in_turn(0, 1)
def test_empty_axes(name):
    _check_empty(CASES[name], None)


@pytest.mark.gpu
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [n for n in KERNELS if CASES[n].op not in OF_PRODUCTS])
def test_empty_axes_of_kernels(name):
    _check_empty(CASES[name], "mosaic")


def test_vmap_of_no_examples():
    """No kernel is launched on a grid of size 0."""
    mean = lambda x: jnp.mean(jaxkern.rms_norm(x))
    grads = jax.vmap(jax.value_and_grad(mean))
    assert not check.kernel_calls(check.lowered(grads, jnp.ones((0, 2, 256))))


ONE_PROGRAM = {case.op: name for name, case in CASES.items() if name != "dropout"}


@pytest.mark.parametrize("name", ONE_PROGRAM.values())
def test_a_second_call_traces_nothing(name, monkeypatch):
    """Outside of jit an op is one program; dropout's case has an array for its rate, to check."""

    def trace():
        raise AssertionError("an op was traced again")

    arrays = CASES[name].arrays(jax.random.key(0), SIZES, MIXED)
    CASES[name].call(*arrays)
    monkeypatch.setattr(dispatch, "standard_promotion", trace)
    CASES[name].call(*arrays)


@pytest.mark.parametrize("name", KERNELS)
def test_implementations_that_there_are_not_are_refused(name):
    kinds = CASES[name].types(SIZES | {"k": 128, "h": 128}, MIXED)
    with pytest.raises(ValueError, match=r'"mosaic", "xla" or None, got \'triton\''):
        jax.eval_shape(functools.partial(CASES[name].call, implementation="triton"), *kinds)
    if not check.ON_GPU:
        run = jax.jit(functools.partial(CASES[name].call, implementation="mosaic"))
        with pytest.raises(NotImplementedError, match=r"lowered for cpu. Use implementation="):
            run.lower(*kinds)


def test_an_unknown_default_implementation_is_named():
    """JAXKERN_IMPLEMENTATION may give one, as nothing checks it before a call."""
    with pytest.raises(ValueError, match=r"None, got 'triton'"), dispatch._default("triton"):
        jaxkern.rms_norm(jnp.ones((2, 8)))
    with (
        pytest.raises(ValueError, match=r"None, got 'triton'"),
        jaxkern.default_implementation("triton"),
    ):
        pass


OF_A_SHAPE = r"(\((\.\.\.|[A-Z])[^a-z]*\)|the shape of \w+)"
"""The shape that an array must have, as messages tell it: in letters, or as another array's."""


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.run is None])
def test_wrong_arguments_are_named(name):
    """An argument that is no array or lacks an axis; if one is longer, what does not go with it."""
    case = CASES[name]
    kinds = case.types(SIZES, MIXED)
    free = next((a.name for a in case.arguments if a.axes.startswith("m")), None)
    for i, (argument, kind) in enumerate(zip(case.names, kinds, strict=True)):
        text = lambda *arrays, i=i: case.call(*arrays[:i], "ones", *arrays[i + 1 :])
        with pytest.raises(TypeError, match=r"^\w+ must be an array, got str"):
            jax.eval_shape(text, *kinds)
        fewer, longer = kind.shape[1:], (kind.shape[0] + 1, *kind.shape[1:])
        for shape, named in ((fewer, argument), (longer, r"\w+")) if argument != free else ():
            wrong = (*kinds[:i], jax.ShapeDtypeStruct(shape, kind.dtype), *kinds[i + 1 :])
            got = re.escape(str(shape)) if named == argument else r"\("
            with pytest.raises(ValueError, match=rf"^{named} must have .*{OF_A_SHAPE}.*got {got}"):
                jax.eval_shape(case.call, *wrong)


WRONG = {
    bool: ("no", 1, None, jnp.array(True)),
    int: (True, 1.5, "2"),
    float: (True, "1", float("nan"), float("inf"), np.float32("inf"), 1j),
    str: (3, True, ("x", 3), object()),
}
"""Values that an option of each type refuses: options are annotated, and those of str name axes."""


def options_of(op):
    """The options of a public function that are compiled in, with their types."""
    for name, parameter in inspect.signature(getattr(jaxkern, op)).parameters.items():
        kinds = [
            k for k in WRONG if str(parameter.annotation).split(" | ")[0] in (k.__name__, str(k))
        ]
        if parameter.kind is parameter.KEYWORD_ONLY and kinds:
            yield name, kinds[0]


@pytest.mark.parametrize("name", [case.name for case in {c.op: c for c in CASES.values()}.values()])
def test_options_of_another_type_are_refused(name):
    case = CASES[name]
    kinds = case.types(SIZES, MIXED)
    for option, kind in options_of(case.op):
        for value in WRONG[kind]:
            wrong = functools.partial(case.call, **{option: value})
            with pytest.raises((TypeError, ValueError), match=rf"^{option} must .*got "):
                jax.eval_shape(wrong, *kinds)


def ones(*shape, dtype=F32):
    return jnp.ones(shape, dtype)


def in_groups(*shape):
    return {"B": ones(*shape), "C": ones(*shape)}


def saving(every):
    return {"checkpoint_every": every}


VALUE, TYPE = ValueError, TypeError
OF_NORMS = [
    (TYPE, r"bias must be an array.*eps is given by name, eps=1e-05", {"bias": 1e-5}),
    (VALUE, "x must have at least one axis", {"x": 1.0}),
    (VALUE, "eps must be at least 0, got -1e-06", {"eps": -1e-6}),
    (VALUE, r'^activation .* one of "relu".* or None; got \'mish\'', {"activation": "mish"}),
    (VALUE, r'^gate_activation .* "relu".*; got \'mish\'', {"gate_activation": "mish"}),
    (VALUE, r'^gate_activation .*"tanh"; got None', {"gate_activation": None}),
    (VALUE, "positive divisor of the last axis of x, 32; got 3", {"group_size": 3}),
    (TYPE, "dtype must be bfloat16, .*, got float8_e5m2", {"dtype": jnp.float8_e5m2}),
    (NotImplementedError, "dtype is float64", {"dtype": "float64", "implementation": "mosaic"}),
]
OF_LOSSES = [
    (TYPE, "labels must be integers, got float32; .* optax", {"labels": ones(7)}),
    (VALUE, "ignore_index must be an int of 32 bits", {"ignore_index": 2**31}),
    (VALUE, "label_smoothing must be at most 1", {"label_smoothing": 1.5}),
    (VALUE, "label_smoothing must be at least 0", {"label_smoothing": -0.1}),
    (VALUE, "logit_softcap must be above 0 or None, got 0", {"logit_softcap": 0}),
    (VALUE, "logit_softcap must .*inf.*None is for no cap", {"logit_softcap": 1e400}),
    (VALUE, '"mean", "sum" or "none", got .max', {"reduction": "max"}),
]
OF_SCANS = [
    (VALUE, r"low <= high, got \(1, 0\); \(-inf, inf\) stands for no", {"dt_limit": (1, 0)}),
    (VALUE, r"dt_limit\[0\] must be a number, got nan", {"dt_limit": (np.nan, 1)}),
    (TYPE, r"dt_limit must be two numbers, \(low, high\); got 1", {"dt_limit": 1}),
    (TYPE, r"must be an int or None, got 'all'", saving("all")),
]
WRONG_CALLS = {
    "silu_and_mul": [(VALUE, r"last axis of even size.*shape \(2, 5\)", {"x": ones(2, 5)})],
    "gelu_and_mul": [(VALUE, r"last axis of even size.*got shape \(\)", {"x": 1.0})],
    "glu": [
        (VALUE, r"without up .*even size.*\(2, 5\)", {"gate": ones(2, 5), "up": None}),
        (VALUE, r'activation .* "relu".*; got \'mish\'', {"activation": "mish"}),
        (VALUE, r'activation must be .*"tanh"; got None', {"activation": None}),
    ],
    "swiglu": [
        (VALUE, "alpha must be above 0, got 0", {"alpha": 0.0}),
        (VALUE, "limit must be above 0 or None, got -7; None is", {"limit": -7}),
    ],
    "rms_norm": OF_NORMS,
    "layer_norm": OF_NORMS,
    "linear": [
        (VALUE, r'activation must be one of "relu".* or None; got', {"activation": "mish"}),
        (VALUE, r"accumulator must have shape \(16, 24\)", {"accumulator": ones(24, 16)}),
        (TYPE, "accumulator must be float32", {"accumulator": ones(16, 24, dtype=BF16)}),
        (VALUE, "accumulate_dtype must be float32", {"x": ones(7, 16), "accumulate_dtype": BF16}),
        *(
            (TYPE, "^accumulate_dtype must be a dtype, got ", {"accumulate_dtype": wrong})
            for wrong in ("bogus", None, 3, ones(3), (None, None))
        ),
        (NotImplementedError, "x is float32", {"x": ones(7, 16), "implementation": "mosaic"}),
    ],
    "rms_norm_linear": [
        (TYPE, "b must be a tuple of 2 arrays, .*; got float", {"w": [ones(16, 8)] * 2, "b": 1.0}),
        (VALUE, "as many arrays, .*; got 2 and 1", {"w": [ones(16, 8)] * 2, "b": (None,)}),
    ],
    "gated_linear_unit": [
        (VALUE, r"\(K, 2N\).*odd number", {"w_gate": ones(16, 25), "w_up": None}),
        (VALUE, "b_up must be None without w_up", {"w_up": None, "b_up": ones(12)}),
        (VALUE, r"b_gate must have shape \(24,\)", {"b_gate": ones(3)}),
        (VALUE, r"b_up must have shape \(24,\)", {"b_up": ones(3)}),
        (TYPE, "b_up must have a floating dtype", {"b_up": ones(24, dtype=int)}),
        (VALUE, "activation must be one of", {"activation": None}),
        (VALUE, r'alpha is .* within "silu".*=\'gelu\'', {"activation": "gelu", "alpha": 1.702}),
        (VALUE, "limit must be above 0", {"limit": 0.0}),
        (VALUE, r"two arrays \(16, 24\).*got one array", {"accumulators": ones(16, 24)}),
        (VALUE, "of w_gate and of w_up; got 1", {"accumulators": (ones(16, 24),)}),
        (TYPE, r"^accumulators\[0\] must be an array, got", {"accumulators": (None, None)}),
        (VALUE, r"\(16, 24\) = \(K, 2N\)", {"w_up": None, "accumulators": ones(3, 3)}),
    ],
    "cross_entropy": OF_LOSSES,
    "linear_cross_entropy": [
        *OF_LOSSES,
        (VALUE, r"goes in as weight\.T", {"weight": ones(40, 16)}),
        (VALUE, "memory must be at least 1, got 0", {"memory": 0}),
        (TYPE, "accumulator must be float32", {"accumulator": ones(16, 40, dtype=BF16)}),
    ],
    "linear_scan, continued": [
        (TYPE, r"b must be complex where a is.*16.*astype\(complex", {"a": 1j * ones(2, 5, 32)}),
        (TYPE, "b must be complex where initial_state", {"initial_state": 1j * ones(2, 32)}),
    ],
    "causal_conv1d, continued": [
        (VALUE, r"W at least 1; got \(32, 0\)", {"weight": ones(32, 0)}),
        (VALUE, "activation must be \"silu\" or None, got 'relu'", {"activation": "relu"}),
    ],
    "ssd": [
        *OF_SCANS,
        (VALUE, r"A must have shape \(6,\) = \(H,\) of x; got \(6, 1\)", {"A": ones(6, 1)}),
        (
            ValueError,
            r"B must have a number of groups that divides the 6.*4",
            in_groups(2, 5, 4, 3),
        ),
        (VALUE, r"C must have shape \(2, 5, 1, 3\).*as B", {"C": ones(1, 5, 1, 3)}),
        (VALUE, r"D must have shape \(6,\) = \(H,\) of x, or \(H, P\)", {"D": ones(3)}),
        (VALUE, r"D must have shape \(6, 64\) = \(H, P\) of x; got", {"D": ones(6, 6)}),
        *((VALUE, f"multiple of 128 or None, got {k}; try", saving(k)) for k in (0, -128, 64, 200)),
    ],
    "selective_scan": [
        *OF_SCANS,
        (VALUE, r"A must have shape \(D, N\), D the 32 .*\(3, 32\)", {"A": ones(3, 32)}),
        (VALUE, r"B must have shape \(2, 5, 3\).*got \(2, 3, 5\)", {"B": ones(2, 3, 5)}),
        (VALUE, r"C must have shape \(2, 5, 3\).*\(2, 5, 1, 3\)", {"C": ones(2, 5, 1, 3)}),
        (VALUE, r"B must have a number of groups .* the 32.*got 5", in_groups(2, 5, 5, 3)),
        *((VALUE, f"1, a multiple of 8 or None, got {k}; try", saving(k)) for k in (0, -8, 2, 20)),
    ],
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_calls(name):
    case = CASES[name]
    like = (ones(*t.shape, dtype=t.dtype) for t in case.types(SIZES, MIXED))
    right = dict(zip(case.names, like, strict=True))
    for error, words, changes in WRONG_CALLS[name]:
        arrays = (right | {n: v for n, v in changes.items() if n in right}).values()
        options = {n: v for n, v in changes.items() if n not in right}
        with pytest.raises(error, match=words):
            case.call(*arrays, **options)


STATIC = " must be .* compiled in; .*static_argnames"
TRACED = {
    "norm_before_gate": ("rms_norm", True, STATIC),
    "group_size": ("rms_norm", 4, STATIC),
    "eps": ("rms_norm", 1e-5, STATIC),
    "limit": ("swiglu", 7.0, " must be a Python number.*static"),
    "dt_limit": ("ssd", 1.0, r"\[1\] must be a Python number, as it is comp"),
}


@pytest.mark.parametrize("option", TRACED)
def test_traced_options_name_their_remedy(option):
    name, value, words = TRACED[option]
    kinds = CASES[name].types(SIZES, MIXED)
    given = lambda value: {option: (0, value) if option == "dt_limit" else value}
    call = lambda value, *arrays: CASES[name].call(*arrays, **given(value))
    with pytest.raises(TypeError, match=f"^{option}{words}"):
        jax.eval_shape(call, value, *kinds)


# The table of cases: that it has every op, and that what it says of an op holds

OPS = {
    name
    for name, f in inspect.getmembers(jaxkern, inspect.isfunction)
    if f.__module__.startswith("jaxkern.ops")
}


def test_every_op_has_its_cases():
    """One for the strict modes, and errors against float64."""
    assert {c.op for c in TABLE if c.strict} == OPS
    assert {c.op for c in TABLE if c.errors} == {op for op in OPS if not op.endswith("_step")}


def test_what_is_timed_has_a_cost_and_one_name():
    timed = [c for c in TABLE if c.shapes]
    assert len({c.name for c in timed}) == len(timed)
    assert all(c.forward and total(c.forward.elements, c.sizes(c.shapes[0].sizes)) for c in timed)
    assert {name for ops in MODELS.values() for name, _ in ops} <= {c.name for c in timed}


def test_a_case_without_kernels_is_plain_jax_where_that_is_named(monkeypatch):
    """Else the op chooses."""
    (c,) = (c for c in TABLE if c.name == "gated_delta_rule_step")
    asked = []
    recording = functools.wraps(jaxkern.gated_delta_rule_step)(lambda *_, **how: asked.append(how))
    monkeypatch.setattr(jaxkern, c.op, recording)
    for name in ("mosaic", None, "xla"):
        c.call(*c.names, implementation=name)
    assert asked == [{}, {}, {"implementation": "xla"}]


def test_sizes_of_arguments_and_costs():
    gated = next(c for c in TABLE if c.name == "gated_linear_unit, joined")
    sizes = gated.sizes(((2, 5), 8, 4))
    types = gated.types(sizes, dtypes("bfloat16", parameters="float32"))
    assert [(t.shape, str(t.dtype)) for t in types] == [
        ((2, 5, 8), "bfloat16"),
        ((8, 8), "bfloat16"),
        ((8,), "float32"),
    ]
    assert total("m k + 1/8 k h", {"m": 10, "k": 8, "h": 4}) == 10 * 8 + 4


COLLECTIVES = "all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"


def test_what_is_strict_says_how_a_mesh_splits_it():
    """Over axes of the case, one of which is the batch's or the rows' and in every result."""
    for c in (c for c in TABLE if c.strict):
        assert set(c.split.split()) <= set(c.axes.split())
        sizes = dict.fromkeys(AXES, 4) | {"m": (4, 2)}
        *_, result = c.specs(c.split[0], "data", sizes)
        assert "data" in result or c.op == "accumulate_weight_grad"
    (c,) = (c for c in TABLE if c.name == "linear, gelu")
    sizes = {"m": (4, 2), "k": 8, "h": 8}
    assert c.specs("m", "x", sizes) == (
        P("x", None, None),
        P(None, None),
        P(None),
        P("x", None, None),
    )
    assert c.specs("h", "x", sizes)[1:] == (P(None, "x"), P("x"), P(None, None, "x"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("c", [c for c in TABLE if c.strict and c.sequence], ids=lambda c: c.name)
def test_a_split_sequence_exchanges_what_its_case_says(c):
    """In plain JAX; what kernels exchange over every axis is in `bench collectives`."""
    mesh = check.mesh_of(AxisType.Auto, 4, names=("data",))
    sizes = dict.fromkeys(AXES, 8) | {"m": (8, 2), "w": 4, "g": 1}
    sizes["l"] = 1024  # a part has the tokens from one saved state to the next
    sizes["d"] = 128  # for fewer plain JAX convolves, which XLA splits as it likes
    arrays = c.types(sizes, dtypes("float32"))

    def run(dout, *arrays):
        first = lambda *arrays: jax.tree.leaves(c.call(*arrays))[0]
        out, vjp = jax.vjp(first, *arrays)
        return out, vjp(dout)

    dout = jax.tree.leaves(jax.eval_shape(c.call, *arrays))[0]
    *ins, out = (NamedSharding(mesh, spec) for spec in c.specs("l", "data", sizes))
    given = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)
        for a, s in zip((dout, *arrays), (out, *ins), strict=True)
    ]
    text = jax.jit(run).lower(*given).compile().as_text()
    found = {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in COLLECTIVES}
    assert {kind: n for kind, n in found.items() if n} == c.collectives("l")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "c", [c for c in TABLE if c.expression and c.errors and c.errors.small], ids=lambda c: c.name
)
def test_expressions_are_of_the_op(c):
    """In float32 both are near the truth, so that each is measured against what it should be."""
    sizes = c.sizes(c.errors.small)
    arrays = c.arrays(jax.random.key(5), sizes, dtypes("float32"))
    want, *_ = truth(c, arrays, np.ones(jax.eval_shape(c.expression, *arrays).shape))
    for got in (c.expression(*arrays), c.call(*arrays, implementation="xla")):
        error = np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)
        assert error < 1e-5
