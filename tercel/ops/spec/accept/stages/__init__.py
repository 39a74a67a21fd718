"""The stages of the Triton kernel."""
