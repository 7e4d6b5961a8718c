"""Mappers that learn by gradient, under Lightning."""
