"""Numerics and quantization study toolkit for the recurrent state of hybrid language models."""
