"""Kernels in Triton (Tillet, Kung and Cox 2019), one operation a file. Imported only where Triton is installed.

Compile-time parameters are numbers of the model; quantities of the batch are run-time arguments that
are not specialised either, so that serving compiles nothing that warm-up has not.
"""
