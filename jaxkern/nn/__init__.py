"""Layers on jaxkern's ops for three libraries, each an optional extra.

flax      flax.nnx
linen     flax.linen
equinox   equinox
mamba     the Mamba block itself, functions of arrays that the three share
mamba2    likewise the Mamba-2 block
delta_net likewise Gated DeltaNet and Kimi Delta Attention
remat     policies of jax.checkpoint for these blocks
common    what such a kind of block is, and which calls are left to a library

A layer that the library has, too, has its name, its arguments and its parameters: what one was
saved from loads into the other.
"""
