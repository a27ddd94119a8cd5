"""The device's pool of KV pages."""
