"""Language models as kvferry sees them: geometry, position-free KV, prefill and decode."""
