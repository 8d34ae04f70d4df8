"""What a trained model is worth."""

from temper_lab.eval.bpb import Bpb, bits_per_byte

__all__ = ["Bpb", "bits_per_byte"]
