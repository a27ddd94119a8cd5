"""Load and latency measurements, of a server over HTTP or of an engine in this process."""
