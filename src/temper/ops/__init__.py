"""Operations on streams, in three implementations with the same functions.

`naive` is plain torch and the oracle, `fused` is torch with backwards written by hand for any device, `cpu` are
native kernels. `autograd` makes any of them differentiable, `backend` chooses.
"""
