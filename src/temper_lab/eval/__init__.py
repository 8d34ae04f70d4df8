"""Evaluation of trained models."""

from temper_lab.eval.bpb import Bpb, bits_per_byte

__all__ = ["Bpb", "bits_per_byte"]
