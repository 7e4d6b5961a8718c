"""What a mapped cache is worth: quality against controls, and time."""
