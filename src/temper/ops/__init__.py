"""Operations on streams, in several backends behind one interface.

`backend` says what a backend is and chooses one; `naive` is plain torch and the oracle, `fused` is torch with backwards
written by hand for any device, `cpu` are native kernels. `autograd` makes kernels differentiable, `schema` declares
them as torch operators, `recompute` trades memory for mixing again.
"""
