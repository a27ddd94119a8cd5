"""The operator's configuration: frozen values, one class a YAML section, loaded once."""
