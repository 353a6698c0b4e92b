"""Personalised decentralised learning: one shared representation, many private heads, no server."""

__version__ = "0.1.0"
