"""Zarr stores of activations."""
