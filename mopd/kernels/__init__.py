"""Logprobs, entropies and divergences of the loss head, without a second vocabulary-sized tensor.

`select` is the way in; docs/kernels.md says what each function does and how. Importing this package
imports neither torch nor triton; `select` imports torch, and triton only when the Triton backend is
asked for.
"""
