"""The host tier: blocks on the host (L2), the operations that fill and read them, and retraction images."""
