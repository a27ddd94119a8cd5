"""What a device offers the executors: streams, events, buffers, copies to and from the host."""
