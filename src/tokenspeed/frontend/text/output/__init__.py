"""What a model's text means: reasoning, answer and tool calls, told apart while the text arrives."""
