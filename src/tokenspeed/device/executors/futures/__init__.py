"""The executor for runtimes without streams: outputs are futures, and one step's future is the next step's input."""
