"""The optimizers where Optax's stand: the same arguments, and what its own tests ask of each."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxkern

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
NAMES = ("adam", "adamw", "sgd")
OPTIONS = {"adam": {}, "adamw": {"weight_decay": 0.1}, "sgd": {"momentum": 0.9}}


def fused(name):
    return getattr(jaxkern, f"fused_{name}")


def made(name, module=jaxkern, **options):
    make = fused(name) if module is jaxkern else getattr(module, name)
    return make(**({"learning_rate": 0.1} | OPTIONS[name] | options))


def assert_close(got, want, rtol=3e-6):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    close = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=1e-6)
    jax.tree.map(lambda a, b: close(np.float64(a), np.float64(b)), got, want)


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_those_of_optax(name):
    """By position and by name, with the same defaults; those beyond Optax's are by name alone."""
    ours = inspect.signature(fused(name)).parameters
    theirs = inspect.signature(getattr(optax, name)).parameters
    by_position = lambda parameters: [
        (p.name, p.default) for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    assert by_position(ours) == by_position(theirs)
    for p in theirs.values():
        assert (ours[p.name].kind, ours[p.name].default) == (p.kind, p.default)


# What may be made of nothing but shapes


def test_init_takes_shapes_as_optax_does():
    shape = jax.ShapeDtypeStruct((2, 4), F32)
    tree = {"w": shape, "h": jax.ShapeDtypeStruct((4,), BF16), "none": None}
    for name in NAMES:
        got, want = made(name).init(tree), made(name).init(jax.tree.map(jnp.ones_like, tree))
        assert_close(got, want)
    assert made("adamw").init(shape).mu.shape == optax.adamw(0.1).init(shape)[0].mu.shape


def test_shapes_of_a_state_need_no_values():
    tx = made("adamw", master_dtype=F32, mu_dtype="int8", nu_dtype="uint8", skip_nonfinite=True)
    tree = {"w": jnp.ones((16, 256), BF16), "b": jnp.ones(3)}
    shapes = jax.eval_shape(lambda: tree)
    types = lambda state: jax.tree.map(lambda a: (a.shape, a.dtype), state)
    assert types(jax.eval_shape(tx.init, shapes)) == types(tx.init(tree))
    with pytest.raises(TypeError, match=r"params\['w'\] must be an array.*jax.eval_shape"):
        tx.init(shapes)
    with pytest.raises(TypeError, match=r"grads.* must be a floating array, got ShapeDtypeStruct"):
        jaxkern.apply(tx, shapes, tx.init(tree), tree)


def test_numbers_are_scalars():
    """Python's floats and NumPy's; Optax takes them as parameters too."""
    params, grads = {"a": 2.0, "b": np.float32(1.0)}, {"a": 0.5, "b": np.float32(0.25)}
    for name in NAMES:
        ours, theirs = made(name), made(name, optax)
        got, _ = jaxkern.apply(ours, grads, ours.init(params), params)
        updates, _ = ours.update(grads, ours.init(params), params)
        want = theirs.update(grads, theirs.init(params), params)[0]
        assert_close(updates, want)
        assert_close(got, optax.apply_updates(params, want))


# Wrong arguments, when the optimizer is made

WRONG = [
    ("adamw", {"learning_rate": "1e-3"}, TypeError, "'1e-3' (str); pass float('1e-3')"),
    ("sgd", {"learning_rate": None}, TypeError, "learning_rate must be a number"),
    (
        "adam",
        {"learning_rate": float("nan")},
        ValueError,
        "learning_rate must be a number, got nan",
    ),
    ("adam", {"learning_rate": [1e-3]}, TypeError, "got [0.001] (list)"),
    ("adamw", {"learning_rate": jnp.ones(2)}, ValueError, "got shape (2,)"),
    ("adamw", {"b1": lambda count: 0.9}, TypeError, "optax.inject_hyperparams"),
    ("adamw", {"b1": jnp.complex64(1)}, TypeError, "array of dtype complex64"),
    ("adamw", {"b2": True}, TypeError, "b2 must be a number or a scalar array, got True"),
    ("adamw", {"eps": "small"}, TypeError, "eps must be"),
    ("adamw", {"eps_root": -1.0}, ValueError, "eps_root must be at least 0"),
    ("adamw", {"weight_decay": None}, TypeError, "weight_decay must be"),
    ("adamw", {"clip_norm": "1"}, TypeError, "clip_norm must be"),
    ("adamw", {"mask": {"w": "no"}}, TypeError, "mask['w'] must be True or False, got 'no'"),
    ("adamw", {"mask": "biases"}, TypeError, "mask must be True or False"),
    ("adamw", {"mu_dtype": "wide"}, TypeError, "mu_dtype must be a dtype"),
    ("adamw", {"master_dtype": "wide"}, TypeError, "master_dtype must be float32 or None"),
    ("adamw", {"seed": 0.5}, TypeError, "seed must be an integer"),
    ("adamw", {"seed": jax.random.key(0)}, TypeError, "jax.random.bits(key)"),
    ("adamw", {"nesterov": 0.9}, TypeError, "nesterov must be True or False, got 0.9"),
    ("adamw", {"skip_nonfinite": "no"}, TypeError, "skip_nonfinite must be True or False"),
    ("adam", {"stochastic_rounding": 1}, TypeError, "stochastic_rounding must be True or False"),
    ("sgd", {"momentum": True}, TypeError, "momentum must be a number"),
    ("sgd", {"nesterov": 0.9}, TypeError, "nesterov must be True or False"),
]


@pytest.mark.parametrize(("name", "wrong", "error", "words"), WRONG)
def test_refuses_wrong_arguments_when_it_is_made(name, wrong, error, words):
    with pytest.raises(error, match=re.escape(words)):
        made(name, **wrong)


def test_numbers_may_be_of_any_kind():
    """Of NumPy, of JAX, traced or whole; an infinite norm clips nothing."""
    params = {"w": jnp.ones(3)}
    want = jaxkern.apply(tx := made("adamw"), params, tx.init(params), params)[0]
    for kind in (np.float64, np.float32, jnp.float32, lambda n: jnp.asarray(n)[...]):
        tx = made("adamw", learning_rate=kind(0.1), weight_decay=kind(0.1), b1=kind(0.9))
        assert_close(jaxkern.apply(tx, params, tx.init(params), params)[0], want)

    @jax.jit
    def step(rate, b2):
        tx = made("adamw", learning_rate=rate, b2=b2, eps_root=rate * 0)
        return jaxkern.apply(tx, params, tx.init(params), params)[0]

    assert_close(step(0.1, 0.999), want)
    clipped = made("adamw", clip_norm=float("inf"), eps=0)
    assert_close(jaxkern.apply(clipped, params, clipped.init(params), params)[0], want)


def test_schedules_must_return_numbers():
    params = {"w": jnp.ones(3)}
    for value, error, words in (
        (None, TypeError, "the value of the schedule learning_rate must be a number"),
        (jnp.ones(3), ValueError, r"the schedule learning_rate .* got shape \(3,\)"),
    ):
        tx = made("adamw", learning_rate=lambda count: value)  # noqa: B023
        with pytest.raises(error, match=words):
            tx.update(params, tx.init(params), params)


def test_masks_that_do_not_fit():
    params = {"w": jnp.ones(3), "b": [jnp.ones(2), jnp.ones(2)]}
    step = lambda mask: jaxkern.apply(
        tx := made("adamw", mask=mask), params, tx.init(params), params
    )[0]
    for mask in ({"w": True}, {"w": True, "b": True, "c": True}, [True, False]):
        with pytest.raises(ValueError, match=r"mask must have the structure of params.*mask\["):
            step(mask)
    with pytest.raises(TypeError, match="mask must be True or False"):
        step(lambda params: None if params is None else 1)
    whole = {"w": True, "b": [False, False]}
    assert_close(step({"w": np.True_, "b": False}), step(whole))
    assert_close(step(lambda params: {"w": jnp.array(True), "b": False}), step(whole))


def test_loss_scale_and_norm_of_a_wrong_call():
    params = jnp.ones(3)
    for tx in (made("adam"), optax.adam(0.1)):
        with pytest.raises(TypeError, match=r"loss_scale must be one of jaxkern.precision, got 8"):
            jaxkern.apply(tx, params, tx.init(params), params, loss_scale=8.0)
    with pytest.raises(TypeError, match=r"loss_scale must be one of jaxkern\.precision"):
        jaxkern.scale_gradients(params, 8.0)
    wrapped = optax.chain(made("adam", clip_norm=1.0))
    with pytest.raises(ValueError, match="grad_norm must be None for a transformation other"):
        jaxkern.apply(wrapped, params, wrapped.init(params), params, grad_norm=jnp.float32(1.0))


def test_trees_that_differ_are_told_apart_in_few_words():
    """Whatever the trees hold: no dump of them."""
    tx = made("adam")
    params = {f"layer{i}": {"w": jnp.ones(2), "b": jnp.ones(2)} for i in range(40)}
    state = tx.init(params)
    cut = {k: v for k, v in params.items() if k != "layer7"}
    for grads, words in (
        (cut, "grads['layer7']['b'] is missing"),
        (params | {"more": jnp.ones(2)}, "grads['more'] is not in params"),
        (list(params.values()), "grads['layer0']['b'] is missing"),
        (None, "grads['layer0']['b'] is missing"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)) as error:
            jaxkern.apply(tx, grads, state, params)
        assert len(str(error.value)) < 160


def test_complex_parameters_are_refused():
    with pytest.raises(TypeError, match="split_real_and_imaginary"):
        made("adam").init({"c": jnp.ones(2, jnp.complex64)})
    tx = optax.contrib.split_real_and_imaginary(made("adam"))
    updates, _ = tx.update(c := jnp.ones(2, jnp.complex64), tx.init(c), c)
    assert updates.dtype == jnp.complex64


# What Optax's own tests ask of every optimizer


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, {"master_dtype": F32, "skip_nonfinite": True}])
def test_states_can_be_mapped_over_as_parameters(name, options):
    """By ``optax.tree.map_params``, which inits with a placeholder."""
    tx = made(name, **options)
    params = {"w": jnp.ones((2, 3), BF16 if options else F32), "b": jnp.ones(3)}
    state = tx.init(params)
    mapped = optax.tree.map_params(tx, lambda a: a + 1, state)
    fields = {"sgd": ("trace",)}.get(name, ("mu", "nu"))
    for field in fields:
        assert_close(getattr(mapped, field), jax.tree.map(jnp.ones_like, getattr(state, field)))
    assert mapped.count == 0


