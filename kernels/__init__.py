"""kernels: every device operation, each file with a plain torch reference and the Triton kernel beside it.

The `x_ref` functions are the CPU path of the models and the oracle of the tests; the functions named `x`
launch Triton kernels. The folder imports torch and triton only and may be imported without triton and without
a GPU: `kernels.jit` holds the one guard.
"""
