"""Machines that look for faults nobody has thought of: small in `make test`, large in `make torture`."""
