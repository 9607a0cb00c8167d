"""The one error of the benchmarks: something is missing or went wrong, and the text says what."""


class BenchmarkError(Exception):
    """A measurement could not be made: read the sentence, mend that, run it again."""
