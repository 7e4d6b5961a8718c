"""The run-time: carry a source cache over and hand the target a cache to decode from."""
