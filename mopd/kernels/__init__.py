"""Logprobs of given tokens from logits, without a second vocabulary-sized tensor.

`select.gathered_logprobs` is the way in. Importing this package imports neither torch nor triton;
`select` imports torch, and triton only when the Triton backend is asked for.
"""
