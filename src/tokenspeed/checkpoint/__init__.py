"""Where a model's files come from and what they say; the weights themselves are the device's."""
