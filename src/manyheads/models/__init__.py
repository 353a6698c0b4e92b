"""Nets as a representation and a head."""
