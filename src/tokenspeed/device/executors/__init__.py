"""Turn plans into device work; one module a kind of runtime."""
