"""Which program serves a configuration, and the program itself."""