@pytest.mark.parametrize("name", NAMES)
def test_other_arguments_of_update_are_let_pass(name):
    params = jnp.ones(3)
    tx = made(name)
    tx.update(params, tx.init(params), params, value=1.0)
    jaxkern.apply(tx, params, tx.init(params), params, value=1.0)


@pytest.mark.parametrize("name", NAMES)
def test_injected_hyperparameters_change_nothing(name):
    params = [-jnp.ones((2, 3)), jnp.ones((2, 5, 2))]
    grads = [jnp.ones((2, 3)), -jnp.ones((2, 5, 2))]
    options = {"learning_rate": 0.1} | OPTIONS[name]
    tx, injected = made(name), optax.inject_hyperparams(fused(name))(**options)
    updates, state = jax.jit(tx.update)(grads, jax.jit(tx.init)(params), params)
    got, inner = jax.jit(injected.update)(grads, jax.jit(injected.init)(params), params)
    assert_close(got, updates)
    assert_close(inner.inner_state, state)


@pytest.mark.parametrize("dtype", [F16, BF16, F32, jnp.float64])
@pytest.mark.parametrize("name", NAMES)
def test_types_are_stable(name, dtype):
    """Updates have the parameters' dtype, and the state its own, as ``lax.cond`` wants it."""
    with jax.enable_x64(dtype == jnp.float64):
        tx = made(name)
        params = jnp.array([-1.0, 10.0, 1.0], dtype)

        @jax.jit
        def step(params, state):
            even = jax.random.randint(jax.random.key(0), (), 0, 2) == 0
            updates, new = jax.lax.cond(
                even, lambda: tx.update(2 * params, state, params), lambda: (params, state)
            )
            done = jaxkern.apply(tx, params, new, params)
            return jax.lax.cond(even, lambda: done, lambda: (updates + params, new))

        state = tx.init(params)
        for _ in range(2):
            params, state = step(params, state)
        assert params.dtype == dtype
        assert step._cache_size() == 1


