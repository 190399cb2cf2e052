"""Typed clients of the services."""
