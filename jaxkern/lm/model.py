"""Language models of recurrent blocks and hybrids with attention, in flax.nnx on jaxkern's ops::

    x = embedding[tokens]                                     (B, L, d_model)
    for each layer:
        x = x + layer(rms_norm(x))
    logits = rms_norm(x) · embeddingᵀ                         (B, L, vocab_size)

The layers are blocks of Mamba (:mod:`jaxkern.nn.mamba`, arXiv 2312.00752), of Mamba-2
(:mod:`jaxkern.nn.mamba2`, arXiv 2405.21060), or of Gated DeltaNet or Kimi Delta Attention
(:mod:`jaxkern.nn.delta_net`, arXiv 2412.06464 and 2510.26692) and, in a pattern that the config's
`layers` says, attention and MLPs (:mod:`jaxkern.lm.layers`). The output layer may be a matrix of
its own, `head`. The parameters of all layers of a kind are stacked along a leading axis. The layers
follow one another in the program, or run in a loop over the repeats of their pattern, whose time to
compile does not grow with depth: there, what a layer saves for the backward is copied to and from
arrays that hold it for all. The residual stream `x` is kept in fp32, as in the papers' own code,
and what a layer adds to it is added by the next one's norm; matrix products run in the policy's
compute dtype; A, D and dt_bias enter the scan in the parameters' dtype.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.custom_derivatives import SymbolicZero

import jaxkern
from jaxkern.core.derivatives import Differentiable
from jaxkern.core.dispatch import Implementation
from jaxkern.core.mesh import TypeOf, match_primal
from jaxkern.lm import layers
from jaxkern.lm.config import BLOCKS, DEFAULT_REMAT, REMATS, ModelConfig, Remat
from jaxkern.lm.parallel import Split
from jaxkern.nn import remat as policies
from jaxkern.nn.collectives import whole_beside
from jaxkern.nn.common import Norm
from jaxkern.precision import Policy

DECAYED = frozenset(
    {"embedding", "head", "in_proj", "conv_weight", "x_proj", "dt_proj", "out_proj"}
    | {"f_proj", "g_proj"}
    | {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
)  # weight decay leaves norms, biases, A_log and D alone


def decayed(params: Any) -> Any:
    """The optimizer's mask: a boolean for each parameter, whether it decays."""
    return jax.tree.map_with_path(lambda path, _: path[-1].key in DECAYED, params)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of how the model runs, as opposed to what it is.

    Attributes:
      policy: dtypes.
      implementation: of the ops.
      remat: what the backward computes again: ``"none"``; ``"cheap"`` and ``"scan"``, which keep
        of each block what :mod:`jaxkern.nn.remat` says; or each ``"layer"`` from its input.
      scan_layers: whether the layers run in a loop.
      split: how the model is split between devices, inside ``shard_map``; ``None`` for one device.
      gathers: whether it has one device's parts of matrices, by ``split.fsdp``, to be gathered.

    Raises:
      ValueError: `remat` is none of these.
    """

    policy: Policy = dataclasses.field(default_factory=Policy)
    implementation: Implementation | None = None
    remat: Remat = DEFAULT_REMAT
    scan_layers: bool = False
    split: Split | None = None
    gathers: bool = True

    def __post_init__(self):
        if self.remat not in REMATS:
            raise ValueError(f"remat must be one of {', '.join(REMATS)}; got {self.remat!r}")


_both = jax.checkpoint_policies.save_from_both_policies
_kept = jax.checkpoint_policies.save_only_these_names
POLICIES = {
    "cheap": _both(policies.CHEAP, _kept(*layers.KEPT, "attention")),
    "scan": _both(policies.SCAN, _kept(*layers.KEPT)),
}
"""The results that a layer keeps for the backward."""

_FASTEST = 8
"""Steps between the saved states of Mamba's scan, where speed alone counts, or a layer's states are
there only while its gradients are computed."""

_SMALL = 1 << 19
"""Bytes of a layer's parameter up to which decoding has a copy of it."""