@pytest.mark.parametrize("name", NAMES)
def test_accumulated_steps_wait(name):
    """Of ``optax.MultiSteps``: zeros in the parameters' dtype, until one in four."""
    steps = optax.MultiSteps(made(name), every_k_schedule=4)
    params = jnp.array([1.0, 2.0], BF16)
    state = jax.jit(steps.init)(params)
    update = jax.jit(steps.update)
    for i in range(4):
        updates, state = update(2 * params, state, params)
        assert updates.dtype == BF16
        assert bool((updates == 0).all()) == (i < 3)


def test_dtypes_of_averages():
    """Of Optax's names, strings too; by default float32 at least."""
    for dtype in (BF16, "bfloat16", np.float32, None):
        wanted = jnp.dtype(dtype or F32)
        for of in (BF16, F32):
            params = jnp.zeros(2, of)
            assert fused("adamw")(0.1, mu_dtype=dtype).init(params).mu.dtype == wanted
            trace = fused("sgd")(0.1, 0.9, accumulator_dtype=dtype).init(params).trace
            assert trace.dtype == wanted


def test_nothing_to_train():
    for tree in ({}, (), {"a": None, "b": {}}):
        for name in NAMES:
            tx = made(name, clip_norm=1.0, skip_nonfinite=True)
            state = tx.init(tree)
            assert jaxkern.apply(tx, tree, state, tree)[0] == tree
            assert tx.update(tree, state, tree)[0] == tree


def test_refuses_what_is_no_step():
    params = {"w": jnp.ones(2)}
    tx = jaxkern.fused_sgd(0.1, clip_norm=1.0)
    state = tx.init(params)
    with pytest.raises(TypeError, match="tx must be an Optax transformation, got NoneType"):
        jaxkern.apply(None, params, state, params)  # pyright: ignore[reportArgumentType]
    for step in (functools.partial(jaxkern.apply, tx), tx.update):
        with pytest.raises(
            TypeError, match="grad_norm must be a number or a scalar array, got 'a'"
        ):
            step(params, state, params, grad_norm="a")
        with pytest.raises(ValueError, match=r"grad_norm must be .*, got shape \(2,\)"):
            step(params, state, params, grad_norm=jnp.ones(2))
        with pytest.raises(TypeError, match="loss_scale must be one of"):
            step(params, state, params, loss_scale=2.0)
