"""Triton kernels of quantlab, reached through `quantlab.dispatch` at call time."""
