"""From a checkpoint's files to a model bound to a KV pool."""
