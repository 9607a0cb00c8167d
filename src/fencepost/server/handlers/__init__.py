"""The protocol's operations: parse the request, ask the store, render the outcome."""
