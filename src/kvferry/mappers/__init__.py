"""Mappers: from one model's position-free KV to another's."""
