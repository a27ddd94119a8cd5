"""Parts of models that are not kernels."""
