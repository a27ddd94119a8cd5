"""The OpenAI HTTP API over a `GenerationService`."""
