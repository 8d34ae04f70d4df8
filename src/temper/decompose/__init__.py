"""Decompositions of a tensor: plain (least squares) or weighted by a second moment of the inputs.

Functions of tensors, float64 in and out, which know no generator. Derivations: docs/math.md, "Compression".
"""