class MambaLM(nnx.Module):
    """The whole model; `blocks` holds all layers, stacked, of a hybrid by their kinds."""

    def __init__(self, config: ModelConfig, options: Options = Options(), *, rngs: nnx.Rngs):
        self.config = config
        self.options = options
        self.split = options.split or Split(config)
        shape = (config.vocab_size, config.d_model)
        self.embedding = nnx.Param(0.02 * jax.random.normal(rngs.params(), shape, jnp.float32))
        self.norm = nnx.Param(jnp.ones(config.d_model, jnp.float32))
        if not config.tie_embeddings:
            bound = config.d_model**-0.5
            self.head = nnx.Param(
                jax.random.uniform(rngs.params(), shape[::-1], jnp.float32, -bound, bound)
            )
        stacks = {kind: self._stacked(kind, rngs) for kind in dict.fromkeys(config.kinds)}
        self.blocks: Any = nnx.Dict(stacks) if config.hybrid else stacks.popitem()[1]

    def _stacked(self, kind: str, rngs: nnx.Rngs) -> Any:
        """All layers of a kind, and the norms before them."""
        config, options = self.config, self.options
        how: Any = {"dtype": options.policy.compute, "implementation": options.implementation}
        one = lambda rngs: layers.make(kind, config, rngs=rngs, **how)
        count = config.count(kind)
        stacked: Any = nnx.split_rngs(splits=count)(nnx.vmap(one, in_axes=0, out_axes=0))(rngs)
        stacked.norm = nnx.Param(jnp.ones((count, config.d_model), jnp.float32))
        return stacked

    @property
    def stacks(self) -> dict[str, Any]:
        """The layers of each kind."""
        return dict(self.blocks) if self.config.hybrid else {self.config.kinds[0]: self.blocks}

    def __call__(
        self,
        tokens: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        """Compute the logits of the token after each one.

        Args:
          tokens: (B, L), any integer dtype. One outside the vocabulary makes its logits NaN, and
            those after it.
          segment_ids: (B, L), integers, for packed documents: one ends where the number changes,
            and its tokens have the logits that they have without the others.
          mask: (B, L), booleans or integers, false or 0 for padding, on the left or the right: the
            other tokens have the logits that they have without it, and padding's mean nothing.
            Padding between tokens parts them as the end of a document does.

        Returns:
          (B, L, vocab_size), the policy's output dtype.

        Raises:
          TypeError: an argument is not an array of integers, or `mask` also of booleans.
          ValueError: a shape does not fit.
        """
        return self._logits(self.hidden(tokens, segment_ids=segment_ids, mask=mask))

    def hidden(
        self,
        tokens: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        mask: jax.Array | None = None,
        isolate_nan: bool = True,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Compute what the output layer multiplies: the last norm of what the layers give.

        Other args and errors are as for a call.

        Args:
          isolate_nan: whether a NaN surely stays in its document, see :func:`jaxkern.ssd`.
          dropout_key: of the config's `dropout`; ``None`` for none. Each device has its own.

        Returns:
          (B, L, d_model), the policy's compute dtype; times :attr:`output_layer` the logits.
        """
        tokens, segment_ids = _check(tokens, segment_ids, mask)
        options: Any = {
            "segment_ids": segment_ids,
            "isolate_nan": isolate_nan,
            "axis_name": self.axis_name,
            "sequence_axis": self.split.axis("sequence"),
        }
        mix = lambda block, x, *_, **more: (block(x, **options, **more), None)
        how: Any = {"unroll": not self.options.scan_layers, "remat": self.options.remat}
        return self._last_norm(*self._run(mix, tokens, dropout_key=dropout_key, **how)[0])

    @property
    def axis_name(self) -> str | None:
        """The mesh axis over which channels, heads and the vocabulary are split."""
        return self.split.axis("tensor")

    def gather_outer(self) -> None:
        """Joins the devices' parts of what is outside of the layers, once for a step."""
        for name in ("embedding", "norm", "head"):
            if hasattr(self, name):
                whole = self._gathered({name: getattr(self, name)[...]})
                setattr(self, name, nnx.Param(whole[name]))

    def _gathered(self, params: Any, **options: Any) -> Any:
        if not self.options.gathers:
            return params
        return self.split.gathered(params, self.options.policy.compute, **options)

    @property
    def output_layer(self) -> jax.Array:
        """The matrix of the output layer, (d_model, vocab_size): of a tied one the embedding's."""
        return self.embedding[...].T if self.config.tie_embeddings else self.head[...]

    def prefill(
        self, tokens: jax.Array, state: Any = None, *, mask: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        """Read prompts, to go on from with :meth:`step`.

        Args:
          tokens: (B, L), any integer dtype, L at least 1.
          state: what earlier tokens left; by default :meth:`init_state`.
          mask: (B, L), booleans or integers, false or 0 for padding, wherever it stands: a row has
            the logits and the state that it has without it. A row with padding begins anew,
            whatever `state` it had; one of padding alone is left with the state before the first
            token.

        Returns:
          The logits after every row's last token, (B, vocab_size) in the output dtype, and the
          state there.

        Raises:
          TypeError, ValueError: as a call does; ValueError without the state that attention needs.
        """
        tokens, segment_ids = _check(tokens, None, mask, to_left=True)
        if not tokens.shape[1]:
            raise ValueError(f"tokens must have at least one token a row, got shape {tokens.shape}")
        options: Any = {"return_cache": True, "segment_ids": segment_ids}

        def mix(block: Any, x: jax.Array, state: Any, number: jax.Array) -> tuple[jax.Array, Any]:
            take = lambda v: jax.lax.dynamic_index_in_dim(v, number, keepdims=False)
            put = lambda v, new: jax.lax.dynamic_update_index_in_dim(v, new, number, 0)
            out, cache = block(x, jax.tree.map(take, state), **options)
            return out, jax.tree.map(put, state, cache)

        before = self.init_state(len(tokens)) if state is None else state
        stream, after = self._run(mix, tokens, before)
        if segment_ids is not None:
            last = segment_ids[:, -1] != 0
            read = lambda leaf: last.reshape(1, -1, *[1] * (leaf.ndim - 2))
            after = jax.tree.map(lambda leaf: jnp.where(read(leaf), leaf, 0), after)
        return self._logits(self._last_norm(*(leaf[:, -1] for leaf in stream))), after

    def step(self, tokens: jax.Array, state: Any, small: Any = None) -> tuple[jax.Array, Any]:
        """One token per row: tokens (B,) -> logits (B, vocab_size), next state.

        They are NaN beyond the tokens that the state of a model with attention is made for. A loop
        over tokens hands on the :meth:`small_params` of each layer, which it has from before.

        A token takes as long as it launches kernels, so there is no loop over the layers. XLA hands
        slices of the stacked matrices to the products that read them, without a copy.
        """
        tokens = jnp.asarray(tokens)
        _check_integers("tokens", tokens)
        if tokens.ndim != 1:
            raise ValueError(
                f"tokens must have shape (B,), got {tokens.shape}; prefill takes sequences"
            )
        x, out = self._embed(tokens)
        small = [self.small_params(*of) for of in self.each_layer] if small is None else small
        for (kind, number), own in zip(self.each_layer, small, strict=True):
            block = self._block(kind, number, own)
            normalised, x = self._add_and_normalise(x, out, block.norm)
            out, after = block.step(normalised, state[kind], layer=number)
            state = state | {kind: after}
        return self._logits(self._last_norm(x, out)), state

    def small_params(self, kind: str, number: Any) -> dict[str, jax.Array]:
        """A layer's small parameters by name, and what its steps would compute of them alone."""
        block = self._block(kind, number, {})
        if kind not in layers.OTHERS:
            block.prepare()
        params = nnx.to_pure_dict(nnx.state(block))
        return {name: leaf for name, leaf in params.items() if leaf.nbytes <= _SMALL}

    @property
    def each_layer(self) -> list[tuple[str, int]]:
        """The kind of each layer, and its number among those of its kind."""
        kinds = self.config.kinds
        return [(kind, kinds[:i].count(kind)) for i, kind in enumerate(kinds)]

    def _block(self, kind: str, number: Any, own: dict[str, jax.Array]) -> Any:
        """Makes a layer of parameters of its `own`, and of slices of the stacks for the others."""
        graphdef, stacked = nnx.split(self.stacks[kind])
        stacked = nnx.to_pure_dict(stacked)
        take = lambda name: self._gathered({name: stacked[name][number]})[name]
        params = {name: own[name] if name in own else take(name) for name in stacked}
        block: Any = nnx.merge(graphdef, params)
        for name in own.keys() - stacked.keys():
            setattr(block, name, nnx.Param(own[name]))
        return block

    def init_state(self, batch_size: int, length: int | None = None) -> Any:
        """The state before the first token, of each kind all layers' stacked.

        Where there is attention, `length` is how many tokens a row will have at most, its prompt's
        among them.
        """
        if "attention" in self.config.kinds and length is None:
            raise ValueError(
                "length must say how many tokens the state is for: attention keeps each of them"
            )

        def stacked(kind: str, stack: Any) -> Any:
            options = (length,) if kind in layers.OTHERS else ()
            tile = lambda a: jnp.tile(a, (self.config.count(kind), *[1] * a.ndim))
            return jax.tree.map(tile, stack.init_cache(batch_size, *options))

        return {kind: stacked(kind, stack) for kind, stack in self.stacks.items()}

    def _run(
        self,
        mix: Callable[..., Any],
        tokens: jax.Array,
        state: Any = None,
        *,
        unroll: bool = False,
        remat: Remat = "none",
        dropout_key: jax.Array | None = None,
    ) -> tuple[Any, Any]:
        """Runs the layers on tokens (...): the stream, what the last layer adds to it, the state.

        `mix` runs a layer: it takes its block, its input, the state of all layers of its kind and
        its number among them, and gives the block's output and the state. `unroll` is whether
        they follow one another, and there is no loop.
        """
        pattern = self.config.pattern
        repeats = self.config.n_layers // len(pattern)
        split = {kind: nnx.split(stack) for kind, stack in self.stacks.items()}
        loop = not unroll
        in_order = remat != "none" and self.split.axes and not self.split.axis("sequence")

        def layer(kind: str, stream: Any, state: Any, params: Any, numbers: Any) -> Any:
            def mixed(weights, stream, state, number):
                params, norm = weights
                params = self._gathered(params, without="norm")
                if in_order:
                    params, stream = _in_order(params, stream)
                block = nnx.merge(split[kind][0], params)
                more: dict[str, Any] = {}
                if remat != "cheap" and kind == "mamba" and state is None:  # not read as a prompt
                    more["checkpoint_every"] = _FASTEST
                x, out = stream
                if of_block:
                    more["norm"] = Norm(norm, x, self.config.eps)
                out, state = mix(block, out, state, number, **more)
                return (out[::-1] if of_block else (x, out)), state

            norm = self._gathered({"norm": params["norm"][...]})["norm"]
            # A block that computes the norm does not keep its result for the backward.
            apply, of_block = mixed, kind in BLOCKS and remat != "layer" and state is None
            if not of_block:
                stream = self._add_and_normalise(stream[0], stream[1], norm)[::-1]
            if remat in POLICIES:
                # The weights' copies in the compute dtype are shared: made again, they would be
                # copied out of the stacked arrays first.
                alone = not loop and (False, True, True, True)
                apply = jax.checkpoint(mixed, prevent_cse=alone, policy=POLICIES[remat])
            (x, out), state = apply((params, norm), stream, state, numbers[0])
            if dropout_key is not None and self.config.dropout:
                key = jax.random.fold_in(dropout_key, numbers[1])
                how: Any = {"implementation": self.options.implementation}
                out = jaxkern.dropout(out, self.config.dropout, key, **how)
            return (x, out), state

        run: Any = layer
        if remat == "layer":
            # In a loop nothing can be shared across the barrier that prevent_cse would add.
            run = jax.checkpoint(layer, prevent_cse=not loop, static_argnums=0)

        def layers_of_pattern(carried, given):
            (stream, state), (params, repeat) = carried, given
            for i, kind in enumerate(pattern):
                count, before = pattern.count(kind), pattern[:i].count(kind)
                own = params[kind]
                if count > 1:
                    own = jax.tree.map(lambda leaf, at=before: leaf[at], own)
                numbers = repeat * count + before, repeat * len(pattern) + i
                stream, after = run(kind, stream, state and state[kind], own, numbers)
                state = state and state | {kind: after}
            return (stream, state), None

        # The state is carried, and so updated in place: what a scan stacks is a new array.
        carried = self._embed(tokens), state
        given = {kind: params for kind, (_, params) in split.items()}
        for kind in given:
            if (count := pattern.count(kind)) > 1:
                apart = lambda leaf, count=count: leaf.reshape(repeats, count, *leaf.shape[1:])
                given[kind] = jax.tree.map(apart, given[kind])
        if loop:
            return jax.lax.scan(layers_of_pattern, carried, (given, jnp.arange(repeats)))[0]
        for repeat, params in enumerate(of_layers(given, repeats)):
            carried, _ = layers_of_pattern(carried, (params, repeat))
        return carried

    def _embed(self, tokens):
        """The stream, and nothing to add to it yet."""
        table = whole_beside(self.embedding[...], tokens).astype(jnp.float32)
        x = layers.embed(table, tokens, self.config.vocab_size, self.axis_name)
        return x, jnp.zeros_like(x, self.options.policy.compute)

    def _last_norm(self, x, out):
        return self._add_and_normalise(x, out, self.norm)[0]

    def _logits(self, hidden):
        policy = self.options.policy
        weight = whole_beside(self.output_layer, hidden)
        return policy.cast_to_output(hidden @ policy.cast_to_compute(weight))

    def _add_and_normalise(self, x, out, norm) -> tuple[jax.Array, jax.Array]:
        """Returns the normalised sum in the dtype of `out`, and the sum in the stream's."""
        options: Any = {"eps": self.config.eps, "implementation": self.options.implementation}
        return jaxkern.rms_norm(out, whole_beside(norm[...], x), residual=x, **options)


def _of_layers_fwd(stacked: Any, count: int) -> tuple[Any, Any]:
    """The parameters of each layer."""
    take = lambda i: jax.tree.map(lambda leaf: leaf[i], stacked)
    types = jax.tree.map(lambda leaf: TypeOf(jax.typeof(leaf)), stacked)
    return [take(i) for i in range(count)], types


def _of_layers_bwd(count: int, types: Any, grads: Any) -> tuple[Any]:
    """The gradients of all layers, stacked, from those of each.

    Concatenated in two steps, which XLA fuses into one kernel. For each element it compares the
    index with the bounds of one array after the other, so a few arrays a step are faster: on an
    H200 48 matrices of 16 MiB take 454 µs in groups of 6, and 1,029 in one step.
    """
    size = next(n for n in range(math.isqrt(count), 0, -1) if count % n == 0)

    def stacked(like: TypeOf, *leaves: jax.Array) -> jax.Array:
        groups = [jnp.concatenate(group)[None] for group in itertools.batched(leaves, size)]
        return match_primal(jnp.concatenate(groups).reshape(count, *leaves[0].shape), like)

    return (jax.tree.map(stacked, types, *grads, is_leaf=lambda of: isinstance(of, TypeOf)),)


of_layers = Differentiable(_of_layers_fwd, _of_layers_bwd)


def _in_order(params: Any, stream: Any) -> tuple[Any, Any]:
    """A layer's arguments, whose backward ends with the gradients of its matrices.

    For several devices XLA would leave those of all layers to the end of the backward, and have in
    memory until then what they are computed of: of what is computed again, a quarter of the whole.
    Over parts of a sequence, which take little, it may: meanwhile the scan of the layer before can
    exchange its states.
    """
    leaves, tree = jax.tree.flatten_with_path(params)
    matrices = [i for i, (path, _) in enumerate(leaves) if path[0].key.endswith("_proj")]
    leaves = [leaf for _, leaf in leaves]
    found, stream = _together(([leaves[i] for i in matrices], stream))
    for i, leaf in zip(matrices, found, strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(tree, leaves), stream


@jax.custom_jvp
def _together(tree: Any) -> Any:
    return tree


def _together_jvp(trees: Any, tangents: Any) -> tuple[Any, Any]:
    """The barrier has what moves alone: JAX 0.12 cannot transpose one of constants, too."""
    of_zero = lambda t: isinstance(t, SymbolicZero)
    leaves, tree = jax.tree.flatten(*tangents, is_leaf=of_zero)
    moving = iter(jax.lax.optimization_barrier([t for t in leaves if not of_zero(t)]))
    return *trees, jax.tree.unflatten(tree, [t if of_zero(t) else next(moving) for t in leaves])


_together.defjvp(_together_jvp, symbolic_zeros=True)


def _check_integers(name: str, value: jax.Array) -> None:
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"{name} must have an integer dtype, got {value.dtype}")


def _check(
    tokens: Any, segment_ids: Any, mask: Any, *, to_left: bool = False
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the tokens, 0 for padding, and the segments that both other arguments make.

    Padding is 0 there where there are no `segment_ids`; `to_left` moves it to the front.
    """
    tokens = jnp.asarray(tokens)
    named = {"tokens": tokens, "segment_ids": segment_ids, "mask": mask}
    for name, value in named.items():
        value = tokens if value is None else jnp.asarray(value)
        if (name, value.dtype) != ("mask", bool):
            _check_integers(name, value)
        if name == "tokens" and value.ndim != 2:
            raise ValueError(
                f"tokens must have shape (B, L), got {value.shape}; give one sequence as "
                "tokens[None]"
            )
        if value.shape != tokens.shape:
            raise ValueError(
                f"{name} must have shape {tokens.shape} = (B, L) of tokens, got {value.shape}"
            )
    segment_ids = None if segment_ids is None else jnp.asarray(segment_ids)
    if mask is None:
        return tokens, segment_ids
    mask = jnp.asarray(mask) != 0
    if to_left:
        order = jnp.argsort(mask, axis=-1, stable=True)
        tokens, mask = (jnp.take_along_axis(leaf, order, -1) for leaf in (tokens, mask))
    tokens = jnp.where(mask, tokens, 0)
    if segment_ids is None:
        return tokens, mask.astype(jnp.int32)
    first = jnp.zeros((len(tokens), 1), bool)
    ends = (segment_ids[:, 1:] != segment_ids[:, :-1]) | (mask[:, 1:] != mask[:, :-1])
    return tokens, jnp.cumsum(jnp.concatenate([first, ends], axis=1), axis=1, dtype=jnp.int32)


def initial_params(config: ModelConfig, seed: Any = 0) -> dict[str, Any]:
    """The parameters before any training, a nested dict of fp32 arrays."""
    return nnx.to_pure_dict(nnx.state(MambaLM(config, rngs=nnx.Rngs(jax.random.key(seed)))))


def count_params(params) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))
