"""Embedding and loss of a vocabulary, of which inside ``shard_map`` each device may have a part.

A device has the rows of its classes of an embedding, and their columns of an output layer. Of the
loss

    loss = log Σ_v exp(l_v) − l_y

the devices add up their sums of exp(l_v), relative to the largest of their logarithms, and l_y,
which one of them has: three numbers of a token, and no logits.

An indexed read's own gradient adds with atomics on a GPU, in another order on every run. For bytes
a product does instead, exact here and its transpose one too; for large vocabularies `rows_of`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jaxkern
from jaxkern.nn.collectives import enter, leave

_PRODUCT_UP_TO = 1024


def embed(table: jax.Array, tokens: jax.Array, size: int, axis_name: str | None) -> jax.Array:
    """Reads rows of a table for tokens (...): (..., D), NaN for one outside the vocabulary.

    The table (size, D) is fp32; with a mesh axis, over which it is split, it is the device's rows.
    Tokens are of any integer dtype.
    """
    read, given = product_with, tokens
    if size > _PRODUCT_UP_TO:
        read, tokens = rows_of, _counting_to(tokens, size + 1)
    if axis_name is None:
        rows = read(table, tokens)
    else:
        own, mine = _of_device(tokens, len(table), axis_name)
        rows = jnp.where(mine[..., None], read(table, jnp.where(mine, own, 0)), 0)
        rows = leave(rows, axis_name)
    limits = jnp.iinfo(given.dtype)
    if limits.min >= 0 and limits.max < size:
        return rows
    given = _counting_to(given, size)[..., None]
    return jnp.where((given >= 0) & (given <= size - 1), rows, jnp.nan)


def product_with(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Reads rows of a table (V, D) fp32 for tokens (...) by a product: (..., D)."""
    tokens = _counting_to(tokens, len(table))
    every = jnp.arange(len(table), dtype=tokens.dtype).reshape((1,) * tokens.ndim + (-1,))
    return jnp.matmul((tokens[..., None] == every).astype("f4"), table, precision="highest")


@jax.custom_vjp
def rows_of(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Reads rows of a table (V, D) fp32 for tokens (...): (..., D), its gradient deterministic.

    The gradient's rows are sorted by token, added up by a scan that starts anew at each token's
    first, and each token's last sum is written to its row. A NaN or an infinity in one of them
    reaches the sums of the tokens sorted after it, in its column.
    """
    return table[tokens]


def _rows_bwd(res, dout):
    table, tokens = res
    size, dim = table.shape
    tokens = tokens.reshape(-1).astype(jnp.promote_types(tokens.dtype, jnp.int32))
    tokens = jnp.where(tokens < 0, tokens + size, tokens)
    order = jnp.argsort(tokens)
    token, rows = tokens[order], dout.reshape(-1, dim)[order]
    again = (token == jnp.roll(token, 1)).at[:1].set(False)
    decay = jnp.broadcast_to(again[:, None], rows.shape).astype(rows.dtype)
    sums = jaxkern.linear_scan(decay[None], rows[None])[0]
    last = jnp.roll(~again, -1)
    # The others have rows of their own past the end: if two rows might be one, XLA would first
    # sort all elements by where they go, so that it is certain which of them stays.
    row = jnp.where(last, token, size + jnp.arange(len(token), dtype=token.dtype))
    dtable = jnp.zeros_like(table).at[row].set(sums, mode="drop", unique_indices=True)
    return dtable, None


rows_of.defvjp(lambda table, tokens: (table[tokens], (table, tokens)), _rows_bwd)


def _counting_to(tokens: jax.Array, size: int) -> jax.Array:
    """The tokens in a dtype that holds all of `size`."""
    return tokens if jnp.iinfo(tokens.dtype).max >= size - 1 else tokens.astype(jnp.int32)


def linear_cross_entropy(
    x: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    axis_name: str | None,
    *,
    ignore_index: int,
    **options: Any,
) -> Any:
    """:func:`jaxkern.linear_cross_entropy`, the mean, where each device has some of the classes.

    Every device has all of x (..., K), its own columns of the weight (K, V/n), and the labels (...)
    of all V classes, with a negative `ignore_index`. With no `axis_name` the weight is whole.
    """
    options["ignore_index"] = ignore_index
    if axis_name is None:
        return jaxkern.linear_cross_entropy(x, weight, labels, **options)
    size = weight.shape[1]
    classes, mine = _of_device(labels, size, axis_name)
    unknown = (labels < 0) | (labels >= size * lax.axis_size(axis_name))
    counted = labels != ignore_index
    own = jnp.where(counted, jnp.where(mine, classes, 0), ignore_index)
    options |= {"reduction": "none", "return_lse": True}
    losses, lse = jaxkern.linear_cross_entropy(enter(x, axis_name), weight, own, **options)
    largest = lax.pmax(lax.stop_gradient(lse), axis_name)
    sums = jnp.stack([jnp.exp(lse - largest), jnp.where(mine, lse - losses, 0)])
    exps, of_label = leave(sums, axis_name)
    losses = jnp.where(counted, largest + jnp.log(exps) - of_label, 0)
    losses = jnp.where(unknown & counted, jnp.nan, losses)
    return jnp.sum(losses) / jnp.maximum(jnp.sum(counted, dtype=jnp.int32), 1)


def _of_device(classes: jax.Array, size: int, axis_name: str) -> tuple[jax.Array, jax.Array]:
    """Numbers classes from the first of the device's `size`, and whether each is among them."""
    wide = classes.astype(jnp.promote_types(classes.dtype, jnp.int32))
    classes = wide - lax.axis_index(axis_name) * size
    return classes, (classes >= 0) & (classes < size)
