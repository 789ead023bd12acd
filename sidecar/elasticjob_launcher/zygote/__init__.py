"""Zygote: preloaded interpreter from which workers are forked; both sides of it."""
