"""Large commits: decided as a whole, carried out in slices."""
