"""Arithmetic that gives the same bits on every CPU, with any number of threads and any BLAS.

Products with sums of a stated order (:mod:`fixed_order.products`), compiled for the CPU at hand by LLVM.
"""
