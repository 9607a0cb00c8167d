"""Which node leads, for which term, and what nodes tell each other."""
