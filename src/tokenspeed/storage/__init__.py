"""The storage tier (L3): pages of KV behind the host tier, kept by a store outside the engine."""
