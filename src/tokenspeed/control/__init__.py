"""The control plane of one rank: `event_loop.EventLoop.round` and one module for each concern it calls.

The modules do not import each other and hold no reference to the loop; each gets what it needs as
arguments of its one call a round and returns values. Control thread only.
"""
