"""The trainer: one noun a file, `loop` on top and `state` at the bottom."""
