"""The forward on CPU in C: one call a step, any ragged batch, results that depend on the row alone."""
