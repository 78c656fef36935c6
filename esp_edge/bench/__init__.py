"""Benchmarks: questions -> lanes -> interleaved runs -> records -> summary -> report and plots; and the cost of a pass.

Only the modules that run a model (``run``, ``cost``, ``machine``) import llama.cpp's side of the package.
"""
