"""Levanter token caches."""
