"""Text in and out: tokenizer, chat template, incremental detokenization, stop strings."""
